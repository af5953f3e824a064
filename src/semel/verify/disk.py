"""A checkpoint folder whose disk can be full: a small file system in memory where we may mount one, else a limit.

The limit is that of the size of files (RLIMIT_FSIZE), put on the processes of a life while they run. It is stricter
than a full disk: it holds for every file that they write, wherever it is.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from semel.verify.power.disk import PowerDisk, require_fuse
from semel.verify.power.forgetful import MODES, Loss

BALLAST = ".semel-verify-ballast"
CHUNK_BYTES = 1 << 20
MOUNT_S_MAX = 30.0


class Disk:
    """The disk below `folder`. `is_mounted` tells which of the two it is."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.is_mounted = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder)

    def fill(self, pids: Sequence[int]) -> None:
        """From here on `pids`, and what they start, cannot write there."""
        if self.is_mounted:
            self._write_ballast()
        else:
            _limit(pids, on=True)

    def free(self, pids: Sequence[int] = ()) -> None:
        """There is room again, for those of `pids` that still live and for everybody who comes."""
        if self.is_mounted:
            self._ballast.unlink(missing_ok=True)
        else:
            _limit(pids, on=False)

    def close(self) -> None:
        """Gone, and what was on it lies in the folder. A process with a file open there does not keep us from it."""
        if not self.is_mounted:
            return
        self._ballast.unlink(missing_ok=True)
        aside = self.folder.with_name(f"{self.folder.name}.kept")
        with suppress(OSError):  # there is no room for it: the file system ends all the same
            shutil.copytree(self.folder, aside, symlinks=True)
        self.is_mounted = not (_run("umount", self.folder) or _run("umount", "--lazy", self.folder))
        if not self.is_mounted and aside.is_dir():
            self.folder.rmdir()
            aside.rename(self.folder)

    @property
    def _ballast(self) -> Path:
        return self.folder / BALLAST

    def _write_ballast(self) -> None:
        """Halve the piece that does not fit any more, until not even one byte does."""
        count = CHUNK_BYTES
        with self._ballast.open("ab", buffering=0) as file:
            while count:
                try:
                    file.write(bytes(count))
                except OSError:
                    count //= 2


class ForgetfulDisk(Disk):
    """One whose power can be cut, too. It is full as a folder is that is no disk: by a limit."""

    def __init__(self, folder: Path) -> None:
        require_fuse(may_install=True)
        self.folder = folder
        self.is_mounted = False
        self._power = PowerDisk(folder)

    def cut_power(self, mode: str, seed: int) -> Loss:
        """What was lost. Afterwards there is power again."""
        if mode not in MODES:
            raise ValueError(f"a power cut does not lose {mode!r}; it loses {', '.join(MODES)}")
        loss = self._power.cut_power(mode, seed)
        self._power.restore_power()
        return loss

    def close(self) -> None:
        aside = self.folder.with_name(f"{self.folder.name}.kept")
        with suppress(OSError):
            self._power.copy_to(aside)
        self._power.close()
        if aside.is_dir() and not os.path.ismount(self.folder):
            self.folder.rmdir()
            aside.rename(self.folder)


def _run(program: str, *arguments: str | Path) -> bool:
    found = shutil.which(program)
    if found is None:
        return False
    command = [found, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=MOUNT_S_MAX, check=False)  # noqa: S603  the arguments are ours, there is no shell
    return done.returncode == 0


def _limit(pids: Sequence[int], *, on: bool) -> None:
    if sys.platform != "linux":
        # Nobody else lets us change the limits of a process that runs.
        return
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if on else hard, hard))
