"""The producers of one worker process: initialised ahead of need, under transactional ids that nobody else uses.

A transactional producer serves one branch and is dropped. So that no two transactions ever share a producer id and
epoch (KAFKA-17754), each begins with InitProducerId, which takes some milliseconds, and half a second where the
transaction before it under the same id is still being ended. Therefore the next ones are initialised in the background
while the batch is decided, and under other ids of the pool.

**The pool of ids is fixed.** Brokers remember an id for a week, so there cannot be one per batch. A worker leases a
slot of its machine, held by a file lock that the kernel releases however the worker ends, and numbers its ids in there:

    <prefix>-<sink>-<machine>-<slot>-<number>

An id may be used again once what it was used for last is settled: when a task of batch N runs, everything before N is.
What each id was used for is written into the slot's file, because the next holder of the slot must know.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from semel.durable import create_file
from semel.errors import MissingExtra
from semel.kafka.options import connection_options
from semel.kafka.tokens import OAUTH_CB
from semel.sinks.kafka.delivery import (
    NO_ANSWER,
    NOTHING_WRONG,
    PURGED,
    TOO_LARGE,
    UNASSIGNED,
    DeliveryFailed,
    Failure,
    patiently,
)
from semel.sinks.kafka.stand_in import can_log_in, no_kerberos_in_librdkafka
from semel.sinks.kafka.wire.client import Wire, request_timeout_ms
from semel.sinks.kafka.wire.producer import DirectProducer, suits

if TYPE_CHECKING:
    import pyarrow as pa

#: Which producer writes the rows: the quick one wherever it can, or librdkafka for everything.
BY_ITSELF, LIBRDKAFKA = "auto", "librdkafka"
PRODUCERS = (BY_ITSELF, LIBRDKAFKA)
SLOTS_MAX = 10_000
INIT_TIMEOUT_S = 60.0
REPORTS_S = 2.0
WARM_MAX = 8
#: How much may wait to be sent before the task waits, too, where rows go one by one.
WAITING_KBYTES_MAX = 64 * 1024

T = TypeVar("T")
#: (batch, attempt): what an id was used for.
Use = tuple[int, int]


class Producer(Protocol):
    """What both kinds of producers can do. `drop` sends nothing: an open transaction stays open."""

    def learn(self, topics: Sequence[str]) -> None: ...
    def init_transactions(self) -> None: ...
    def begin_transaction(self) -> None: ...
    def abort_transaction(self, timeout_s: float) -> None: ...
    def send(self, topic: str, columns: Mapping[str, pa.Array], rows: int) -> None: ...
    def send_one(self, topic: str, key: bytes, value: bytes, partition: int) -> None: ...
    def flush(self, timeout_s: float) -> None: ...
    def drop(self) -> None: ...


class RowProducer:
    """confluent-kafka's own producer: one Python call per row. It takes headers and timestamps."""

    def __init__(self, conf: Mapping[str, Any]) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka import Producer as ConfluentProducer

        self._failures: list[Failure] = []
        self._troubles: list[Any] = []
        own = {"on_delivery": self._delivered, "error_cb": self._troubles.append, "delivery.report.only.error": True}
        waiting_kbytes = min(WAITING_KBYTES_MAX, int(conf.get("queue.buffering.max.kbytes", WAITING_KBYTES_MAX)))
        try:
            self._real: Any = ConfluentProducer(
                {"log_level": "2", **conf, "queue.buffering.max.kbytes": waiting_kbytes, **own}
            )
        except KafkaException as error:
            raise _failed(error) from None

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            partition = UNASSIGNED if message.partition() is None else message.partition()
            size = len(message.value() or b"")
            self._failures.append(Failure(error.name(), error.str(), message.topic(), partition, message.key(), size))

    def learn(self, topics: Sequence[str]) -> None:
        for topic in topics:
            patiently(partial(self._look_up, topic), INIT_TIMEOUT_S)

    def _look_up(self, topic: str, timeout_s: float) -> None:
        self._call(lambda: self._real.list_topics(topic, timeout_s))

    def init_transactions(self) -> None:
        patiently(lambda s: self._call(lambda: self._real.init_transactions(s)), INIT_TIMEOUT_S)

    def begin_transaction(self) -> None:
        self._call(self._real.begin_transaction)

    def abort_transaction(self, timeout_s: float) -> None:
        # librdkafka forgets a partition that is just being added to the transaction, takes it for empty, and leaves it
        # open at the broker. When the rows have arrived, it has not.
        self._wait_for_reports()
        self._call(lambda: self._real.abort_transaction(timeout_s))

    def _call(self, call: Callable[[], T]) -> T:
        """Any call may raise, `poll` included: confluent-kafka raises a fatal error wherever it learns of it."""
        from confluent_kafka import KafkaException

        try:
            return call()
        except KafkaException as error:
            with suppress(KafkaException):
                self._real.poll(0)
            raise _failed(error, self._causes(), self._troubles) from None

    def send(self, topic: str, columns: Mapping[str, pa.Array], rows: int) -> None:
        from confluent_kafka import KafkaException

        values = {name: _python_values(name, array) for name, array in columns.items()}
        for index in range(rows):
            row = {name: column[index] for name, column in values.items() if column[index] is not None}
            try:
                self._produce(topic, row)
            except KafkaException as error:
                if error.args[0].name() in NOTHING_WRONG:
                    # Not with this row: one before it has broken the transaction.
                    self._wait_for_reports()
                    self._raise_failures()
                raise _failed(error, (_of_row(error, topic, row), *self._causes())) from None
        self._poll(0)

    def _produce(self, topic: str, row: dict[str, Any]) -> None:
        while True:
            try:
                self._real.produce(topic, **row)
                return
            except BufferError:
                # Limited by the time that librdkafka itself gives each row (delivery.timeout.ms).
                self._poll(0.05)

    def _poll(self, timeout_s: float) -> None:
        self._call(lambda: self._real.poll(timeout_s))
        self._raise_failures()

    def send_one(self, topic: str, key: bytes, value: bytes, partition: int) -> None:
        self._call(lambda: self._real.produce(topic, key=key, value=value, partition=partition))

    def flush(self, timeout_s: float) -> None:
        left = self._call(lambda: self._real.flush(timeout_s))
        self._raise_failures()
        if left:
            raise DeliveryFailed(f"{left} rows were not acknowledged within {timeout_s:.0f} s", ())

    def _causes(self) -> list[Failure]:
        """What failed, and then its echo: rows that were given up because of it may be reported before it."""
        return sorted(self._failures, key=_is_unlikely_the_cause)

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        if all(f.name in PURGED for f in self._failures):
            self._wait_for_reports()
        failures = self._causes()
        if failures[0].name in PURGED:
            failures = [*self._why_purged(), *failures]
        raise DeliveryFailed(failures[0].text, failures)

    def _wait_for_reports(self) -> None:
        with suppress(DeliveryFailed):
            self._call(lambda: self._real.flush(REPORTS_S))

    def _why_purged(self) -> list[Failure]:
        """What is wrong with the transaction: it is told to whoever asks for another one, and nothing else happens."""
        from confluent_kafka import KafkaException

        try:
            self._real.begin_transaction()
        except KafkaException as error:
            said = error.args[0]
            return [Failure(said.name(), said.str())] if said.name() not in NOTHING_WRONG else []
        return []

    def drop(self) -> None:
        # Not close(): it would abort the transaction.
        self._real = None


