"""Which columns of a DataFrame fit which columns of PostgreSQL, and how each is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semel.sinks.postgres import copy

INTEGERS = {"int2": (16, ">i2"), "int4": (32, ">i4"), "int8": (64, ">i8")}
FLOATS = {"float4": (32, ">f4"), "float8": (64, ">f8")}
TEXTS = frozenset({"text", "varchar", "bpchar", "name", "citext", "json", "xml"})
#: An integer of 64 bits as a decimal.
_INT64_PRECISION = 19


@dataclass(frozen=True)
class Column:
    """A column of a table, by the name of its type in the catalog. For an array, `element` is what it holds."""

    name: str
    type: str
    kind: str = "b"
    element: str = ""
    element_oid: int = 0
    #: Rows must bring a value for it.
    required: bool = False
    #: The server computes it.
    generated: bool = False
    #: The type as a person writes it.
    shown: str = ""
    element_kind: str = "b"
    #: For a decimal, the digits behind the point that the column keeps; None where it keeps all.
    scale: int | None = None


def encoder(arrow: Any, column: Column) -> copy.Encode | None:
    """How values of an Arrow type are written into a column; None where they do not fit."""
    import pyarrow as pa

    t = pa.types
    if t.is_list(arrow):
        of = Column("", column.element, column.element_kind, scale=column.scale)
        element = encoder(arrow.value_type, of) if column.element else None
        return copy.arrays(element, column.element_oid) if element else None
    if t.is_integer(arrow):
        return _integer(column)
    if t.is_floating(arrow):
        return _float(arrow, column.type)
    if _is_text(arrow):
        return _text(column)
    # The server would round without a word.
    if t.is_decimal(arrow) and not 0 <= arrow.scale <= (arrow.scale if column.scale is None else column.scale):
        return None
    return _plain(arrow).get(column.type)


def _plain(arrow: Any) -> dict[str, copy.Encode]:
    """The only type that such a value fits, and how it is written."""
    import pyarrow as pa

    t = pa.types
    if t.is_decimal(arrow):
        return {"numeric": copy.numerics(arrow.scale, arrow.precision)}
    if t.is_timestamp(arrow):
        return {"timestamp" if arrow.tz is None else "timestamptz": copy.timestamps(arrow.tz)}
    if t.is_boolean(arrow):
        return {"bool": copy.booleans}
    if t.is_date(arrow):
        return {"date": copy.dates()}
    return {"bytea": copy.text} if _is_bytes(arrow) else {}


def _integer(column: Column) -> copy.Encode | None:
    import pyarrow as pa

    if column.type in INTEGERS:
        bits, binary = INTEGERS[column.type]
        return copy.numbers({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits], binary)
    # Into one that counts in tens, the server would round without a word.
    is_exact = column.type == "numeric" and (column.scale or 0) >= 0
    return copy.numerics(0, _INT64_PRECISION) if is_exact else None


def _float(arrow: Any, kind: str) -> copy.Encode | None:
    import pyarrow as pa

    bits, binary = FLOATS.get(kind, (0, ""))
    # Half of the digits of a double would be lost without a word.
    return copy.numbers({32: pa.float32(), 64: pa.float64()}[bits], binary) if arrow.bit_width <= bits else None


def _text(column: Column) -> copy.Encode | None:
    if column.type in TEXTS or column.kind == "e":
        return copy.text
    return {"jsonb": copy.jsonb, "uuid": copy.uuids}.get(column.type)


def _is_text(arrow: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(arrow) or pa.types.is_large_string(arrow))


def _is_bytes(arrow: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow))


def sql_type(arrow: Any) -> str | None:
    """The type of a column that is created for these values; None where PostgreSQL has none."""
    import pyarrow as pa

    t = pa.types
    if t.is_list(arrow):
        element = sql_type(arrow.value_type)
        return f"{element}[]" if element and not element.endswith("]") else None
    if t.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})" if arrow.scale >= 0 else None
    if t.is_timestamp(arrow):
        return "timestamp" if arrow.tz is None else "timestamptz"
    if t.is_integer(arrow):
        return "smallint" if arrow.bit_width <= 16 else "integer" if arrow.bit_width == 32 else "bigint"
    if t.is_floating(arrow):
        return "real" if arrow.bit_width == 32 else "double precision"
    plain = {"boolean": t.is_boolean, "date": t.is_date, "bytea": _is_bytes, "text": _is_text}
    return next((name for name, fits in plain.items() if fits(arrow)), None)
