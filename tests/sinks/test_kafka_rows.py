"""What becomes of a row: the quick producer and the other give the same records, where a Java producer puts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from semel.dev.kafka import KafkaCluster
from semel.errors import ConfigError
from semel.ids import Branch
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.producers import RowProducer, make_producer
from semel.sinks.kafka.rows import rows_by_topic
from semel.sinks.kafka.wire.producer import DirectProducer, suits
from semel.sinks.kafka.wire.requests import LogRecord
from semel.testing.harness import attempt, context
from tests.sinks.kafka_rig import Rig, prepare, records_of, started, write

PARTITIONS = 5

#: Records by partition: key and value, in the order of the log.
Seen = dict[int, list[tuple[bytes | None, bytes | None]]]


class Pair:
    """One topic for each kind of producer, and one producer of each kind, without transactions: they write at once."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.topics = {kind: rig.topic(kind.__name__.lower(), PARTITIONS) for kind in (DirectProducer, RowProducer)}
        conf = rig.sink("x").producer_settings()
        self.producers = {kind: make_producer(conf, by_row=kind is RowProducer) for kind in self.topics}
        assert [type(producer) for producer in self.producers.values()] == list(self.topics)
        self._positions = {(topic, p): 0 for topic in self.topics.values() for p in range(PARTITIONS)}

    def send(self, batch: pa.RecordBatch) -> tuple[Seen, Seen]:
        """What the quick producer and the other have added to their topics."""
        for kind, topic in self.topics.items():
            for _, columns, rows in rows_by_topic(batch, topic):
                self.producers[kind].send(topic, columns, rows)
            self.producers[kind].flush(20)
        quick, by_row = (self._added(topic) for topic in self.topics.values())
        return quick, by_row

    def _added(self, topic: str) -> Seen:
        added: Seen = {}
        for p in range(PARTITIONS):
            end = self.rig.world.wire.log_end(topic, p)
            while self._positions[topic, p] < end:
                found = self.rig.world.wire.read(topic, p, self._positions[topic, p])
                self._positions[topic, p] = found.next_offset
                records = [entry for entry in found.entries if isinstance(entry, LogRecord)]
                added.setdefault(p, []).extend((r.key, r.value) for r in records)
        return added

    def drop(self) -> None:
        for producer in self.producers.values():
            producer.drop()


@pytest.fixture(scope="module")
def pair(kafka_cluster: KafkaCluster) -> Iterator[Pair]:
    rig = Rig(kafka_cluster.bootstrap)
    made = Pair(rig)
    yield made
    made.drop()
    rig.end()


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def flat(seen: Seen) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(partition, key, value) for partition, records in sorted(seen.items()) for key, value in records]


# Both producers ---------------------------------------------------------------------------------------------------

LONG = "x" * 900_000
#: (the type of key and value, the keys, the values).
CASES: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.string(), ["a", "b", "c"], ["", None, "Grüße 🎉 注文 a\x00b"]),
    (pa.string(), ["", "注文", "a\x00b"], ["x", "y", "z"]),
    (pa.binary(), [b"", b"\x00\xff", b"k"], [b"\x00", b"", None]),
    (pa.large_string(), ["a", "bb", "ccc"], ["ä", None, ""]),
    (pa.large_binary(), [b"a", b"bb", b"ccc"], [b"\xff" * 300, None, b""]),
    (pa.string_view(), ["short", "longer than the twelve bytes of a view", "s"], [None, "", "also quite a bit longer"]),
    (pa.binary_view(), [b"short", b"longer than the twelve bytes of a view", b"s"], [None, b"", b"x" * 40]),
    (pa.binary(3), [b"abc", b"def", b"ghi"], [b"123", None, b"789"]),
    (pa.string(), ["large", "small", "large"], [LONG, "1", LONG]),
]


