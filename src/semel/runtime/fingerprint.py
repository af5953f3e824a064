"""The fingerprint of what a task wrote to a sink: the same for the same rows, in whatever order, by whatever task.

Spark hashes each row in a column of its own; the task counts the rows and adds the hashes up. No Python call per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


@dataclass
class Fingerprint:
    """How many rows there are, and the sum of their hashes, which are in `column`."""

    column: str
    rows: int = 0
    sum: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """A null is a row that the sink's `where` left out."""
        import pyarrow as pa
        import pyarrow.compute as pc

        hashes = batch.column(batch.schema.get_field_index(self.column))
        self.rows += len(hashes) - hashes.null_count
        # Sums of unsigned integers wrap around in Arrow, as this one does.
        self.sum = (self.sum + (pc.sum(hashes.view(pa.uint64())).as_py() or 0)) % 2**64

    def __str__(self) -> str:
        return f"{self.rows}:{self.sum:016x}"


def without_hashes(batch: pa.RecordBatch, columns: Collection[str]) -> pa.RecordBatch:
    """The batch as the user knows it."""
    if not columns:
        return batch
    return batch.select([index for index, name in enumerate(batch.schema.names) if name not in columns])


def with_hashes(
    frame: DataFrame, views: Sequence[str | None], asking: Sequence[bool]
) -> tuple[DataFrame, tuple[str, ...]]:
    """Add the hashes of the rows of each view that is asked for, and say in which columns; "" where there are none.

    They are a projection of their own, over columns that are computed already: what is hashed is what is written.
    """
    if not any(asking):
        return frame, tuple("" for _ in views)
    schema = frame.schema
    taken = {name.lower() for name in schema.names}
    free = (name for number in count(len(views)) if (name := f"_semel_{number}") not in taken)
    columns: dict[str | None, str] = {}
    hashes: list[str] = []
    for view in dict.fromkeys(view for view, asks in zip(views, asking, strict=True) if asks):
        expression = hash_of(schema if view is None else schema[view].dataType, view)
        if expression:
            columns[view] = next(free)
            hashes.append(f"{expression} AS {columns[view]}")
    named = tuple(columns.get(view, "") if asks else "" for view, asks in zip(views, asking, strict=True))
    return frame.selectExpr("*", *hashes) if hashes else frame, named


def hash_of(rows: Any, view: str | None) -> str:
    """The SQL that hashes a row of these columns; "" where Spark can hash none. A row that is left out gives null.

    `xxhash64` passes over nulls, and over the bounds of what is nested: ("a", null) and (null, "a") would be the same.
    So it is also told which columns are null, and gets what is nested as JSON.
    """
    names = [field.name.lower() for field in rows.fields]
    if len(set(names)) < len(names) or not all(_is_hashable(field.dataType) for field in rows.fields):
        return ""
    prefix = f"{view}." if view else ""
    fields = [(f"{prefix}`{f.name.replace('`', '``')}`", f.dataType.typeName()) for f in rows.fields]
    values = [f"to_json({name})" if kind in ("array", "struct") else name for name, kind in fields]
    row = f"xxhash64({', '.join([*values, *(f'isnull({name})' for name, _ in fields)])})"
    return f"if(isnull({view}), NULL, {row})" if view else row


def _is_hashable(kind: Any) -> bool:
    """Spark hashes neither maps nor variants: equal ones may be stored differently."""
    name = kind.typeName()
    if name == "array":
        return _is_hashable(kind.elementType)
    if name == "struct":
        return all(_is_hashable(field.dataType) for field in kind.fields)
    return name not in ("map", "variant")
