"""Which columns of a DataFrame fit which columns of MySQL, and how each is written: as text, whole columns at a time.

Text is what LOAD DATA and INSERT understand; `loaders.bulk` has a binary form, and leaves the checks to this one.
Whatever the server would change without an error is refused here: digits that a column drops, bytes that it pads, nulls
that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: Bits of the integers.
INTEGERS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
FLOATS = {"float": 32, "double": 64}
TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json"})
BYTES = frozenset({"varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
#: Types that an index can only hold in part.
UNINDEXED = (TEXTS - {"char", "varchar"}) | (BYTES - {"varbinary"})

#: For a key that semel creates: an index needs a length, and keys that differ in case, accents or spaces at the end are
#: two keys. MariaDB and MySQL have other names for that.
KEY_TEXT = "varchar(255) CHARACTER SET utf8mb4 COLLATE {}"
KEY_BYTES = "varbinary(255)"
MARIADB_EXACT, MYSQL_EXACT = "utf8mb4_nopad_bin", "utf8mb4_0900_bin"
#: More digits behind the point MySQL does not have.
SCALE_MAX = 30

_DAY_US = 86_400_000_000
#: 1000-01-01 and 9999-12-31: what MySQL promises to hold, in days since 1970.
DAYS = (-354_285, 2_932_896)
DATETIMES_US = (DAYS[0] * _DAY_US, (DAYS[1] + 1) * _DAY_US - 1)
#: A timestamp begins one second after 1970; most servers refuse what lies beyond 2038 themselves.
TIMESTAMPS_US = (1_000_000, (2**32) * 1_000_000 - 1)


class Unfit(ValueError):
    """A value that the column cannot hold."""


@dataclass(frozen=True)
class Column:
    """A column of a table, as information_schema describes it."""

    name: str
    type: str
    #: The type as a definition spells it.
    shown: str
    nullable: bool = True
    #: Rows must bring a value for it.
    required: bool = False
    #: The server computes it.
    generated: bool = False
    counts_up: bool = False
    precision: int = 0
    scale: int = 0
    #: Digits behind the second.
    fraction: int = 0
    octets: int = 0
    charset: str = ""
    collation: str = ""

    @property
    def definition(self) -> str:
        """The type with all that decides which values are equal."""
        letters = f" CHARACTER SET {self.charset} COLLATE {self.collation}" if self.charset and self.collation else ""
        return self.shown + letters


@dataclass(frozen=True)
class Encode:
    """How a column is written: `text` makes an Arrow array of text, `expression` makes a value of that text."""

    text: Callable[[pa.Array], pa.Array]
    expression: str = "{}"
    #: The text may hold anything, tabs and line ends included.
    free: bool = False


def encoder(arrow: Any, column: Column) -> Encode | None:
    """How values of an Arrow type are written into a column; None where they do not fit."""
    import pyarrow as pa

    t = pa.types
    if t.is_integer(arrow):
        return _integer(column)
    if t.is_floating(arrow):
        return Encode(_floats) if arrow.bit_width <= FLOATS.get(column.type, 0) else None
    if t.is_string(arrow) or t.is_large_string(arrow):
        return Encode(_texts, free=True) if column.type in TEXTS else None
    if t.is_boolean(arrow):
        return _boolean(column)
    if t.is_decimal(arrow):
        return Encode(_decimals(column)) if column.type == "decimal" else None
    return _temporal(arrow, column) or _bytes(arrow, column)


def _integer(column: Column) -> Encode | None:
    bits = INTEGERS.get(column.type)
    if bits is not None:
        unsigned = "unsigned" in column.shown
        return Encode(_integers(0, 2**bits - 1) if unsigned else _integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    if column.type == "decimal":
        largest: int = 10 ** (column.precision - column.scale) - 1
        return Encode(_integers(0 if "unsigned" in column.shown else -largest, largest))
    return None


def _boolean(column: Column) -> Encode | None:
    if column.type == "tinyint":
        return Encode(_booleans)
    # The text of a bit is taken for its byte, so a comparison makes the bit.
    return Encode(_booleans, "({} = '1')") if column.shown == "bit(1)" else None


def _temporal(arrow: Any, column: Column) -> Encode | None:
    import pyarrow as pa

    if pa.types.is_date(arrow) and column.type == "date":
        return Encode(_dates)
    if pa.types.is_timestamp(arrow) and column.type == ("datetime" if arrow.tz is None else "timestamp"):
        return Encode(_timestamps(DATETIMES_US if arrow.tz is None else TIMESTAMPS_US, column.fraction))
    return None


def _bytes(arrow: Any, column: Column) -> Encode | None:
    if not _is_bytes(arrow):
        return None
    if column.type == "binary":
        return Encode(_hexadecimal(column.octets), "UNHEX({})")
    return Encode(_hexadecimal(None), "UNHEX({})") if column.type in BYTES else None


def _is_bytes(arrow: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow))


def is_nested(arrow: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(arrow))


# Columns as text ----------------------------------------------------------------------------------------------------


def _check_range(array: pa.Array, low: int, high: int, shown: pa.Array) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pc.min_max(array).as_py()
    if found["min"] is None or (low <= found["min"] and found["max"] <= high):
        return
    wrong = found["min"] if found["min"] < low else found["max"]
    # As text: Python has no dates behind the year 9999.
    raise Unfit(f"{shown.cast(pa.string())[pc.index(array, wrong).as_py()]} is out of range")


def _integers(low: int, high: int) -> Callable[[pa.Array], pa.Array]:
    def text(array: pa.Array) -> pa.Array:
        import pyarrow as pa

        _check_range(array, low, high, array)
        return array.cast(pa.string())

    return text


def _floats(array: pa.Array) -> pa.Array:
    """The shortest text that is read as the same double; also of a float, because the server reads doubles."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.is_finite(array).fill_null(True)).as_py():
        raise Unfit("MySQL has no NaN and no infinity")
    return array.cast(pa.float64()).cast(pa.string())


