"""What the driver asks of a cluster and its topics before the first row, and the few records it writes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, SinkUnavailable
from semel.sinks.kafka_markers import PARTITIONS
from semel.sinks.kafka_reach import ACL_REMEDY, Reach, bad_options, tidy

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

#: Small segments, so that compaction can keep the topic short; old ends of transactions go after an hour. The broker
#: takes off the compression that a pipeline has chosen for its rows: kafka-python reads the topic without codecs.
CONTROL_SETTINGS = {
    "cleanup.policy": "compact",
    "compression.type": "uncompressed",
    "segment.bytes": str(16 * 1024 * 1024),
    "segment.ms": str(60 * 60 * 1000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(60 * 60 * 1000),
}
#: Settings that the control topic must have: setting -> what another value does.
REQUIRED = {
    "cleanup.policy": "it would forget what proves a batch",
    "compression.type": "semel could not read what pipelines with another compression write there",
}


def check_options(settings: Mapping[str, str]) -> None:
    """Raise ConfigError unless librdkafka takes these settings for a producer. Asks no broker."""
    from confluent_kafka import KafkaException, Producer

    try:
        Producer({**settings, "log_level": "2"})
    except KafkaException as error:
        raise bad_options(error) from None


def check_target(servers: str, options: Mapping[str, str], topic: str, timeout_s: float) -> None:
    """Raise unless the cluster can be reached and the topic is there for us to write to."""
    reach = Reach(servers, options)
    found = reach.metadata(topic, timeout_s)
    if topic:
        _require(found.topics[topic].error, topic, servers)
        _require_writable(reach, topic, timeout_s)


def _require(error: KafkaError | None, topic: str, servers: str) -> None:
    if error is None:
        return
    if error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        raise ConfigError(
            f"There is no topic {topic} at {servers}.",
            remedy="Create it first, or correct its name: semel creates none.",
        )
    if error.name() == "TOPIC_AUTHORIZATION_FAILED":
        raise _not_writable(topic, servers)
    raise ConfigError(f"Topic {topic} at {servers} cannot be used: {error.str()}.")


def _require_writable(reach: Reach, topic: str, timeout_s: float) -> None:
    from confluent_kafka import KafkaException, TopicCollection
    from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]

    asked = reach.admin.describe_topics(
        TopicCollection([topic]), include_authorized_operations=True, request_timeout=timeout_s
    )
    try:
        allowed = asked[topic].result().authorized_operations
    except KafkaException as error:
        raise reach.explain(error, f"Kafka at {reach.servers} did not describe topic {topic}") from None
    if allowed is not None and AclOperation.WRITE not in allowed and AclOperation.ALL not in allowed:
        raise _not_writable(topic, reach.servers)


def _not_writable(topic: str, servers: str) -> ConfigError:
    return ConfigError(f"This user may not write to topic {topic} at {servers}.", remedy=ACL_REMEDY)


def ensure_control_topic(servers: str, options: Mapping[str, str], topic: str, timeout_s: float) -> None:
    """Create semel's own topic where it is missing. One that may forget markers is refused."""
    reach = Reach(servers, options)
    known = reach.metadata(topic, timeout_s).topics[topic]
    if known.error is not None:
        if known.error.name() == "TOPIC_AUTHORIZATION_FAILED":
            raise ConfigError(
                f"This user may not read and write semel's control topic {topic} at {servers}.", remedy=ACL_REMEDY
            )
        _create(reach, topic, timeout_s)
        return
    if len(known.partitions) != PARTITIONS:
        raise ConfigError(
            f"The control topic {topic} has {len(known.partitions)} partitions and must have {PARTITIONS}.",
            remedy="Name another topic with control_topic, and let semel create it.",
        )
    settings = _settings_of(reach, topic, timeout_s)
    for name, harm in REQUIRED.items():
        if settings[name] != CONTROL_SETTINGS[name]:
            raise ConfigError(
                f"The control topic {topic} has {name}={settings[name]}: {harm}.",
                remedy=f"Set {name}={CONTROL_SETTINGS[name]} on {topic}, or name another topic with control_topic.",
            )


def _settings_of(reach: Reach, topic: str, timeout_s: float) -> dict[str, str]:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        found = reach.admin.describe_configs([resource], request_timeout=timeout_s)[resource].result()
    except KafkaException as error:
        what = f"The settings of the control topic {topic} at {reach.servers} cannot be read (DescribeConfigs)"
        raise reach.explain(error, what) from None
    return {name: entry.value for name, entry in found.items()}


def _create(reach: Reach, topic: str, timeout_s: float) -> None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    new = NewTopic(topic, PARTITIONS, -1, config=CONTROL_SETTINGS)
    try:
        reach.admin.create_topics([new], operation_timeout=timeout_s)[topic].result()
    except KafkaException as error:
        said = error.args[0]
        if said.name() == "TOPIC_ALREADY_EXISTS":
            return
        settings = " ".join(f"--config {name}={value}" for name, value in CONTROL_SETTINGS.items())
        raise ConfigError(
            f"semel's control topic {topic} is missing at {reach.servers} and cannot be created: {tidy(said.str())}.",
            remedy=f"Create it: kafka-topics.sh --create --topic {topic} --partitions {PARTITIONS} {settings}",
        ) from None


def write_record(
    settings: Mapping[str, str], topic: str, partition: int, key: bytes, value: bytes | None, timeout_s: float
) -> None:
    """One record outside of any transaction, acknowledged by all in-sync replicas when this returns."""
    from confluent_kafka import KafkaException, Producer

    errors: list[Any] = []
    # Twice the same record says what one says, so it need not wait half a second for a producer id.
    plain = {"enable.idempotence": "false", "log_level": "2"}
    try:
        producer = Producer({**settings, **plain})
    except KafkaException as error:
        raise bad_options(error) from None
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
    left = producer.flush(timeout_s)
    if errors and "AUTHORIZATION" in errors[0].name():
        raise ConfigError(f"This user may not write to the control topic {topic}.", remedy=ACL_REMEDY)
    if left or errors:
        reason = errors[0].str() if errors else f"no answer within {timeout_s:.0f} s"
        raise SinkUnavailable(f"A record did not reach the control topic {topic}: {reason}.")
