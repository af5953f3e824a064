"""The game on Kafka: orders come in by one topic and go out by others, and a reader watches all the time."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semel.demo.audit import Verdict, audit
from semel.demo.orders import Order
from semel.demo.shops import Scene, Shop
from semel.dev.jars import connector_jars
from semel.dev.kafka import kafka
from semel.errors import MissingExtra

PARTITIONS = 2
CAUGHT_UP_WITHIN_S = 30.0
ANSWER_WITHIN_S = 10.0

Row = tuple[str, str, int, str, str]


def kafka_scene() -> Scene:
    try:
        import confluent_kafka  # noqa: F401 - asked for before a broker is started
    except ImportError:
        raise MissingExtra("semel demo --kafka needs confluent-kafka, which is not installed.", extra="kafka") from None
    jars = ",".join(map(str, connector_jars(say=lambda _: None)))
    pipelines = Path(__file__).with_name("kafka_pipelines.py")
    return Scene("kafka", pipelines, "semel.demo.kafka_baseline", _broker, {"spark.jars": jars})


@contextmanager
def _broker(folder: Path) -> Iterator[Callable[[Path], Shop]]:
    with kafka(folder / "kafka", quick=True) as cluster:
        yield lambda of_side: KafkaShop(cluster.bootstrap, of_side.name)


class KafkaShop:
    """Three topics of one side: the orders as they are made, the orders as they arrive, and each customer's totals."""

    def __init__(self, servers: str, side: str) -> None:
        from confluent_kafka import Producer

        self.servers = servers
        self.made, self.arriving, self.totals = (f"{side}-{name}" for name in ("made", "arrived", "totals"))
        self._create(self.made, self.arriving, self.totals)
        self._producer: Any = Producer({"bootstrap.servers": servers, "log_level": "2"})
        self._reader = Reader(servers, self.arriving, self.totals)
        self._reader.start()

    def _create(self, *topics: str) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": "2"})
        for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in topics]).values():
            future.result()

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "SEMEL_DEMO_SERVERS": self.servers,
            "SEMEL_DEMO_MADE": self.made,
            "SEMEL_DEMO_ARRIVING": self.arriving,
            "SEMEL_DEMO_TOTALS": self.totals,
        }

    def write(self, number: int, orders: Sequence[Order]) -> None:  # noqa: ARG002 - topics have no file names
        for order in orders:
            self._producer.produce(self.made, json.dumps(asdict(order)), key=order.id)
        if self._producer.flush(ANSWER_WITHIN_S):
            raise RuntimeError("the broker did not take the orders")

    def delivered(self) -> int:
        return self._reader.delivered()

    def arrived(self, orders: int) -> bool:
        return self._reader.counted() == orders == self.delivered()

    def audit(self, orders: Sequence[Order]) -> Verdict:
        self._reader.catch_up(CAUGHT_UP_WITHIN_S)
        return audit(orders, self._reader.rows.elements(), self._reader.totals.values())

    def close(self) -> None:
        self._reader.stop()
        self._producer = None


class Reader(threading.Thread):
    """A consumer with isolation.level=read_committed that runs through all kills. What it saw, it has seen for good."""

    def __init__(self, servers: str, arriving: str, totals: str) -> None:
        super().__init__(name="reader", daemon=True)
        self.rows: Counter[Row] = Counter()
        self.totals: dict[str, tuple[str, int, int]] = {}
        self._settings = {
            "bootstrap.servers": servers,
            "group.id": f"demo-{arriving}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": "false",
            "log_level": "2",
        }
        self._topics = (arriving, totals)
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._ended = threading.Event()
        self._positions: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(self._settings)
        consumer.assign([TopicPartition(t, p, 0) for t in self._topics for p in range(PARTITIONS)])
        try:
            while not self._ended.is_set():
                for message in consumer.consume(500, 0.2):
                    if message.error() is None:
                        self._hear(message)
                self._note_positions(consumer)
        finally:
            consumer.close()

    def _hear(self, message: Any) -> None:
        said = json.loads(message.value())
        with self._lock:
            if message.topic() == self._topics[0]:
                self.rows[said["id"], said["customer"], said["cents"], said["item"], said["at"]] += 1
                self._ids.add(said["id"])
            else:
                # The newest record of a customer is the total: the records of a key are in one partition, in order.
                self.totals[said["customer"]] = (said["customer"], said["orders"], said["cents"])

    def _note_positions(self, consumer: Any) -> None:
        from confluent_kafka import TopicPartition

        wanted = [TopicPartition(t, p) for t in self._topics for p in range(PARTITIONS)]
        with self._lock:
            self._positions = {(p.topic, p.partition): max(p.offset, 0) for p in consumer.position(wanted)}

    def delivered(self) -> int:
        with self._lock:
            return len(self._ids)

    def counted(self) -> int:
        with self._lock:
            return sum(orders for _, orders, _ in self.totals.values())

    def catch_up(self, within_s: float) -> None:
        """Until all that is stable has been read. What a transaction that nobody ends holds up counts as lost."""
        from confluent_kafka import Consumer, TopicPartition

        probe = Consumer(self._settings)
        try:
            ends = {
                (t, p): probe.get_watermark_offsets(TopicPartition(t, p), timeout=ANSWER_WITHIN_S)[1]
                for t in self._topics
                for p in range(PARTITIONS)
            }
        finally:
            probe.close()
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with self._lock:
                if all(self._positions.get(where, 0) >= end for where, end in ends.items()):
                    return
            time.sleep(0.1)

    def stop(self) -> None:
        self._ended.set()
        self.join()
