"""What a test sees of a Kafka cluster from outside: records as readers see them, transactions as brokers list them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from semel.ids import parse_branch
from semel.sinks.kafka.markers import PARTITIONS, Fate, MarkerLog, partition_of
from semel.sinks.kafka.sink import CONTROL_TOPIC
from semel.sinks.kafka.topics import ensure_control_topic
from semel.sinks.kafka.wire.client import Wire

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Seen:
    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 0


class KafkaWorld:
    """`options` are those of a confluent-kafka client besides the address."""

    def __init__(self, servers: str, options: dict[str, str] | None = None, control_topic: str = CONTROL_TOPIC) -> None:
        self.servers = servers
        self.options = options or {}
        self.control_topic = control_topic
        self._admin: Any = AdminClient({"bootstrap.servers": servers, **self.options})
        self._wire: Wire | None = None

    @property
    def wire(self) -> Wire:
        if self._wire is None:
            self._wire = Wire(self.servers, self.options, TIMEOUT_S)
        return self._wire

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._admin = None

    def create_topics(self, *names: str, partitions: int = 2, config: dict[str, str] | None = None) -> None:
        new = [NewTopic(name, partitions, -1, config=config or {}) for name in names]
        for future in self._admin.create_topics(new, operation_timeout=TIMEOUT_S).values():
            future.result()
        ensure_control_topic(self.servers, self.options, self.control_topic, TIMEOUT_S)

    # Records ----------------------------------------------------------------------------------------------------------

    def committed(self, topic: str) -> list[Seen]:
        """What a read_committed reader sees, once no transaction is being ended any more."""
        self.wait_until_ended()
        return list(self._read(topic, "read_committed"))

    def _read(self, topic: str, isolation: str) -> Iterator[Seen]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                **self.options,
                "group.id": "test-reader",
                "isolation.level": isolation,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": "false",
                "enable.partition.eof": "true",
            }
        )
        try:
            partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
            consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
            left = set(partitions)
            deadline = time.monotonic() + TIMEOUT_S
            while left:
                assert time.monotonic() < deadline, f"partitions {left} of {topic} had no end"
                message = consumer.poll(1.0)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    yield _seen(message)
                elif error.name() == "_PARTITION_EOF":
                    left.discard(message.partition())
                else:
                    raise KafkaException(error)
        finally:
            consumer.close()

    # Transactions -----------------------------------------------------------------------------------------------------

    def open_transactions(self) -> list[str]:
        """The transactional ids that have a transaction open, of anybody."""
        return [name for name, _ in self.wire.open_transactions(lambda _: True)]

    def wait_until_ended(self) -> None:
        """Until no transaction is between its end and the markers in the logs: EndTxn is answered before that."""
        deadline = time.monotonic() + TIMEOUT_S
        while any("PREPARE" in state.upper() for state in self._states()):
            assert time.monotonic() < deadline, "a transaction is still being ended"
            time.sleep(0.02)

    def _states(self) -> list[str]:
        # The wire asks again while a broker that was killed is not quite back.
        listed = self.wire._until_answered("ListTransactions", self.wire._client._async_list_transactions)
        return [t.state.value for of_broker in listed.values() for t in of_broker]

    def marker_log(self, sink: str) -> MarkerLog:
        log = MarkerLog(self.control_topic, partition_of(sink))
        log.catch_up(self.wire)
        return log

    def end_by_branch(self, name: str) -> None:
        """Abort the transaction of a branch behind the sink's back, as a broker does after the timeout."""
        branch = parse_branch(name)
        assert branch is not None
        transaction = self.marker_log(branch.sink).markers[name].transaction
        assert transaction is not None
        self.wire.raise_epoch(transaction.id, 60_000)
        self.wait_until_ended()

    def count_markers(self, of: str) -> int:
        """Fences and visible markers of the sinks whose name has this part."""
        count = 0
        for partition in range(PARTITIONS):
            log = MarkerLog(self.control_topic, partition)
            log.catch_up(self.wire)
            count += sum(of in sink for _, sink in log.fences)
            count += sum(of in m.branch.sink and m.fate is Fate.COMMITTED for m in log.markers.values())
        return count

    def leave_open(self, transactional_id: str, topic: str) -> Any:
        """A transaction of somebody else. It stays open for as long as the result is kept, and longer."""
        producer = Producer({"bootstrap.servers": self.servers, **self.options, "transactional.id": transactional_id})
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
        producer.produce(topic, b"not ours", key=b"0")
        producer.flush(TIMEOUT_S)
        return producer


def _seen(message: Any) -> Seen:
    return Seen(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
        message.timestamp()[1],
    )
