"""Kafka as a source: Spark's own, with the settings that exactly-once rests on, checked before the query starts.

Spark keeps the offsets in its checkpoint and goes by those alone. What is set here: records of aborted transactions are
never seen (`read_committed`), input that is gone stops the query instead of being skipped (`failOnDataLoss`), and the
first start begins where it was told. The name of a group travels along in the plan; `kafka_progress` reports under it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, Refused
from semel.kafka.options import PREFIX, hide_secrets, login_for_java
from semel.kafka.tokens import TokenProvider
from semel.sources.java_pattern import matcher
from semel.sources.kafka_broker import Broker, Partition, with_its_tokens

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: "earliest", "latest", "group-offsets", a time, or offsets by topic and partition.
Start = str | datetime | Mapping[str, Mapping[int, int]]

SERVERS = "kafka.bootstrap.servers"
#: The reader option that carries the group. It is there, if empty, in every source that `read_kafka` made.
GROUP = "semel.group"
TIMEOUT_S = 10.0

#: Spark's numbers for "from the beginning" and "from the end" among explicit offsets.
PLACES = {"earliest": -2, "latest": -1}

#: Settings that the guarantee rests on: option -> (the value it has, what another value does).
REQUIRED = {
    "kafka.isolation.level": ("read_committed", "records of aborted transactions would be read as if they were real"),
    "failondataloss": ("true", "Spark then skips input that is gone without a word, which is loss"),
}

_NOT_HERE = "it is an argument of read_kafka"
_NO_END = "a stream has no end; to stop at the end of today's input use trigger(availableNow=True)"
#: What Kafka's client does better with than with its own defaults: option -> value. What the user says counts more.
#: After each poll, of 500 records by default, Spark asks the broker for both ends of the partition, and waits for the
#: answers. A poll returns no more than one fetch brought, so that the larger number takes no more memory.
QUICKER = {"kafka.max.poll.records": "20000"}

#: Options that are refused whatever their value: option -> (why, what to write instead).
REFUSED = {
    "subscribe": (_NOT_HERE, 'read_kafka(spark, "orders", ...)'),
    "subscribepattern": (_NOT_HERE, 'read_kafka(spark, pattern="orders-.*", ...)'),
    "assign": (
        "single partitions cannot be chosen here",
        'read_kafka(spark, "orders", ...) and .where("partition = 0")',
    ),
    "startingoffsets": (_NOT_HERE, 'start="earliest", "latest", "group-offsets" or {"orders": {0: 42}}'),
    "startingtimestamp": (_NOT_HERE, "start=datetime(...)"),
    "startingoffsetsbytimestamp": (_NOT_HERE, "start=datetime(...)"),
    "startingoffsetsbytimestampstrategy": (_NOT_HERE, "start=datetime(...)"),
    "endingoffsets": (_NO_END, "nothing"),
    "endingtimestamp": (_NO_END, "nothing"),
    "endingoffsetsbytimestamp": (_NO_END, "nothing"),
    GROUP: (_NOT_HERE, 'group="billing"'),
    "kafka.group.id": (
        "Spark's readers would join the group and take partitions from its members",
        'group="billing" to report offsets under a name, or groupIdPrefix where the broker allows certain names only',
    ),
    "kafka.enable.auto.commit": ("the offsets are those of the checkpoint and of nobody else", "nothing"),
    "kafka.auto.offset.reset": ("a reader that jumps elsewhere loses or repeats input", 'start="earliest" or "latest"'),
    "kafka.key.deserializer": ("Spark reads keys as bytes", '"CAST(key AS STRING)" in the query'),
    "kafka.value.deserializer": ("Spark reads values as bytes", '"CAST(value AS STRING)" in the query'),
    "kafka.interceptor.classes": ("an interceptor may drop or change records unseen", "nothing"),
}

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10"
#: The connector for a line of Spark. Patch releases go together; the jars of some later ones cannot be had everywhere.
_CONNECTOR_VERSIONS = {"3.5": "3.5.7", "4.0": "4.0.0"}


def read_kafka(  # noqa: PLR0913 - all but the first two are keywords
    spark: SparkSession,
    topics: str | Sequence[str] = (),
    *,
    servers: str,
    pattern: str = "",
    start: Start = "earliest",
    fallback: str = "earliest",
    group: str = "",
    options: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    token_provider: TokenProvider | None = None,
) -> DataFrame:
    """A stream over one topic, several, or those that match a pattern, with Spark's columns: key, value, topic, ...

    `start` counts on the first start only; afterwards the checkpoint does. `fallback` is for partitions that it says
    nothing of. With a `group`, the offsets of each committed batch are reported to the broker, for monitoring tools.
    `options` are Spark's; those that begin with `kafka.` go to the Kafka client. `timeout_s` limits each question asked
    of the broker before the query starts. `token_provider` gives the tokens for these questions, where a login is by
    OAUTHBEARER; Spark's own client is Java, and fetches its tokens as `options` say.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    source = KafkaSource(servers, names, pattern, start, fallback, group, dict(options or {}))
    return source.load(spark, Broker(with_its_tokens(source.settings(), token_provider), timeout_s))


