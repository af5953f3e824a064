"""How far behind a query is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


def ends_in(offset: str) -> dict[tuple[str, int], int]:
    """Up to where each partition is read, by topic and number, as an offset of Kafka stands in Spark's log."""
    topics = json.loads(offset)
    return {(topic, int(number)): int(at) for topic, numbers in topics.items() for number, at in numbers.items()}


@dataclass(frozen=True)
class Lag:
    """How many records a read_committed reader would still find behind the end of a batch, by partition."""

    batch: int
    by_partition: Mapping[str, int]

    @property
    def records(self) -> int:
        return sum(self.by_partition.values())
