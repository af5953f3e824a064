"""What is asked of a cluster before a pipeline is claimed. A start that is refused here has fenced nobody."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from semel.errors import ConfigError
from semel.ids import PipelineId
from semel.sinks.kafka.topics import TRANSACTION_STATE, check_keeping, ensure_control_topic
from semel.sinks.kafka.wire.client import Wire

if TYPE_CHECKING:
    from semel.sinks.kafka.sink import Kafka


def check_store(sink: Kafka, pipeline: PipelineId) -> None:
    """Whether the cluster can keep what exactly-once rests on. The control topic is created where it is missing."""
    ensure_control_topic(sink.servers, sink.options, sink.control_topic, sink.timeout_s)
    _refuse_what_the_broker_refuses(sink, pipeline)
    _check_keeping(sink)


def _refuse_what_the_broker_refuses(sink: Kafka, pipeline: PipelineId) -> None:
    """May we use these ids, and is the timeout allowed: asked with an id that no task uses."""
    prefix = sink.prefix(pipeline)
    with closing(Wire(sink.servers, sink.options, sink.timeout_s)) as wire:
        answer = wire.raise_epoch(f"{prefix}-probe", sink.transaction_timeout_ms)
    if answer == "INVALID_TRANSACTION_TIMEOUT":
        raise ConfigError(
            f"{sink.describe()}: transaction_timeout_ms={sink.transaction_timeout_ms} is above what the broker allows.",
            remedy="Lower it, or raise transaction.max.timeout.ms of the brokers.",
        )
    if answer != "NO_ERROR":
        raise ConfigError(
            f"{sink.describe()} does not let us use transactional ids beginning with {prefix}: {answer}.",
            remedy=f"Allow Write and Describe on transactional ids with the prefix {prefix}.",
        )


def _check_keeping(sink: Kafka) -> None:
    """The topics that rows name themselves are known only with the rows."""
    topics = [topic for topic in (sink.topic, sink.control_topic, TRANSACTION_STATE) if topic]
    accept = sink.accept_unclean_elections
    check_keeping(sink.servers, sink.options, topics, sink.timeout_s, accept_unclean=accept)
