"""How far behind a query is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Lag:
    """How many records a read_committed reader would still find behind the end of a batch, by partition."""

    batch: int
    by_partition: Mapping[str, int]

    @property
    def records(self) -> int:
        return sum(self.by_partition.values())
