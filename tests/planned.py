"""A checkpoint in which Spark has planned some batches, without Spark."""

from __future__ import annotations

from semel.decisions.memory import MemoryStore
from semel.runtime.plans import SparkPlans


def offsets(batch: int, end: int | None = None) -> bytes:
    """What Spark writes for a batch of one Kafka topic that ends there."""
    stop = (batch + 1) * 10 if end is None else end
    return f'v1\n{{"batchWatermarkMs":0}}\n{{"orders":{{"0":{stop}}}}}'.encode()


def plans(batches: int = 200, store: MemoryStore | None = None) -> SparkPlans:
    """The plans of this many batches; none of them is done."""
    checkpoint = MemoryStore() if store is None else store
    for batch in range(batches):
        checkpoint.create(f"offsets/{batch}", offsets(batch))
    return SparkPlans(checkpoint)
