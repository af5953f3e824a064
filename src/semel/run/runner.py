"""`semel run`: start every pipeline of a file, tell what happens, stop clean on a signal."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel import errors
from semel.errors import CheckpointError, CommitStalled, ConfigError, Fenced, PlanRestored, QueryStopped, SemelError
from semel.run.loading import load_pipelines, place_and_error, split_target
from semel.run.session import SparkSettings, open_session
from semel.runtime.batch import PLAN_OVERWRITTEN, Report
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.commits import Waiting, finished
from semel.runtime.handover import HANDOVER, Handover
from semel.runtime.pipeline import STOP_S_MAX, Pipeline, Running, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("semel")

LOOK_EVERY_S = 0.2
GRACE_S = 30.0
SPARK_STOP_S_MAX = 15.0


@dataclass(frozen=True)
class Happening:
    """What `semel run` tells: a pipeline "started", ended a "batch", "stopped" or "failed", or is "waiting".

    Who waits has a decided batch that is `visible_in` some sinks and not in those that it `waits_for`.
    """

    event: str
    pipeline: str
    batch: int | None = None
    how: str = ""
    rows: int = 0
    attempt: int = 0
    ms: float = 0.0
    lag: int | None = None
    lag_by_partition: Mapping[str, int] | None = None
    warning: str = ""
    error: str = ""
    waits_for: tuple[str, ...] = ()
    visible_in: tuple[str, ...] = ()
    since: str = ""
    seconds: float = 0.0
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))


Hear = Callable[[Happening], None]
#: What is made of each writer before it is launched; `semel verify` gives it another checkpoint.
Adapt = Callable[[StreamWriter], StreamWriter]


def as_it_is(writer: StreamWriter) -> StreamWriter:
    return writer


def exit_code(error: BaseException) -> int:
    """What a shell or a supervisor may act on.

    2 means that the same start would fail again, 3 that another runs, 4 that a batch is decided and not visible in
    every sink: do not leave it stopped.
    """
    if isinstance(error, Fenced):
        return 3
    if isinstance(error, CommitStalled):
        return 4
    return 2 if isinstance(error, ConfigError | CheckpointError) else 1


def run(target: str, settings: SparkSettings, hear: Hear, adapt: Adapt = as_it_is, *, grace_s: float = GRACE_S) -> None:
    """Run the pipelines of `FILE[:NAME]` until they end, one fails, or a signal says stop. Raises what failed."""
    with StopSignals() as stop:
        pipelines = load_pipelines(target)
        path = split_target(target)[0]
        spark = open_session(settings, pipelines)
        # PySpark takes SIGINT for itself when its context starts.
        stop.install()
        with all_stopped(spark, stop, hear, grace_s) as runs:
            for pipeline in pipelines:
                if not stop.is_asked():
                    runs.append(launch(pipeline, spark, path, hear, adapt, stop, grace_s))
            with jvm_watched():
                watch(runs, stop, hear)


# One pipeline -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A pipeline that was started, and whether its end has been told. `begin` starts it once more."""

    name: str
    running: Running
    told: bool = False
    begin: Callable[[], Running] | None = None
    restarts: int = 0

    @property
    def active(self) -> bool:
        return bool(self.running.query.isActive)


def launch(
    pipeline: Pipeline,
    spark: SparkSession,
    path: Path,
    hear: Hear,
    adapt: Adapt = as_it_is,
    stop: StopSignals | None = None,
    grace_s: float = GRACE_S,
) -> Run:
    signals = stop or StopSignals()
    with told_as_config_error(f"Pipeline {pipeline.name} of {path} cannot be built", path):
        writer = adapt(pipeline(spark))
        planned = planned_batch(spark, writer)

    def listener(report: Report) -> None:
        again = report.how == "committed" and report.batch == planned
        hear(
            Happening(
                "batch",
                pipeline.name,
                report.batch,
                "replayed" if again else report.how,
                report.rows,
                report.attempt,
                round(sum(report.ms.values()), 1),
                report.lag.records if report.lag else None,
                report.lag.by_partition if report.lag else None,
                report.warning,
            )
        )

    def waits(waiting: Waiting) -> None:
        hear(_waiting(pipeline.name, waiting))

    def begin() -> Running:
        return unless_stopped(lambda: writer.launch(listener, waits, signals.is_asked), pipeline.name, signals, grace_s)

    with told_as_config_error(f"Pipeline {pipeline.name} of {path} cannot be started", path):
        running = begin()
    hear(Happening("started", pipeline.name, warning=running.function.not_promised))
    return Run(pipeline.name, running, begin=begin)


