"""A small batch that the driver writes itself: Spark computes the rows in the JVM, and no Python worker is needed.

The driver is one more task to the sinks: the same writers, the same failpoints, a branch of its own. If more comes than
was expected, it gives up, and tasks write the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from semel.runtime.task import TaskWriter
from semel.sinks.base import StagedPart

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: What the driver holds of a batch at the most. It expected less; see `hands.DRIVER_BYTES`.
HELD_BYTES_MAX = 64 * 1024 * 1024
#: Spark numbers the tries of its tasks from 0 on. Those of the driver are none of them.
_TRIES = count(1_000_000_000)


class TooMuch(Exception):
    """More rows came than the driver takes. Nothing was written."""


def write_by_driver(frame: DataFrame, writer: TaskWriter) -> tuple[list[StagedPart], int]:
    """The parts that were staged, and how large a row is."""
    batches = rows_of(frame)
    rows = sum(batch.num_rows for batch in batches)
    size = sum(batch.nbytes for batch in batches)
    if size > HELD_BYTES_MAX:
        raise TooMuch(f"{rows} rows of {size} bytes")
    return writer.run(batches, 0, next(_TRIES)), size // max(rows, 1)


def rows_of(frame: DataFrame) -> Sequence[pa.RecordBatch]:
    """The rows in the order of their partitions, as tasks would get them.

    It is what `toArrow` does in public, which PySpark 3.5 has not, and which makes one table of them.
    """
    batches: Sequence[pa.RecordBatch] = frame._collect_as_arrow()  # type: ignore[operator]
    return batches
