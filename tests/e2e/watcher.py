"""A read_committed reader of the output topic that runs while everything else is being killed, and remembers all."""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from semel.errors import SourceUnavailable
from semel.sources.kafka_broker import Broker, Offsets
from tests.e2e.kafka_audit import Sight
from tests.processes import wait_until

TIMEOUT_S = 30.0
ROWS_PER_READ = 1000
READ_S = 0.05


class Watcher(threading.Thread):
    """It reads each partition from its beginning. A place that is gone is an error: nothing is read twice unseen."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        super().__init__(name="watcher", daemon=True)
        self.topic = topic
        self.partitions = range(partitions)
        self.error = ""
        self._sights: list[Sight] = []
        self._end: dict[int, int] = {}
        self._stopping = threading.Event()
        self._servers = servers
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "watcher",
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.auto.commit": "false",
                "enable.partition.eof": "true",
                "reconnect.backoff.max.ms": "200",
                "fetch.wait.max.ms": "50",
                "log_level": "0",
            }
        )
        self._consumer.assign([TopicPartition(topic, p, 0) for p in self.partitions])

    def run(self) -> None:
        while not self._stopping.is_set():
            found = self._consumer.consume(ROWS_PER_READ, READ_S)
            now = time.time()
            for message in found:
                error = message.error()
                if error is None:
                    self._sights.append(_sight(message, now))
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._end[_number(message.partition())] = _number(message.offset())
                elif error.name() == "_AUTO_OFFSET_RESET":
                    self.error = error.str()
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join(TIMEOUT_S)

    @property
    def sights(self) -> list[Sight]:
        """All that was seen so far."""
        assert not self.error, f"the watcher lost its place: {self.error}"
        return list(self._sights)

    def caught_up(self) -> list[Sight]:
        """All that a reader can see now."""
        stable = self._last_stable_offsets()
        wait_until(lambda: all(self._end.get(p, -1) >= end for (_, p), end in stable.items()), TIMEOUT_S)
        return self.sights

    def _last_stable_offsets(self) -> Offsets:
        """Asked again while a broker that was killed knows no leader yet."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                broker = Broker({"kafka.bootstrap.servers": self._servers}, TIMEOUT_S)
                return broker.end_offsets([(self.topic, p) for p in self.partitions])
            except SourceUnavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)


def _sight(message: Any, now: float) -> Sight:
    source_partition, source_offset, task = map(int, message.value().split())
    return Sight(int(message.key()), source_partition, source_offset, task, message.partition(), message.offset(), now)


def _number(value: int | None) -> int:
    return -1 if value is None else value
