"""The producer of record batches against brokers that lose requests and answers, and hand partitions over."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecords

from semel.sinks.kafka import Kafka
from semel.sinks.kafka.delivery import DeliveryFailed
from semel.sinks.kafka.wire import batches
from semel.sinks.kafka.wire import producer as direct
from semel.sinks.kafka.wire.producer import DirectProducer, suits
from semel.sinks.kafka.wire.records import BATCH_BYTES
from semel.sinks.kafka.wire.requests import Answer, Batches, Transaction

PARTITIONS = 3


@dataclass
class Brokers:
    """Two brokers that keep Kafka's rules: rows in turn, none twice, only in partitions that were added before."""

    seed: int = 1
    trouble: float = 0.0
    batch_bytes_max: int = 10**9
    refuse: str = ""
    logs: dict[int, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    ended: list[bool] = field(default_factory=list)
    largest: int = 0
    #: (partition, number of the first row, rows) -> the batch. What is sent again must be the same.
    sent: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311 - it is a test

    # What a producer asks of the wire.

    def start_producer(self, *_: object) -> tuple[str, int, int]:
        return "NO_ERROR", 7, 3

    def leaders(self, _: str) -> tuple[str, dict[int, int]]:
        if self._unlucky():
            return "LEADER_NOT_AVAILABLE", {}
        return "NO_ERROR", {p: self._leader(p) for p in range(PARTITIONS)}

    def add_partitions(self, _: Transaction, places: Mapping[str, Sequence[int]]) -> tuple[str, str]:
        self.added |= set(places["t"])
        return "NO_ERROR", ""

    def end(self, _: Transaction, *, commit: bool) -> str:
        self.ended.append(commit)
        return "NO_ERROR"

    def produce(self, _node: int, _id: str | None, batches: Batches, then: Callable[[Answer], None]) -> None:
        if self._unlucky():
            return then(Answer({}))
        codes = {("t", p): self._append(p, b"".join(pieces)) for p, pieces in batches["t"].items()}
        return then(Answer({}) if self._unlucky() else Answer(codes))

    # How they work.

    def _unlucky(self) -> bool:
        return self.chance.random() < self.trouble

    def _leader(self, partition: int) -> int:
        return (partition + self.chance.randrange(2) * bool(self.trouble)) % 2

    def _append(self, partition: int, data: bytes) -> str:
        if self.refuse:
            return self.refuse
        if self._unlucky():
            return "NOT_LEADER_FOR_PARTITION"
        (batch,) = MemoryRecords(data)
        assert batch.validate_crc()
        records = list(batch)
        assert [record.offset for record in records] == list(range(len(records)))
        assert self.sent.setdefault((partition, batch.base_sequence, len(records)), data) == data
        self.largest = max(self.largest, len(data))
        if len(data) > self.batch_bytes_max:
            self.refused += 1
            return "MESSAGE_SIZE_TOO_LARGE"
        assert partition in self.added
        assert (batch.producer_id, batch.producer_epoch) == (7, 3)
        if self.last.get(partition) == (batch.base_sequence, len(records)):
            return "DUPLICATE_SEQUENCE_NUMBER"
        assert batch.base_sequence == self.expected.get(partition, 0), "a row is missing or out of turn"
        self.expected[partition] = batch.base_sequence + len(records)
        self.last[partition] = (batch.base_sequence, len(records))
        self.logs.setdefault(partition, []).extend((record.key, record.value) for record in records)
        return "NO_ERROR"


def producer(brokers: Any, **conf: str) -> DirectProducer:
    made = DirectProducer({"transactional.id": "x", **{k.replace("_", "."): v for k, v in conf.items()}}, brokers)
    made.init_transactions()
    made.begin_transaction()
    return made


def columns(*numbers: int, size: int = 10) -> dict[str, pa.Array]:
    return {
        "key": pa.array([f"{n % 5}" for n in numbers]),
        "value": pa.array([f"{n}".ljust(size) for n in numbers]),
        "partition": pa.array([n % 5 % PARTITIONS for n in numbers], pa.int32()),
    }


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.floats(0.0, 0.4),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 30),
    st.sampled_from([10**9, 200]),
)
def test_every_row_arrives_once_and_in_turn(
    seed: int, trouble: float, sizes: list[int], step: int, batch_bytes_max: int
) -> None:
    brokers = Brokers(seed, trouble, batch_bytes_max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "PAUSE_S", 0.0)
        patch.setattr(direct, "PAUSE_S_MAX", 0.0)
        patch.setattr(direct, "POLL_S", 0.001)
        patch.setattr(direct, "WAITING_BYTES_MAX", 1_000)
        patch.setattr(batches, "ROWS_PER_STEP", step)
        patch.setattr(batches, "STEP_BYTES_MAX", 1_000)
        mine = producer(brokers, batch_size="300")
        start = 0
        for size in sizes:
            mine.send("t", columns(*range(start, start + size)), size)
            start += size
        mine.flush(20)
    for partition in range(PARTITIONS):
        wanted = [n for n in range(start) if n % 5 % PARTITIONS == partition]
        assert [int(value) for _, value in brokers.logs.get(partition, [])] == wanted
    assert brokers.ended == []


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_batch_that_the_topic_does_not_take_is_split_and_later_ones_are_smaller(compression: str) -> None:
    brokers = Brokers(batch_bytes_max=150)
    mine = producer(brokers, compression_type=compression)
    mine.send("t", columns(*range(50)), 50)
    mine.flush(20)
    assert brokers.largest > 150
    before = brokers.refused
    mine.send("t", columns(*range(50)), 50)
    mine.flush(20)
    assert brokers.refused == before > 0
    assert sum(len(log) for log in brokers.logs.values()) == 100


