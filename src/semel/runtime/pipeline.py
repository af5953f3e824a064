"""What the user writes: `semel.write(df).to(...)`, `semel.sink(...)` and `@semel.pipeline`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from semel.errors import ConfigError, SemelError
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.checks import (
    Guarantee,
    check_executors,
    check_guarantee,
    check_options,
    check_sinks,
    check_sources,
    check_streaming,
    check_trigger,
)
from semel.runtime.commits import Waiting, finished
from semel.runtime.foreach_batch import BatchFunction, Listener
from semel.runtime.handover import Watch
from semel.runtime.hands import DRIVER_ROWS
from semel.runtime.options import AUTO, Switches, check_names
from semel.runtime.phases import Limits
from semel.runtime.query import CHECKPOINT_DEFAULT
from semel.runtime.staging import check_rows
from semel.sinks.base import Sink
from semel.sources.plan import known_by, planned_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: How much longer than its grace a stop may take: to hear what a batch says in the end, and to end Spark's query.
STOP_S_MAX = 15.0
LAST_WORDS_S = 3.0

CHECKPOINT = "checkpointLocation"


def write(df: DataFrame, *, guarantee: str = "exactly-once") -> StreamWriter:
    """Begin a pipeline: `semel.write(df).to(sink, ...).option("checkpointLocation", path).start()`."""
    check_streaming(df)
    return StreamWriter(df, check_guarantee(guarantee))


def sink(
    *sinks: Sink,
    guarantee: str = "exactly-once",
    name: str = "",
    power_loss_safe: bool = True,
    tuned_workers: bool = True,
    tasks: str | int = AUTO,
    driver_rows: int = DRIVER_ROWS,
    limits: Limits = Limits(),
) -> BatchFunction:
    """The drop-in: `df.writeStream.foreachBatch(semel.sink(Sqlite(...))).option(...).start()`.

    `limits` is what `commit_limits` is to `semel.write`.
    """
    check_sinks(sinks)
    return BatchFunction(
        sinks,
        check_guarantee(guarantee),
        name=name,
        switches=Switches(power_loss_safe, tuned_workers, tasks, driver_rows),
        limits=limits,
    )


@dataclass(frozen=True)
class StreamWriter:
    """Looks like Spark's DataStreamWriter. Each call returns a new writer; `start` returns Spark's StreamingQuery."""

    df: DataFrame = field(repr=False)
    guarantee: Guarantee = "exactly-once"
    sinks: tuple[Sink, ...] = ()
    options_: Mapping[str, Any] = field(default_factory=dict, repr=False)
    trigger_: Mapping[str, Any] = field(default_factory=dict)
    output_mode: str = ""
    name: str = ""
    limits: Limits = Limits()

    def to(self, *sinks: Sink) -> StreamWriter:
        """The sinks that every batch commits to together."""
        check_sinks((*self.sinks, *sinks))
        return replace(self, sinks=(*self.sinks, *sinks))

    def option(self, key: str, value: Any) -> StreamWriter:
        return self.options(**{key: value})

    def options(self, **options: Any) -> StreamWriter:
        check_options(options)
        check_names(options)
        return replace(self, options_={**self.options_, **options})

    def trigger(self, **arguments: Any) -> StreamWriter:
        """As Spark's `trigger`: processingTime="5 seconds", availableNow=True, once=True."""
        check_trigger(arguments)
        return replace(self, trigger_=arguments)

    def outputMode(self, mode: str) -> StreamWriter:  # noqa: N802 - Spark's own name
        return replace(self, output_mode=mode)

    def queryName(self, name: str) -> StreamWriter:  # noqa: N802 - Spark's own name
        return replace(self, name=name)

    def commit_limits(self, limits: Limits) -> StreamWriter:
        """How long a decided batch tries to commit before the pipeline stops."""
        return replace(self, limits=limits)

    @property
    def checkpoint(self) -> str:
        """Where the checkpoint is; Spark's own default of `conf/queryName` counts."""
        if CHECKPOINT in self.options_:
            return str(self.options_[CHECKPOINT])
        default = self.df.sparkSession.conf.get(CHECKPOINT_DEFAULT, None)
        if default and self.name:
            return f"{default.rstrip('/')}/{self.name}"
        raise ConfigError(
            "The pipeline has no checkpointLocation, without which nothing can be recovered.",
            remedy='Name one: .option("checkpointLocation", "/path/of/its/own").',
        )

    def start(self) -> StreamingQuery:
        """Check, claim, recover, and hand over to Spark."""
        return self.launch().query

    def launch(
        self,
        listener: Listener | None = None,
        waiting: Callable[[Waiting], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Running:
        """As `start`, with a handle that can stop between two batches.

        `listener` hears how each batch ended, and `waiting` of a decided batch that waits for a sink. `is_stopped` is
        asked while the start itself waits so: it gives up then.
        """
        check_sinks(self.sinks)
        plan = self.df._jdf.queryExecution().analyzed()
        check_sources(plan, self.guarantee)
        check_executors(self.sinks, self.df.sparkSession)
        function = BatchFunction(
            self.sinks,
            self.guarantee,
            name=self.name,
            limits=self.limits,
            listener=listener,
            waiting=waiting,
            is_stopped=is_stopped,
            switches=Switches.said_by(self.options_),
        )
        check_rows(self.df, function.sinks)
        function.rows_checked = True
        function.known_by = known_by(planned_sources(plan))
        spark = self.df.sparkSession
        checkpoint = Checkpoint(spark, self.checkpoint)
        checkpoint.require_writable()
        function.begin(spark, self.checkpoint, checkpoint.ensure_query_id())
        try:
            running = Running(self._spark_writer(function).start(), function)
        except BaseException:
            function.end()
            raise
        Watch(running.query, function).start()
        return running

    def _spark_writer(self, function: BatchFunction) -> Any:
        writer = self.df.writeStream.foreachBatch(function).options(**self.options_).option(CHECKPOINT, self.checkpoint)
        if self.name:
            writer = writer.queryName(self.name)
        if self.output_mode:
            writer = writer.outputMode(self.output_mode)
        return writer.trigger(**self.trigger_) if self.trigger_ else writer


@dataclass(frozen=True)
class Running:
    """A started pipeline."""

    query: StreamingQuery
    function: BatchFunction

    def stop(self, grace_s: float = 30.0) -> bool:
        """Stop after the batch that is being worked on, or in the middle of it when `grace_s` is over.

        Returns whether the batch came to its end. Both are safe: the next start goes on from there. Whatever a store
        does, this returns within `grace_s` and STOP_S_MAX; `undone` says then what is decided and not committed.
        """
        whole = self.function.drain(grace_s)
        if not whole:
            # A commit that hangs is waited for no longer, and the batch says what is open.
            self.function.abandon()
            self.function.drain(LAST_WORDS_S)
        return finished(self._stop_query, STOP_S_MAX - LAST_WORDS_S, "semel-stop") and whole

    def _stop_query(self) -> None:
        self.query.stop()
        self.function.end()

    def undone(self) -> SemelError | None:
        """After a stop that was not whole: which batch is decided, where it is visible, and where it is not."""
        return self.function.undone()


@dataclass(frozen=True)
class Pipeline:
    """A named way to build a stream: what a pipeline file holds and `semel run` starts."""

    build: Callable[[SparkSession], StreamWriter]
    name: str
    packages: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, spark: SparkSession) -> StreamWriter:
        """The writer, named after the pipeline unless the file named it."""
        writer = self.build(spark)
        if not isinstance(writer, StreamWriter):
            raise ConfigError(
                f"Pipeline {self.name} returned {type(writer).__name__}, not what semel.write(df).to(...) gives.",
                remedy="End the function with: return semel.write(df).to(...).option(...)",
            )
        return writer if writer.name else writer.queryName(self.name)


@overload
def pipeline(build: Callable[[SparkSession], StreamWriter], /) -> Pipeline: ...
@overload
def pipeline(
    *, name: str = "", packages: tuple[str, ...] = (), conf: Mapping[str, str] | None = None
) -> Callable[[Callable[[SparkSession], StreamWriter]], Pipeline]: ...
def pipeline(
    build: Callable[[SparkSession], StreamWriter] | None = None,
    /,
    *,
    name: str = "",
    packages: tuple[str, ...] = (),
    conf: Mapping[str, str] | None = None,
) -> Pipeline | Callable[[Callable[[SparkSession], StreamWriter]], Pipeline]:
    """Mark a function that gets `spark` and returns a writer. `packages` and `conf` go to the Spark session."""

    def decorate(function: Callable[[SparkSession], StreamWriter]) -> Pipeline:
        chosen = name or function.__name__
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,79}", chosen):
            raise ConfigError(f"A pipeline cannot be named {chosen!r}.", remedy="Use letters, digits, _ and -.")
        return Pipeline(function, chosen, tuple(packages), dict(conf or {}))

    return decorate if build is None else decorate(build)
