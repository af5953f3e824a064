"""Arrow to SQLite: which type goes where, and what cannot be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.errors import BatchFailed

if TYPE_CHECKING:
    import pyarrow as pa


def quote(identifier: str) -> str:
    """An identifier as SQL, whatever is in it."""
    return '"' + identifier.replace('"', '""') + '"'


def sqlite_type(kind: pa.DataType) -> str | None:
    """The column type for an Arrow type, or None when SQLite has nothing that keeps it."""
    import pyarrow as pa

    t = pa.types
    if t.is_boolean(kind) or t.is_integer(kind):
        return "INTEGER"
    if t.is_floating(kind):
        return "REAL"
    if t.is_binary(kind) or t.is_large_binary(kind):
        return "BLOB"
    if t.is_string(kind) or t.is_large_string(kind) or t.is_null(kind):
        return "TEXT"
    # Exact as text: decimals keep every digit; dates and times are ISO 8601, so that text order is time order.
    if t.is_decimal(kind) or t.is_date(kind) or t.is_timestamp(kind):
        return "TEXT"
    return None


def affinity_accepts(declared: str, kind: pa.DataType) -> bool:
    """Whether a declared column keeps the values as they are (https://sqlite.org/datatype3.html, section 3.1)."""
    import pyarrow as pa

    ours = sqlite_type(kind)
    declared = declared.upper()
    if "INT" in declared:
        return ours == "INTEGER"
    if any(word in declared for word in ("CHAR", "CLOB", "TEXT")):
        return ours == "TEXT"
    if not declared or "BLOB" in declared:
        return True
    # REAL and NUMERIC affinity turn text that looks like a number into a number; dates and times do not look like one.
    return ours in ("INTEGER", "REAL") or pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def to_sqlite(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in types that SQLite takes as they are. Raises for NaN, which SQLite would store as NULL."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [_column(f.name, c) for f, c in zip(batch.schema, batch.columns, strict=True)], names=batch.schema.names
    )


def _column(name: str, column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        raise BatchFailed(
            f"Column {name} holds NaN, which SQLite cannot store (it would become NULL).",
            remedy=f"Replace it before the sink, for example with nanvl({name}, NULL).",
        )
    if pa.types.is_boolean(kind):
        return pc.cast(column, pa.int64())
    if pa.types.is_timestamp(kind):
        # UTC, microseconds, one format for every row, so that text order is time order.
        return pc.strftime(column.cast(pa.timestamp("us")), format="%Y-%m-%d %H:%M:%S")
    if pa.types.is_decimal(kind) or pa.types.is_date(kind) or pa.types.is_null(kind):
        text = pc.cast(column, pa.string())
        if pa.types.is_decimal(kind) and pc.any(pc.match_substring(text, "E")).as_py():
            # Arrow spells small decimals as 0E-8; one spelling for every row is easier to read and to compare.
            return pa.array([None if v is None else f"{v:f}" for v in column.to_pylist()], pa.string())
        return text
    return column