def test_batches_are_filled_whatever_the_steps_that_their_rows_come_in() -> None:
    brokers = Brokers()
    mine = producer(brokers, batch_size="1000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "ROWS_PER_STEP", 7)
        mine.send("t", columns(*range(0, 500, 5)), 100)  # all to one partition
        mine.flush(20)
    # Of each row are counted a key of 1 byte, a value of 10, and 32 for what is around them.
    full = (1000 - BATCH_BYTES) // (1 + 10 + 32)
    assert [rows for _, _, rows in brokers.sent] == [full] * (100 // full) + [100 % full]


def test_a_few_rows_that_wait_do_not_keep_the_memory_of_all_that_came_with_them() -> None:
    mine = producer(Brokers(), batch_size="10000")
    before = pa.total_allocated_bytes()
    for start in range(0, 50_000, 10_000):
        mine.send("t", columns(*range(start, start + 10_000), size=100), 10_000)
    assert pa.total_allocated_bytes() - before < 100_000
    mine.flush(20)


def test_a_row_that_the_topic_does_not_take_is_named() -> None:
    mine = producer(Brokers(batch_bytes_max=200))
    mine.send("t", columns(3, size=500), 1)
    with pytest.raises(DeliveryFailed) as caught:
        mine.flush(20)
    (failure,) = caught.value.failures
    assert (failure.name, failure.partition, failure.key, failure.size) == ("MSG_SIZE_TOO_LARGE", 0, b"3", 500)


def test_a_row_above_the_limit_of_the_user_is_refused_before_it_is_sent() -> None:
    brokers = Brokers()
    mine = producer(brokers, message_max_bytes="400")
    with pytest.raises(DeliveryFailed, match="Message size too large") as caught:
        mine.send("t", columns(3, size=500), 1)
    assert (caught.value.failures[0].key, caught.value.failures[0].size) == (b"3", 500)
    assert brokers.logs == {}


def test_an_answer_that_is_final_fails_the_task_and_the_transaction_is_aborted() -> None:
    brokers = Brokers(refuse="INVALID_PRODUCER_EPOCH")
    mine = producer(brokers)
    mine.send("t", columns(1), 1)
    with pytest.raises(DeliveryFailed, match="INVALID_PRODUCER_EPOCH"):
        mine.flush(20)
    mine.abort_transaction(1)
    assert brokers.ended == [False]


def test_an_abort_waits_for_what_is_under_way_and_ends_the_transaction_whatever_the_answer_is() -> None:
    brokers = Slow(refuse="INVALID_PRODUCER_EPOCH")
    mine = producer(brokers, batch_size="100")
    mine.send("t", columns(*range(30)), 30)
    threading.Timer(0.2, brokers.answer).start()
    mine.abort_transaction(10)
    assert brokers.said
    assert brokers.ended == [False]


class Slow(Brokers):
    """Answers when it is told to."""

    said = False

    def produce(self, node: int, id_: str | None, batches: Batches, then: Callable[[Answer], None]) -> None:
        self.later = [*getattr(self, "later", []), lambda: Brokers.produce(self, node, id_, batches, then)]

    def answer(self) -> None:
        for call in self.later:
            call()
        self.said = True


def test_what_is_never_acknowledged_fails_the_task_in_time() -> None:
    mine = producer(Brokers(refuse="NOT_LEADER_FOR_PARTITION"), delivery_timeout_ms="200")
    mine.send("t", columns(1, 2), 2)
    why = "2 rows were not acknowledged within 0 s: the broker last answered NOT_LEADER_FOR_PARTITION"
    with pytest.raises(DeliveryFailed, match=f"^{why}$"):
        mine.flush(20)


def test_what_nobody_answers_to_is_told_as_such() -> None:
    mine = producer(Brokers(trouble=1.0), delivery_timeout_ms="200", topic_metadata_propagation_max_ms="0")
    mine._leaders["t"] = dict.fromkeys(range(PARTITIONS), 0)
    mine.send("t", columns(1, 2), 2)
    mine._leaders_of = lambda topic: dict.fromkeys(range(PARTITIONS), 0)  # type: ignore[method-assign] # noqa: ARG005
    with pytest.raises(DeliveryFailed, match=r"^2 rows were .* within 0 s: the last request got no answer$"):
        mine.flush(20)


def test_rows_without_a_key_go_to_one_partition_after_the_other() -> None:
    brokers = Brokers()
    mine = producer(brokers)
    for _ in range(PARTITIONS):
        mine.send("t", {"value": pa.array(["a", "b"])}, 2)
    mine.flush(20)
    assert sorted(brokers.logs) == list(range(PARTITIONS))
    assert all([value for _, value in log] == [b"a", b"b"] for log in brokers.logs.values())


def test_which_settings_it_follows() -> None:
    assert suits({"bootstrap.servers": "a:1", "sasl.username": "u", "linger.ms": "5", "compression.type": "zstd"})
    assert not suits({"partitioner": "consistent"})
    assert not suits({"compression.type": "brotli"})
    assert not suits({"sticky.partitioning.linger.ms": "7"})


FOLLOWED_HERE = """
    batch.num.messages queue.buffering.max.kbytes request.timeout.ms connections.max.idle.ms metadata.max.age.ms
    reconnect.backoff.ms reconnect.backoff.max.ms socket.send.buffer.bytes client.id
"""
NOT_HERE = """
    socket.timeout.ms socket.keepalive.enable socket.nagle.disable broker.address.family api.version.request debug
    queue.buffering.max.messages queue.buffering.backpressure.threshold
"""


def test_settings_that_would_be_ignored_here_are_left_to_librdkafka() -> None:
    assert [name for name in FOLLOWED_HERE.split() if not suits({name: "1234"})] == []
    assert [name for name in NOT_HERE.split() if suits({name: "1234"})] == []


def test_the_settings_that_the_sink_itself_makes_are_followed() -> None:
    assert suits(Kafka("127.0.0.1:1", "orders").producer_settings())


def test_a_batch_has_no_more_rows_than_the_user_wants() -> None:
    brokers = Brokers()
    mine = producer(brokers, batch_num_messages="30")
    for rows in (range(0, 250, 5), range(250, 500, 5)):  # all to one partition
        mine.send("t", columns(*rows), 50)
    mine.flush(20)
    assert [rows for _, _, rows in brokers.sent] == [30, 30, 30, 10]


def test_no_more_waits_than_the_user_wants() -> None:
    """What is sent is answered at once here, so that all the rest is sent before the next rows are taken in."""
    waiting: dict[int, Any] = {}
    for kbytes in (20, 2000):
        mine = producer(Brokers(), queue_buffering_max_kbytes=str(kbytes))
        for start in range(0, 10_000, 1000):
            mine.send("t", columns(*range(start, start + 1000), size=100), 1000)
            waiting[kbytes] = max(waiting.get(kbytes, 0), mine._waiting_bytes)
        mine.flush(20)
    assert waiting[20] <= 20 * 1024 < waiting[2000]