@pytest.mark.parametrize(("kind", "keys", "values"), CASES, ids=[f"{i}-{kind}" for i, (kind, _, _) in enumerate(CASES)])
def test_both_producers_write_the_same_records(
    pair: Pair, kind: pa.DataType, keys: list[Any], values: list[Any]
) -> None:
    """An empty value is no tombstone: null stays null, and no bytes stay no bytes."""
    quick, by_row = pair.send(batch_of(key=pa.array(keys, kind), value=pa.array(values, kind)))
    assert quick == by_row
    assert sorted(flat(quick), key=str) == sorted(
        ((java_partition(_bytes(k), PARTITIONS), _bytes(k), _bytes(v)) for k, v in zip(keys, values, strict=True)),
        key=str,
    )


def test_null_keys_and_columns_without_a_type_of_their_own_are_null(pair: Pair) -> None:
    one = pa.array([3, 3, 3], pa.int32())
    for keys in (pa.array([None, "k", None], pa.string()), pa.nulls(3)):
        quick, by_row = pair.send(batch_of(key=keys, value=pa.nulls(3), partition=one))
        expected = [(3, _bytes(k), None) for k in keys.to_pylist()]
        assert (flat(quick), flat(by_row)) == (expected, expected)


def test_rows_without_a_key_column_have_no_key(pair: Pair) -> None:
    for seen in pair.send(batch_of(value=pa.array(["a", "b"]))):
        assert sorted((key, value) for _, key, value in flat(seen)) == [(None, b"a"), (None, b"b")]


def test_a_slice_of_an_array_writes_only_its_rows(pair: Pair) -> None:
    """Arrow's buffers hold the whole array; the slice begins and ends somewhere within, nulls included."""
    keys = pa.array([None if i % 7 == 3 else f"key {i}" for i in range(100)])
    values = pa.array([None if i % 5 == 1 else f"value {i}" * (i % 4) for i in range(100)])
    whole = batch_of(key=keys, value=values, partition=pa.array([i % 3 for i in range(100)], pa.int32()))
    for start, length in ((0, 1), (13, 60), (99, 1), (8, 9)):
        part = whole.slice(start, length)
        quick, by_row = pair.send(part)
        expected = sorted(
            ((r["partition"], _bytes(r["key"]), _bytes(r["value"])) for r in part.to_pylist()), key=lambda r: r[0]
        )
        assert (flat(quick), flat(by_row)) == (expected, expected)


def test_a_partition_that_is_given_is_taken_and_one_that_is_not_is_chosen_by_the_key(pair: Pair) -> None:
    given_ = [4, None, 0, None, 2]
    batch = batch_of(
        key=pa.array([f"k{i}" for i in range(5)]), value=pa.array(["v"] * 5), partition=pa.array(given_, pa.int32())
    )
    quick, by_row = pair.send(batch)
    expected = sorted(
        (java_partition(f"k{i}".encode(), PARTITIONS) if p is None else p, f"k{i}".encode(), b"v")
        for i, p in enumerate(given_)
    )
    assert (sorted(flat(quick), key=str), sorted(flat(by_row), key=str)) == (expected, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.binary(max_size=12), st.none() | st.binary(max_size=40)), min_size=1, max_size=30),
    st.integers(0, 5),
    st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
)
def test_whatever_the_bytes_both_producers_agree_with_java(
    pair: Pair, rows: list[tuple[bytes, bytes | None]], skipped: int, kind: pa.DataType
) -> None:
    before: list[tuple[bytes, bytes | None]] = [(b"skipped", b"skipped")] * skipped
    keys, values = zip(*before, *rows, strict=True)
    quick, by_row = pair.send(batch_of(key=pa.array(keys, kind), value=pa.array(values, kind)).slice(skipped))
    expected: Seen = {}
    for key, value in rows:
        expected.setdefault(java_partition(key, PARTITIONS), []).append((key, value))
    assert (quick, by_row) == (expected, expected)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


# Where rows go ----------------------------------------------------------------------------------------------------

#: From Kafka's own UtilsTest.testMurmur2.
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def java_partition(key: bytes | None, partitions: int) -> int:
    """As Kafka's BuiltInPartitioner computes it."""
    assert key is not None
    return (int(murmur2(key)) & 0x7FFFFFFF) % partitions