def _python_values(name: str, array: pa.Array) -> list[Any]:
    import pyarrow as pa

    if name == "headers":
        return [None if row is None else [_header(header) for header in row] for row in array.to_pylist()]
    if name == "timestamp":
        return list(array.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()).to_pylist())
    return list(array.to_pylist())


def _header(header: Mapping[str, Any] | None) -> tuple[str, bytes | None]:
    if header is None or header["key"] is None:
        raise ValueError("a header has no key")
    return header["key"], header["value"]


def _failed(error: Any, failures: Sequence[Failure] = (), troubles: Sequence[Any] = ()) -> DeliveryFailed:
    """Where no answer came, the reason is among the troubles that were reported."""
    first = error.args[0]
    transient = first.retriable() or first.name() in NO_ANSWER
    known = [t for t in troubles if t.name() != "_ALL_BROKERS_DOWN"] if transient else []
    said = [Failure(e.name(), e.str(), retriable=e.retriable()) for e in (*known[-1:], first)]
    return DeliveryFailed(first.str(), tuple(failures) or tuple(said))


def _is_unlikely_the_cause(failure: Failure) -> tuple[bool, int]:
    """Rows that were given up; and of those that were too large together, the smaller ones."""
    return failure.name in PURGED, -failure.size if failure.name == TOO_LARGE else 0


def _of_row(error: Any, topic: str, row: Mapping[str, Any]) -> Failure:
    first = error.args[0]
    key, value = (v.encode() if isinstance(v, str) else v for v in (row.get("key"), row.get("value")))
    text = first.str().removeprefix("Unable to produce message: ")
    return Failure(first.name(), text, topic, row.get("partition", UNASSIGNED), key, len(value or b""))


