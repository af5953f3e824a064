"""Rows into Kafka topics, each at a place that is known by counting.

All rows of a key go to one partition, in order. The producer is idempotent, so that none gets there twice whatever
happens to the brokers meanwhile; and after each feeding every partition must end where the count says.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from semel.errors import ConfigError, MissingExtra, SourceUnavailable
from semel.kafka.options import connection_options
from semel.sources.kafka_broker import Partition
from semel.verify.feeders import Feeder, KafkaPlace
from semel.verify.workload import Workload

#: How many partitions a topic gets that is not there yet.
PARTITIONS = 2
ANSWER_S_MAX = 10.0
#: A broker that is killed while rows are on their way to it comes back within this time.
FEED_S_MAX = 180.0
PAUSE_S = 0.1
#: How many rows are handed over before the producer is asked what became of them.
POLL_EVERY_ROWS = 1000


class KafkaFeeder(Feeder):
    """`options` are those of Spark's source, with names in lower case."""

    keeps_order = True

    def __init__(self, options: Mapping[str, str], workload: Workload) -> None:
        super().__init__(workload)
        self.servers = str(options.get("kafka.bootstrap.servers", ""))
        self.topics = _topics(options)
        self._assigned = _assigned(options)
        _refuse_a_late_start(options)
        self._settings: dict[str, Any] = {**connection_options(options), "log_level": 0}
        self._producer: Any = None
        self._consumer: Any = None
        #: Where the next row of each partition goes.
        self._ends: dict[Partition, int] = {}

    def check_empty(self) -> None:
        for (topic, partition), (first, end) in self._asked(self._bounds).items():
            if end > first:
                raise ConfigError(
                    f"Topic {topic} at {self.servers} is not empty: partition {partition} holds {end - first} records.",
                    remedy="Let the pipeline read a new topic for this run: nobody else's rows can be compared.",
                )

    def _put(self, coming: range) -> None:
        if not self._ends:
            self._begin()
        ends, places, failed = dict(self._ends), list[KafkaPlace](), list[str]()
        partitions = sorted(ends)
        for n in coming:
            key = self.workload.key(n).encode()
            topic, partition = partitions[zlib.crc32(key) % len(partitions)]
            self._produce(topic, partition, key, n, failed)
            places.append(KafkaPlace(topic, partition, ends[topic, partition]))
            ends[topic, partition] += 1
        left = self._producer.flush(FEED_S_MAX)
        if left or failed:
            raise self._unavailable(f"did not take {left or len(failed)} rows: {(failed or ['no answer'])[0]}")
        self._require(ends)
        self._ends = ends
        self.places += places

    def _produce(self, topic: str, partition: int, key: bytes, n: int, failed: list[str]) -> None:
        def hear(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(str(error.str()))

        deadline = time.monotonic() + FEED_S_MAX
        while True:
            try:
                self._producer.produce(topic, self.workload.encode(n), key, partition, on_delivery=hear)
                break
            except BufferError:  # the queue is full
                if time.monotonic() > deadline:
                    raise self._unavailable("takes no more rows") from None
                self._producer.poll(PAUSE_S)
        if n % POLL_EVERY_ROWS == 0:
            self._producer.poll(0)

    def _begin(self) -> None:
        """Make the topics that are missing: Spark's source fails without them."""
        wanted = max((p + 1 for ps in self._assigned.values() for p in ps), default=0)
        self._asked(lambda: create_topics(self._settings, self.topics, max(PARTITIONS, wanted)))
        self.check_empty()
        ends = {place: end for place, (_, end) in self._asked(self._bounds).items()}
        assigned = {(topic, p) for topic, found in self._assigned.items() for p in found}
        missing = {*self.topics} - {topic for topic, _ in ends} or {f"{t}-{p}" for t, p in assigned - ends.keys()}
        if missing:
            raise self._unavailable(f"has no {', '.join(sorted(missing))}, and did not let us create it")
        own = {"enable.idempotence": True, "linger.ms": 5, "reconnect.backoff.max.ms": 500}
        self._producer = _client().Producer({**self._settings, **own})
        self._ends = ends

    def _bounds(self) -> dict[Partition, tuple[int, int]]:
        """The first offset and the end of each partition that the source reads; none of a topic that is missing."""
        client = _client()
        if self._consumer is None:
            # With read_committed the end would be that of what is committed, and hide somebody's open transaction.
            own = {"group.id": "semel-verify", "isolation.level": "read_uncommitted"}
            self._consumer = client.Consumer({**self._settings, **own})
        known = self._consumer.list_topics(timeout=ANSWER_S_MAX).topics
        found = {}
        for topic in self.topics:
            there = known[topic].partitions if topic in known and known[topic].error is None else {}
            for partition in sorted(set(self._assigned.get(topic, there)) & set(there)):
                asked = client.TopicPartition(topic, partition)
                found[topic, partition] = self._consumer.get_watermark_offsets(asked, timeout=ANSWER_S_MAX)
        return found

    def _require(self, expected: Mapping[Partition, int]) -> None:
        """Each partition ends where it should. A broker that has just come back may say less for a moment."""
        deadline = time.monotonic() + FEED_S_MAX
        while True:
            ends = {place: end for place, (_, end) in self._asked(self._bounds).items()}
            if ends == expected:
                return
            wrong = {place: end for place, end in ends.items() if end != expected.get(place, 0)}
            if time.monotonic() > deadline or any(end > expected.get(place, 0) for place, end in wrong.items()):
                (topic, partition), end = next(iter(wrong.items()), (min(expected), "nowhere"))
                raise self._unavailable(
                    f"has a partition {partition} of topic {topic} that ends at {end}, "
                    f"not at {expected.get((topic, partition), 0)}",
                    remedy="Let nobody else write to the topic while the run lasts.",
                )
            time.sleep(PAUSE_S)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """An answer of the brokers, asked for again while they are away: for longer once it is known that they exist.

        A topic that was made a moment ago may have no leader yet.
        """
        deadline = time.monotonic() + (FEED_S_MAX if self._ends else ANSWER_S_MAX)
        while True:
            try:
                return ask()
            except _client().KafkaException as error:
                if time.monotonic() > deadline:
                    raise self._unavailable(f"does not answer: {error.args[0].str()}") from None
            time.sleep(PAUSE_S)

    def _unavailable(self, what: str, remedy: str = "") -> SourceUnavailable:
        now = f"{self.fed} rows were fed; of those after them some may be in the source"
        return SourceUnavailable(f"Kafka at {self.servers} {what}.", data_now=now, remedy=remedy)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = self._producer = None


def create_topics(settings: Mapping[str, Any], topics: Sequence[str], partitions: int) -> None:
    """Make the topics that are missing, with the replicas that the brokers give by default.

    Whoever may not create topics may still use those that exist, so a refusal is not an error of this call.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin: Any = AdminClient(dict(settings))
    known = admin.list_topics(timeout=ANSWER_S_MAX).topics
    new = [NewTopic(topic, partitions, -1) for topic in topics if topic not in known]
    for future in admin.create_topics(new, operation_timeout=ANSWER_S_MAX).values() if new else ():
        with suppress(KafkaException):
            future.result(ANSWER_S_MAX)
    # Every broker is to know them before somebody asks one that does not.
    deadline = time.monotonic() + ANSWER_S_MAX
    while new and time.monotonic() < deadline:
        known = admin.list_topics(timeout=ANSWER_S_MAX).topics
        if all(topic in known and known[topic].partitions for topic in topics):
            return
        time.sleep(PAUSE_S)


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise MissingExtra("A Kafka source needs confluent-kafka, which is not installed.", extra="kafka") from None
    return confluent_kafka


def _topics(options: Mapping[str, str]) -> tuple[str, ...]:
    if "subscribepattern" in options:
        raise ConfigError(
            f"Topics that match a pattern cannot be fed: {options['subscribepattern']!r} names none.",
            remedy="Name the topics for this run: subscribe, or read_kafka(spark, TOPIC, ...).",
        )
    named = options.get("subscribe", "").split(",")
    return tuple(dict.fromkeys(name.strip() for name in (*named, *_assigned(options)) if name.strip()))


def _assigned(options: Mapping[str, str]) -> dict[str, list[int]]:
    """What the option `assign` says: {"orders": [0, 1]}."""
    try:
        return {str(topic): [int(p) for p in found] for topic, found in json.loads(options.get("assign", "{}")).items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError("The option assign of the Kafka source is not partitions by topic.") from None


def _refuse_a_late_start(options: Mapping[str, str]) -> None:
    """Rows that are there before the pipeline starts must be read: Spark's own default is to pass over them."""
    if any(name.startswith(("startingtimestamp", "startingoffsetsbytimestamp")) for name in options):
        return
    start = options.get("startingoffsets", "latest")
    with suppress(ValueError, AttributeError):
        if all(at in (-2, 0) for found in json.loads(start).values() for at in found.values()):
            return
    if start.lower() != "earliest":
        raise ConfigError(
            f"The Kafka source starts at {start}: it would pass over rows that are fed before it.",
            remedy='Start it at the beginning: .option("startingOffsets", "earliest"), '
            'or read_kafka(..., start="earliest").',
        )
