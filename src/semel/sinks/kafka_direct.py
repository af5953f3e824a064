"""A producer that sends whole record batches: rows go from Arrow's buffers to the broker without a call per row.

It keeps the rules of Kafka's own idempotent producer, in their plainest form: the rows of a partition are numbered, one
batch of a partition is under way at a time, and what got no answer is sent again under the same numbers, so that the
broker takes no row twice and none out of turn. A transaction stays open because nobody ends it: the driver will.

Rows that need more (headers, timestamps, unusual settings) go through librdkafka (kafka_producers).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from semel.kafka_options import CONNECTION
from semel.sinks.kafka_delivery import UNASSIGNED, DeliveryFailed, Failure
from semel.sinks.kafka_records import BATCH_BYTES, CODECS, RECORD_BYTES, encode, partitions_by_key, record_batch
from semel.sinks.kafka_requests import Answer, Transaction, is_transient
from semel.sinks.kafka_wire import Wire

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: How much may wait to be acknowledged before the task waits, too: some batches for each of some partitions.
WAITING_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BYTES_MAX = 4 * 1024 * 1024
#: How many requests may be under way to one broker, each with other partitions: the next one is there when it is done
#: with the last. It works on one request of a connection at a time.
REQUESTS_MAX = 3
ROWS_PER_STEP = 10_000
PAUSE_S, PAUSE_S_MAX = 0.02, 0.5
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
    "queue.buffering.max.kbytes": "",
    "queue.buffering.max.messages": "",
    "request.timeout.ms": "30000",
    "topic.metadata.propagation.max.ms": "30000",
    "transaction.timeout.ms": "60000",
    "transactional.id": "",
}

#: What brokers answer, in librdkafka's words, which the rest of the sink knows.
WORDS = {
    "MESSAGE_SIZE_TOO_LARGE": "MSG_SIZE_TOO_LARGE",
    "RECORD_LIST_TOO_LARGE": "MSG_SIZE_TOO_LARGE",
    "UNKNOWN_TOPIC_OR_PARTITION": "UNKNOWN_TOPIC_OR_PART",
    "INVALID_TOPIC": "TOPIC_EXCEPTION",
}
TOO_LARGE = "MSG_SIZE_TOO_LARGE"
TEXTS = {
    TOO_LARGE: "Broker: Message size too large",
    "UNKNOWN_TOPIC_OR_PART": "Broker: Unknown topic or partition",
    "TOPIC_AUTHORIZATION_FAILED": "Broker: Topic authorization failed",
    "TOPIC_EXCEPTION": "Broker: Invalid topic",
    "_UNKNOWN_PARTITION": "Local: Unknown partition",
}
#: The broker has these rows already: the answer to their first sending was lost.
TAKEN_BEFORE = "DUPLICATE_SEQUENCE_NUMBER"


def suits(conf: Mapping[str, str]) -> bool:
    """Whether all that these settings ask for is done here."""
    plain = {"partitioner": ("murmur2_random",), "compression.type": tuple(CODECS)}
    return all(
        CONNECTION.fullmatch(name) or (name in FOLLOWED and value in plain.get(name, (value,)))
        for name, value in conf.items()
    )


@dataclass
class Rows:
    """Some rows of one partition, next to each other in the batch that they travel in."""

    partition: Partition
    key: pa.Array | None
    value: pa.Array
    size: int
    sequence: int = -1
    data: bytes = b""
    born: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return len(self.value)


@dataclass
class Partition:
    topic: str
    number: int
    sequence: int = 0
    #: Rows that do not fill a batch yet, and batches that wait for their turn; one may be under way.
    gathered: list[Rows] = field(default_factory=list)
    gathered_bytes: int = 0
    batches: deque[Rows] = field(default_factory=deque)
    under_way: bool = False
    not_before: float = 0.0
    pause_s: float = PAUSE_S


class DirectProducer:
    """One producer id and epoch. `drop` lets go of it and sends nothing: a transaction that is open stays open."""

    def __init__(self, conf: Mapping[str, str], wire: Wire) -> None:
        settings = {**FOLLOWED, **conf}
        self._wire = wire
        self._id = settings["transactional.id"]
        self._transaction_timeout_ms = int(settings["transaction.timeout.ms"])
        self._compression = settings["compression.type"]
        self._batch_bytes = max(1, int(settings["batch.size"]) - BATCH_BYTES)
        self._row_bytes_max = int(settings["message.max.bytes"])
        self._delivery_s = int(settings["delivery.timeout.ms"]) / 1000
        self._propagation_s = int(settings["topic.metadata.propagation.max.ms"]) / 1000
        self._transaction: Transaction | None = None
        self._leaders: dict[str, dict[int, int]] = {}
        self._added: set[tuple[str, int]] = set()
        self._partitions: dict[tuple[str, int], Partition] = {}
        #: How many requests are under way to each broker.
        self._busy: Counter[int] = Counter()
        self._answers: SimpleQueue[tuple[int, list[Rows], Answer]] = SimpleQueue()
        self._waiting_bytes = 0
        self._failures: list[Failure] = []
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
        for start in range(0, rows, ROWS_PER_STEP):
            part = {name: array.slice(start, ROWS_PER_STEP) for name, array in columns.items()}
            for partition, chosen in self._by_partition(topic, part):
                self._gather(partition, chosen.get("key"), chosen["value"])
            self._go_on()
            if self._waiting_bytes > WAITING_BYTES_MAX:
                self._make_room()

    def _make_room(self) -> None:
        """Wait until less is waiting. With many partitions none may have filled a batch: then what there is goes."""
        if not any(partition.batches for partition in self._partitions.values()):
            self._cut_all()
        while self._waiting_bytes > WAITING_BYTES_MAX and any(p.batches for p in self._partitions.values()):
            self._take_answers(POLL_S)
            self._go_on()

    def send_one(self, topic: str, key: bytes, value: bytes, partition: int) -> None:
        """A single record, such as a marker."""
        import pyarrow as pa

        if self._transaction is None:
            self.init_transactions()
        self._leaders_of(topic)
        self._gather(self._partition(topic, partition), pa.array([key]), pa.array([value]))

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

    def _by_partition(
        self, topic: str, columns: Mapping[str, pa.Array]
    ) -> Iterator[tuple[Partition, Mapping[str, pa.Array]]]:
        import numpy as np
        import pyarrow as pa

        count = len(self._leaders_of(topic))
        numbers = self._numbers(topic, columns, count)
        # Numbers of two bytes are sorted without a comparison.
        order = np.argsort(numbers.astype(np.uint16) if count <= 1 << 16 else numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=count))
        sorted_ = {name: columns[name].take(pa.array(order)) for name in ("key", "value") if name in columns}
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > start:
                yield (
                    self._partition(topic, number),
                    {name: array.slice(start, end - start) for name, array in sorted_.items()},
                )

    def _numbers(self, topic: str, columns: Mapping[str, pa.Array], count: int) -> np.ndarray[Any, Any]:
        """The partition of each row: what the row says, else by its key, else the same for all, by turns."""
        import numpy as np

        rows = len(columns["value"])
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
        return self._partitions.setdefault((topic, number), Partition(topic, number))

    # Batches ----------------------------------------------------------------------------------------------------------

    def _gather(self, partition: Partition, key: pa.Array | None, value: pa.Array) -> None:
        size = value.nbytes + (key.nbytes if key is not None else 0)
        partition.gathered.append(Rows(partition, key, value, size))
        partition.gathered_bytes += size
        self._waiting_bytes += size
        if partition.gathered_bytes >= self._batch_bytes:
            self._cut(partition, all_of_it=False)

    def _cut(self, partition: Partition, *, all_of_it: bool) -> None:
        """Make batches of what was gathered; what does not fill one stays, unless all of it is wanted."""
        if not partition.gathered:
            return
        import numpy as np

        key, value = _together(partition.gathered)
        sizes = _row_sizes(key, value)
        if sizes.max() > self._row_bytes_max:
            index = int(sizes.argmax())
            raise self._refused(TOO_LARGE, partition.topic, UNASSIGNED, {"key": key, "value": value}, index)
        self._waiting_bytes -= partition.gathered_bytes
        partition.gathered, partition.gathered_bytes = [], 0
        ends = np.cumsum(sizes)
        start, before = 0, 0
        while start < len(value):
            end = max(int(np.searchsorted(ends, before + self._batch_bytes, "right")), start + 1)
            if end == len(value) and not all_of_it and ends[-1] - before < self._batch_bytes:
                break
            self._put(partition, _slice(key, start, end - start), value.slice(start, end - start))
            start, before = end, int(ends[end - 1])
        if start < len(value):
            rest = Rows(partition, _slice(key, start), value.slice(start), int(ends[-1]) - before)
            partition.gathered, partition.gathered_bytes = [rest], rest.size
            self._waiting_bytes += rest.size

    def _cut_all(self) -> None:
        for partition in self._partitions.values():
            self._cut(partition, all_of_it=True)

    def _put(self, partition: Partition, key: pa.Array | None, value: pa.Array) -> None:
        batch = Rows(partition, key, value, 0, partition.sequence)
        partition.sequence = _later(partition.sequence, len(batch))
        self._encode(batch)
        partition.batches.append(batch)

    def _encode(self, batch: Rows) -> None:
        if self._transaction is None:
            raise RuntimeError("rows need a producer id first")
        batch.data = record_batch(
            encode(batch.key, batch.value),
            len(batch),
            producer_id=self._transaction.producer_id,
            epoch=self._transaction.epoch,
            sequence=batch.sequence,
            now_ms=int(time.time() * 1000),
            transactional=bool(self._id),
            compression=self._compression,
        )
        batch.size = len(batch.data)
        self._waiting_bytes += batch.size

    # To the brokers ---------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the answers that are there, and give every broker that is not busy what waits for it."""
        self._take_answers(0)
        self._add_partitions()
        now = time.monotonic()
        ready: dict[int, list[Rows]] = {}
        for partition in self._partitions.values():
            if partition.batches and not partition.under_way and partition.not_before <= now:
                self._raise_if_late(partition.batches[0], now)
                leader = self._leaders_of(partition.topic).get(partition.number, -1)
                chosen = ready.setdefault(leader, [])
                if self._busy[leader] < REQUESTS_MAX and sum(b.size for b in chosen) < REQUEST_BYTES_MAX:
                    chosen.append(partition.batches[0])
        for leader, batches in ready.items():
            if leader < 0:
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

    def _settle(self, batch: Rows, said: str) -> None:
        partition = batch.partition
        if said in ("NO_ERROR", TAKEN_BEFORE):
            partition.batches.popleft()
            partition.pause_s = PAUSE_S
            self._waiting_bytes -= batch.size
        elif WORDS.get(said) == TOO_LARGE and len(batch) > 1:
            self._split(batch)
        elif is_transient(said):
            self._again([batch])
        elif len(self._failures) < FAILURES_KEPT:
            one = len(batch) == 1
            key = batch.key[0].as_py() if one and batch.key is not None else None
            size = len(batch.value[0].as_py() or b"") if one else -1
            self._failures.append(_failure(said, partition.topic, partition.number, _bytes(key), size))

    def _again(self, batches: Iterable[Rows]) -> None:
        """Later, and perhaps to another broker."""
        for batch in batches:
            partition = batch.partition
            partition.not_before = time.monotonic() + partition.pause_s
            partition.pause_s = min(partition.pause_s * 2, PAUSE_S_MAX)
            self._leaders.pop(partition.topic, None)

    def _split(self, batch: Rows) -> None:
        """The topic takes no batches of this size. The halves keep the numbers of their rows."""
        partition, half = batch.partition, len(batch) // 2
        partition.batches.popleft()
        self._waiting_bytes -= batch.size
        key, value = batch.key, batch.value
        first = Rows(partition, _slice(key, 0, half), value.slice(0, half), 0, batch.sequence, born=batch.born)
        later = _later(batch.sequence, half)
        second = Rows(partition, _slice(key, half), value.slice(half), 0, later, born=batch.born)
        for part in (second, first):
            self._encode(part)
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

    def _raise_if_late(self, batch: Rows, now: float) -> None:
        if now - batch.born > self._delivery_s:
            raise self._not_acknowledged(self._delivery_s)

    def _not_acknowledged(self, seconds: float) -> DeliveryFailed:
        left = sum(len(b) for p in self._partitions.values() for b in p.batches)
        return DeliveryFailed(f"{left} rows were not acknowledged within {seconds:.0f} s", ())

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


