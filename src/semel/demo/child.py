"""One life of a contestant: a process group that tells JSON lines on its stdout until it is killed or stopped."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GONE_WITHIN_S = 3.0
_END: dict[str, Any] = {}


class Child:
    """The child leads a process group of its own, so that its JVM dies with it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path, log: Path) -> None:
        self.log = log
        self.silent = False
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                command,
                env={**os.environ, **variables},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="child", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            raise RuntimeError("the child was started without a pipe")
        for line in self.process.stdout:
            with suppress(ValueError):  # the last line of a killed process may be torn
                self.events.put(json.loads(line))
        self.events.put(_END)

    def next_event(self, wait_s: float) -> dict[str, Any] | None:
        """The next event, or None when none came. `silent` tells that no more can come."""
        try:
            event = self.events.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return None
        if event is _END:
            self.silent = True
            self.process.wait()
            return None
        return event

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def killed(self) -> bool:
        return self.process.returncode == -signal.SIGKILL

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when nobody of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._wait_until_gone()

    def stop(self, grace_s: float, gone_within_s: float = GONE_WITHIN_S) -> int:
        """SIGTERM, then wait; what does not end in time is killed. Returns the exit code."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
            self._wait_until_gone(gone_within_s)
        self.kill()
        return self.process.returncode

    def _wait_until_gone(self, within_s: float = GONE_WITHIN_S) -> None:
        """Only a group without processes is proof that nothing of this life writes any more."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.02)

    def last_words(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
