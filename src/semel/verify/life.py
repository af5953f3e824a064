"""One life of the pipeline: a session of processes, what it tells, and what can be done to it.

The driver leads a process group and a session. Its JVM is in the group; the Python workers have a group of their own
(pyspark.daemon), as executors may have. All of them are in the session, by which they are found.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semel.demo.child import Child
from semel.verify.child import run_command, run_variables
from semel.verify.plan import Fault

LOOK_EVERY_S = 0.02
#: To look at all processes takes some milliseconds.
LOOK_AT_ALL_EVERY_S = 0.1
HEARD_WITHIN_S = 10.0
GONE_WITHIN_S = 30.0
#: A process that outlives the driver by more than this is killed: Spark's JVM takes some seconds to notice.
ORPHANED_S_MAX = 10.0
#: What ends one of two drivers: our own word, or Spark's when both want to write the same file of its checkpoint.
FENCED = ("Fenced", "Multiple streaming queries are concurrently using", "Multiple streaming jobs detected")

JVM, EXECUTOR, DAEMON = "org.apache.spark.deploy.SparkSubmit", "CoarseGrainedExecutorBackend", "pyspark.daemon"


@dataclass(frozen=True)
class BatchTold:
    """A batch that a life told of, with the time of day at which it ended."""

    ended_s: float
    number: int
    how: str
    rows: int
    ms: float


class Life:
    """`number` tells the lives of a run apart. `log` gets what the life says on stderr."""

    def __init__(
        self, number: int, command: Sequence[str], variables: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self.number = number
        self.began_s = time.time()
        self.told: list[BatchTold] = []
        self.error = ""
        self.error_kind = ""
        # Nobody of it is left: from here on its numbers may belong to somebody else.
        self.gone = False
        self.child = Child(command, variables, folder, log)
        self._ear = threading.Thread(target=self._listen, name=f"life {number}", daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        while not self.child.silent:
            event = self.child.next_event(1.0)
            # Whatever else the user's file prints is not for us.
            if isinstance(event, dict):
                self._hear(event)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        self.error = event.get("error", self.error)
        if kind == "error":
            self.error_kind = event.get("kind", "")
        if kind == "batch":
            batch = BatchTold(
                time.time(), event["batch"], event.get("how", ""), event.get("rows", 0), event.get("ms", 0)
            )
            self.told.append(batch)

    # How it is --------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def batches(self) -> int:
        """How many have ended so far."""
        return len(self.told)

    @property
    def ended(self) -> bool:
        return self.child.process.poll() is not None

    @property
    def stopped(self) -> bool:
        """Whether the driver was halted by SIGSTOP."""
        seen = _look_at(self.pid)
        return seen is not None and seen.state == "T"

    @property
    def fenced(self) -> bool:
        """Whether it ended because somebody else runs the pipeline."""
        return self.ended and any(words in f"{self.error_kind}: {self.error}" for words in FENCED)

    @property
    def reason(self) -> str:
        """Why it ended, as far as it said."""
        return self.error or self.child.last_words() or f"it said nothing; exit code {self.child.process.returncode}"

    def wait(self, true: Callable[[], bool], seconds_max: float) -> bool:
        """Until it is true, the life has ended, or the time is over. Returns whether it is true."""
        end = time.monotonic() + seconds_max
        while not true() and not self.ended and time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)
        return true()

    def members(self, role: str = "") -> list[int]:
        """The processes that live: python (the driver itself), jvm, worker or executor; all when no role is named."""
        everybody = {} if self.gone else _processes_of(self.pid)
        if role == "":
            return list(everybody)
        return [pid for pid, seen in everybody.items() if self._role(pid, seen, everybody) == role]

    def _role(self, pid: int, seen: _Seen, everybody: Mapping[int, _Seen]) -> str:
        if pid == self.pid:
            return "python"
        if EXECUTOR in seen.command:
            return "executor"
        if JVM in seen.command:
            return "jvm"
        parent = everybody.get(seen.parent)
        # The daemon forks the workers, and so shares its command line with them.
        return "worker" if DAEMON in seen.command and parent is not None and DAEMON in parent.command else ""

    # What is done to it -----------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals, role: str = "") -> int:
        """To everybody, or to one role. Returns how many were there."""
        reached = 0
        # The driver first: nobody else starts new ones that a later look would miss.
        for pid in sorted(self.members(role), key=lambda pid: pid != self.pid):
            reached += signal_one(pid, number)
        return reached

    def kill(self) -> bool:
        """SIGKILL to everybody; returns when nobody is left, and whether that is what the driver died of."""
        self.signal(signal.SIGKILL)
        if not self.ended:
            # Where there is no /proc, the group is all that can be found.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self.join(orphaned_s_max=0.0)

    def join(self, *, seconds_max: float = GONE_WITHIN_S, orphaned_s_max: float = ORPHANED_S_MAX) -> bool:
        """Wait for the end of the driver and of everybody whom it leaves, and hear all that it said.

        What does not end is killed. Returns whether the driver was killed.
        """
        self.wait(lambda: False, seconds_max)
        self._wait_for_members(orphaned_s_max if self.ended else 0.0)
        end = time.monotonic() + GONE_WITHIN_S
        while self.members() and time.monotonic() < end:
            self.signal(signal.SIGKILL)
            time.sleep(LOOK_AT_ALL_EVERY_S)
        self.wait(lambda: False, GONE_WITHIN_S)
        self._ear.join(HEARD_WITHIN_S)
        self.gone = not self.members()
        return self.child.killed

    def _wait_for_members(self, seconds_max: float) -> None:
        end = time.monotonic() + seconds_max
        while self.members() and time.monotonic() < end:
            time.sleep(LOOK_AT_ALL_EVERY_S)

    def stop(self, grace_s: float, gone_within_s: float = ORPHANED_S_MAX) -> int:
        """SIGTERM to the driver, which ends its batch; what does not end in time is killed. Returns the exit code."""
        with suppress(ProcessLookupError):
            self.child.process.terminate()
        self.join(seconds_max=grace_s, orphaned_s_max=gone_within_s)
        return int(self.child.process.returncode)


def begin_life(
    target: str,
    checkpoint: Path,
    *,
    conf: Mapping[str, str],
    variables: Mapping[str, str],
    log: Path,
    fault: Fault | None = None,
    master: str = "local[2]",
    number: int = 1,
) -> Life:
    """The next life of the pipeline of `FILE[:NAME]`, with the environment that its fault asks for."""
    command = run_command(target, checkpoint, conf, master)
    environment = run_variables({**variables, **(fault.variables if fault else {})})
    # Paths in the user's file are seen from where the user stands.
    return Life(number, command, environment, Path.cwd(), log)


def signal_one(pid: int, number: signal.Signals) -> bool:
    """False when it ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


# The process table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    parent: int
    session: int
    state: str
    command: str


def _look_at(pid: int) -> _Seen | None:
    """None when it ended, even if nobody has asked for its exit code yet."""
    try:
        # The name of the program stands in parentheses and may hold blanks.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return None if fields[0] in "ZX" else _Seen(int(fields[1]), int(fields[3]), fields[0], command)


def _processes_of(leader: int) -> dict[int, _Seen]:
    """Everybody in the session of `leader`, and everybody below one of them."""
    everybody = {}
    for path in Path("/proc").glob("[0-9]*"):
        seen = _look_at(int(path.name))
        if seen is not None:
            everybody[int(path.name)] = seen
    found = {pid for pid, seen in everybody.items() if leader in (pid, seen.session)}
    more = found
    while more:
        more = {pid for pid, seen in everybody.items() if seen.parent in more} - found
        found |= more
    return {pid: everybody[pid] for pid in sorted(found)}
