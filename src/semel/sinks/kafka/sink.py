"""Kafka: a true two-phase participant.

A task writes its rows and its marker in one transaction and leaves it open: prepared. The driver reads the markers
back, which proves that they are in the log and tells the producer id and epoch of each; it decides; then it ends every
transaction with EndTxn. If it dies in between, the next driver reads the same markers and ends what the decision names.

An answer that does not say what happened ("fenced", "unknown id", "invalid state") is never taken for success nor for
failure: the marker tells. A transaction that the broker aborted, after its timeout for example, is *gone*: the batch is
run again, and the transaction with the same rows takes its place, whichever task has written it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from semel.errors import ConfigError
from semel.ids import Branch, PipelineId, to_sink_name
from semel.kafka.login import can_log_in, check_login, no_kerberos_in_librdkafka
from semel.kafka.options import hide_secrets, java_to_librdkafka, with_tokens
from semel.kafka.tokens import OAUTH_CB, TokenProvider
from semel.sinks.base import Capabilities, Context, Participant, Sink, Writer
from semel.sinks.evidence import Evidence
from semel.sinks.kafka.producers import BY_ITSELF, LIBRDKAFKA, PRODUCERS
from semel.sinks.kafka.rows import check_columns
from semel.sinks.kafka.topics import check_options, check_target
from semel.sinks.kafka.writer import KafkaWriter

if TYPE_CHECKING:
    import pyarrow as pa

CONTROL_TOPIC = "semel-control"
#: What a broker allows unless told otherwise (transaction.max.timeout.ms).
TRANSACTION_TIMEOUT_MS = 900_000
DELIVERY_TIMEOUT_MS = 120_000

#: Settings that the guarantee depends on: setting -> (the values that keep it, what to use instead).
FIXED = {
    "transactional.id": ((), "transactional_id_prefix of the sink"),
    "enable.idempotence": (("true",), "the default"),
    "acks": (("all", "-1"), "the default"),
    "request.required.acks": (("all", "-1"), "the default"),
}

#: Settings that the sink has an argument for.
ARGUMENTS = {"bootstrap.servers": "servers", "transaction.timeout.ms": "transaction_timeout_ms"}

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Kafka(Sink):
    """`Kafka("127.0.0.1:9092", "orders")`: rows with the columns of Spark's own Kafka sink.

    Without a `topic` the rows have a column of that name. `options` are Kafka's producer settings, with or without
    Spark's prefix `kafka.`, for SASL and TLS as well. `transactional_id_prefix` must be this pipeline's alone; by
    default it is made of its id. `transaction_timeout_ms` should exceed batch time plus restart time; when it does not,
    nothing is lost, but the batch is run again. `timeout_s` is how long to wait for a broker's answer.
    `accept_unclean_elections` starts the pipeline although an election may lose what the guarantee rests on.
    `producer="librdkafka"` sends every row by librdkafka, in place of semel's own quicker producer. `token_provider` is
    a function that returns a token and the seconds that it lasts, for a login by OAUTHBEARER.
    """

    servers: str
    topic: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    transactional_id_prefix: str = ""
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    control_topic: str = CONTROL_TOPIC
    timeout_s: float = 15.0
    accept_unclean_elections: bool = False
    producer: str = BY_ITSELF
    token_provider: TokenProvider | None = field(default=None, repr=False, compare=False)

    kind: ClassVar[str] = "kafka"
    modules: ClassVar[tuple[str, ...]] = ("confluent_kafka", "crc32c", "kafka", "numpy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(_ADDRESS.fullmatch(server.strip()) for server in self.servers.split(",")):
            raise ConfigError(
                f"A Kafka sink needs addresses of brokers, not {self.servers!r}.",
                remedy='Write Kafka("host:9092", "topic"), or several addresses with commas between them.',
            )
        if self.topic == self.control_topic:
            raise ConfigError(f"The topic {self.topic} is semel's own: rows cannot go there.")
        if self.transaction_timeout_ms <= 0 or self.timeout_s <= 0:
            raise ConfigError("transaction_timeout_ms and timeout_s of a Kafka sink must be greater than zero.")
        if self.producer not in PRODUCERS:
            raise ConfigError(
                f"A Kafka sink knows no producer {self.producer!r}.", remedy=f"Use {' or '.join(map(repr, PRODUCERS))}."
            )
        object.__setattr__(self, "options", with_tokens(self.options, self.servers, self.token_provider))
        self._check_options(java_to_librdkafka(self.options))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name == OAUTH_CB:
                continue
            allowed, instead = FIXED.get(name, ((value.lower(),), ""))
            if value.lower() not in allowed:
                raise ConfigError(f"The Kafka option {name}={value} breaks the guarantee.", remedy=f"Use {instead}.")
            if name in ARGUMENTS and value != str(getattr(self, ARGUMENTS[name])):
                raise ConfigError(
                    f"The Kafka option {name}={value} does not count: the sink has an argument for it.",
                    remedy=f"Give it as {ARGUMENTS[name]}.",
                )

    def __repr__(self) -> str:
        return f"Kafka({self.servers!r}, {self.topic!r}, options={hide_secrets(self.options)!r}, name={self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(native_prepare=True, commits_by_task=True, expires=True)

    def default_name(self) -> str:
        return to_sink_name(f"kafka_{self.topic}" if self.topic else "kafka")

    def describe(self) -> str:
        return f"Kafka topic {self.topic} at {self.servers}" if self.topic else f"Kafka at {self.servers}"

    def prefix(self, pipeline: PipelineId) -> str:
        """What every transactional id of this sink begins with."""
        return f"{self.transactional_id_prefix or f'semel-{pipeline}'}-{self.name}"

    def producer_settings(self) -> dict[str, Any]:
        """Settings of librdkafka. Rows land in the partitions that a Java producer would choose."""
        return {
            "linger.ms": "5",
            # A fresh connection is wanted at once; after failures the pause doubles each time, up to ten seconds.
            "reconnect.backoff.ms": "1",
            "partitioner": "murmur2_random",
            # librdkafka wants a row to be delivered before its transaction runs out of time.
            "delivery.timeout.ms": str(min(DELIVERY_TIMEOUT_MS, self.transaction_timeout_ms)),
            # A topic that was created a moment ago may be unknown to a broker for so long.
            "topic.metadata.propagation.max.ms": "5000",
            # The writer itself waits when much is under way, so librdkafka's own limits are never met.
            "queue.buffering.max.messages": "10000000",
            "queue.buffering.max.kbytes": "2097151",
            "batch.num.messages": "100000",
            **java_to_librdkafka(self.options),
            "bootstrap.servers": self.servers,
            "acks": "all",
            "enable.idempotence": "true",
        }

    def check(self, schema: pa.Schema) -> None:

        check_columns(schema, topic=self.topic, target=self.describe())
        check_login(self.producer_settings())
        check_target(self.servers, self.options, self.topic, self.timeout_s)
        own = {"transaction.timeout.ms": str(self.transaction_timeout_ms), "transactional.id": "semel-check"}
        check_options({**self.producer_settings(), **own})
        if self.producer == LIBRDKAFKA and not can_log_in(self.producer_settings()):
            raise no_kerberos_in_librdkafka(f"All rows of {self.describe()}, because of producer={LIBRDKAFKA!r},")

    def check_store(self, pipeline: PipelineId) -> None:
        from semel.sinks.kafka.checks import check_store

        check_store(self, pipeline)

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        return KafkaWriter(
            branch,
            self.producer_settings(),
            topic=self.topic,
            target=self.describe(),
            prefix=self.prefix(branch.attempt.pipeline) if durable else "",
            plan=plan,
            transaction_timeout_ms=self.transaction_timeout_ms,
            control_topic=self.control_topic,
            producer=self.producer,
        )

    def participant(self, context: Context) -> Participant:
        from semel.sinks.kafka.participant import KafkaParticipant

        return KafkaParticipant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        from semel.sinks.kafka.evidence import evidence

        return evidence(self, pipeline, batches)
