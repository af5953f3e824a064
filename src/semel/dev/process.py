"""A server's process, known by its pid and by the moment it started: a pid alone may belong to somebody else by now."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KILL_TIMEOUT_S_MAX = 10
_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A process that this command or an earlier one started."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        seen = _look_at(self.pid)
        if seen is None or seen.started != self.started:
            return False
        if seen.ended:
            # A child that ended stays in the table until its parent asks; somebody else's is not ours to ask for.
            with suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        return not seen.ended

    def kill(self) -> None:
        """SIGKILL. Returns when it is dead."""
        self.send(signal.SIGKILL)
        if not self._ends_within(KILL_TIMEOUT_S_MAX):
            raise TimeoutError(f"process {self.pid} is alive {KILL_TIMEOUT_S_MAX} s after SIGKILL")

    def stop(self, seconds_max: float, *, by: signal.Signals = signal.SIGTERM) -> bool:
        """A signal that asks it to end, and SIGKILL when that takes too long. Returns whether it ended by itself."""
        self.send(by)
        if self._ends_within(seconds_max):
            return True
        self.kill()
        return False

    def send(self, number: signal.Signals) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _ends_within(self, seconds_max: float) -> bool:
        deadline = time.monotonic() + seconds_max
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def spawn(command: list[str], log: Path) -> Process:
    """Start a program that may outlive this one: a session of its own, so that Ctrl-C here does not reach it."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    seen = _look_at(pid)
    return Process(pid, seen.started if seen else "ended at once")


def processes_in(folder: Path, program: str) -> list[Process]:
    """Those that run a program in a folder, whoever started them. A server's processes all work in its data folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and others' are not ours to look into.
        with suppress(OSError):
            running = Path(os.readlink(path / "exe")).name.removesuffix(" (deleted)")
            if running == program and os.readlink(path / "cwd") == str(folder):
                seen = _look_at(int(path.name))
                if seen is not None and not seen.ended:
                    found.append(Process(int(path.name), seen.started))
    return found


@dataclass(frozen=True)
class _Seen:
    # Words that no other process of that pid shares.
    started: str
    ended: bool


def _look_at(pid: int) -> _Seen | None:
    """What the system says of a pid; None when nobody has it."""
    if not Path("/proc/self/stat").exists():
        return _look_with_ps(pid)
    try:
        # The name of the program stands in parentheses and may hold blanks.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, threads, ticks = fields[0], int(fields[17]), fields[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The first thread of a process can be gone while others still hold its ports.
    return _Seen(f"{ticks} ticks after boot {boot}", ended=state in "ZX" and threads <= 1)


def _look_with_ps(pid: int) -> _Seen | None:
    command = ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)]
    words = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()  # noqa: S603  the arguments are ours, there is no shell
    return _Seen(" ".join(words[1:]), ended=words[0].startswith("Z")) if words else None
