"""What carries rows to the brokers: a producer of whole record batches, or librdkafka's with a call for each row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from semel.errors import MissingExtra
from semel.kafka.connection import request_timeout_ms
from semel.kafka.login import can_log_in, no_kerberos_in_librdkafka
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
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.producer import DirectProducer, suits

if TYPE_CHECKING:
    import pyarrow as pa

#: Which producer writes the rows: the quick one wherever it can, or librdkafka for everything.
BY_ITSELF, LIBRDKAFKA = "auto", "librdkafka"
PRODUCERS = (BY_ITSELF, LIBRDKAFKA)
INIT_TIMEOUT_S = 60.0
REPORTS_S = 2.0
#: How much may wait to be sent before the task waits, too, where rows go one by one.
WAITING_KBYTES_MAX = 64 * 1024
T = TypeVar("T")


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
    with WIRES_LOCK:
        key = (request_timeout_ms(conf), *sorted(connection_options(conf).items()))
        if key not in WIRES:
            patience_s = min(INIT_TIMEOUT_S, int(conf["delivery.timeout.ms"]) / 1000)
            WIRES[key] = Wire(conf["bootstrap.servers"], conf, patience_s)
        return WIRES[key]


WIRES: dict[tuple[Any, ...], Wire] = {}
WIRES_LOCK = threading.Lock()