def make_producer(conf: Mapping[str, Any], *, by_row: bool) -> Producer:
    """The quick kind, unless the rows or the settings need the other."""
    try:
        import confluent_kafka  # noqa: F401 - asked for here, so that its absence is said in our words
    except ImportError:
        raise MissingExtra("The Kafka sink needs confluent-kafka, which is not installed.", extra="kafka") from None
    if not by_row and suits(conf):
        return DirectProducer(conf, _wire(conf))
    if not can_log_in(conf):
        what = "Rows with headers or timestamps" if by_row else "These settings"
        raise no_kerberos_in_librdkafka(f"{what}, or producer={LIBRDKAFKA!r},")
    if (source := conf.get(OAUTH_CB)) is not None:
        # librdkafka would wait ten seconds for a token, and not say why there is none.
        source.token()
    return RowProducer(conf)


def _wire(conf: Mapping[str, Any]) -> Wire:
    """The connections of this process, which its producers share."""
    with _WIRES_LOCK:
        key = (request_timeout_ms(conf), *sorted(connection_options(conf).items()))
        if key not in _WIRES:
            patience_s = min(INIT_TIMEOUT_S, int(conf["delivery.timeout.ms"]) / 1000)
            _WIRES[key] = Wire(conf["bootstrap.servers"], conf, patience_s)
        return _WIRES[key]


# Transactional ids --------------------------------------------------------------------------------------------------


class Lease:
    """A slot of this machine's pool of ids under one prefix, ours for as long as the process lives."""

    def __init__(self, prefix: str, folder: Path | None = None) -> None:
        self.prefix = prefix
        self._folder = folder or _private_folder(prefix)
        machine = self._folder / "machine"
        create_file(machine, uuid.uuid4().hex[:8].encode())
        self._machine = machine.read_text()
        self.slot, self._file = self._take_slot()
        self.uses = self._read_uses()

    def _take_slot(self) -> tuple[int, int]:
        for slot in range(SLOTS_MAX):
            file = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return slot, file
            except BlockingIOError:
                os.close(file)
        raise RuntimeError(f"more than {SLOTS_MAX} processes write under the prefix {self.prefix}")

    def _read_uses(self) -> dict[int, Use]:
        try:
            said = json.loads(os.pread(self._file, 1 << 20, 0) or b"{}")
            return {int(number): (batch, attempt) for number, (batch, attempt) in said.items()}
        except (ValueError, TypeError):
            # Cut short by a kill. An id that is taken in use too early costs a branch, which is then written again.
            return {}

    def transactional_id(self, number: int) -> str:
        return f"{self.prefix}-{self._machine}-{self.slot}-{number}"

    def is_free(self, number: int, use: Use) -> bool:
        """Whether what the id was used for last is settled by the time that a task works on `use`."""
        return self.uses.get(number, (-1, -1)) < use

    def note(self, number: int, use: Use) -> None:
        """Before the first row: whoever leases the slot after us must find it."""
        self.uses[number] = use
        content = json.dumps({str(n): u for n, u in self.uses.items()}).encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))

    def release(self) -> None:
        os.close(self._file)


