"""Record batches made from Arrow columns, read back by kafka-python, and partitions as a Java producer chooses them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2
from kafka.record import MemoryRecords

from semel.sinks.kafka.wire.records import (
    BATCH_BYTES,
    CODECS,
    Pieces,
    cut,
    decode,
    encode,
    partitions_by_key,
    record_batch,
    varints,
)

blobs = st.one_of(st.none(), st.binary(max_size=200), st.sampled_from([b"", b"x" * 63, b"y" * 64, b"z" * 20_000]))


Row = tuple[bytes | None, bytes | None]


def batch_of(rows: list[Row], compression: str = "none", ends: Sequence[int] = ()) -> bytes:
    return packed(pieces_of(rows, ends), len(rows), compression)


def pieces_of(rows: list[Row], ends: Sequence[int] = ()) -> Pieces:
    keys, values = (pa.array([row[i] for row in rows], pa.binary()) for i in (0, 1))
    return list(cut(encode(keys, values, np.arange(len(rows))), [*ends, len(rows)]))


def packed(pieces: Pieces, rows: int, compression: str = "none") -> bytes:
    return b"".join(
        record_batch(
            pieces,
            rows,
            producer_id=2**40,
            epoch=32_767,
            sequence=2**31 - 1,
            now_ms=1_700_000_000_000,
            transactional=True,
            compression=compression,
        )
    )


@given(st.lists(st.tuples(blobs, blobs), min_size=1, max_size=80), st.integers(1, 80))
def test_a_batch_holds_the_rows_in_their_order(rows: list[Row], end: int) -> None:
    (batch,) = MemoryRecords(batch_of(rows, ends=[min(end, len(rows))]))
    assert batch.validate_crc()
    assert (batch.producer_id, batch.producer_epoch, batch.is_transactional) == (2**40, 32_767, True)
    read = list(batch)
    assert [(record.key, record.value) for record in read] == rows
    assert [record.offset for record in read] == list(range(len(rows)))
    assert {record.timestamp for record in read} == {1_700_000_000_000}
    assert all(not record.headers for record in read)


@given(st.lists(st.tuples(blobs, blobs), min_size=1, max_size=30), st.integers(1, 30))
def test_what_was_encoded_can_be_read_again(rows: list[Row], end: int) -> None:
    assert decode(pieces_of(rows, [min(end, len(rows))])) == rows


@given(st.lists(st.tuples(blobs, st.integers(0, 2)), min_size=1, max_size=60))
def test_records_of_several_batches_are_made_at_once_and_sorted_later(rows: list[tuple[bytes | None, int]]) -> None:
    chosen = [number for _, number in rows]
    places = np.array([chosen[:i].count(number) for i, number in enumerate(chosen)])
    order = sorted(range(len(rows)), key=lambda i: chosen[i])
    records = encode(None, pa.array([value for value, _ in rows], pa.binary()), places).take(pa.array(order))
    ends = np.cumsum([chosen.count(number) for number in range(3)]).tolist()
    for number, piece in enumerate(cut(records, ends)):
        expected = [value for value, of in rows if of == number]
        if expected:
            (batch,) = MemoryRecords(packed([piece], len(expected)))
            assert [(record.offset, record.value) for record in batch] == list(enumerate(expected))


def test_rows_far_into_an_array_of_more_than_two_gigabytes() -> None:
    size = 3 << 30  # of zeros, which take no memory until someone writes into them
    buffers = [None, pa.py_buffer(np.array([0, size - 3, size])), pa.py_buffer(np.zeros(size, np.uint8))]
    values = pa.Array.from_buffers(pa.large_binary(), 2, buffers).slice(1)
    assert decode([*cut(encode(None, values, np.arange(1)), [1])]) == [(None, bytes(3))]


def test_a_batch_of_more_rows_than_the_table_of_numbers_has() -> None:
    rows: list[Row] = [(b"%d" % i, b"v") for i in range(40_000)]
    (batch,) = MemoryRecords(batch_of(rows))
    assert [(record.key, record.value) for record in batch] == rows


def test_columns_may_be_slices_text_and_absent() -> None:
    values = pa.array(["a", "b", None, "ä", "e"]).slice(1, 3)
    body = list(cut(encode(None, values, np.arange(3)), [3]))
    one = record_batch(body, 3, producer_id=-1, epoch=-1, sequence=-1, now_ms=0, transactional=False)
    (batch,) = MemoryRecords(b"".join(one))
    assert not batch.is_transactional
    assert [(record.key, record.value) for record in batch] == [(None, b"b"), (None, None), (None, "ä".encode())]


@pytest.mark.parametrize("compression", sorted(set(CODECS) - {"none"}))
def test_a_compressed_batch_is_smaller_and_says_how(compression: str) -> None:
    rows: list[Row] = [(b"k", b"v" * 1000)] * 20
    plain, small = batch_of(rows), batch_of(rows, compression)
    assert len(small) < len(plain) / 5
    (batch,) = MemoryRecords(small)
    assert batch.validate_crc()
    assert batch.compression_type == CODECS[compression]


@pytest.mark.parametrize("compression", sorted(set(CODECS) - {"none"}))
@pytest.mark.parametrize("value", [b"v" * 1000, random.Random(1).randbytes(1000)], ids=["alike", "random"])  # noqa: S311
def test_a_large_batch_can_be_read_whatever_its_compression(compression: str, value: bytes) -> None:
    rows: list[Row] = [(b"%d" % i, value) for i in range(500)]
    data = batch_of(rows, compression)
    records = pa.decompress(data[BATCH_BYTES:], len(batch_of(rows)) - BATCH_BYTES, codec=compression, asbytes=True)
    assert records == batch_of(rows)[BATCH_BYTES:]


def test_the_blocks_of_lz4_do_not_refer_to_each_other() -> None:
    """Kafka's Java broker and clients refuse those that do (KafkaLZ4BlockInputStream), and liblz4 links large ones."""
    frame = batch_of([(b"k", b"v" * 1000)] * 500, "lz4")[BATCH_BYTES:]
    assert frame[:4] == bytes.fromhex("04224d18")
    assert frame[4] & 0x20


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_varints(numbers: list[int]) -> None:
    def read(data: bytes) -> int:
        bits = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(data))
        assert [byte >> 7 for byte in data] == [1] * (len(data) - 1) + [0]
        return (bits >> 1) ^ -(bits & 1)

    found = varints(np.array(numbers, np.int64))
    # Once for all, where all are the same.
    each = [found.as_py()] * len(numbers) if isinstance(found, pa.Scalar) else found.to_pylist()
    assert [read(data) for data in each] == numbers


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1, max_size=50), st.integers(1, 50))
def test_keys_choose_the_partitions_that_a_java_producer_would(keys: list[bytes | None], partitions: int) -> None:
    found = partitions_by_key(pa.array(keys, pa.binary()).slice(len(keys) // 3), partitions).tolist()
    for key, number in zip(keys[len(keys) // 3 :], found, strict=True):
        assert 0 <= number < partitions
        if key is not None:
            assert number == (murmur2(key) & 0x7FFFFFFF) % partitions
