"""The fingerprint of what a task wrote to a sink: the same for the same rows, by whatever task. No Python call per row.

Where a replay brings the rows of a task in the same order, it is a checksum of what Arrow holds, which costs next to
nothing. Where rows were shuffled their order is a matter of chance: there Spark hashes each row in a column of its own,
and the task adds the hashes up.

A task may write several of Spark's partitions, one after the other. In a replay others may be written together. So its
fingerprint says what each of them had: it is one print for each partition, with a plus sign between them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from semel.checksum import crc32c

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: Stands where the name of a column of hashes could: the order of the rows is known, and no hashes are needed.
IN_ORDER = "*"
#: So begins a checksum of rows in their order.
ORDERED = "in-order-"
#: Between the prints of partitions that one task wrote, and what stands there when none had rows.
SEPARATOR, NO_ROWS = "+", f"0:{0:016x}"


@dataclass
class Checksum:
    """Of rows in their order, whatever batches they come in.

    Column by column, of what Arrow holds: where the nulls are, how long what has a length is, and the values. What is
    nested is taken apart.
    """

    rows: int = 0
    #: place of a column, and what of it -> the checksum of all that came so far.
    sums: dict[tuple[str, str], int] = field(default_factory=dict)
    #: place of a column -> how many values came so far; inside of lists that is not the number of rows.
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, rows: pa.RecordBatch) -> None:
        for index, column in enumerate(rows.columns):
            self._add(str(index), column)
        self.rows += rows.num_rows

    def _add(self, place: str, values: pa.Array) -> None:
        import numpy as np
        import pyarrow as pa

        before = self.counts.get(place, 0)
        self.counts[place] = before + len(values)
        if values.null_count:
            absent = np.nonzero(values.is_null().to_numpy(zero_copy_only=False))[0]
            self._sum(place, "nulls", absent.astype(np.int64) + before)
            values = values.drop_null()
        kind = values.type
        if pa.types.is_struct(kind):
            for index, part in enumerate(values.flatten()):
                self._add(f"{place}.{index}", part)
        elif pa.types.is_boolean(kind):
            self._sum(place, "values", values.to_numpy(zero_copy_only=False))
        elif not len(values) or pa.types.is_null(kind):
            return
        elif pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_string(kind):
            offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
            self._sum(place, "lengths", np.diff(offsets))
            if pa.types.is_nested(kind):
                self._add(f"{place}.*", values.values.slice(offsets[0], offsets[-1] - offsets[0]))
            else:
                self._sum(place, "values", memoryview(values.buffers()[2] or b"")[offsets[0] : offsets[-1]])
        else:
            size = kind.bit_width // 8
            self._sum(place, "values", memoryview(values.buffers()[1])[values.offset * size :][: len(values) * size])

    def _sum(self, place: str, what: str, content: Any) -> None:
        self.sums[place, what] = crc32c()(content, self.sums.get((place, what), 0))

    def __str__(self) -> str:
        said = repr((sorted(self.sums.items()), sorted(self.counts.items())))
        return f"{self.rows}:{ORDERED}{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"


@dataclass
class Fingerprint:
    """How many rows there are, and the sum of their hashes: of each partition that the rows come from."""

    #: partition -> its rows, and the sum of their hashes
    partitions: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, hashes: pa.Array, origins: pa.Array | None = None) -> None:
        """A null is a row that the sink's `where` left out. `origins` are the partitions that the rows come from."""
        import numpy as np
        import pyarrow as pa

        if not len(hashes):
            return
        counted = hashes.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        values = hashes.view(pa.uint64()).fill_null(0).to_numpy(zero_copy_only=False)
        from_where = np.zeros(1, np.int64) if origins is None else origins.to_numpy(zero_copy_only=False)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(from_where)) + 1))
        # Sums of unsigned integers wrap around in numpy, as this one does.
        sums, rows = np.add.reduceat(values, starts), np.add.reduceat(counted, starts)
        for start, more, total in zip(starts, rows, sums, strict=True):
            partition = int(from_where[start])
            before, so_far = self.partitions.get(partition, (0, 0))
            self.partitions[partition] = before + int(more), (so_far + int(total)) % 2**64

    def __str__(self) -> str:
        written = [f"{rows}:{total:016x}" for rows, total in self.partitions.values() if rows]
        return SEPARATOR.join(sorted(written)) or NO_ROWS


def is_in_order(fingerprint: str) -> bool:
    return fingerprint.partition(":")[2].startswith(ORDERED)


def prints_in(fingerprint: str) -> Counter[str]:
    """What each partition had that was written together; nothing where there is no fingerprint."""
    return Counter(fingerprint.split(SEPARATOR) if fingerprint else ())


def without_hashes(batch: pa.RecordBatch, columns: Collection[str]) -> pa.RecordBatch:
    """The batch as the user knows it."""
    if not columns:
        return batch
    return batch.select([index for index, name in enumerate(batch.schema.names) if name not in columns])


@dataclass(frozen=True)
class Hashed:
    """The columns that a frame got for fingerprints.

    `hashes` has one for each view, "" where there is none. `origins` says which partition a row comes from; it is ""
    where each task writes one of them.
    """

    hashes: tuple[str, ...]
    origins: str = ""

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(sorted({*self.hashes, self.origins} - {"", IN_ORDER}))


def with_hashes(
    frame: DataFrame, views: Sequence[str | None], asking: Sequence[bool], *, joined: bool = False
) -> tuple[DataFrame, Hashed]:
    """Add the hashes of the rows of each view that is asked for. `joined` says that a task writes several partitions.

    They are a projection of their own, over columns that are computed already: what is hashed is what is written.
    """
    if not any(asking):
        return frame, Hashed(tuple("" for _ in views))
    schema = frame.schema
    taken = {name.lower() for name in schema.names}
    free = (name for number in count(len(views)) if (name := f"_semel_{number}") not in taken)
    columns: dict[str | None, str] = {}
    added: list[str] = []
    for view in dict.fromkeys(view for view, asks in zip(views, asking, strict=True) if asks):
        expression = hash_of(schema if view is None else schema[view].dataType, view)
        if expression:
            columns[view] = next(free)
            added.append(f"{expression} AS {columns[view]}")
    origins = next(free) if added and joined else ""
    if origins:
        added.append(f"spark_partition_id() AS {origins}")
    named = tuple(columns.get(view, "") if asks else "" for view, asks in zip(views, asking, strict=True))
    return frame.selectExpr("*", *added) if added else frame, Hashed(named, origins)


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