def test_the_hash_that_these_tests_compare_with_is_the_one_of_java() -> None:
    signed = {key: (int(murmur2(key)) ^ 0x80000000) - 0x80000000 for key in MURMUR2}
    assert signed == MURMUR2


def test_keys_go_to_the_partitions_of_a_java_producer(pair: Pair) -> None:
    expected = {(h & 0x7FFFFFFF) % PARTITIONS for h in MURMUR2.values()}
    keys = list(MURMUR2)
    for seen in pair.send(batch_of(key=pa.array(keys), value=pa.array(keys))):
        assert {key: p for p, key, _ in flat(seen)} == {k: (h & 0x7FFFFFFF) % PARTITIONS for k, h in MURMUR2.items()}
    assert len(expected) > 2


@pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])
def test_rows_go_to_the_topics_of_their_column_in_their_order(rig: Rig, by_row: bool) -> None:
    """A thousand rows over two topics and two batches of Arrow, one transaction."""
    one, two = rig.topic("one", 1), rig.topic("two", 1)
    rows = range(1000)
    columns = {
        "topic": pa.array([two if i % 3 else one for i in rows]),
        "key": pa.array([str(i) for i in rows]),
        "value": pa.array([f"row {i}" for i in rows]),
    }
    if by_row:
        columns["timestamp"] = pa.array([datetime(2024, 7, 1)] * 1000, pa.timestamp("us"))
    batch = batch_of(**columns)
    sink = rig.sink()
    with started(sink) as participant:
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(batch.slice(0, 400))
        writer.write(batch.slice(400))
        (committable,) = participant.prepare(attempt(), [writer.prepare()])
        participant.commit(committable)
    assert [int(r.key) for r in rig.world.committed(one)] == [i for i in rows if i % 3 == 0]
    assert [int(r.key) for r in rig.world.committed(two)] == [i for i in rows if i % 3]


def test_the_topic_of_the_sink_wins_over_the_column(rig: Rig) -> None:
    topic = rig.topic()
    write(rig.sink(topic), batch_of(topic=pa.array(["elsewhere", None]), value=pa.array(["a", "b"])))
    assert sorted(r.value for r in rig.world.committed(topic)) == [b"a", b"b"]


# Headers and times ------------------------------------------------------------------------------------------------

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_headers_and_timestamps_arrive(rig: Rig) -> None:
    topic = rig.topic(partitions=1)
    headers: Sequence[Any] = [
        [{"key": "trace", "value": b"\x00\x01"}, {"key": "trace", "value": b"again"}, {"key": "ü", "value": None}],
        [],
        None,
    ]
    when = datetime(2024, 7, 1, 12, 30, 0, 5999, tzinfo=timezone.utc)
    times = pa.array([when, when, None], pa.timestamp("us", "Europe/Berlin"))
    write(
        rig.sink(topic),
        batch_of(
            key=pa.array(list("abc")), value=pa.array(list("xyz")), headers=pa.array(headers, HEADERS), timestamp=times
        ),
    )
    seen = rig.world.committed(topic)
    assert [(r.key, r.value) for r in seen] == [(b"a", b"x"), (b"b", b"y"), (b"c", b"z")]
    assert list(seen[0].headers) == [("trace", b"\x00\x01"), ("trace", b"again"), ("ü", None)]
    assert (seen[1].headers, seen[2].headers) == ((), ())
    milliseconds = int(when.timestamp() * 1000)
    assert [r.timestamp_ms for r in seen[:2]] == [milliseconds, milliseconds]
    assert seen[2].timestamp_ms > milliseconds


@pytest.mark.parametrize("column", ["headers", "timestamp"])
def test_only_rows_with_headers_or_timestamps_leave_the_quick_path(rig: Rig, column: str) -> None:
    topic = rig.topic()
    extra = pa.array([None], HEADERS if column == "headers" else pa.timestamp("us"))
    made: dict[str, Any] = {}
    for name, batch in {
        "plain": records_of(1),
        column: batch_of(key=pa.array(["1"]), value=pa.array(["v"]), **{column: extra}),
    }.items():
        writer = rig.sink(topic).writer(Branch(attempt(), f"orders_{rig.suffix}", 0, 0))
        writer.write(batch)
        made[name] = type(writer._ready.producer)  # type: ignore[attr-defined]
        writer.abort()
    assert made == {"plain": DirectProducer, column: RowProducer}


