"""One driver takes a pipeline over from another that still runs: which one waits for the other, and how long.

The newer one claims, which fences the older one: it decides and commits nothing any more. But Spark, above it, may
still write `commits/N` or `offsets/N+1` into the checkpoint, and of two Sparks that write the same file one fails. So
the newer one waits, before it reads the checkpoint, until the older one says that it has left, or its process is gone,
or the limit is over: a driver that is paused must not hold up the one that takes its place. The older one looks for a
newer claim once in a while, also when no batch comes, and stops its query.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.decisions.log import DecisionLog
from semel.process import has_ended, is_this_process

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from semel.runtime.foreach_batch import BatchFunction

_LOG = logging.getLogger("semel")


@dataclass(frozen=True)
class Handover:
    """How often the two look for each other, and when they stop waiting.

    The older one has `grace_s` for the batch at hand, then its query is stopped; the newer one waits for all of that.
    """

    look_every_s: float = 0.5
    grace_s: float = 3.0
    wait_s: float = 10.0
    #: So often a query that lost a race for a file of the checkpoint is started again, in one life of `semel run`.
    restarts: int = 5


HANDOVER = Handover()


def may_be_running(log: DecisionLog) -> bool:
    """Whether the newest claim may be of a driver at work: it has not left, and its process is not known to be gone."""
    newest = log.newest_claim()
    return newest > 0 and not (log.has_left(newest) or has_ended(log.claimed(newest)))


def wait_for_older(
    log: DecisionLog,
    ours: int,
    limits: Handover = HANDOVER,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until whoever held the pipeline before us writes nothing any more. False when the limit was over before."""
    older = _newest_of_another(log, ours)
    if older == 0:
        return True
    give_up_at = clock() + limits.wait_s
    told = False
    while not (log.has_left(older) or has_ended(log.claimed(older))):
        left_s = give_up_at - clock()
        if left_s <= 0:
            _LOG.warning(
                "Incarnation %s (%s) did not stop within %.0f s. It is fenced, and this one goes on.",
                older,
                log.holder(older),
                limits.wait_s,
            )
            return False
        if not told:
            _LOG.warning("Taking over from incarnation %s (%s): waiting for it to stop.", older, log.holder(older))
            told = True
        sleep(min(limits.look_every_s, left_s))
    return True


def _newest_of_another(log: DecisionLog, ours: int) -> int:
    """The newest incarnation before ours that is not of this process, where Spark itself sees to the order."""
    for older in range(ours - 1, 0, -1):
        claim = log.claimed(older)
        if not claim:
            return 0
        if not is_this_process(claim):
            return older
    return 0


class Watch(threading.Thread):
    """Looks whether a query still has its pipeline, until it has ended. Stops it when a newer incarnation claims."""

    def __init__(self, query: StreamingQuery, function: BatchFunction, limits: Handover = HANDOVER) -> None:
        super().__init__(name="semel-watch", daemon=True)
        self.query = query
        self.function = function
        self.limits = limits

    def run(self) -> None:
        # Spark's JVM may end at any time, and with it the query: then there is nothing left to watch.
        with suppress(Exception):
            while self.query.isActive:
                if self.function.find_newer() is not None:
                    self.function.drain(self.limits.grace_s)
                    self.query.stop()
                    _LOG.warning("%s", self.function.fenced)
                    break
                time.sleep(self.limits.look_every_s)
            self.function.end()
