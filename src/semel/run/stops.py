"""How the pipelines of a file are stopped, by a signal or because one of them failed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from semel.errors import QueryStopped, SemelError
from semel.run.happenings import GRACE_S, Happening, Hear, Launched, error_in
from semel.runtime.commits import finished
from semel.runtime.pipeline import STOP_S_MAX, Running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_STOP_S_MAX = 15.0


def stop_all(
    runs: Sequence[Launched], spark: SparkSession, stop: StopSignals, hear: Hear, grace_s: float = GRACE_S
) -> list[SemelError]:
    """Returns the failures that nobody has been told of yet: a batch may fail while it is waited for.

    All of them are stopped at once, so that the grace is that of all.
    """
    stop.at_once = lambda number: _die(spark, number)
    stopping = [_Stopping(run.running, grace_s) for run in runs]
    for one in stopping:
        one.start()
    give_up_at = time.monotonic() + grace_s + STOP_S_MAX
    failures = []
    for run, one in zip(runs, stopping, strict=True):
        one.join(max(0.0, give_up_at - time.monotonic()))
        # Whatever goes wrong while stopping, the batch is safe: the next start completes it or rolls it back.
        with suppress(Exception):
            failure = _failure_of_stop(run, hear, whole=one.whole)
            failures += [failure] if failure else []
    with suppress(Exception):
        if not finished(spark.stop, SPARK_STOP_S_MAX, "semel-stop-spark"):
            # Something in it hangs. It is ours, and all that it could still do is safe to cut off.
            _kill_jvm(spark)
    return failures


class _Stopping(threading.Thread):
    """Stops one pipeline. `whole` says whether its batch came to its end."""

    def __init__(self, running: Running, grace_s: float) -> None:
        super().__init__(name="semel-stop-pipeline", daemon=True)
        self.running = running
        self.grace_s = grace_s
        self.whole = False

    def run(self) -> None:
        with suppress(Exception):  # of Spark, which does not keep us from saying what is open
            self.whole = self.running.stop(self.grace_s)


def _failure_of_stop(run: Launched, hear: Hear, *, whole: bool) -> SemelError | None:
    if run.told:
        return None
    run.told = True
    # Being cut off by the stop itself is no failure, so only what semel raised counts.
    found = None
    with suppress(Exception):  # a JVM that says nothing does not keep us from saying what we know
        found = error_in(str(run.running.query.exception() or ""))
    failure = None if isinstance(found, QueryStopped) else found
    if failure is None and not whole:
        failure = run.running.undone()
    hear(Happening("failed" if failure else "stopped", run.name, error=str(failure or "")))
    return failure


def _die(spark: SparkSession, number: int) -> None:
    _kill_jvm(spark)
    os._exit(128 + number)


def _kill_jvm(spark: SparkSession) -> None:
    with suppress(Exception):
        gateway: Any = spark.sparkContext._gateway
        gateway.proc.kill()


class StopSignals:
    """SIGTERM and SIGINT ask for a clean stop. The second one does what `at_once` says."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self.at_once: Callable[[int], None] = lambda number: os._exit(128 + number)

    def __enter__(self) -> StopSignals:
        self._before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def is_asked(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        return self._asked.wait(seconds)

    def _handle(self, number: int, _frame: object) -> None:
        if self._asked.is_set():
            self.at_once(number)
        self._asked.set()
