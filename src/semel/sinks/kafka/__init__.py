"""Kafka."""

from semel.sinks.kafka.sink import Kafka

__all__ = ["Kafka"]
