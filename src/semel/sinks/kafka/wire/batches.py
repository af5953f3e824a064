"""Rows of a step, shared out to the batches of their partitions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semel.sinks.kafka.wire.records import RECORD_BYTES, Pieces

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

#: How much is taken in at once.
ROWS_PER_STEP, STEP_BYTES_MAX = 10_000, 8 * 1024 * 1024
PAUSE_S, PAUSE_S_MAX = 0.02, 0.5


@dataclass
class KafkaBatch:
    """Rows of one partition, next to each other. It is open for more until it is packed."""

    partition: Partition
    #: Records as `encode` makes them. What is sent again must be the same, so nobody writes into them.
    pieces: list[bytes | memoryview] = field(default_factory=list)
    rows: int = 0
    #: The most bytes that its rows may take, and how many it takes of those that wait.
    bound: int = 0
    size: int = 0
    sequence: int = -1
    data: Pieces = ()
    born: float = field(default_factory=time.monotonic)


@dataclass
class Partition:
    topic: str
    number: int
    #: How large batches may be: less, once the topic refused one.
    batch_bytes: int
    sequence: int = 0
    #: A batch that is not full yet, and those that wait for their turn; one may be under way.
    filling: KafkaBatch | None = None
    batches: deque[KafkaBatch] = field(default_factory=deque)
    under_way: bool = False
    not_before: float = 0.0
    pause_s: float = PAUSE_S


@dataclass(frozen=True)
class Share:
    """Rows of one step, up to `end` in the order of their partitions, and their first place in a batch."""

    batch: KafkaBatch
    place: int
    start: int
    end: int


def steps(sizes: np.ndarray[Any, Any], rows: int) -> Iterator[tuple[int, int]]:
    """From where to where rows are taken in together."""
    ends = sizes.cumsum()
    start = before = 0
    while start < rows:
        end = min(rows, start + ROWS_PER_STEP, max(start + 1, rows_within(ends, before + STEP_BYTES_MAX)))
        yield start, end
        start, before = end, int(ends[end - 1])


def rows_within(ends: np.ndarray[Any, Any], limit: int) -> int:
    """How many rows end within the limit."""
    return int(ends.searchsorted(limit, "right"))


def places_of(shares: Sequence[Share]) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.concatenate([np.arange(s.place, s.place + s.end - s.start) for s in shares])


def row_sizes(key: pa.Array | None, value: pa.Array) -> Any:
    import pyarrow.compute as pc

    lengths = [pc.binary_length(array) for array in (key, value) if array is not None]
    filled = [array.fill_null(0) if array.null_count else array for array in lengths]
    sizes: Any = sum(array.to_numpy(zero_copy_only=False) for array in filled)
    return sizes + RECORD_BYTES