def _decimals(column: Column) -> Callable[[pa.Array], pa.Array]:
    def text(array: pa.Array) -> pa.Array:
        import pyarrow as pa

        kind = pa.decimal128 if column.precision <= 38 else pa.decimal256
        # A cast that would drop a digit raises.
        return array.cast(kind(column.precision, column.scale)).cast(pa.string())

    return text


def _booleans(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    return array.cast(pa.int8()).cast(pa.string())


def _dates(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    days = array.cast(pa.date32())
    _check_range(days.cast(pa.int32()), *DAYS, shown=days)
    return days.cast(pa.string())


def _timestamps(limits: tuple[int, int], fraction: int) -> Callable[[pa.Array], pa.Array]:
    """The time in UTC, in microseconds. A column with fewer digits would round without a word."""
    step = 10 ** (6 - fraction)

    def text(array: pa.Array) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
        plain = numbers.cast(pa.timestamp("us"))
        _check_range(numbers, *limits, shown=plain)
        whole = pc.multiply(pc.divide(numbers, step), step)
        if step > 1 and not pc.all(pc.equal(whole, numbers).fill_null(True)).as_py():
            raise Unfit(f"the column holds {fraction} digits of a second, and the rows have more")
        return plain.cast(pa.string())

    return text


def _texts(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    return array.cast(pa.string())


def _hexadecimal(octets: int | None) -> Callable[[pa.Array], pa.Array]:
    """Two digits for each byte. A column of one width pads what is shorter, so it takes that width alone."""

    def text(array: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        array = array.cast(pa.binary())
        if octets is not None and not pc.all(pc.equal(pc.binary_length(array), octets).fill_null(True)).as_py():
            raise Unfit(f"the column holds exactly {octets} bytes, and the rows have fewer or more")
        ends = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
        data = np.frombuffer(array.buffers()[2] or b"", np.uint8)[int(ends[0]) : int(ends[-1])]
        digits = np.frombuffer(b"0123456789abcdef", np.uint8)
        pairs = np.empty((len(data), 2), np.uint8)
        pairs[:, 0], pairs[:, 1] = digits[data >> 4], digits[data & 15]
        offsets = ((ends - ends[0]) * 2).astype(np.int32)
        made = pa.Array.from_buffers(pa.string(), len(array), [None, pa.py_buffer(offsets), pa.py_buffer(pairs)])
        return pc.if_else(array.is_valid(), made, pa.scalar(None, pa.string())) if array.null_count else made

    return text


# A table that does not exist yet ------------------------------------------------------------------------------------


def sql_type(arrow: Any, *, key: str = "") -> str | None:
    """The type of a column that is created for these values; None where MySQL has none. A key has a collation."""
    import pyarrow as pa

    t = pa.types
    if t.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})" if 0 <= arrow.scale <= SCALE_MAX else None
    if t.is_timestamp(arrow):
        return "datetime(6)" if arrow.tz is None else "timestamp(6)"
    if t.is_integer(arrow):
        return {8: "tinyint", 16: "smallint", 32: "int"}.get(arrow.bit_width, "bigint")
    if t.is_floating(arrow):
        return "double" if arrow.bit_width > 32 else "float"
    plain = {
        KEY_TEXT.format(key) if key else "longtext CHARACTER SET utf8mb4": lambda a: (
            t.is_string(a) or t.is_large_string(a)
        ),
        KEY_BYTES if key else "longblob": _is_bytes,
        "boolean": t.is_boolean,
        "date": t.is_date,
    }
    return next((name for name, fits in plain.items() if fits(arrow)), None)
