"""What the driver asks of a cluster and its topics before the first row, and the few records it writes itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, Refused, SinkUnavailable
from semel.kafka.login import needs_stand_in, without_login
from semel.sinks.kafka.delivery import DeliveryFailed
from semel.sinks.kafka.markers import PARTITIONS
from semel.sinks.kafka.reach import ACL_REMEDY, Reach, bad_options, tidy
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.producer import DirectProducer

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

_LOG = logging.getLogger("semel")

UNCLEAN, IN_SYNC = "unclean.leader.election.enable", "min.insync.replicas"
#: Where brokers keep what became of transactions.
TRANSACTION_STATE = "__transaction_state"
COPIES = 3
UNKNOWN_TOPIC = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
#: How soon all brokers know of the topic above, when it was created a moment ago. Not every make of broker has it.
STATE_KNOWN_S_MAX = 1.0
KNOWN_PAUSE_S = 0.1

#: Small segments, so that compaction can keep the topic short; old ends of transactions go after an hour. The broker
#: takes off the compression that a pipeline has chosen for its rows: kafka-python reads the topic without codecs.
CONTROL_SETTINGS = {
    "cleanup.policy": "compact",
    "compression.type": "uncompressed",
    "segment.bytes": str(16 * 1024 * 1024),
    "segment.ms": str(60 * 60 * 1000),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(60 * 60 * 1000),
    UNCLEAN: "false",
}
#: Settings that the control topic must have: setting -> what another value does.
REQUIRED = {
    "cleanup.policy": "it would forget what proves a batch",
    "compression.type": "semel could not read what pipelines with another compression write there",
}


def check_options(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless librdkafka takes these settings for a producer. Asks no broker."""
    from confluent_kafka import KafkaException, Producer

    try:
        # A client with tokens would wait for one.
        looked_at = without_login(settings) if needs_stand_in(settings) else settings
        Producer({**looked_at, "log_level": "2"})
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
    if error.name() in UNKNOWN_TOPIC:
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
    """Create semel's own topic where it is missing. One that may forget markers is refused, whoever created it."""
    reach = Reach(servers, options)
    deadline = time.monotonic() + timeout_s
    while True:
        cluster = reach.metadata(topic, timeout_s)
        known = cluster.topics[topic]
        if known.error is None:
            break
        if known.error.name() == "TOPIC_AUTHORIZATION_FAILED":
            raise ConfigError(
                f"This user may not read and write semel's control topic {topic} at {servers}.", remedy=ACL_REMEDY
            )
        if _create(reach, topic, min(COPIES, max(1, len(cluster.brokers))), timeout_s):
            return
        # It is there, and the broker that we asked has not heard of it yet.
        if time.monotonic() > deadline:
            raise SinkUnavailable(
                f"The brokers at {servers} say that the control topic {topic} is there, and do not describe it within "
                f"{timeout_s:.0f} s."
            )
        time.sleep(KNOWN_PAUSE_S)
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
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = reach.admin.describe_configs([resource], request_timeout=timeout_s)[resource].result()
        except KafkaException as error:
            # It is there: one broker has told us of it, and another may not have heard of it yet.
            if error.args[0].name() in UNKNOWN_TOPIC and time.monotonic() < deadline:
                time.sleep(KNOWN_PAUSE_S)
                continue
            what = f"The settings of the control topic {topic} at {reach.servers} cannot be read (DescribeConfigs)"
            raise reach.explain(error, what) from None
        return {name: entry.value for name, entry in found.items()}


