"""librdkafka through ctypes: rows go from Arrow's buffers to the broker without a Python call per row.

The library is the one that confluent-kafka brings along and has loaded; this module only speaks to it directly. Where
it cannot be found, or where rows have headers or timestamps, which `rd_kafka_produce_batch` does not take, the sink
uses confluent-kafka's own `produce` (`kafka_producers.py`); both give the same records.

Deliveries that succeed are not reported, deliveries that fail are: every failed row is an event, and a flush that ends
well with no such event means that each row was acknowledged by all in-sync replicas.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.sinks.kafka_delivery import NO_ANSWER, NOTHING_WRONG, PURGED, DeliveryFailed, Failure, patiently

if TYPE_CHECKING:
    import pyarrow as pa

PRODUCER = 0
EVENT_DR, EVENT_ERROR, EVENT_STATS = 0x1, 0x8, 0x20
COPY, PER_ROW_PARTITION = 0x2, 0x8
UNASSIGNED = -1
UNKNOWN_PARTITION = -190
ERROR_TEXT_BYTES = 512
ROWS_PER_CALL = 10_000
#: How much may wait to be sent before the task waits, too. It is little on purpose: rows that fit into the processor's
#: cache until they are sent cost a third less. But what lingers is not being sent, and must not stop the task.
WAITING_BYTES = 4 * 1024 * 1024
WAITING_BYTES_PER_MS_OF_LINGER = 200 * 1024
WAITING_BYTES_MAX = 64 * 1024 * 1024
WAITING_ROWS_MIN, WAITING_ROWS_MAX = 1_000, 400_000
FAILURES_KEPT = 20
METADATA_TIMEOUT_S = 30.0
ABORT_SLICE_MS = 50
#: How long a topic that was just created may be unknown to brokers; librdkafka's own setting and default.
PROPAGATION = ("topic.metadata.propagation.max.ms", "30000")
PROPAGATION_PAUSE_S = 0.1
NOT_KNOWN_YET = frozenset({"UNKNOWN_TOPIC_OR_PART", "LEADER_NOT_AVAILABLE"})


class Message(ctypes.Structure):
    """`rd_kafka_message_t`."""

    _fields_ = (
        ("err", c_int),
        ("rkt", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("len", c_size_t),
        ("key", c_void_p),
        ("key_len", c_size_t),
        ("offset", ctypes.c_int64),
        ("private", c_void_p),
    )


class TopicMetadata(ctypes.Structure):
    """`rd_kafka_metadata_topic`."""

    _fields_ = (("topic", c_char_p), ("partition_cnt", c_int), ("partitions", c_void_p), ("err", c_int))


class Metadata(ctypes.Structure):
    """`rd_kafka_metadata`, as far as it is read here."""

    _fields_ = (
        ("broker_cnt", c_int),
        ("brokers", c_void_p),
        ("topic_cnt", c_int),
        ("topics", POINTER(TopicMetadata)),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rd_kafka_conf_new": (c_void_p, ()),
    "rd_kafka_conf_set": (c_int, (c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)),
    "rd_kafka_conf_destroy": (None, (c_void_p,)),
    "rd_kafka_conf_set_events": (None, (c_void_p, c_int)),
    "rd_kafka_new": (c_void_p, (c_int, c_void_p, c_char_p, c_size_t)),
    "rd_kafka_destroy": (None, (c_void_p,)),
    "rd_kafka_init_transactions": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_begin_transaction": (c_void_p, (c_void_p,)),
    "rd_kafka_abort_transaction": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_error_name": (c_char_p, (c_void_p,)),
    "rd_kafka_error_string": (c_char_p, (c_void_p,)),
    "rd_kafka_error_is_retriable": (c_int, (c_void_p,)),
    "rd_kafka_error_destroy": (None, (c_void_p,)),
    "rd_kafka_err2name": (c_char_p, (c_int,)),
    "rd_kafka_err2str": (c_char_p, (c_int,)),
    "rd_kafka_topic_new": (c_void_p, (c_void_p, c_char_p, c_void_p)),
    "rd_kafka_topic_name": (c_char_p, (c_void_p,)),
    "rd_kafka_topic_destroy": (None, (c_void_p,)),
    "rd_kafka_produce_batch": (c_int, (c_void_p, c_int32, c_int, c_void_p, c_int)),
    "rd_kafka_flush": (c_int, (c_void_p, c_int)),
    "rd_kafka_outq_len": (c_int, (c_void_p,)),
    "rd_kafka_queue_get_main": (c_void_p, (c_void_p,)),
    "rd_kafka_queue_destroy": (None, (c_void_p,)),
    "rd_kafka_queue_poll": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_event_type": (c_int, (c_void_p,)),
    "rd_kafka_event_message_next": (POINTER(Message), (c_void_p,)),
    "rd_kafka_event_error": (c_int, (c_void_p,)),
    "rd_kafka_event_error_string": (c_char_p, (c_void_p,)),
    "rd_kafka_event_destroy": (None, (c_void_p,)),
    "rd_kafka_metadata": (c_int, (c_void_p, c_int, c_void_p, POINTER(POINTER(Metadata)), c_int)),
    "rd_kafka_metadata_destroy": (None, (POINTER(Metadata),)),
    "rd_kafka_fatal_error": (c_int, (c_void_p, c_char_p, c_size_t)),
}


@functools.cache
def load() -> Any:
    """The library, or None where it cannot be used from here."""
    try:
        import confluent_kafka  # noqa: F401 - it brings the library into this process
        import numpy as np  # noqa: F401 - the messages of a batch are laid out with it

        library = ctypes.CDLL(_path())
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, OSError, AttributeError, StopIteration):
        return None
    return library if ctypes.sizeof(Message) == 72 else None


def _path() -> str:
    """The file that the process has mapped. It is never a second copy: that would be a second librdkafka."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split(maxsplit=5)[5] for line in lines if "librdkafka" in line)


