"""`semel run`: start every pipeline of a file, tell what happens, stop clean on a signal."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from semel.errors import (
    CheckpointError,
    CommitStalled,
    ConfigError,
    DecisionUnknown,
    Fenced,
    InDoubt,
    PlanRestored,
    QueryStopped,
    RowsGone,
    SemelError,
)
from semel.run.happenings import GRACE_S, Happening, Hear, Launched, error_in, first_line
from semel.run.loading import load_pipelines, place_and_error, split_target
from semel.run.session import SparkSettings, open_session
from semel.run.stops import StopSignals, stop_all
from semel.runtime.batch import PLAN_OVERWRITTEN
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.commits import Waiting
from semel.runtime.handover import HANDOVER, Handover
from semel.runtime.phases import Report
from semel.runtime.pipeline import Pipeline, Running, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("semel")

LOOK_EVERY_S = 0.2

#: What is made of each writer before it is launched; `semel verify` gives it another checkpoint.
Adapt = Callable[[StreamWriter], StreamWriter]


def as_it_is(writer: StreamWriter) -> StreamWriter:
    return writer


#: After these a batch is decided, or may be, and not known to be visible in every sink. What needs a person is first,
#: then what the next start completes.
OPEN = ((InDoubt, RowsGone), (CommitStalled,), (DecisionUnknown,))


def exit_code(error: BaseException) -> int:
    """What a shell or a supervisor may act on.

    2 means that the same start would fail again, 3 that another runs, 4 that a batch is decided, or may be, and not
    visible in every sink: do not leave it so.
    """
    if isinstance(error, Fenced):
        return 3
    if isinstance(error, sum(OPEN, ())):
        return 4
    return 2 if isinstance(error, ConfigError | CheckpointError) else 1


def run(
    target: str,
    settings: SparkSettings,
    hear: Hear,
    adapt: Adapt = as_it_is,
    *,
    grace_s: float = GRACE_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Run the pipelines of `FILE[:NAME]` until they end, one fails, or a signal says stop. Raises what failed.

    They are stopped, too, when they are not wanted any more.
    """
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
                watch(runs, stop, hear, is_wanted)


# One pipeline -------------------------------------------------------------------------------------------------------


def launch(
    pipeline: Pipeline,
    spark: SparkSession,
    path: Path,
    hear: Hear,
    adapt: Adapt = as_it_is,
    stop: StopSignals | None = None,
    grace_s: float = GRACE_S,
) -> Launched:
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
    return Launched(pipeline.name, running, begin=begin)


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


def watch(
    runs: Sequence[Launched], stop: StopSignals, hear: Hear, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Return when all have ended, a signal came, or they are not wanted any more; raise when one failed."""
    while True:
        tell_ends(runs, hear)
        # One that has ended may have been started again, and is not told of then.
        if all(run.told for run in runs) or not is_wanted() or stop.wait(LOOK_EVERY_S):
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
            f"Spark's JVM is gone: {first_line(str(error))}",
            data_now="what was committed stays visible; whether the batch at hand was decided is not known from here",
            remedy="Start again. If it was killed for its memory, give it more: --conf spark.driver.memory=4g.",
        ) from error


def tell_ends(runs: Sequence[Launched], hear: Hear) -> None:
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


def started_again(run: Launched, hear: Hear) -> bool:
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


def is_superseded(run: Launched, limits: Handover = HANDOVER, sleep: Callable[[float], None] = time.sleep) -> bool:
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
                    f"{first_line(str(error))}",
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
            f"Pipeline {name} could not be started again: {first_line(str(error))}",
            data_now="what was committed stays visible",
            remedy="Mend the cause and start again: the next start goes on from there.",
        ) from error


def failure_of(run: Launched) -> SemelError | None:
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
            f"Pipeline {run.name} failed: {first_line(str(found))}",
            data_now="what was committed stays visible; whether the batch at hand was decided is not known from here",
            remedy="Mend the cause and start again: the next start completes the batch or runs it again.",
        )
    )
    return function.fenced if isinstance(error, QueryStopped) else error


@contextmanager
def all_stopped(
    spark: SparkSession, stop: StopSignals, hear: Hear, grace_s: float = GRACE_S
) -> Iterator[list[Launched]]:
    """However the block ends, every pipeline is stopped after its current batch; a second signal does not wait."""
    runs: list[Launched] = []
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


def _rank(failure: SemelError) -> int:
    return next((rank for rank, kinds in enumerate(OPEN) if isinstance(failure, kinds)), len(OPEN))


def gravest(failures: Sequence[SemelError]) -> SemelError:
    """Of several failures the one to end with: the first of the gravest, as in `OPEN`. Others are told now, because
    nobody else will."""
    found = min(failures, key=_rank)
    for failure in failures:
        if failure is not found:
            _LOG.error("%s", failure)
    return found
