"""Requests of Kafka's own protocol, and what the answers say. Pure: nothing in here sends or waits.

All of it is the transaction protocol from before KIP-890, which librdkafka speaks, too, and every broker: from EndTxn
version 5 on, the answer moves the epoch on, and from Produce version 12 on, rows add their partition to the transaction
by themselves.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semel.kafka.answers import NO_ANSWER, error_of, name_of, raise_for
from semel.kafka.connection import REQUEST_TIMEOUT_MS

FETCH_BYTES_MAX = 8 * 1024 * 1024
END_TXN_VERSION_MAX = 4
INIT_PRODUCER_VERSION_MAX = 4
ADD_PARTITIONS_VERSION_MAX = 3
PRODUCE_VERSION_MAX = 11
#: From this version on a request looks as `_produce_fields` makes it.
PRODUCE_VERSION_COMPACT = 9
ALL_REPLICAS = -1
#: Topic names are in fetch requests up to this version, topic ids after it.
FETCH_VERSION_MAX = 12
#: From this version on topics have ids.
METADATA_VERSION_MIN = 10
#: From this version on a leader may say that it does not know the end yet.
LIST_OFFSETS_VERSION_MIN = 5
LATEST = -1

#: topic -> partition -> a record batch, in pieces that follow each other.
Batches = Mapping[str, Mapping[int, Sequence[bytes | memoryview]]]


@dataclass(frozen=True)
class Transaction:
    """A transaction of the broker's own. No two of ours ever share a producer id and epoch (KAFKA-17754)."""

    id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class LogRecord:
    """One record as it lies in the log, of an open, a committed or an aborted transaction, or of none."""

    offset: int
    producer_id: int
    epoch: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class LogEnd:
    """The record with which the broker ends the transaction of a producer in this partition."""

    offset: int
    producer_id: int
    committed: bool


@dataclass(frozen=True)
class Slice:
    """Part of a log. `next_offset` is where the next slice begins, `end` what the leader took for the end."""

    entries: Sequence[LogRecord | LogEnd]
    next_offset: int
    end: int


@dataclass(frozen=True)
class Answer:
    """What a broker says to rows, partition by partition. `failed` is why it says nothing."""

    codes: Mapping[tuple[str, int], str]
    failed: str = ""

    def of(self, topic: str, partition: int) -> str:
        return self.codes.get((topic, partition), self.failed or NO_ANSWER)


# Requests -----------------------------------------------------------------------------------------------------------


def end_request(transaction: Transaction, *, commit: bool) -> Any:
    from kafka.protocol.producer.transaction import EndTxnRequest

    return EndTxnRequest(
        transactional_id=transaction.id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.epoch,
        committed=commit,
        max_version=END_TXN_VERSION_MAX,
    )


def start_producer_request(transactional_id: str | None, transaction_timeout_ms: int) -> Any:
    from kafka.protocol.producer.transaction import InitProducerIdRequest

    return InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        max_version=INIT_PRODUCER_VERSION_MAX,
    )


def add_partitions_request(transaction: Transaction, places: Mapping[str, Sequence[int]]) -> Any:
    from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transaction.id,
        v3_and_below_producer_id=transaction.producer_id,
        v3_and_below_producer_epoch=transaction.epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=list(partitions))
            for topic, partitions in places.items()
        ],
        max_version=ADD_PARTITIONS_VERSION_MAX,
    )


def open_transactions_request() -> Any:
    from kafka.protocol.admin.transactions import ListTransactionsRequest

    return ListTransactionsRequest(state_filters=["Ongoing"], producer_id_filters=[])


def produce_request(transactional_id: str | None, batches: Batches, timeout_ms: int = REQUEST_TIMEOUT_MS) -> Any:
    request = _produce_in_pieces()(
        transactional_id=transactional_id,
        acks=ALL_REPLICAS,
        timeout_ms=timeout_ms,
        max_version=PRODUCE_VERSION_MAX,
    )
    request.batches = batches
    return request


@functools.cache
def _produce_in_pieces() -> Any:
    from kafka.protocol.producer import ProduceRequest

    class ProduceInPieces(ProduceRequest, init=False):  # type: ignore[call-arg,misc]
        """kafka-python would copy the records of a request twice. This joins their pieces once."""

        batches: Batches

        def encode(self, version: int | None = None, header: bool = False, framed: bool = False) -> Any:
            if header and framed and version is None and self.API_VERSION >= PRODUCE_VERSION_COMPACT:
                fields = _produce_fields(self.transactional_id, self.timeout_ms, self.batches)
                parts = self.encode_header(flexible=True), *fields
                return b"".join((struct.pack(">i", sum(map(len, parts))), *parts))
            self.topic_data = _topic_data(self.batches)
            return super().encode(version=version, header=header, framed=framed)

    return ProduceInPieces