def _create(reach: Reach, topic: str, copies: int, timeout_s: float) -> bool:
    """False when somebody else has created it."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    # With two copies that must both be there, one dead broker would stop all writing: there the brokers' habit counts.
    chosen = {**CONTROL_SETTINGS, **({IN_SYNC: str(COPIES - 1)} if copies == COPIES else {})}
    new = NewTopic(topic, PARTITIONS, copies, config=chosen)
    try:
        reach.admin.create_topics([new], operation_timeout=timeout_s)[topic].result()
    except KafkaException as error:
        said = error.args[0]
        if said.name() == "TOPIC_ALREADY_EXISTS":
            return False
        settings = " ".join(f"--config {name}={value}" for name, value in chosen.items())
        raise ConfigError(
            f"semel's control topic {topic} is missing at {reach.servers} and cannot be created: {tidy(said.str())}.",
            remedy=f"Create it: kafka-topics.sh --create --topic {topic} --partitions {PARTITIONS} "
            f"--replication-factor {copies} {settings}",
        ) from None
    return True


# What the proof rests on --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """How a cluster keeps a topic. What is None is not known, and `why` says why."""

    topic: str
    copies: int | None = None
    in_sync_min: int | None = None
    unclean: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class Judgement:
    """What of it breaks the proof, what weakens it, and what nobody told us."""

    unclean: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def judge(kept: Sequence[Kept], brokers: int) -> Judgement:
    """An unclean election loses what all were told is safe, whatever else is set. Few copies lose it with a disk.

    One broker can have no more than one copy, and who runs it knows that. With one copy it is no matter how many
    copies must be in sync.
    """
    weak = [
        *(f"{k.topic} has 1 copy on {brokers} brokers" for k in kept if k.copies == 1 and brokers > 1),
        *(
            f"{k.topic} has {IN_SYNC}=1 with {k.copies} copies"
            for k in kept
            if k.in_sync_min == 1 and k.copies is not None and k.copies > 1
        ),
    ]
    return Judgement(
        unclean=tuple(k.topic for k in kept if k.unclean),
        weak=tuple(weak),
        unknown=tuple(f"{k.topic} ({k.why})" for k in kept if None in (k.copies, k.in_sync_min, k.unclean)),
    )


def check_keeping(
    servers: str, options: Mapping[str, str], topics: Sequence[str], timeout_s: float, *, accept_unclean: bool
) -> None:
    """Refuse topics of which an unclean election may lose what is acknowledged, and warn of few copies."""
    reach = Reach(servers, options)
    began = time.monotonic()
    while True:
        kept, brokers = _kept(reach, topics, timeout_s)
        # A broker may not have heard yet of a topic that was created a moment ago.
        unheard = {k.topic for k in kept if k.why in UNKNOWN_TOPIC}
        patience_s = STATE_KNOWN_S_MAX if unheard == {TRANSACTION_STATE} else timeout_s
        if not unheard or time.monotonic() - began > patience_s:
            break
        time.sleep(KNOWN_PAUSE_S)
    found = judge(kept, brokers)
    if found.unclean and not accept_unclean:
        raise _unclean(found.unclean, servers)
    if found.weak:
        _LOG.warning("%s", _weak(found.weak, servers))
    if found.unknown:
        _LOG.warning("%s", _unknown(found.unknown, servers))


def _kept(reach: Reach, topics: Sequence[str], timeout_s: float) -> tuple[list[Kept], int]:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

    described = {topic: reach.metadata(topic, timeout_s) for topic in topics}
    resources = {topic: ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics}
    asked = reach.admin.describe_configs(list(resources.values()), request_timeout=timeout_s)
    kept = []
    for topic, cluster in described.items():
        known = cluster.topics[topic]
        if known.error is not None:
            kept.append(Kept(topic, why=known.error.name()))
            continue
        copies = min((len(p.replicas) for p in known.partitions.values()), default=None)
        try:
            settings = {name: entry.value for name, entry in asked[resources[topic]].result().items()}
        except KafkaException as error:
            # A broker has refused to say, or else nobody has answered.
            if error.args[0].name().startswith("_"):
                what = f"The settings of topic {topic} at {reach.servers} cannot be read (DescribeConfigs)"
                raise reach.explain(error, what) from None
            kept.append(Kept(topic, copies, why=error.args[0].name()))
            continue
        kept.append(_from_settings(topic, copies, settings))
    return kept, len(next(iter(described.values())).brokers)


def _from_settings(topic: str, copies: int | None, settings: Mapping[str, str | None]) -> Kept:
    in_sync, unclean = settings.get(IN_SYNC), settings.get(UNCLEAN)
    return Kept(
        topic,
        copies,
        int(in_sync) if in_sync else None,
        {"true": True, "false": False}.get(unclean or ""),
        why="the broker does not say",
    )


def _unclean(topics: Sequence[str], servers: str) -> Refused:
    alter = f"kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics --entity-name"
    return Refused(
        f"At {servers} {UNCLEAN}=true for {', '.join(topics)}: an election may then lose what was acknowledged. Where "
        "a marker is lost, semel would take rows that are visible for gone, and write them twice.",
        data_now="this start wrote nothing; what was visible before still is",
        remedy="Turn it off: "
        + "; ".join(f"{alter} {topic} --add-config {UNCLEAN}=false" for topic in topics)
        + ". Or say that it is meant: Kafka(..., accept_unclean_elections=True).",
    )


def _weak(findings: Sequence[str], servers: str) -> str:
    return (
        f"What is acknowledged at {servers} may be on a single disk: {'; '.join(findings)}.\n"
        "  the data now: nothing is known to be lost. A broker that dies with its disk may take rows or markers along, "
        "and batches are then lost or written twice\n"
        f"  what to do: Give the topics {COPIES} copies (kafka-reassign-partitions.sh) and {IN_SYNC}={COPIES - 1} "
        "(kafka-configs.sh --alter --entity-type topics --entity-name TOPIC --add-config)."
    )


def _unknown(findings: Sequence[str], servers: str) -> str:
    return (
        f"Nobody told us how safely {servers} keeps {', '.join(findings)}.\n"
        "  the data now: nothing is known to be lost. Whether an election may lose rows or markers "
        f"({UNCLEAN}), and how many copies there are, is not known\n"
        "  what to do: Allow Describe and DescribeConfigs on these topics, or make sure of "
        f"{UNCLEAN}=false, {COPIES} copies and {IN_SYNC}={COPIES - 1} yourself."
    )


# The driver's own records -------------------------------------------------------------------------------------------


def write_record(
    settings: Mapping[str, Any], topic: str, partition: int, key: bytes, value: bytes | None, timeout_s: float
) -> None:
    """One record outside of any transaction, acknowledged by all in-sync replicas when this returns."""
    if needs_stand_in(settings):
        _write_directly(settings, topic, partition, key, value, timeout_s)
    else:
        _write_by_librdkafka(settings, topic, partition, key, value, timeout_s)


def _write_directly(
    settings: Mapping[str, Any], topic: str, partition: int, key: bytes, value: bytes | None, timeout_s: float
) -> None:
    wire = Wire(settings["bootstrap.servers"], settings, timeout_s)
    producer = DirectProducer(settings, wire)
    try:
        producer.send_one(topic, key, value, partition)
        producer.flush(timeout_s)
    except DeliveryFailed as error:
        if error.failures and "AUTHORIZATION" in error.failures[0].name:
            raise _control_not_writable(topic) from None
        raise SinkUnavailable(f"A record did not reach the control topic {topic}: {error}.") from None
    finally:
        wire.close()


def _write_by_librdkafka(
    settings: Mapping[str, Any], topic: str, partition: int, key: bytes, value: bytes | None, timeout_s: float
) -> None:
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
        raise _control_not_writable(topic)
    if left or errors:
        reason = errors[0].str() if errors else f"no answer within {timeout_s:.0f} s"
        raise SinkUnavailable(f"A record did not reach the control topic {topic}: {reason}.")


def _control_not_writable(topic: str) -> ConfigError:
    return ConfigError(f"This user may not write to the control topic {topic}.", remedy=ACL_REMEDY)
