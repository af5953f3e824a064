"""One task: its rows and its marker in one transaction, flushed, every delivery checked, and left open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from semel.errors import BatchFailed, ConfigError, SemelError, SinkUnavailable
from semel.failpoints import failpoint
from semel.ids import Branch
from semel.sinks.base import StagedPart, Writer
from semel.sinks.kafka.delivery import TOO_LARGE, UNASSIGNED, DeliveryFailed, Failure
from semel.sinks.kafka.markers import marker_record, partition_of
from semel.sinks.kafka.pool import Pool, Ready, forget_plain_producer, plain_producer, pool_for
from semel.sinks.kafka.producers import BY_ITSELF, LIBRDKAFKA, Producer
from semel.sinks.kafka.reach import LOGIN_REMEDY, tidy
from semel.sinks.kafka.rows import BY_ROW, rows_by_topic

if TYPE_CHECKING:
    import pyarrow as pa

ABORT_TIMEOUT_S = 10.0
KEY_CHARACTERS_SHOWN = 60

#: What librdkafka calls a failure -> what to do about it.
REMEDIES = {
    TOO_LARGE: "Raise max.message.bytes of the topic and kafka.max.request.size of the sink, or make the "
    "row smaller; the batch runs again from the same offsets.",
    "TOPIC_AUTHORIZATION_FAILED": "Allow Write on the topic with an ACL, then start the pipeline again.",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "Allow Write and Describe on the sink's transactional ids with an ACL, "
    "then start the pipeline again.",
    "UNKNOWN_TOPIC_OR_PART": "Create the topic, then start the pipeline again.",
    "_UNKNOWN_TOPIC": "Create the topic, then start the pipeline again.",
    "TOPIC_EXCEPTION": "Correct the name of the topic, then start the pipeline again.",
    "_AUTHENTICATION": f"{LOGIN_REMEDY} Then start the pipeline again.",
    "_UNKNOWN_PARTITION": "Write to partitions that the topic has, or leave the column partition out.",
    "INVALID_TRANSACTION_TIMEOUT": "Lower transaction_timeout_ms, or raise transaction.max.timeout.ms of the brokers.",
}


class KafkaWriter(Writer):
    """Without a `prefix` for transactional ids the rows are visible as soon as they arrive: at least once."""

    def __init__(  # noqa: PLR0913 - all but the first two are keywords
        self,
        branch: Branch,
        settings: Mapping[str, Any],
        *,
        topic: str,
        target: str,
        prefix: str,
        plan: str = "",
        transaction_timeout_ms: int,
        control_topic: str,
        producer: str = BY_ITSELF,
    ) -> None:
        self.branch = branch
        self.topic = topic
        self.target = target
        self.prefix = prefix
        self.plan = plan
        self.control_topic = control_topic
        self.rows = 0
        self._settings = dict(settings)
        self._timeout_s = int(settings["delivery.timeout.ms"]) / 1000 + 5
        if prefix:
            self._settings["transaction.timeout.ms"] = str(transaction_timeout_ms)
        self._by_row = self._always_by_row = producer == LIBRDKAFKA
        self._topics = (control_topic, topic) if topic else (control_topic,)
        self._pool: Pool | None = None
        self._ready: Ready | None = None
        self._plain: Producer | None = None

    @property
    def _use(self) -> tuple[int, int]:
        return self.branch.attempt.batch, self.branch.attempt.attempt

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        try:
            producer = self._producer(batch.schema)
            for topic, columns, rows in rows_by_topic(batch, self.topic):
                producer.send(topic, columns, rows)
        except DeliveryFailed as error:
            raise self._failed(error) from None
        except (ConfigError, SinkUnavailable) as error:
            raise _unreached(error) from None
        except ValueError as error:
            raise BatchFailed(f"{self.target}: {error}.") from None
        self.rows += batch.num_rows

    def _producer(self, schema: pa.Schema) -> Producer:
        """Made with the first row: a task without rows needs none."""
        if self._ready is not None:
            return self._ready.producer
        if self._plain is not None:
            return self._plain
        self._by_row = self._always_by_row or any(name in schema.names for name in BY_ROW)
        if not self.prefix:
            self._plain = plain_producer(self._settings, by_row=self._by_row)
            return self._plain
        self._pool = pool_for(self.prefix, self._settings, topics=self._topics, by_row=self._by_row)
        self._ready = self._pool.take(self._use)
        self._ready.producer.begin_transaction()
        return self._ready.producer

    def prepare(self) -> StagedPart:
        if self._ready is None and self._plain is None:
            return StagedPart(self.branch, 0)
        try:
            if self._plain is not None:
                self._plain.flush(self._timeout_s)
                return StagedPart(self.branch, self.rows)
            return self._leave_open()
        except DeliveryFailed as error:
            raise self._failed(error) from None
        except (ConfigError, SinkUnavailable) as error:
            raise _unreached(error) from None

    def _leave_open(self) -> StagedPart:
        if self._ready is None or self._pool is None:
            raise RuntimeError("there is no transaction to prepare")
        ready = self._ready
        key, value = marker_record(self.branch, self.rows, ready.id, self.plan)
        ready.producer.send_one(self.control_topic, key, value, partition_of(self.branch.sink))
        failpoint("kafka.marked")
        ready.producer.flush(self._timeout_s)
        self._ready = None
        ready.producer.drop()
        self._pool.warm_up(self._use)
        return StagedPart(self.branch, self.rows, {"id": ready.id, "retried": _is_retried()})

    def abort(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            with suppress(
                DeliveryFailed, SemelError
            ):  # the driver ends what is left over, and the broker after its timeout
                ready.producer.abort_transaction(ABORT_TIMEOUT_S)
            ready.producer.drop()
        if self._plain is not None:
            self._plain = None
            forget_plain_producer(self._settings, by_row=self._by_row)

    def _failed(self, error: DeliveryFailed) -> BatchFailed:
        first = error.failures[0] if error.failures else Failure("", str(error))
        what = f"did not take a row{self._where(first)}" if first.topic else "did not let a task write"
        rows = sum(f.size >= 0 for f in error.failures)
        more = f"; {rows} rows failed or more" if rows > 1 and first.topic else ""
        return BatchFailed(
            f"{self.target} {what}: {tidy(first.text)}{more}.",
            remedy=next((REMEDIES[name] for name in (f.name for f in error.failures) if name in REMEDIES), ""),
        )

    def _where(self, failure: Failure) -> str:
        known = [
            f"topic {failure.topic}" if failure.topic != self.topic else "",
            f"partition {failure.partition}" if failure.partition != UNASSIGNED else "",
            f"key {_shown(failure.key)}, {failure.size} bytes" if failure.size >= 0 else "",
        ]
        text = ", ".join(word for word in known if word)
        return f" ({text})" if text else ""


def _unreached(error: ConfigError | SinkUnavailable) -> BatchFailed:
    """What the options are to blame for has a remedy of its own; brokers that are away have the batch's."""
    return BatchFailed(error.what, remedy=error.remedy if isinstance(error, ConfigError) else "")


def _shown(key: bytes | None) -> str:
    return "null" if key is None else repr(key.decode(errors="replace")[:KEY_CHARACTERS_SHOWN])


def _is_retried() -> bool:
    """Whether Spark has run this task before: then a transaction may be left over."""
    try:
        from pyspark import TaskContext
    except ImportError:
        return False
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0
