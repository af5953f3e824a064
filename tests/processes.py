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
