"""What is refused before a row is written, and why. Each check is a small function that raises a three-line error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from semel.errors import ConfigError, Refused
from semel.protocol.refusals import refuse_executors, refuse_temporary
from semel.sinks.base import Sink
from semel.sources.plan import PlannedSource, planned_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Guarantee = Literal["exactly-once", "at-least-once", "at-most-once"]

#: Query options that take the decision out of order with Spark's own log: option -> why.
REFUSED_OPTIONS = {
    "asyncprogresstrackingenabled": "Spark then writes commits/N later or not at all, so it may run a batch again "
    "with other offsets",
}

#: Source options that let Spark skip input silently: (option, value) -> why.
REFUSED_SOURCE_OPTIONS = {
    ("failondataloss", "false"): "Spark then skips input that is gone without a word, which is loss",
}

ISOLATION_LEVEL = "kafka.isolation.level"

#: Masters whose executors are on the driver's machine.
LOCAL_MASTERS = ("local", "spark://127.", "spark://localhost:")

REFUSED_TRIGGERS = {
    "continuous": "continuous processing has no micro-batches that could be decided",
    "realTime": "the real-time trigger hands rows to the sink before the batch ends",
}


def check_guarantee(text: str) -> Guarantee:
    if text not in get_args(Guarantee):
        raise ConfigError(
            f"There is no guarantee {text!r}.",
            remedy=f"Use one of {', '.join(get_args(Guarantee))}.",
        )
    return cast(Guarantee, text)


def check_sinks(sinks: Sequence[Sink]) -> None:
    if not sinks:
        raise ConfigError("The pipeline has no sink.", remedy="Name at least one: semel.write(df).to(Sqlite(...)).")
    strangers = [repr(s) for s in sinks if not isinstance(s, Sink)]
    if strangers:
        raise ConfigError(
            f"Not a sink: {', '.join(strangers)}.", remedy="Pass objects such as Sqlite(...) or Files(...)."
        )
    twice = [name for name, n in Counter(s.name for s in sinks).items() if n > 1]
    if twice:
        raise ConfigError(
            f"Two sinks of the pipeline are named {', '.join(map(repr, twice))}.",
            remedy="Give each a name of its own: Sqlite(..., name='orders_copy').",
        )


def check_streaming(df: DataFrame) -> None:
    if not hasattr(df, "_jdf"):
        raise Refused(
            "This DataFrame comes from Spark Connect, where semel cannot reach the query's checkpoint.",
            remedy="Use a classic session: SparkSession.builder.master(...).",
        )
    if not df.isStreaming:
        raise ConfigError(
            "This DataFrame is not a stream, so there are no batches to commit.",
            remedy="Read it with spark.readStream; trigger(availableNow=True) handles bounded input.",
        )


def check_options(options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        why = REFUSED_OPTIONS.get(option.lower())
        if why and str(value).lower() == "true":
            raise Refused(f"The option {option}=true breaks the guarantee: {why}.", remedy=f"Leave {option} out.")


def check_trigger(arguments: Mapping[str, Any]) -> None:
    for name, why in REFUSED_TRIGGERS.items():
        if arguments.get(name) is not None:
            raise Refused(
                f"trigger({name}=...) cannot be exactly-once: {why}.",
                remedy="Use trigger(processingTime=...) or trigger(availableNow=True).",
            )


def check_sources(plan: Any, guarantee: Guarantee) -> None:
    """Look at the options of each source in a streaming plan (a JVM LogicalPlan)."""
    for source in planned_sources(plan):
        for (option, value), why in REFUSED_SOURCE_OPTIONS.items():
            if source.options.get(option, "").lower() == value:
                raise Refused(
                    f"The source option {option}={value} breaks the guarantee: {why}.",
                    remedy=f"Leave {option} out of the source.",
                )
        if guarantee == "exactly-once" and source.is_kafka:
            check_isolation(source)


def check_checkpoint(*, is_temporary: bool, guarantee: Guarantee) -> None:
    """At-least-once remembers nothing, and may forget everything."""
    if refuse_temporary(is_temporary=is_temporary, remembers=guarantee != "at-least-once"):
        raise Refused(
            "The query has no checkpointLocation: Spark made a temporary one, so the next start would write every row "
            "again.",
            remedy='Add .option("checkpointLocation", "/path/of/its/own") to the query.',
        )


def check_executors(sinks: Sequence[Sink], spark: SparkSession) -> None:
    """A master on this machine has its workers here, too."""
    master = str(spark.sparkContext.master)
    are_remote = not master.startswith(LOCAL_MASTERS)
    for sink in sinks:
        if refuse_executors(are_remote=are_remote, reaches_remote=sink.capabilities.remote_executors):
            raise Refused(
                f"Sink {sink.name} ({sink.describe()}) is on this machine alone, and the tasks run elsewhere: "
                f"the master is {master}.",
                remedy="Run with --master 'local[*]', or write to a store that every executor can reach.",
            )


def check_isolation(source: PlannedSource) -> None:
    """Kafka's own default is to hand out records of open and aborted transactions too."""
    level = source.options.get(ISOLATION_LEVEL, "")
    if level.lower() != "read_committed":
        raise Refused(
            f"The Kafka source has {ISOLATION_LEVEL}={level or 'read_uncommitted, by default'}: it would read records "
            "of aborted transactions, which were never written once.",
            remedy=f'Add .option("{ISOLATION_LEVEL}", "read_committed") to the source, or use semel.read_kafka(...).',
        )
