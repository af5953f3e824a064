"""Whom a server runs as: servers refuse to be root, and root's folders are closed to everybody else."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from semel.errors import ConfigError

NOBODY = "nobody"
LOOK_TIMEOUT_S_MAX = 10


@dataclass(frozen=True)
class Account:
    """A user of this machine."""

    uid: int
    gid: int

    @property
    def is_ours(self) -> bool:
        return self.uid == os.geteuid()

    def command(self, command: Sequence[str], **environment: str) -> list[str]:
        """A command line that runs another as this user, with nothing of our environment: it may hold secrets."""
        clean = [_tool("env"), "-i", "-C", "/", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
        clean += [f"{name}={value}" for name, value in environment.items()]
        change = [_tool("setpriv"), f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        return [*clean, *([] if self.is_ours else change), *command]

    def make_folder(self, folder: Path) -> None:
        """A new folder that only this user may enter."""
        folder.mkdir(mode=0o700, parents=True)
        if not self.is_ours:
            os.chown(folder, self.uid, self.gid)

    def reaches(self, folder: Path) -> bool:
        """Whether the way to a folder is open to this user."""
        command = self.command([_tool("test"), "-x", str(folder)])
        return subprocess.run(command, timeout=LOOK_TIMEOUT_S_MAX, check=False).returncode == 0  # noqa: S603  the arguments are ours, there is no shell

    def run(
        self, command: Sequence[str], *, text: str, keep: int, temporary: str, seconds_max: float
    ) -> tuple[int, str]:
        """Run a program to its end with `text` on stdin. Returns its exit code and all that it said.

        It inherits the descriptor `keep`, and puts its temporary files into the folder `temporary`.
        """
        try:
            done = subprocess.run(  # noqa: S603  the arguments are ours, there is no shell
                self.command(command, TMPDIR=temporary),
                input=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[keep],
                timeout=seconds_max,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"it took more than {seconds_max:.0f} s"
        return done.returncode, done.stdout


def ourselves() -> Account:
    return Account(os.geteuid(), os.getegid())


def account_for(data: Path, name: str) -> Account:
    """The user who owns the data. For new data ourselves; when we are root, the user of that name, or else nobody."""
    if data.exists():
        owner = data.stat()
        if os.geteuid() not in (0, owner.st_uid):
            raise ConfigError(
                f"{data} belongs to another user of this machine.",
                data_now="the data in that folder was not touched; nothing was started",
                remedy="Run the command as that user, or name another folder.",
            )
        return Account(owner.st_uid, owner.st_gid)
    if os.geteuid() != 0:
        return ourselves()
    for each in (name, NOBODY):
        with suppress(KeyError):
            found = pwd.getpwnam(each)
            return Account(found.pw_uid, found.pw_gid)
    raise ConfigError("There is no user on this machine that a server could run as.", remedy=f"Make one: {name}.")


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A folder as a descriptor that programs started meanwhile inherit.

    The way to the folder may be closed to them: a project below root's home, a test folder in /tmp. What we opened
    they reach as /proc/self/fd/N, which goes straight to the folder and asks for rights on that folder alone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.set_inheritable(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


def _tool(name: str) -> str:
    found = shutil.which(name, path="/usr/bin:/bin")
    if found is None:
        raise ConfigError(f"There is no program {name!r} on this machine.", remedy="Install coreutils and util-linux.")
    return found
