"""A producer that sends whole record batches: rows go from Arrow's buffers to the broker without a call per row.

It keeps the rules of Kafka's own idempotent producer, in their plainest form: the rows of a partition are numbered, one
batch of a partition is under way at a time, and what got no answer is sent again under the same numbers, so that the
broker takes no row twice and none out of turn. A transaction stays open because nobody ends it: the driver will.

Rows that need more (headers, timestamps, unusual settings) go through librdkafka (`producers`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from semel.kafka.answers import NO_ANSWER, is_transient
from semel.kafka.connection import follows
from semel.kafka.options import CONNECTION
from semel.sinks.kafka.delivery import TOO_LARGE, UNASSIGNED, DeliveryFailed, Failure
from semel.sinks.kafka.wire.batches import (
    PAUSE_S,
    PAUSE_S_MAX,
    KafkaBatch,
    Partition,
    Share,
    places_of,
    row_sizes,
    rows_within,
    steps,
)
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.records import (
    BATCH_BYTES,
    CODECS,
    Pieces,
    cut,
    decode,
    encode,
    partitions_by_key,
    record_batch,
)
from semel.sinks.kafka.wire.requests import Answer, Transaction

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: How much may wait to be acknowledged before the task waits, too: some batches for each of some partitions.
WAITING_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BYTES_MAX = 4 * 1024 * 1024
#: How many requests may be under way to one broker, each with other partitions: the next one is there when it is done
#: with the last. It works on one request of a connection at a time.
REQUESTS_MAX = 3
#: Rows that are a smaller part of a step than this are copied: a few are not to keep the memory of all of them.
SMALL_PART = 1 / 16
POLL_S = 0.1
FAILURES_KEPT = 20

#: Settings that it follows, beside those of the connection: all others are librdkafka's. A task has its rows at once,
#: so that there is nothing to linger for.
FOLLOWED = {
    "acks": "all",
    "batch.num.messages": "100000",
    "batch.size": "1000000",
    "compression.type": "none",
    "delivery.timeout.ms": "120000",
    "enable.idempotence": "true",
    "linger.ms": "5",
    "message.max.bytes": "1000000",
    "partitioner": "murmur2_random",
    "queue.buffering.max.kbytes": "2097151",
    "queue.buffering.max.messages": "10000000",
    "request.timeout.ms": "",
    "topic.metadata.propagation.max.ms": "30000",
    "transaction.timeout.ms": "60000",
    "transactional.id": "",
}

#: What brokers answer, in librdkafka's words, which the rest of the sink knows.
WORDS = {
    "MESSAGE_SIZE_TOO_LARGE": TOO_LARGE,
    "RECORD_LIST_TOO_LARGE": TOO_LARGE,
    "UNKNOWN_TOPIC_OR_PARTITION": "UNKNOWN_TOPIC_OR_PART",
    "INVALID_TOPIC": "TOPIC_EXCEPTION",
}
TEXTS = {
    TOO_LARGE: "Broker: Message size too large",
    "UNKNOWN_TOPIC_OR_PART": "Broker: Unknown topic or partition",
    "TOPIC_AUTHORIZATION_FAILED": "Broker: Topic authorization failed",
    "TOPIC_EXCEPTION": "Broker: Invalid topic",
    "_UNKNOWN_PARTITION": "Local: Unknown partition",
}
#: The broker has these rows already: the answer to their first sending was lost.
TAKEN_BEFORE = "DUPLICATE_SEQUENCE_NUMBER"


#: Settings of which only some values are followed.
ONLY = {
    "compression.type": tuple(CODECS),
    "partitioner": ("murmur2_random",),
    "queue.buffering.max.messages": (FOLLOWED["queue.buffering.max.messages"],),
}


def suits(conf: Mapping[str, Any]) -> bool:
    """Whether all that these settings ask for is done here."""
    return all(
        follows(name) if CONNECTION.fullmatch(name) else name in FOLLOWED and value in ONLY.get(name, (value,))
        for name, value in conf.items()
    )


class DirectProducer:
    """One producer id and epoch. `drop` lets go of it and sends nothing: a transaction that is open stays open."""

    def __init__(self, conf: Mapping[str, Any], wire: Wire) -> None:
        settings = {**FOLLOWED, **conf}
        self._wire = wire
        self._id = settings["transactional.id"]
        self._transaction_timeout_ms = int(settings["transaction.timeout.ms"])
        self._compression = settings["compression.type"]
        self._batch_bytes = max(1, int(settings["batch.size"]) - BATCH_BYTES)
        self._batch_rows = int(settings["batch.num.messages"])
        self._waiting_bytes_max = min(WAITING_BYTES_MAX, int(settings["queue.buffering.max.kbytes"]) * 1024)
        self._row_bytes_max = int(settings["message.max.bytes"])
        self._delivery_s = int(settings["delivery.timeout.ms"]) / 1000
        self._propagation_s = int(settings["topic.metadata.propagation.max.ms"]) / 1000
        self._transaction: Transaction | None = None
        self._leaders: dict[str, dict[int, int]] = {}
        self._added: set[tuple[str, int]] = set()
        self._partitions: dict[tuple[str, int], Partition] = {}
        #: How many requests are under way to each broker.
        self._busy: Counter[int] = Counter()
        self._answers: SimpleQueue[tuple[int, list[KafkaBatch], Answer]] = SimpleQueue()
        self._waiting_bytes = 0
        self._failures: list[Failure] = []
        self._last_trouble = ""
        self._turn = time.monotonic_ns()

    # Transactions -----------------------------------------------------------------------------------------------------

    def learn(self, topics: Sequence[str]) -> None:
        for topic in topics:
            self._leaders_of(topic)

    def init_transactions(self) -> None:
        answer, producer_id, epoch = self._wire.start_producer(self._id or None, self._transaction_timeout_ms)
        if answer != "NO_ERROR":
            raise _failed(_failure(answer))
        self._transaction = Transaction(self._id, producer_id, epoch)

    def begin_transaction(self) -> None:
        """It begins with the first partition that is added to it."""

    def abort_transaction(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._busy.total() and time.monotonic() < deadline:
            # Whatever else goes wrong: this is the way out.
            with suppress(DeliveryFailed):
                self._take_answers(POLL_S)
        if self._transaction is not None and self._added:
            self._wire.end(self._transaction, commit=False)

    # Rows -------------------------------------------------------------------------------------------------------------

    def send(self, topic: str, columns: Mapping[str, pa.Array], rows: int) -> None:
        """Rows of one topic: `value`, and where given `key` and `partition`. Returns before they are acknowledged."""
        if self._transaction is None:
            self.init_transactions()
        sizes = row_sizes(columns.get("key"), columns["value"])
        for start, end in steps(sizes, rows):
            part = {name: array.slice(start, end - start) for name, array in columns.items()}
            self._take_in(topic, part, sizes[start:end])
            self._go_on()
            if self._waiting_bytes > self._waiting_bytes_max:
                self._make_room()

    def _make_room(self) -> None:
        """Wait until less is waiting. With many partitions none may have filled a batch: then what there is goes."""
        if not any(partition.batches for partition in self._partitions.values()):
            self._cut_all()
        while self._waiting_bytes > self._waiting_bytes_max and any(p.batches for p in self._partitions.values()):
            self._take_answers(POLL_S)
            self._go_on()

    def send_one(self, topic: str, key: bytes, value: bytes | None, partition: int) -> None:
        """A single record, such as a marker. Without a value it is a tombstone."""
        import pyarrow as pa

        if self._transaction is None:
            self.init_transactions()
        columns = {"key": pa.array([key]), "value": pa.array([value], pa.binary()), "partition": pa.array([partition])}
        self._take_in(topic, columns, row_sizes(columns["key"], columns["value"]))

    def flush(self, timeout_s: float) -> None:
        """Return when every row is acknowledged. Raises when one is not, or when it takes too long."""
        deadline = time.monotonic() + timeout_s
        self._cut_all()
        self._go_on()
        while self._waiting_bytes:
            self._take_answers(POLL_S)
            self._go_on()
            if self._waiting_bytes and time.monotonic() > deadline:
                raise self._not_acknowledged(timeout_s)
        self._leaders.clear()  # by the next task the topic may have more partitions

    def drop(self) -> None:
        """Nothing to let go of: the connection is the process's own."""

    def _take_in(self, topic: str, columns: Mapping[str, pa.Array], sizes: np.ndarray[Any, Any]) -> None:
        """Make records of the rows of one step, and give each to the batch that it will travel in."""
        import numpy as np
        import pyarrow as pa

        if sizes.max() > self._row_bytes_max:
            raise self._refused(TOO_LARGE, topic, UNASSIGNED, columns, int(sizes.argmax()))
        numbers = self._numbers(topic, columns)
        counts = np.bincount(numbers)
        chosen = np.flatnonzero(counts)
        if len(chosen) == 1:
            shares = self._shares(topic, chosen, counts, sizes)
            records = encode(columns.get("key"), columns["value"], places_of(shares))
        else:
            # Numbers of two bytes are sorted without a comparison.
            order = np.argsort(numbers.astype(np.uint16) if len(counts) <= 1 << 16 else numbers, kind="stable")
            shares = self._shares(topic, chosen, counts, sizes[order])
            places = np.empty(len(order), np.int64)
            places[order] = places_of(shares)
            records = encode(columns.get("key"), columns["value"], places).take(pa.array(order))
        self._share_out(shares, records)

    def _numbers(self, topic: str, columns: Mapping[str, pa.Array]) -> np.ndarray[Any, Any]:
        """The partition of each row: what the row says, else by its key, else the same for all, by turns."""
        import numpy as np

        rows, count = len(columns["value"]), len(self._leaders_of(topic))
        self._turn += 1
        numbers = np.full(rows, self._turn % count, np.int64)
        key = columns.get("key")
        if key is not None and key.null_count < rows:
            has_key = key.is_valid().to_numpy(zero_copy_only=False)
            numbers = np.where(has_key, partitions_by_key(key, count), numbers)
        if "partition" in columns:
            said = columns["partition"].fill_null(UNASSIGNED).to_numpy(zero_copy_only=False)
            if said.max() >= count:  # it may have more partitions by now
                self._leaders.pop(topic, None)
                count = len(self._leaders_of(topic))
            if said.max() >= count or said.min() < UNASSIGNED:
                index = int(np.nonzero((said >= count) | (said < UNASSIGNED))[0][0])
                raise self._refused("_UNKNOWN_PARTITION", topic, int(said[index]), columns, index)
            numbers = np.where(said == UNASSIGNED, numbers, said)
        return numbers

    def _partition(self, topic: str, number: int) -> Partition:
        if (topic, number) not in self._partitions:
            self._partitions[topic, number] = Partition(topic, number, self._batch_bytes)
        return self._partitions[topic, number]

    # Batches ----------------------------------------------------------------------------------------------------------

    def _shares(
        self, topic: str, chosen: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
    ) -> list[Share]:
        """Which batches take the rows, whose sizes are in the order of their partitions. A full one is replaced."""
        ends, shares = sizes.cumsum(), []
        start = before = 0
        for number in chosen.tolist():
            partition, last = self._partition(topic, number), start + int(counts[number])
            while start < last:
                batch = partition.filling = partition.filling or KafkaBatch(partition)
                fitting = rows_within(ends, before + partition.batch_bytes - batch.bound)
                end = min(last, fitting, start + self._batch_rows - batch.rows)
                if end == start and batch.rows:
                    self._close(batch)
                    continue
                end = max(end, start + 1)
                shares.append(Share(batch, batch.rows, start, end))
                batch.rows += end - start
                batch.bound += int(ends[end - 1]) - before
                if end < last or batch.bound >= partition.batch_bytes:
                    partition.filling = None
                start, before = end, int(ends[end - 1])
        return shares

    def _share_out(self, shares: Sequence[Share], records: pa.Array) -> None:
        for share, piece in zip(shares, cut(records, [share.end for share in shares]), strict=True):
            batch = share.batch
            small = share.end - share.start < len(records) * SMALL_PART
            batch.pieces.append(bytes(piece) if small else piece)
            batch.size += len(piece)
            self._waiting_bytes += len(piece)
            if batch is not batch.partition.filling:
                self._close(batch)

    def _cut_all(self) -> None:
        for partition in self._partitions.values():
            if partition.filling:
                self._close(partition.filling)

    def _close(self, batch: KafkaBatch) -> None:
        """It takes no more rows, and waits for its turn."""
        partition = batch.partition
        if partition.filling is batch:
            partition.filling = None
        batch.sequence, batch.born = partition.sequence, time.monotonic()
        partition.sequence = _later(partition.sequence, batch.rows)
        self._pack(batch)
        partition.batches.append(batch)

    def _pack(self, batch: KafkaBatch) -> None:
        if self._transaction is None:
            raise RuntimeError("rows need a producer id first")
        batch.data = record_batch(
            batch.pieces,
            batch.rows,
            producer_id=self._transaction.producer_id,
            epoch=self._transaction.epoch,
            sequence=batch.sequence,
            now_ms=int(time.time() * 1000),
            transactional=bool(self._id),
            compression=self._compression,
        )
        self._waiting_bytes -= batch.size
        batch.size = sum(map(len, batch.data))
        self._waiting_bytes += batch.size

    # To the brokers ---------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the answers that are there, and give every broker that is not busy what waits for it."""
        self._take_answers(0)
        self._add_partitions()
        now = time.monotonic()
        ready: dict[int, list[KafkaBatch]] = {}
        for partition in self._partitions.values():
            if partition.batches and not partition.under_way and partition.not_before <= now:
                self._raise_if_late(partition.batches[0], now)
                leader = self._leaders_of(partition.topic).get(partition.number, -1)
                chosen = ready.setdefault(leader, [])
                if self._busy[leader] < REQUESTS_MAX and sum(b.size for b in chosen) < REQUEST_BYTES_MAX:
                    chosen.append(partition.batches[0])
        for leader, batches in ready.items():
            if leader < 0:
                self._last_trouble = f"partition {batches[0].partition.number} had no leader" if batches else ""
                self._again(batches)
            elif batches:
                self._busy[leader] += 1
                for batch in batches:
                    batch.partition.under_way = True
                self._wire.produce(
                    leader, self._id or None, _by_topic(batches), _answer_to(self._answers, leader, batches)
                )

    def _add_partitions(self) -> None:
        """The coordinator must know which partitions the transaction is in before a row gets there."""
        if not (self._id and self._transaction):
            return
        wanted = {place for place, p in self._partitions.items() if p.batches} - self._added
        if not wanted:
            return
        places: dict[str, list[int]] = {}
        for topic, number in sorted(wanted):
            places.setdefault(topic, []).append(number)
        answer, refused = self._wire.add_partitions(self._transaction, places)
        # Even a refusal may have begun the transaction, and so it is to be ended.
        self._added |= wanted
        if answer != "NO_ERROR":
            raise _failed(_failure(answer, refused))

    def _take_answers(self, wait_s: float) -> None:
        while True:
            try:
                leader, batches, answer = self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
            except Empty:
                break
            wait_s = 0
            self._busy[leader] -= 1
            for batch in batches:
                batch.partition.under_way = False
                self._settle(batch, answer.of(batch.partition.topic, batch.partition.number))
        if self._failures:
            raise DeliveryFailed(self._failures[0].text, self._failures)

    def _settle(self, batch: KafkaBatch, said: str) -> None:
        partition = batch.partition
        if said in ("NO_ERROR", TAKEN_BEFORE):
            partition.batches.popleft()
            partition.pause_s = PAUSE_S
            self._waiting_bytes -= batch.size
        elif WORDS.get(said) == TOO_LARGE and batch.rows > 1:
            self._split(batch)
        elif is_transient(said):
            answered = f"the broker last answered {said}"
            self._last_trouble = "the last request got no answer" if said == NO_ANSWER else answered
            self._again([batch])
        elif len(self._failures) < FAILURES_KEPT:
            key, value = decode(batch.pieces)[0] if batch.rows == 1 else (None, None)
            size = len(value or b"") if batch.rows == 1 else -1
            self._failures.append(_failure(said, partition.topic, partition.number, key, size))

    def _again(self, batches: Iterable[KafkaBatch]) -> None:
        """Later, and perhaps to another broker."""
        for batch in batches:
            partition = batch.partition
            partition.not_before = time.monotonic() + partition.pause_s
            partition.pause_s = min(partition.pause_s * 2, PAUSE_S_MAX)
            self._leaders.pop(partition.topic, None)

    def _split(self, batch: KafkaBatch) -> None:
        """The topic takes no batches of this size. The halves keep the numbers of their rows."""
        import numpy as np
        import pyarrow as pa

        partition, half = batch.partition, batch.rows // 2
        partition.batches.popleft()
        self._waiting_bytes -= batch.size
        partition.batch_bytes = max(1, min(partition.batch_bytes, batch.bound // 2))
        rows = decode(batch.pieces)
        for start, end in ((half, len(rows)), (0, half)):
            key, value = (pa.array(column, pa.binary()) for column in zip(*rows[start:end], strict=True))
            records = encode(key, value, np.arange(end - start))
            part = KafkaBatch(partition, [*cut(records, [end - start])], end - start, batch.bound // 2, born=batch.born)
            part.sequence = _later(batch.sequence, start)
            self._pack(part)
            partition.batches.appendleft(part)

    def _leaders_of(self, topic: str) -> dict[int, int]:
        """Asked for again after any trouble. A topic that was just created may be unknown for a while."""
        deadline = time.monotonic() + self._propagation_s
        while topic not in self._leaders:
            answer, leaders = self._wire.leaders(topic)
            if leaders and answer == "NO_ERROR":
                self._leaders[topic] = leaders
            elif not is_transient(answer) or time.monotonic() > deadline:
                raise _failed(_failure(answer, topic))
            else:
                time.sleep(PAUSE_S)
        return self._leaders[topic]

    # What goes wrong --------------------------------------------------------------------------------------------------

    def _raise_if_late(self, batch: KafkaBatch, now: float) -> None:
        if now - batch.born > self._delivery_s:
            raise self._not_acknowledged(self._delivery_s)

    def _not_acknowledged(self, seconds: float) -> DeliveryFailed:
        left = sum(b.rows for p in self._partitions.values() for b in p.batches)
        why = f": {self._last_trouble}" if self._last_trouble else ""
        return DeliveryFailed(f"{left} rows were not acknowledged within {seconds:.0f} s{why}", ())

    def _refused(
        self, name: str, topic: str, number: int, columns: Mapping[str, pa.Array | None], index: int
    ) -> DeliveryFailed:
        key, value = (array[index].as_py() if (array := columns.get(c)) is not None else None for c in ("key", "value"))
        return _failed(_failure(name, topic, number, _bytes(key), len(_bytes(value) or b"")))


def _failure(
    said: str, topic: str = "", partition: int = UNASSIGNED, key: bytes | None = None, size: int = -1
) -> Failure:
    """What a broker said, or what we found ourselves, in librdkafka's words."""
    name = WORDS.get(said, said)
    return Failure(name, TEXTS.get(name, f"Broker: {said}"), topic, partition, key, size)


def _failed(failure: Failure) -> DeliveryFailed:
    return DeliveryFailed(failure.text, (failure,))


def _answer_to(
    answers: SimpleQueue[tuple[int, list[KafkaBatch], Answer]], leader: int, batches: list[KafkaBatch]
) -> Any:
    return lambda answer: answers.put((leader, batches, answer))


def _by_topic(batches: Iterable[KafkaBatch]) -> dict[str, dict[int, Pieces]]:
    found: dict[str, dict[int, Pieces]] = {}
    for batch in batches:
        found.setdefault(batch.partition.topic, {})[batch.partition.number] = batch.data
    return found


def _later(sequence: int, rows: int) -> int:
    """Numbers of rows begin anew after the largest int32."""
    return (sequence + rows) % (1 << 31)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
