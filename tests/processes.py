"""What tests of several folders need to watch processes: waiting with a limit, and who descends from whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(true: Callable[[], object], seconds_max: float = 60.0) -> None:
    """Wait for something to become true; fail when it takes too long."""
    end = time.monotonic() + seconds_max
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is another one, or was started below it. Raises OSError when it ends meanwhile."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process was halted by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def stopped_workers(group: int) -> list[int]:
    """The Python workers of a child's process tree that a failpoint stopped."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rsplit(")", 1)[1].split()[0]
            command = (path.parent / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if state == "T" and b"pyspark" in command and descends(int(path.parent.name), group):
            found.append(int(path.parent.name))
    return found


def executors_of(group: int) -> list[int]:
    """The executor JVMs of a child's process tree, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if b"CoarseGrainedExecutorBackend" in path.read_bytes() and descends(pid, group):
                found.append(pid)
        except OSError:  # it ended while we looked
            continue
    return found