def _topic_data(batches: Batches) -> list[Any]:
    from kafka.protocol.producer import ProduceRequest

    topic = ProduceRequest.TopicProduceData
    return [
        topic(
            name=name,
            partition_data=[
                topic.PartitionProduceData(index=number, records=b"".join(pieces))
                for number, pieces in partitions.items()
            ],
        )
        for name, partitions in batches.items()
    ]


def _produce_fields(transactional_id: str | None, timeout_ms: int, batches: Batches) -> Iterator[bytes | memoryview]:
    """A produce request as Kafka's protocol guide has it from version 9 on: sizes are varints, and one more than said.

    At the end of each structure stands a 0: no tagged fields (KIP-482).
    """
    yield _compact_text(transactional_id)
    yield struct.pack(">hi", ALL_REPLICAS, timeout_ms)
    yield _varint(len(batches) + 1)
    for name, partitions in batches.items():
        yield _compact_text(name)
        yield _varint(len(partitions) + 1)
        for number, pieces in partitions.items():
            yield struct.pack(">i", number)
            yield _varint(sum(map(len, pieces)) + 1)
            yield from pieces
            yield b"\0"
        yield b"\0"
    yield b"\0"


def _compact_text(text: str | None) -> bytes:
    if text is None:
        return _varint(0)
    data = text.encode()
    return _varint(len(data) + 1) + data


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*digits, number))


def describe_request(topic: str) -> Any:
    from kafka.protocol.metadata import MetadataRequest

    wanted = [MetadataRequest.MetadataRequestTopic(name=topic)]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=METADATA_VERSION_MIN)


def list_offsets_request(topic: str, partition: int) -> Any:
    from kafka.protocol.consumer.offsets import ListOffsetsRequest

    wanted = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
        partition_index=partition, current_leader_epoch=-1, timestamp=LATEST
    )
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=0,
        topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[wanted])],
        min_version=LIST_OFFSETS_VERSION_MIN,
    )


def fetch_request(topic: str, partition: int, offset: int) -> Any:
    from kafka.protocol.consumer.fetch import FetchRequest

    wanted = FetchRequest.FetchTopic.FetchPartition(
        partition=partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES_MAX
    )
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=FETCH_BYTES_MAX,
        isolation_level=0,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        max_version=FETCH_VERSION_MAX,
    )


# What brokers answer ------------------------------------------------------------------------------------------------


def added(response: Any) -> tuple[str, str]:
    """The worst answer to AddPartitionsToTxn by name, and the topic that it is about."""
    codes = [
        (p.partition_error_code, t.name) for t in response.results_by_topic_v3_and_below for p in t.results_by_partition
    ]
    for code, _ in codes:
        if error_of(code).retriable:
            raise_for(code)
    # Where one is refused, the others are said not to have been tried.
    refused = [(name_of(code), topic) for code, topic in codes if code]
    return min(refused, key=lambda one: one[0] == "OPERATION_NOT_ATTEMPTED", default=("NO_ERROR", ""))


def produced(response: Any) -> Answer:
    return Answer(
        {
            (topic.name, partition.index): name_of(partition.error_code)
            for topic in response.responses
            for partition in topic.partition_responses
        }
    )


def log_end(response: Any) -> int:
    found = response.topics[0].partitions[0]
    raise_for(found.error_code)
    return int(found.offset)


def fetched(response: Any, offset: int) -> Slice:
    """What was asked for from an offset on. Where the log begins later, an empty slice leads to its beginning."""
    raise_for(response.error_code)
    found = response.responses[0].partitions[0]
    if name_of(found.error_code) == "OFFSET_OUT_OF_RANGE" and offset < found.log_start_offset:
        return Slice((), found.log_start_offset, found.high_watermark)
    raise_for(found.error_code)
    return _slice(found.records, offset, found.high_watermark)


def _slice(records: bytes | None, offset: int, end: int) -> Slice:
    """What a fetch brought. A batch may begin before the offset that was asked for."""
    from kafka.record import MemoryRecords

    entries: list[LogRecord | LogEnd] = []
    next_offset = offset
    for batch in MemoryRecords(records or b""):
        entries += (entry for entry in _entries(batch) if entry.offset >= offset)
        next_offset = batch.next_offset
    return Slice(entries, max(next_offset, offset), end)


def _entries(batch: Any) -> Iterator[LogRecord | LogEnd]:
    for record in batch:
        if batch.is_control_batch:
            yield LogEnd(record.offset, batch.producer_id, bool(record.commit))
        else:
            yield LogRecord(record.offset, batch.producer_id, batch.producer_epoch, record.key, record.value)