@dataclass(frozen=True)
class KafkaSource:
    """What was asked of `read_kafka`, checked without a look at the broker."""

    servers: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    start: Start = "earliest"
    fallback: str = "earliest"
    group: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check_topics(self.topics, self.pattern)
        _check_start(self.start, self.fallback, self.group)
        _check_options(self.options, self.servers)

    def __repr__(self) -> str:
        of = ", ".join(self.topics) or f"pattern {self.pattern}"
        return f"KafkaSource({of} on {self.servers}, start={self.start}, options={hide_secrets(self.options)})"

    def settings(self) -> dict[str, str]:
        """What Spark's reader is told, whatever the broker says."""
        chosen = {"subscribe": ",".join(self.topics)} if self.topics else {"subscribePattern": self.pattern}
        given = {_spelled(name): _text(value) for name, value in self.options.items() if value is not None}
        client = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        login = {f"{PREFIX}{name}": value for name, value in login_for_java(client).items()}
        required = {"kafka.isolation.level": "read_committed", "failOnDataLoss": "true"}
        # Spark's names of options know no case, and the last one of a name counts.
        kept = {name: value for name, value in given.items() if name.lower() not in REQUIRED}
        return {**QUICKER, **kept, **login, **chosen, **required, SERVERS: self.servers, GROUP: self.group}

    def load(self, spark: SparkSession, broker: Broker) -> DataFrame:
        """The stream. Asks the broker first, so that what is missing is told before a query starts."""
        partitions = broker.partitions(self.topics) if self.topics else broker.partitions_like(self.pattern)
        reader = spark.readStream.format("kafka").options(**self.settings(), **self.starting(partitions, broker))
        try:
            return reader.load()
        except Exception as error:
            if _names_the_missing_connector(str(error)):
                raise _no_connector(spark) from None
            raise

    def starting(self, partitions: Sequence[Partition], broker: Broker) -> dict[str, str]:
        """Where the first start begins, in Spark's words."""
        if isinstance(self.start, datetime):
            at_ms = str(int(self.start.timestamp() * 1000))
            # A partition without a record that new has nothing to start from but its end.
            return {"startingTimestamp": at_ms, "startingOffsetsByTimestampStrategy": "latest"}
        if isinstance(self.start, Mapping):
            known = {(topic, int(n)): int(at) for topic, found in self.start.items() for n, at in found.items()}
            _refuse_strangers(known.keys() - set(partitions))
        elif self.start == "group-offsets":
            known = broker.group_offsets(self.group, partitions)
        else:
            return {"startingOffsets": self.start}
        if not partitions:
            return {"startingOffsets": self.fallback}
        return {"startingOffsets": offsets_as_json({p: known.get(p, PLACES[self.fallback]) for p in partitions})}


