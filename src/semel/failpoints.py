"""Named places where a test kills the process for real.

Each arrow of the protocol has a name in `PROTOCOL`, and sinks bring their own (`sinks/kinds.py`). The environment
variable names a point, the hit at which it acts (the first unless said) and what it does (kill unless said):

    SEMEL_FAILPOINTS="batch.decided"                 SIGKILL when a batch has been decided
    SEMEL_FAILPOINTS="task.prepared@3"               SIGKILL at the third hit in that process
    SEMEL_FAILPOINTS="batch.prepared@2=stop"         SIGSTOP: how a zombie driver is made
    SEMEL_FAILPOINTS="batch.staged=fail"             raise an error

A driver that leads its process group takes the group along, its JVM included; a task takes only its Python worker.
Hits are counted per process. Without the variable a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

VARIABLE = "SEMEL_FAILPOINTS"


@dataclass(frozen=True)
class Failpoint:
    """A place where a process can be killed. `happened` says what has just happened there.

    in_a_task      only a Python worker dies there: Spark fails the batch, and the driver ends with an error
    seldom         most lives do not pass it: in large batches only, or where the checkpoint has lost a plan
    exactly_once   it is not passed below exactly-once
    moves          the driver moves rows there, which it does not where tasks prepare transactions of their own
    locks          from there to the commit the driver holds a lock that nobody else can end
    """

    name: str
    happened: str
    in_a_task: bool = False
    seldom: bool = False
    exactly_once: bool = False
    moves: bool = False
    locks: bool = False


#: Those of the protocol, in the order of one batch's life. Sinks commit between the last two of them.
PROTOCOL = tuple(
    Failpoint(name, happened, in_a_task=name.startswith("task."), seldom=name == "startup.restored")
    for name, happened in {
        "startup.claimed": "this incarnation is claimed, nothing is recovered yet",
        "startup.restored": "a file of a decided plan is back in the checkpoint, others may be missing",
        "startup.closed": "the slot that an older incarnation might still decide in is closed",
        "startup.committed": "decided batches were committed forward, nothing is swept yet",
        "startup.swept": "what was left of older incarnations is gone",
        "batch.began": "Spark handed us the batch, nothing is written",
        "task.wrote": "a task wrote its first rows, nothing is promised",
        "task.prepared": "a task made its branches durable, the driver does not know yet",
        "batch.staged": "the driver holds every staged part",
        "batch.prepared": "every sink has prepared",
        "log.written": "the decision is on disk under a temporary name",
        "batch.decided": "the decision is durable, no sink has committed",
        "batch.committed": "every sink has committed, Spark has not written commits/N",
    }.items()
)
_NAMES = frozenset(point.name for point in PROTOCOL)

ACTED_PAUSE_S = 0.5

_hits: Counter[str] = Counter()


class FailpointError(RuntimeError):
    """Raised by a failpoint whose action is `fail`."""


def all_failpoints() -> dict[str, Failpoint]:
    """Those of the protocol and of every kind of sink by name, in the order of one batch's life."""
    # Sinks import this module, so they are looked for when somebody asks, which no worker does that nobody kills.
    from semel.sinks.kinds import kinds

    *before, last = PROTOCOL
    of_sinks = (point for kind in kinds().values() for point in kind.failpoints)
    return {point.name: point for point in (*before, *of_sinks, last)}


def parse(text: str) -> dict[str, tuple[int, str]]:
    """`point[@nth][=action]`, separated by commas -> point: (nth, action)."""
    plan = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        rest, _, action = item.partition("=")
        point, _, nth = rest.partition("@")
        if point not in _NAMES and point not in (known := all_failpoints()):
            raise ValueError(f"unknown failpoint {point!r}; known: {', '.join(known)}")
        if action not in ("", "kill", "stop", "fail"):
            raise ValueError(f"unknown action {action!r} of failpoint {point}; use kill, stop or fail")
        if nth and (not nth.isdecimal() or int(nth) < 1):
            raise ValueError(f"unknown hit {nth!r} of failpoint {point}; hits are counted from 1")
        plan[point] = (int(nth or 1), action or "kill")
    return plan


def failpoint(point: str) -> None:
    """Act here if the environment says so."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    nth, action = parse(text).get(point, (0, ""))
    _hits[point] += 1
    if _hits[point] != nth:
        return
    if action == "fail":
        raise FailpointError(f"failpoint {point}, hit {nth}")
    sign = signal.SIGSTOP if action == "stop" else signal.SIGKILL
    if os.getpgrp() == os.getpid():
        os.killpg(0, sign)
    else:
        os.kill(os.getpid(), sign)
    # The signal is for the process, and this thread may run on for a moment before it is heard.
    time.sleep(ACTED_PAUSE_S)