def _private_folder(prefix: str) -> Path:
    """Of this user alone: in a folder that others can write to, a name can be taken by anybody."""
    top = Path(tempfile.gettempdir()) / f"semel-{os.getuid()}"
    top.mkdir(mode=0o700, exist_ok=True)
    if top.is_symlink() or top.stat().st_uid != os.getuid():
        raise PermissionError(f"{top} belongs to somebody else")
    folder = top / hashlib.sha256(prefix.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def id_pattern(prefix: str) -> re.Pattern[str]:
    """What the transactional ids under a prefix look like, and those of no other prefix."""
    return re.compile(re.escape(prefix) + r"-[0-9a-f]{8}-[0-9]+-[0-9]+")


@dataclass
class Ready:
    """A producer whose id has a fresh epoch, and which has no transaction yet."""

    id: str
    number: int
    producer: Producer


class Pool:
    """The transactional producers of this process under one prefix, with one set of settings.

    It keeps as many ready as the process needed for its last batch, up to a limit: Spark may run several tasks here,
    one by one, and a producer of librdkafka has threads and connections of its own.
    """

    def __init__(self, prefix: str, conf: Mapping[str, Any], *, topics: Sequence[str], by_row: bool) -> None:
        self.conf = dict(conf)
        self.topics = tuple(topics)
        self.by_row = by_row
        self.lease = Lease(prefix)
        self._lock = threading.Lock()
        self._warm: list[_Initialising] = []
        self._use: Use = (-1, -1)
        self._taken = self._taken_before = 0

    def take(self, use: Use) -> Ready:
        """A producer for one branch: one that was made ahead, or a new one."""
        with self._lock:
            self._count(use)
            ready = self._take_warm(use)
            if ready is None:
                ready = self._make(self._free_number(use))
            self.lease.note(ready.number, use)
            return ready

    def _count(self, use: Use) -> None:
        if use != self._use:
            self._use, self._taken_before, self._taken = use, self._taken, 0
        self._taken += 1

    def _take_warm(self, use: Use) -> Ready | None:
        """The first that is done, else the first that is under way."""
        while self._warm:
            warm = next((w for w in self._warm if not w.is_alive()), self._warm[0])
            self._warm.remove(warm)
            ready = warm.result()
            if ready is not None and self.lease.is_free(ready.number, use):
                return ready
            if ready is not None:
                ready.producer.drop()
        return None

    def warm_up(self, use: Use) -> None:
        """Begin to make the next ones. Called when a branch of `use` is prepared: everything before it is settled."""
        with self._lock:
            while len(self._warm) < min(max(self._taken, self._taken_before, 1), WARM_MAX):
                number = self._free_number(use)
                self._warm.append(_Initialising(number, self._make))
                self._warm[-1].start()

    def _free_number(self, use: Use) -> int:
        """The first id whose last use is settled, and which nobody is making ready."""
        being_made = {w.number for w in self._warm}
        return next(n for n in count() if n not in being_made and self.lease.is_free(n, use))

    def settle(self) -> None:
        """Wait until nothing is in the making."""
        with self._lock:
            for warm in self._warm:
                warm.join()

    def release(self) -> None:
        with self._lock:
            for ready in [warm.result() for warm in self._warm]:
                if ready is not None:
                    ready.producer.drop()
            self._warm.clear()
            self.lease.release()

    def _make(self, number: int) -> Ready:
        transactional_id = self.lease.transactional_id(number)
        producer = make_producer({**self.conf, "transactional.id": transactional_id}, by_row=self.by_row)
        try:
            producer.learn(self.topics)
            producer.init_transactions()
        except BaseException:
            producer.drop()
            raise
        return Ready(transactional_id, number, producer)


class _Initialising(threading.Thread):
    """A producer in the making. If it fails nobody is told: the next task makes its own, and says what is wrong."""

    def __init__(self, number: int, make: Callable[[int], Ready]) -> None:
        super().__init__(name="semel-kafka-init", daemon=True)
        self.number = number
        self._make = make
        self._made: Ready | None = None

    def run(self) -> None:
        with suppress(Exception):
            self._made = self._make(self.number)

    def result(self) -> Ready | None:
        self.join()
        return self._made


_WIRES: dict[tuple[Any, ...], Wire] = {}
_WIRES_LOCK = threading.Lock()
_POOLS: dict[tuple[Any, ...], Pool] = {}
_PLAIN: dict[tuple[Any, ...], Producer] = {}


def pool_for(prefix: str, conf: Mapping[str, Any], *, topics: Sequence[str], by_row: bool) -> Pool:
    """The pool of this process. A worker that Spark uses again finds its producers made."""
    key = (prefix, by_row, tuple(topics), *sorted(conf.items()))
    if key not in _POOLS:
        _POOLS[key] = Pool(prefix, conf, topics=topics, by_row=by_row)
    return _POOLS[key]


def plain_producer(conf: Mapping[str, Any], *, by_row: bool) -> Producer:
    """The producer without transactions that this process keeps, for the weaker guarantees."""
    key = (by_row, *sorted(conf.items()))
    if key not in _PLAIN:
        _PLAIN[key] = make_producer(conf, by_row=by_row)
    return _PLAIN[key]


def forget_plain_producer(conf: Mapping[str, Any], *, by_row: bool) -> None:
    """After a failure: what a producer still holds must not come with the rows of the next task."""
    producer = _PLAIN.pop((by_row, *sorted(conf.items())), None)
    if producer is not None:
        producer.drop()


def settle_all() -> None:
    """Wait until no producer of this process is in the making."""
    for pool in _POOLS.values():
        pool.settle()


def release_all() -> None:
    """Let go of every producer and every slot of this process. A worker need not: the kernel does it."""
    for pool in _POOLS.values():
        pool.release()
    for producer in _PLAIN.values():
        producer.drop()
    for wire in _WIRES.values():
        wire.close()
    _POOLS.clear()
    _PLAIN.clear()
    _WIRES.clear()