def offsets_as_json(offsets: Mapping[Partition, int]) -> str:
    """Offsets as Spark writes them: {"orders": {"0": 42}}. Spark wants every partition to be named."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic)


# Checks -------------------------------------------------------------------------------------------------------------


def _check_topics(topics: Sequence[str], pattern: str) -> None:
    if bool(topics) == bool(pattern):
        raise ConfigError(
            "read_kafka needs topics or a pattern, and not both.",
            remedy='Write read_kafka(spark, "orders", ...), (spark, ["a", "b"], ...) or (spark, pattern="a.*", ...).',
        )
    for topic in topics:
        if not _TOPIC.fullmatch(topic):
            raise ConfigError(
                f"A Kafka topic cannot be named {topic!r}.",
                remedy="Use letters, digits, dots, _ and -; give several topics as a list.",
            )
    try:
        matcher(pattern)
    except ValueError as error:
        raise ConfigError(f"The pattern {pattern!r} is not a regular expression: {error}.") from None


def _check_start(start: Start, fallback: str, group: str) -> None:
    places = ", ".join(map(repr, (*PLACES, "group-offsets")))
    if isinstance(start, str) and start not in (*PLACES, "group-offsets"):
        raise ConfigError(
            f"A stream cannot start at {start!r}.",
            remedy=f"Use one of {places}, a datetime, or offsets such as {{'orders': {{0: 42}}}}.",
        )
    if fallback not in PLACES:
        raise ConfigError(f"The fallback cannot be {fallback!r}.", remedy=f"Use one of {', '.join(map(repr, PLACES))}.")
    if start == "group-offsets" and not group:
        raise ConfigError("start='group-offsets' needs a group.", remedy='Name it: group="billing".')
    if isinstance(start, datetime) and start.tzinfo is None:
        raise ConfigError(
            f"The start {start.isoformat()} has no time zone, so it names no moment.",
            remedy="Give it one: datetime(..., tzinfo=timezone.utc).",
        )
    if isinstance(start, Mapping) and not all(isinstance(found, Mapping) for found in start.values()):
        raise ConfigError(
            "The start is not made of offsets by topic and partition.", remedy='Write it as {"orders": {0: 42, 1: 40}}.'
        )


def _check_options(options: Mapping[str, Any], servers: str) -> None:
    for option, value in options.items():
        name = option.lower()
        if name in REFUSED:
            why, instead = REFUSED[name]
            remedy = f"Leave {option} out." if instead == "nothing" else f"Leave {option} out and use {instead}."
            raise Refused(f"The option {option} cannot be given to read_kafka: {why}.", remedy=remedy)
        required, why = REQUIRED.get(name, ("", ""))
        if required and _text(value).lower() != required:
            raise Refused(
                f"The option {option}={value} breaks the guarantee: {why}.",
                remedy=f"Leave {option} out: read_kafka sets it to {required}.",
            )
        if name == SERVERS and _text(value) != servers:
            raise ConfigError(
                f"servers says {servers} and the option {option} says {value}.", remedy=f"Leave {option} out."
            )
        if "." in name and not name.startswith((PREFIX, "kafkaconsumer.", "fetchoffset.")):
            # Spark would pass over it without a word, and the client would connect without it.
            raise ConfigError(
                f"Spark's Kafka source has no option {option}.",
                remedy=f"Give it to the Kafka client: {PREFIX}{option}.",
            )


def _refuse_strangers(partitions: set[Partition]) -> None:
    if partitions:
        names = ", ".join(f"{topic}-{number}" for topic, number in sorted(partitions))
        raise ConfigError(
            f"The start names partitions that are not read: {names}.", remedy="Correct the topics or the start."
        )


def _spelled(option: str) -> str:
    """Spark's names of options know no case. Kafka's do, and all of them are in lower case."""
    return option.lower() if option.lower().startswith(PREFIX) else option


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# The connector ------------------------------------------------------------------------------------------------------


def connector(spark_version: str = "", scala: str = "") -> str:
    """The coordinate of Spark's Kafka connector for a Spark; by default for the PySpark that is installed.

    `@semel.pipeline(packages=(connector(),))`.
    """
    if not spark_version:
        import pyspark

        spark_version = pyspark.__version__
    line = ".".join(spark_version.split(".")[:2])
    scala = scala or ("2.12" if line.startswith("3.") else "2.13")
    return f"{_CONNECTOR}_{scala}:{_CONNECTOR_VERSIONS.get(line, spark_version)}"


def _names_the_missing_connector(words: str) -> bool:
    return "Failed to find data source: kafka" in words or (
        "NoClassDefFoundError" in words and "kafka" in words.lower()
    )


def _no_connector(spark: SparkSession) -> ConfigError:
    wanted = connector(spark.version, _scala(spark))
    return ConfigError(
        f"This Spark {spark.version} cannot read Kafka: its connector is not on the class path.",
        remedy=f'In a pipeline file write @semel.pipeline(packages=("{wanted}",)); '
        "make a session of your own with semel.configure(SparkSession.builder).getOrCreate().",
    )


def _scala(spark: SparkSession) -> str:
    jvm: Any = spark.sparkContext._jvm
    return ".".join(str(jvm.scala.util.Properties.versionNumberString()).split(".")[:2])