class NativeProducer:
    """One librdkafka producer. `drop` lets go of it and sends nothing: a transaction that is open stays open."""

    def __init__(self, conf: Mapping[str, str]) -> None:
        self._lib = load()
        self._topics: dict[str, int] = {}
        self._partitions: dict[str, int] = {}
        self._propagation_s = int(conf.get(*PROPAGATION)) / 1000
        self._waiting_bytes = _waiting_bytes(float(conf.get("linger.ms", "5")))
        self._failures: list[Failure] = []
        self._trouble: Failure | None = None
        self._handle = self._new(conf)
        self._queue = self._lib.rd_kafka_queue_get_main(self._handle)

    def _new(self, conf: Mapping[str, str]) -> int:
        lib, text = self._lib, ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        settings = lib.rd_kafka_conf_new()
        for name, value in {"log_level": "2", **conf, "delivery.report.only.error": "true"}.items():
            if lib.rd_kafka_conf_set(settings, name.encode(), value.encode(), text, ERROR_TEXT_BYTES):
                lib.rd_kafka_conf_destroy(settings)
                raise DeliveryFailed(f"{name}: {_text(text.value)}", (Failure("_INVALID_ARG", _text(text.value)),))
        lib.rd_kafka_conf_set_events(settings, EVENT_DR | EVENT_ERROR)
        handle = lib.rd_kafka_new(PRODUCER, settings, text, ERROR_TEXT_BYTES)
        if not handle:
            lib.rd_kafka_conf_destroy(settings)
            raise DeliveryFailed(_text(text.value), (Failure("_INVALID_ARG", _text(text.value)),))
        return int(handle)

    def learn(self, topics: Sequence[str]) -> None:
        """Ask for the partitions of topics ahead of the first row.

        It also spares `init_transactions` half a second now and then: its first request may go out over the connection
        that librdkafka drops once it has learned the brokers' own addresses, and is then repeated after a pause.
        """
        for topic in topics:
            self._topic(topic)

    # Transactions -----------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout_s: float) -> None:
        patiently(lambda s: self._check(self._lib.rd_kafka_init_transactions(self._handle, int(s * 1000))), timeout_s)

    def begin_transaction(self) -> None:
        self._check(self._lib.rd_kafka_begin_transaction(self._handle))

    def abort_transaction(self, timeout_s: float) -> None:
        """It waits until every row that it gives up is reported, and the reports must be taken meanwhile."""
        deadline = time.monotonic() + timeout_s
        while error := self._lib.rd_kafka_abort_transaction(self._handle, ABORT_SLICE_MS):
            if _text(self._lib.rd_kafka_error_name(error)) != "_TIMED_OUT" or time.monotonic() > deadline:
                self._check(error)
            self._lib.rd_kafka_error_destroy(error)
            self._serve(0)

    def _check(self, error: int | None) -> None:
        if error:
            raise self._failed(self._taken(error))

    def _taken(self, error: int) -> Failure:
        lib = self._lib
        name, text = _text(lib.rd_kafka_error_name(error)), _text(lib.rd_kafka_error_string(error))
        failure = Failure(name, text, retriable=bool(lib.rd_kafka_error_is_retriable(error)))
        lib.rd_kafka_error_destroy(error)
        return failure

    def _failed(self, failure: Failure) -> DeliveryFailed:
        """Where no answer came, the reason is among the reports."""
        self._serve(0)
        trouble = [self._trouble] if self._trouble and (failure.retriable or failure.name in NO_ANSWER) else []
        return DeliveryFailed(failure.text, (*trouble, failure, *self._failures))

    # Rows -------------------------------------------------------------------------------------------------------------

    def send(self, topic: str, columns: Mapping[str, pa.Array], rows: int) -> None:
        """Rows of one topic: `value`, and where given `key` and `partition`. They are copied before this returns."""
        messages = _messages(columns, rows)
        flags = COPY | (PER_ROW_PARTITION if "partition" in columns else 0)
        if flags & PER_ROW_PARTITION:
            self._require_partitions(topic, messages)
        size = int(messages["len"].sum() + messages["key_len"].sum()) // max(rows, 1) + 1
        allowed = min(max(self._waiting_bytes // size, WAITING_ROWS_MIN), WAITING_ROWS_MAX)
        for start in range(0, rows, ROWS_PER_CALL):
            part = messages[start : start + ROWS_PER_CALL]
            self._wait_for_room(allowed)
            sent = self._lib.rd_kafka_produce_batch(self._topic(topic), UNASSIGNED, flags, part.ctypes.data, len(part))
            if sent != len(part):
                self._raise_refused(topic, part)
        self.raise_failures()

    def send_one(self, topic: str, key: bytes, value: bytes, partition: int) -> None:
        """A single record, such as a marker."""
        import pyarrow as pa

        columns = {"key": pa.array([key]), "value": pa.array([value]), "partition": pa.array([partition], pa.int32())}
        self.send(topic, columns, 1)

    def _wait_for_room(self, rows_max: int) -> None:
        """Limited by the time that librdkafka itself gives each row (delivery.timeout.ms)."""
        while self._lib.rd_kafka_outq_len(self._handle) > rows_max:
            self._serve(5)
            self.raise_failures()

    def _require_partitions(self, topic: str, messages: Any) -> None:
        """Rows for partitions that the topic does not have would stay in the transaction, and so would we."""

        def strays() -> Any:
            wanted = messages["partition"]
            return messages[(wanted < UNASSIGNED) | (wanted >= self._partitions[topic])]

        self._topic(topic)
        if len(strays()):
            self._learn(topic)  # it may have more of them by now
        if len(strays()):
            self._raise_row(topic, strays()[0], UNKNOWN_PARTITION)

    def _raise_refused(self, topic: str, part: Any) -> None:
        first = part[part["err"] != 0][0]
        self._raise_row(topic, first, int(first["err"]))

    def _raise_row(self, topic: str, first: Any, code: int) -> None:
        failure = Failure(
            self._name(code),
            _text(self._lib.rd_kafka_err2str(code)),
            topic,
            int(first["partition"]),
            ctypes.string_at(int(first["key"]), int(first["key_len"])) if first["key"] else None,
            int(first["len"]),
        )
        raise DeliveryFailed(failure.text, (failure,))

    def flush(self, timeout_s: float) -> None:
        """Return when every row is acknowledged. Raises when one is not, or when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while self._lib.rd_kafka_flush(self._handle, 100):
            self._serve(0)
            self.raise_failures()
            if time.monotonic() > deadline:
                left = self._lib.rd_kafka_outq_len(self._handle)
                raise DeliveryFailed(f"{left} rows were not acknowledged within {timeout_s:.0f} s", ())
        self._serve(0)
        self.raise_failures()

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            handle = self._lib.rd_kafka_topic_new(self._handle, name.encode(), None)
            if not handle:
                raise DeliveryFailed(f"{name} is not a usable topic name", (Failure("_INVALID_ARG", "topic name"),))
            self._topics[name] = handle
        if name not in self._partitions:
            self._learn(name)
        return self._topics[name]

    def _learn(self, topic: str) -> None:
        """Ask for the topic's partitions before the first row.

        `rd_kafka_produce_batch` puts rows for a partition that it does not know yet into the transaction under the
        number -1, and they never leave.
        """
        deadline = time.monotonic() + self._propagation_s
        while code := patiently(functools.partial(self._look_up, topic), METADATA_TIMEOUT_S):
            failure = Failure(self._name(code), _text(self._lib.rd_kafka_err2str(code)), topic)
            if failure.name not in NOT_KNOWN_YET or time.monotonic() > deadline:
                raise DeliveryFailed(failure.text, (failure,))
            time.sleep(PROPAGATION_PAUSE_S)

    def _look_up(self, topic: str, timeout_s: float) -> int:
        """Find out how many partitions the topic has. Returns what librdkafka holds against it, 0 for nothing."""
        found = POINTER(Metadata)()
        asked = self._lib.rd_kafka_metadata(
            self._handle, 0, self._topics[topic], ctypes.byref(found), int(timeout_s * 1000)
        )
        if asked:
            raise self._failed(Failure(self._name(asked), _text(self._lib.rd_kafka_err2str(asked))))
        said = found.contents.topics[0]
        code, partitions = int(said.err), int(said.partition_cnt)
        self._lib.rd_kafka_metadata_destroy(found)
        if not code:
            self._partitions[topic] = partitions
        return code

    def _name(self, code: int) -> str:
        return _text(self._lib.rd_kafka_err2name(code))

    # What librdkafka reports ------------------------------------------------------------------------------------------

    def raise_failures(self) -> None:
        if self._failures:
            cause = self._why_purged() if self._failures[0].name in PURGED else []
            failures = (*cause, *self._failures)
            raise DeliveryFailed(failures[0].text, failures)

    def _why_purged(self) -> list[Failure]:
        """What is wrong with the transaction: it is told to whoever asks for another one, and nothing else happens."""
        error = self._lib.rd_kafka_begin_transaction(self._handle)
        said = [self._taken(error)] if error else []
        return [failure for failure in said if failure.name not in NOTHING_WRONG]

    def _serve(self, wait_ms: int) -> None:
        """Take every event that is there; wait for the first one at most so long."""
        while event := self._lib.rd_kafka_queue_poll(self._queue, wait_ms):
            if self._lib.rd_kafka_event_type(event) == EVENT_DR:
                self._keep(self._failed_rows(event))
            else:
                code = self._lib.rd_kafka_event_error(event)
                trouble = Failure(self._name(code), _text(self._lib.rd_kafka_event_error_string(event)))
                self._keep([trouble] if self._is_fatal() else [])
                self._trouble = trouble if trouble.name != "_ALL_BROKERS_DOWN" else self._trouble
            self._lib.rd_kafka_event_destroy(event)
            wait_ms = 0

    def _is_fatal(self) -> bool:
        """Most errors of a connection mend themselves and say nothing about a row."""
        return bool(self._lib.rd_kafka_fatal_error(self._handle, None, 0))

    def _keep(self, failures: Iterator[Failure] | list[Failure]) -> None:
        for failure in failures:
            if len(self._failures) < FAILURES_KEPT:
                self._failures.append(failure)

    def _failed_rows(self, event: int) -> Iterator[Failure]:
        while message := self._lib.rd_kafka_event_message_next(event):
            m = message.contents
            if m.err:
                yield Failure(
                    self._name(m.err),
                    _text(self._lib.rd_kafka_err2str(m.err)),
                    _text(self._lib.rd_kafka_topic_name(m.rkt)),
                    m.partition,
                    ctypes.string_at(m.key, m.key_len) if m.key else None,
                    m.len,
                )

    def drop(self) -> None:
        """Let go without a word to the broker."""
        if self._handle:
            for topic in self._topics.values():
                self._lib.rd_kafka_topic_destroy(topic)
            self._topics.clear()
            self._lib.rd_kafka_queue_destroy(self._queue)
            handle, self._handle = self._handle, 0
            self._lib.rd_kafka_destroy(handle)


def _waiting_bytes(linger_ms: float) -> int:
    return min(max(WAITING_BYTES, int(linger_ms * WAITING_BYTES_PER_MS_OF_LINGER)), WAITING_BYTES_MAX)


def _messages(columns: Mapping[str, pa.Array], rows: int) -> Any:
    """An array of `rd_kafka_message_t` that points into Arrow's buffers."""
    import numpy as np

    messages = np.zeros(rows, dtype=np.dtype(Message))
    messages["partition"] = UNASSIGNED
    for column, pointer, length in (("value", "payload", "len"), ("key", "key", "key_len")):
        if column in columns:
            messages[pointer], messages[length] = _pointers(columns[column])
    if "partition" in columns:
        messages["partition"] = columns["partition"].fill_null(UNASSIGNED).to_numpy(zero_copy_only=False)
    return messages


def _pointers(array: pa.Array) -> tuple[Any, Any]:
    """Address and length of each value. Null has the address 0; an empty value has another one, and no bytes."""
    import numpy as np
    import pyarrow as pa

    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    _, offsets_buffer, data = array.buffers()
    offsets: Any = np.frombuffer(offsets_buffer, dtype=np.int64 if wide else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.uint64)
    base = data.address if data is not None and data.address else _EMPTY_ADDRESS
    addresses = offsets[:-1] + np.uint64(base)
    lengths = np.diff(offsets)
    if array.null_count:
        absent = array.is_null().to_numpy(zero_copy_only=False)
        addresses[absent] = 0
        lengths[absent] = 0
    return addresses, lengths


_EMPTY = ctypes.create_string_buffer(8)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
