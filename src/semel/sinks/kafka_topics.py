"""What the driver asks of a cluster and its topics before the first row, and the few records it writes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, MissingExtra, SinkUnavailable
from semel.kafka_options import connection_options
from semel.sinks.kafka_markers import PARTITIONS
from semel.sinks.kafka_wire import ACL_REMEDY, LOGIN_REMEDY

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

#: Small segments, so that compaction can keep the topic short; old ends of transactions go after an hour.
CONTROL_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 * 1024 * 1024),
    "segment.ms": str(60 * 60 * 1000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(60 * 60 * 1000),
}


def check_target(servers: str, options: Mapping[str, str], topic: str, timeout_s: float) -> None:
    """Raise unless the cluster can be reached and the topic is there for us to write to."""
    admin, failed = _admin(servers, options)
    from confluent_kafka import KafkaException

    try:
        found = admin.list_topics(topic or None, timeout=timeout_s)
    except KafkaException as error:
        raise failed.explain(error, f"Kafka at {servers} cannot be reached") from None
    if topic:
        _require(found.topics[topic].error, topic, servers)
        _require_writable(admin, servers, topic, timeout_s)


def _require(error: Any, topic: str, servers: str) -> None:
    if error is None:
        return
    if error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        raise ConfigError(
            f"There is no topic {topic} at {servers}.",
            remedy="Create it first, or correct its name: semel creates none.",
        )
    raise ConfigError(f"Topic {topic} at {servers} cannot be used: {error.str()}.", remedy=ACL_REMEDY)


def _require_writable(admin: AdminClient, servers: str, topic: str, timeout_s: float) -> None:
    from confluent_kafka import KafkaException, TopicCollection
    from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]

    asked = admin.describe_topics(
        TopicCollection([topic]), include_authorized_operations=True, request_timeout=timeout_s
    )
    try:
        allowed = asked[topic].result().authorized_operations
    except KafkaException as error:
        raise SinkUnavailable(f"Kafka at {servers} did not describe topic {topic}: {error.args[0].str()}.") from None
    if allowed is not None and AclOperation.WRITE not in allowed and AclOperation.ALL not in allowed:
        raise ConfigError(f"This user may not write to topic {topic} at {servers}.", remedy=ACL_REMEDY)


def ensure_control_topic(servers: str, options: Mapping[str, str], topic: str, timeout_s: float) -> None:
    """Create semel's own topic where it is missing. One that may forget markers is refused."""
    admin, failed = _admin(servers, options)
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource, NewTopic  # type: ignore[attr-defined]

    try:
        known = admin.list_topics(topic, timeout=timeout_s).topics[topic]
        if known.error is not None:
            new = NewTopic(topic, PARTITIONS, -1, config=CONTROL_SETTINGS)
            _created(admin.create_topics([new], operation_timeout=timeout_s)[topic], topic, servers)
            return
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        settings = admin.describe_configs([resource], request_timeout=timeout_s)[resource].result()
    except KafkaException as error:
        raise failed.explain(error, f"Topic {topic} at {servers} cannot be looked at") from None
    if len(known.partitions) != PARTITIONS:
        raise ConfigError(
            f"The control topic {topic} has {len(known.partitions)} partitions and must have {PARTITIONS}.",
            remedy="Name another topic with control_topic, and let semel create it.",
        )
    policy = settings["cleanup.policy"].value
    if policy != "compact":
        raise ConfigError(
            f"The control topic {topic} has cleanup.policy={policy}: it would forget what proves a batch.",
            remedy=f"Set cleanup.policy=compact on {topic}, or name another topic with control_topic.",
        )


def _created(future: Any, topic: str, servers: str) -> None:
    from confluent_kafka import KafkaException

    try:
        future.result()
    except KafkaException as error:
        if error.args[0].name() == "TOPIC_ALREADY_EXISTS":
            return
        settings = " ".join(f"--config {name}={value}" for name, value in CONTROL_SETTINGS.items())
        raise ConfigError(
            f"semel's control topic {topic} is missing at {servers} and cannot be created: {error.args[0].str()}.",
            remedy=f"Create it: kafka-topics.sh --create --topic {topic} --partitions {PARTITIONS} {settings}",
        ) from None


def write_record(
    settings: Mapping[str, str], topic: str, partition: int, key: bytes, value: bytes | None, timeout_s: float
) -> None:
    """One record outside of any transaction, acknowledged by all in-sync replicas when this returns."""
    from confluent_kafka import KafkaException, Producer

    errors: list[Any] = []
    producer = Producer({**settings, "log_level": "2"})
    try:
        producer.produce(
            topic,
            key=key,
            value=value,
            partition=partition,
            on_delivery=lambda error, _: errors.append(error) if error else None,
        )
    except KafkaException as error:
        raise SinkUnavailable(f"A record for {topic} was not taken: {error.args[0].str()}.") from None
    if producer.flush(timeout_s) or errors:
        reason = errors[0].str() if errors else f"no answer within {timeout_s:.0f} s"
        raise SinkUnavailable(f"A record did not reach the control topic {topic}: {reason}.")


class _LastError:
    """librdkafka tells why it cannot connect through a callback, and then only that it took too long."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, error: Any) -> None:
        self.seen.append(error)

    def explain(self, error: Any, what: str) -> ConfigError | SinkUnavailable:
        causes = {e.name(): e.str() for e in (*self.seen, error.args[0])}
        login = causes.get("_AUTHENTICATION")
        if login:
            return ConfigError(f"{what}: the login was refused: {login}.", remedy=LOGIN_REMEDY)
        if any("AUTHORIZATION" in name for name in causes):
            return ConfigError(f"{what}: {error.args[0].str()}.", remedy=ACL_REMEDY)
        return SinkUnavailable(f"{what}: {next(iter(causes.values()))}.")


def _admin(servers: str, options: Mapping[str, str]) -> tuple[AdminClient, _LastError]:
    try:
        from confluent_kafka.admin import AdminClient
    except ImportError:
        raise MissingExtra("The Kafka sink needs confluent-kafka, which is not installed.", extra="kafka") from None
    failed = _LastError()
    settings: dict[str, Any] = {**connection_options(options), "bootstrap.servers": servers, "log_level": "2"}
    settings["error_cb"] = failed
    return AdminClient(settings), failed
