"""What requests look like, and what answers of brokers say: no broker in here."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kafka.errors import ConcurrentTransactionsError, OffsetOutOfRangeError
from kafka.protocol.broker_version_data import BrokerVersionData
from kafka.protocol.producer import ProduceRequest

from semel.kafka.answers import NO_ANSWER, is_transient
from semel.kafka.connection import REQUEST_TIMEOUT_MS
from semel.sinks.kafka.wire.records import cut, encode, record_batch
from semel.sinks.kafka.wire.requests import (
    PRODUCE_VERSION_MAX,
    Batches,
    LogRecord,
    Slice,
    added,
    fetched,
    produce_request,
)

OUT_OF_RANGE, INVALID_PRODUCER_EPOCH, CONCURRENT_TRANSACTIONS, TOPIC_AUTHORIZATION, NOT_ATTEMPTED = 1, 47, 51, 29, 55


def fetch_answer(records: bytes = b"", error: int = 0, start: int = 0, end: int = 0) -> Any:
    found = SimpleNamespace(error_code=error, records=records, log_start_offset=start, high_watermark=end)
    return SimpleNamespace(error_code=0, responses=[SimpleNamespace(partitions=[found])])


def add_answer(**codes: list[int]) -> Any:
    topics = [
        SimpleNamespace(name=name, results_by_partition=[SimpleNamespace(partition_error_code=code) for code in of])
        for name, of in codes.items()
    ]
    return SimpleNamespace(results_by_topic_v3_and_below=topics)


def batch_at(offset: int, *values: bytes) -> bytes:
    """A batch as a broker keeps it: with the offset of its first record."""
    count = len(values)
    records = list(cut(encode(None, pa.array(values, pa.binary()), np.arange(count)), [count]))
    made = record_batch(records, count, producer_id=7, epoch=3, sequence=0, now_ms=0, transactional=True)
    return struct.pack(">q", offset) + b"".join(made)[8:]


@pytest.mark.parametrize("version", range(3, PRODUCE_VERSION_MAX + 1))
@pytest.mark.parametrize("transactional_id", [None, "mine", "ä" * 100])
def test_rows_in_pieces_make_the_request_that_kafka_python_would_make(
    transactional_id: str | None, version: int
) -> None:
    batches: Batches = {
        "one": {0: [b"a", memoryview(b"bcd")[1:], b""], 7: [b"x" * 126], 300: [b"y" * 127]},
        "t" * 200: {n: [bytes(100), bytes(20_000)] for n in range(150)},
        "none": {},
    }
    topic = ProduceRequest.TopicProduceData
    theirs = ProduceRequest(
        transactional_id=transactional_id,
        acks=-1,
        timeout_ms=REQUEST_TIMEOUT_MS,
        topic_data=[
            topic(
                name=name,
                partition_data=[topic.PartitionProduceData(index=n, records=b"".join(r)) for n, r in of.items()],
            )
            for name, of in batches.items()
        ],
    )
    ours = produce_request(transactional_id, batches)
    for request in (ours, theirs):
        request.API_VERSION = version
        request.with_header(correlation_id=12_345, client_id="semel")
    sent = ours.encode(framed=True, header=True)
    assert sent == theirs.encode(framed=True, header=True)
    assert ours.encode() == theirs.encode()
    assert ours.encode(framed=True, header=True) == sent
    assert ours.expect_response()


def test_rows_go_by_no_version_that_would_add_their_partition_by_itself() -> None:
    newest = BrokerVersionData(api_versions={ProduceRequest.API_KEY: (0, 13)})
    assert newest.api_version(produce_request("mine", {})) == PRODUCE_VERSION_MAX


def test_a_slice_begins_at_the_offset_that_was_asked_for_though_its_batch_begins_before() -> None:
    records = batch_at(10, b"a", b"b", b"c") + batch_at(13, b"d")
    expected = [LogRecord(offset, 7, 3, None, value) for offset, value in ((12, b"c"), (13, b"d"))]
    assert fetched(fetch_answer(records, end=20), 12) == Slice(expected, 14, 20)


def test_a_fetch_that_brings_nothing_goes_no_further() -> None:
    assert fetched(fetch_answer(end=20), 12) == Slice([], 12, 20)


def test_where_the_log_begins_later_an_empty_slice_leads_to_its_beginning() -> None:
    assert fetched(fetch_answer(error=OUT_OF_RANGE, start=15, end=20), 12) == Slice((), 15, 20)


def test_an_offset_after_the_end_is_not_taken_for_an_empty_log() -> None:
    with pytest.raises(OffsetOutOfRangeError):
        fetched(fetch_answer(error=OUT_OF_RANGE, start=0, end=5), 12)


def test_of_partitions_that_are_refused_the_reason_is_told_not_that_others_were_not_tried() -> None:
    assert added(add_answer(a=[0, 0], b=[0])) == ("NO_ERROR", "")
    assert added(add_answer(a=[NOT_ATTEMPTED], b=[TOPIC_AUTHORIZATION])) == ("TOPIC_AUTHORIZATION_FAILED", "b")
    assert added(add_answer(a=[0, INVALID_PRODUCER_EPOCH])) == ("INVALID_PRODUCER_EPOCH", "a")


def test_partitions_that_cannot_be_added_yet_are_asked_for_again() -> None:
    with pytest.raises(ConcurrentTransactionsError):
        added(add_answer(a=[NOT_ATTEMPTED, CONCURRENT_TRANSACTIONS]))


def test_which_answers_may_change() -> None:
    assert all(map(is_transient, (NO_ANSWER, "NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REQUEST_TIMED_OUT")))
    assert not any(map(is_transient, ("NO_ERROR", "INVALID_PRODUCER_EPOCH", "MESSAGE_SIZE_TOO_LARGE", "")))