@pytest.mark.parametrize("durable", [True, False], ids=["exactly-once", "at-least-once"])
def test_one_setting_sends_every_row_by_librdkafka(rig: Rig, durable: bool) -> None:
    topic = rig.topic()
    made: dict[str, Any] = {}
    for producer in ("auto", "librdkafka"):
        sink = rig.sink(topic, producer=producer)
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0), durable=durable)
        writer.write(records_of(1))
        made[producer] = type(writer._ready.producer if durable else writer._plain)  # type: ignore[attr-defined]
        writer.abort()
    assert made == {"auto": DirectProducer, "librdkafka": RowProducer}


def test_a_producer_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Kafka("h:1", "orders", producer="java")
    assert str(caught.value) == (
        "A Kafka sink knows no producer 'java'.\n  the data now: nothing was started and no row was written\n"
        "  what to do: Use 'auto' or 'librdkafka'."
    )


# Settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_only_librdkafka_knows_take_its_way(rig: Rig) -> None:
    topic = rig.topic()
    sink = rig.sink(topic, options={"sticky.partitioning.linger.ms": "7"})
    with started(sink) as participant:
        aborted = sink.writer(Branch(attempt(), sink.name, 0, 0))
        aborted.write(records_of(9))
        assert isinstance(aborted._ready.producer, RowProducer)  # type: ignore[attr-defined]
        aborted.abort()
        for committable in prepare(participant, sink, attempt(), records_of(1, 2), records_of(3)):
            participant.commit(committable)
    assert rig.visible(topic) == [1, 2, 3]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_rows_are_the_same_both_ways_and_leave_a_marker_that_can_be_read(rig: Rig, codec: str) -> None:
    """The marker is in the transaction of the rows and compressed as they are; the broker stores it plain.

    The first batch has more than 200 KB for each partition: from 64 KB on, frames of lz4 have several blocks.
    """
    keys = [str(i) for i in range(500)]
    large = batch_of(key=pa.array(keys), value=pa.array([f"{key} " * 300 for key in keys]))
    seen = {}
    for way, options in {"quick": {}, "by_row": {"sticky.partitioning.linger.ms": "7"}}.items():
        topic = rig.topic(way)
        sink = rig.sink(topic, name=f"{way}_{rig.suffix}", options={"compression.type": codec, **options})
        assert suits(sink.producer_settings()) == (way == "quick")
        write(sink, large, records_of(*range(500, 510)))
        # In their order, without their offsets: a broker may write the end of a transaction behind rows of the next.
        found = sorted((r.partition, r.offset, r.key, r.value) for r in rig.world.committed(topic))
        seen[way] = [(partition, key, value) for partition, _, key, value in found]
        assert rig.world.marker_log(sink.name).newest_committed(context().pipeline, sink.name) == 1
    assert seen["quick"] == seen["by_row"]
    assert {key: value for _, key, value in seen["quick"]} == {
        **{key.encode(): f"{key} ".encode() * 300 for key in keys},
        **{b"%d" % i: b"row %d" % i for i in range(500, 510)},
    }
    assert min(sum(len(v) for p, _, v in seen["quick"] if p == partition) for partition in range(2)) > 200_000


def test_settings_of_the_user_reach_the_producer_and_those_of_the_guarantee_stay() -> None:
    sink = Kafka(
        "127.0.0.1:1", "orders", options={"kafka.linger.ms": "50", "max.request.size": "5000000", "acks": "-1"}
    )
    told = sink.producer_settings()
    assert (told["linger.ms"], told["message.max.bytes"]) == ("50", "5000000")
    assert (told["acks"], told["enable.idempotence"], told["partitioner"]) == ("all", "true", "murmur2_random")