def unless_stopped(begin: Callable[[], Running], name: str, stop: StopSignals, grace_s: float) -> Running:
    """Begin in a thread that nobody needs: a store may hang in a start, too, and a stop does not wait for that."""
    from pyspark import InheritableThread

    found: list[Running | BaseException] = []

    def work() -> None:
        try:
            found.append(begin())
        except BaseException as error:  # noqa: BLE001 - it is raised below
            found.append(error)

    thread = InheritableThread(target=work, name="semel-begin", daemon=True)
    thread.start()
    give_up_at = math.inf
    while thread.is_alive():
        thread.join(LOOK_EVERY_S)
        if stop.is_asked():
            give_up_at = min(give_up_at, time.monotonic() + grace_s)
        if time.monotonic() > give_up_at:
            raise QueryStopped(
                f"Pipeline {name} was stopped while it waited for a store in its start.",
                data_now="this start wrote no row of a new batch; what was decided before is still to be completed",
                remedy="Start the pipeline again when its stores answer.",
            )
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _waiting(pipeline: str, waiting: Waiting) -> Happening:
    return Happening(
        "waiting",
        pipeline,
        waiting.batch,
        warning=waiting.why,
        waits_for=waiting.sinks,
        visible_in=waiting.visible,
        since=waiting.since,
        seconds=round(waiting.seconds, 1),
    )


@contextmanager
def told_as_config_error(what: str, path: Path) -> Iterator[None]:
    """Errors of the user's code, and of Spark about it, before anything runs."""
    try:
        yield
    except SemelError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {place_and_error(error, path)}") from error


def planned_batch(spark: SparkSession, writer: StreamWriter) -> int | None:
    """The batch that an earlier run had planned and not finished: Spark hands it to us a second time."""
    checkpoint = Checkpoint(spark, writer.checkpoint)
    batch = checkpoint.plans.next_batch()
    return batch if checkpoint.plans.has_planned(batch) else None


# All of them --------------------------------------------------------------------------------------------------------


def watch(runs: Sequence[Run], stop: StopSignals, hear: Hear) -> None:
    """Return when all have ended or a signal came; raise when one failed."""
    while True:
        tell_ends(runs, hear)
        # One that has ended may have been started again, and is not told of then.
        if all(run.told for run in runs) or stop.wait(LOOK_EVERY_S):
            return


@contextmanager
def jvm_watched() -> Iterator[None]:
    """A JVM that dies takes every query along; nobody can ask it why."""
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        yield
    except Py4JJavaError:
        # It is there, and has something to say.
        raise
    except (Py4JError, ConnectionError) as error:
        raise SemelError(
            f"Spark's JVM is gone: {_first_line(str(error))}",
            data_now="what was committed stays visible; whether the batch at hand was decided is not known from here",
            remedy="Start again. If it was killed for its memory, give it more: --conf spark.driver.memory=4g.",
        ) from error


def tell_ends(runs: Sequence[Run], hear: Hear) -> None:
    """Tell of each pipeline that ended since the last look, and raise the first failure."""
    failures = []
    for run in runs:
        if run.told or run.active:
            continue
        try:
            if started_again(run, hear):
                continue
            failure = failure_of(run)
        except SemelError as error:  # of the new start: that is why the pipeline does not run any more
            failure = error
        run.told = True
        hear(Happening("failed" if failure else "stopped", run.name, error=str(failure or "")))
        failures += [failure] if failure else []
    if failures:
        raise gravest(failures)


#: What Spark says when another one has written the same file of the checkpoint, and what we say of it.
LOST_A_RACE = re.compile(
    r"CONCURRENT_STREAM_LOG_UPDATE|Multiple streaming jobs detected|Multiple streaming queries are concurrently using"
    r"|FileAlreadyExistsException.*/(offsets|commits)/"
    rf"|{PlanRestored.__name__}: |{PLAN_OVERWRITTEN}"
)


def started_again(run: Run, hear: Hear) -> bool:
    """Start a query again that an older driver has got in the way of: that one is fenced, and ends by the same race."""
    found = run.running.query.exception()
    if found is None or not LOST_A_RACE.search(str(found)):
        return False
    if run.begin is None or run.restarts >= HANDOVER.restarts or is_superseded(run):
        return False
    run.restarts += 1
    run.running.function.end()
    run.running = _begun(run.begin, run.name)
    why = "an older incarnation wrote to the checkpoint at the same time; the query was started again"
    hear(Happening("started", run.name, warning=why))
    return True


