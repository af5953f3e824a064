"""A topic as a read_committed consumer sees it, from the beginning of each partition.

What it has read, it has seen for good: a place is never read twice, and one that is gone is an error and not a jump.
Partitions come one by one, so a batch may arrive over several looks.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from semel.errors import ConfigError, SinkUnavailable
from semel.ids import PipelineId
from semel.kafka.connection import to_kafka_python
from semel.kafka.options import connection_options
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.reach import Reach
from semel.sources.kafka_broker import Broker
from semel.verify.history import Look
from semel.verify.readers.base import NumberOf, Reader
from semel.verify.workload import Workload, identity_text

ROWS_PER_READ = 1000
READ_S = 0.05
ANSWER_S_MAX = 5.0
#: While the reader runs it asks for less long: it asks again.
QUICK_ANSWER_S_MAX = 2.0
#: A transaction is ended before its markers are in all logs: so long they are waited for.
ENDING_S_MAX = 10.0
#: How often it is asked whether the topic has got more partitions. An answer also tells that the broker is there, which
#: a consumer that gets no rows does not.
PARTITIONS_EVERY_S = 1.0

#: What ends the transactional id of a task of a sink.
_OF_TASK = re.compile(r"-[0-9a-f]{8}-[0-9]+-[0-9]+$")
#: States of a transaction that holds nobody up; in any other it is open (KIP-664, ListTransactions).
ENDED = frozenset({"EMPTY", "COMPLETE_COMMIT", "COMPLETE_ABORT", "DEAD"})


class KafkaReader(Reader):
    snapshots = False
    sink: Kafka

    def __init__(self, sink: Kafka, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(sink, workload, number_of, marked=marked)
        if not sink.topic:
            raise ConfigError(
                f"The sink {sink.name} writes to the topics that its rows name, which cannot be watched.",
                remedy='Give it one topic for this run: Kafka(servers, "topic").',
            )
        self._settings: dict[str, Any] = {
            **connection_options(sink.options),
            "bootstrap.servers": sink.servers,
            "log_level": 0,
        }
        self._consumer: Any = None
        #: Where to read on, and the newest end that was reached, by partition.
        self._next: dict[int, int] = {}
        self._asked_s = 0.0
        self._answered = False
        self._assigned: frozenset[int] = frozenset()
        self._lost_place = ""

    # Before the run ---------------------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        topic, servers = self.sink.topic, self.sink.servers
        found = Reach(servers, self.sink.options).metadata(topic, ANSWER_S_MAX).topics[topic]
        if found.error is not None:
            raise ConfigError(
                f"There is no topic {topic} at {servers} that could be read: {found.error.str()}.",
                remedy="Create it first, or correct its name: semel creates none.",
            )
        try:
            partition = self._first_with_records()
        finally:
            self.let_go()
            self._next.clear()
        if partition is not None:
            raise ConfigError(
                f"Topic {topic} at {servers} is not empty: there are records in partition {partition}.",
                remedy="Let the pipeline write to a new topic for this run: nobody else's rows can be compared.",
            )

    def _first_with_records(self) -> int | None:
        """A partition in which a reader finds something."""
        self._open()
        deadline, ended, partitions = time.monotonic() + ANSWER_S_MAX, set[int](), set(self._next)
        while ended < partitions:
            if time.monotonic() > deadline:
                raise SinkUnavailable(f"{self.sink.describe()} cannot be read: it did not answer in {ANSWER_S_MAX} s.")
            for message in self._consumer.consume(1, READ_S):
                if message.error() is None:
                    return int(message.partition())
                if message.error().name() == "_PARTITION_EOF":
                    ended.add(int(message.partition()))
        return None

    # Looks ------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self._consumer is None:
            self._open()
        self._find_new_partitions()
        began_s = time.time()
        messages = self._consumer.consume(ROWS_PER_READ, READ_S)
        ended_s = time.time()
        numbers = [number for message in messages if (number := self._take(message)) is not None]
        self.rows.update(numbers)
        # Nothing at all may also mean that the broker is away: that is no look.
        if messages or self._answered:
            self.add_look(Look(began_s, ended_s, numbers))
        self._answered = False

    def pause_s(self, took_s: float) -> float:  # noqa: ARG002 - the consumer waits for rows itself
        return 0.0

    def let_go(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _open(self) -> None:
        from confluent_kafka import Consumer

        self._consumer = Consumer(
            {
                **self._settings,
                "group.id": "semel-verify",
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.auto.commit": "false",
                "enable.partition.eof": "true",
                "reconnect.backoff.max.ms": "200",
                "fetch.wait.max.ms": "50",
                "error_cb": self._hear,
            }
        )
        self._asked_s = 0.0
        self._assigned = frozenset()
        self._find_new_partitions()

    def _find_new_partitions(self) -> None:
        from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

        if time.monotonic() < self._asked_s + PARTITIONS_EVERY_S:
            return
        topic = self._consumer.list_topics(self.sink.topic, timeout=QUICK_ANSWER_S_MAX).topics[self.sink.topic]
        if topic.error is not None:
            raise KafkaException(topic.error)
        self._asked_s, self._answered = time.monotonic(), True
        if self._assigned != set(topic.partitions):
            self._assigned = frozenset(topic.partitions)
            for partition in self._assigned:
                self._next.setdefault(partition, OFFSET_BEGINNING)
            # What was fetched ahead and not given out yet is fetched again.
            self._consumer.assign([TopicPartition(self.sink.topic, p, self._next[p]) for p in sorted(self._assigned)])

    def _hear(self, error: Any) -> None:
        """librdkafka comes back by itself; that it was away is a miss."""
        if error.name() in ("_ALL_BROKERS_DOWN", "_TRANSPORT"):
            self.misses += 1

    def _take(self, message: Any) -> int | None:
        """The row of a record, which is noted in its order. None for a stranger, and for what is no record."""
        error, partition, offset = message.error(), message.partition(), message.offset()
        if error is None:
            self._next[partition] = offset + 1
            number = self._number_in(message.key(), message.value())
            if number is not None:
                self.in_order.setdefault(partition, []).append(number)
            return number
        if error.name() == "_PARTITION_EOF":
            self._next[partition] = max(self._next.get(partition, 0), offset)
        elif error.name() == "_AUTO_OFFSET_RESET":
            self._lost_place = f"the reader lost its place in partition {partition}: {error.str()}"
        return None

    def _number_in(self, key: bytes | None, value: bytes | None) -> int | None:
        fields = _fields(value)
        if self.workload.identity in fields:
            found = fields[self.workload.identity]
            return self.number(None if found is None else identity_text(found))
        for part in (key, value):
            if part is not None and (number := self.known(identity_text(part))) is not None:
                return number
        self.stranger(f"a record with key {_text(key)} and value {_text(value)}")
        return None

    # The end ----------------------------------------------------------------------------------------------------------

    def look_last(self, deadline_s: float) -> None:
        """Read up to the last stable offset: what lies behind it no reader sees."""
        ending = min(deadline_s, time.monotonic() + ENDING_S_MAX)
        while any("PREPARE" in state for _, state in self._transactions()) and time.monotonic() < ending:
            time.sleep(READ_S)
        broker = Broker({**self.sink.options, "kafka.bootstrap.servers": self.sink.servers}, ANSWER_S_MAX)
        ends = broker.end_offsets(broker.partitions([self.sink.topic]))
        while any(self._next.get(partition, -1) < end for (_, partition), end in ends.items()):
            self.look()
            if self._lost_place:
                break
            if time.monotonic() > deadline_s:
                raise SinkUnavailable(f"{self.sink.describe()} was not read to its end in time.")
        if self._lost_place:
            raise SinkUnavailable(f"{self.sink.describe()}: {self._lost_place}.")

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        prefix = f"{self.sink.transactional_id_prefix or f'semel-{pipeline}'}-"
        return [
            f"open transaction {name} ({state.lower()})"
            for name, state in self._transactions()
            if name.startswith(prefix) and state not in ENDED and self._is_of_sink(name.removeprefix(prefix))
        ]

    def _is_of_sink(self, rest: str) -> bool:
        """Whether it is this sink's, or nobody can tell whose: another sink of the pipeline has a reader of its own."""
        of_task = _OF_TASK.search(rest)
        return of_task is None or rest[: of_task.start()] == self.sink.name

    def _transactions(self) -> Sequence[tuple[str, str]]:
        """Every transactional id that the brokers know, and its state."""
        from kafka.admin import KafkaAdminClient

        # kafka-python tells nobody but its log why it cannot connect.
        Reach(self.sink.servers, self.sink.options).metadata("", ANSWER_S_MAX)
        client = KafkaAdminClient(
            bootstrap_servers=[server.strip() for server in self.sink.servers.split(",")],
            client_id="semel-verify",
            request_timeout_ms=int(ANSWER_S_MAX * 1000),
            bootstrap_timeout_ms=int(ANSWER_S_MAX * 1000),
            **to_kafka_python(connection_options(self.sink.options)),
        )
        try:
            listed = client.list_transactions()
        finally:
            client.close()
        return sorted((str(one.transactional_id), str(one.state.name)) for found in listed.values() for one in found)


def _fields(value: bytes | None) -> dict[str, Any]:
    """The fields of a value that is a JSON object; none of any other."""
    if not value or not value.lstrip().startswith(b"{"):
        return {}
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(part: bytes | None) -> str:
    return "none" if part is None else repr(identity_text(part)[:40])
