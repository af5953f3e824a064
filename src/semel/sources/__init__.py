"""The sources: Spark's own, given the right settings and checked before a query starts."""

from semel.sources.kafka import read_kafka

__all__ = ["read_kafka"]