def is_superseded(run: Run, limits: Handover = HANDOVER, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether a newer driver has claimed. No answer is not taken for no: a new claim would fence that one."""
    tries = math.ceil(limits.wait_s / limits.look_every_s)
    for tries_left in reversed(range(tries)):
        try:
            return run.running.function.look_for_newer() is not None
        except Exception as error:
            if _is_of_a_dead_jvm(error):
                raise
            if not tries_left:
                raise SemelError(
                    f"Pipeline {run.name} has ended, and whether another driver has taken it over cannot be found out: "
                    f"{_first_line(str(error))}",
                    data_now="what was committed stays visible; the batch at hand is whole or unseen",
                    remedy="Bring the checkpoint's file system back. Start the pipeline again unless another one runs.",
                ) from error
        sleep(limits.look_every_s)
    raise ValueError(f"no try in {limits}")


def _is_of_a_dead_jvm(error: Exception) -> bool:
    from py4j.protocol import Py4JError, Py4JJavaError

    return isinstance(error, ConnectionError) or (isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError))


def _begun(begin: Callable[[], Running], name: str) -> Running:
    """What ran a moment ago is no slip of the user. A JVM that is gone is told of by `jvm_watched`."""
    try:
        return begin()
    except SemelError:
        raise
    except Exception as error:
        if _is_of_a_dead_jvm(error):
            raise
        raise SemelError(
            f"Pipeline {name} could not be started again: {_first_line(str(error))}",
            data_now="what was committed stays visible",
            remedy="Mend the cause and start again: the next start goes on from there.",
        ) from error


def failure_of(run: Run) -> SemelError | None:
    """Why the query ended, or None when it came to its end or was asked to stop."""
    found = run.running.query.exception()
    function = run.running.function
    if found is not None and LOST_A_RACE.search(str(found)):
        function.find_newer()
    if found is None:
        return function.fenced
    error = (
        error_in(str(found))
        or function.fenced
        or SemelError(
            f"Pipeline {run.name} failed: {_first_line(str(found))}",
            data_now="what was committed stays visible; whether the batch at hand was decided is not known from here",
            remedy="Mend the cause and start again: the next start completes the batch or runs it again.",
        )
    )
    return function.fenced if isinstance(error, QueryStopped) else error


def error_in(text: str) -> SemelError | None:
    """The semel error inside what came back from the JVM, where it is only text: the last one is the outermost."""
    found = re.findall(
        r"^(?:.*: )?semel\.errors\.(\w+): ([\s\S]{0,2000}?)\n  the data now: (.*)\n  what to do: (.*)$",
        text,
        re.MULTILINE,
    )
    if not found:
        return None
    kind, what, data_now, remedy = found[-1]
    return errors._rebuild(getattr(errors, kind, SemelError), what, data_now, remedy)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


@contextmanager
def all_stopped(spark: SparkSession, stop: StopSignals, hear: Hear, grace_s: float = GRACE_S) -> Iterator[list[Run]]:
    """However the block ends, every pipeline is stopped after its current batch; a second signal does not wait."""
    runs: list[Run] = []
    try:
        yield runs
    except SemelError as error:
        failures = stop_all(runs, spark, stop, hear, grace_s)
        raise gravest([error, *failures]) from error.__cause__
    except BaseException:
        for failure in stop_all(runs, spark, stop, hear, grace_s):
            _LOG.error("%s", failure)
        raise
    failures = stop_all(runs, spark, stop, hear, grace_s)
    if failures:
        raise gravest(failures)


def gravest(failures: Sequence[SemelError]) -> SemelError:
    """Of several failures the one to end with: the first of those that must not be left as they are. Others are told
    now, because nobody else will."""
    found = next((failure for failure in failures if isinstance(failure, CommitStalled)), failures[0])
    for failure in failures:
        if failure is not found:
            _LOG.error("%s", failure)
    return found


def stop_all(
    runs: Sequence[Run], spark: SparkSession, stop: StopSignals, hear: Hear, grace_s: float = GRACE_S
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


def _failure_of_stop(run: Run, hear: Hear, *, whole: bool) -> SemelError | None:
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