def _answer_to(answers: SimpleQueue[tuple[int, list[Rows], Answer]], leader: int, batches: list[Rows]) -> Any:
    return lambda answer: answers.put((leader, batches, answer))


def _by_topic(batches: Iterable[Rows]) -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {}
    for batch in batches:
        found.setdefault(batch.partition.topic, {})[batch.partition.number] = batch.data
    return found


def _slice(array: pa.Array | None, start: int, rows: int | None = None) -> pa.Array | None:
    return None if array is None else array.slice(start, rows)


def _together(gathered: Sequence[Rows]) -> tuple[pa.Array | None, pa.Array]:
    import pyarrow as pa

    if len(gathered) == 1:
        return gathered[0].key, gathered[0].value
    keys = [rows.key for rows in gathered]
    if any(key is None for key in keys):
        if all(key is None for key in keys):
            return None, pa.concat_arrays([rows.value for rows in gathered])
        kind = next(key.type for key in keys if key is not None)
        keys = [pa.nulls(len(rows), kind) if rows.key is None else rows.key for rows in gathered]
    return pa.concat_arrays(keys), pa.concat_arrays([rows.value for rows in gathered])


def _row_sizes(key: pa.Array | None, value: pa.Array) -> Any:
    import pyarrow.compute as pc

    lengths = [pc.binary_length(array) for array in (key, value) if array is not None]
    filled = [array.fill_null(0) if array.null_count else array for array in lengths]
    sizes: Any = sum(array.to_numpy(zero_copy_only=False) for array in filled)
    return sizes + RECORD_BYTES


def _later(sequence: int, rows: int) -> int:
    """Numbers of rows begin anew after the largest int32."""
    return (sequence + rows) % (1 << 31)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
