"""Rows as PostgreSQL's binary COPY takes them, made from whole Arrow columns without a Python call per row.

A row is the number of its fields, and of each field its size and its bytes; a null is the size -1 and no bytes
("Binary Format" at https://www.postgresql.org/docs/current/sql-copy.html). Columns of one width are laid side by side
in a matrix; Arrow joins what lies between columns of varying width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Matrix = np.ndarray[Any, np.dtype[np.uint8]]

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
#: What is larger is encoded in parts: one Arrow array of bytes holds 2 GiB, and a bit may become five bytes.
BYTES_MAX = 32 * 1024 * 1024

#: PostgreSQL counts days and microseconds from the year 2000.
_DAYS_TO_2000 = 10_957
_MICROSECONDS_TO_2000 = 946_684_800_000_000
_NUMERIC_BASE_DIGITS = 4
_NUMERIC_BASE = 10**_NUMERIC_BASE_DIGITS
_NUMERIC_NEGATIVE = 0x4000
_INT64_DIGITS = 18
_UUID_DIGITS = "([0-9a-fA-F]{4}-?){7}[0-9a-fA-F]{4}"
UUID = rf"^(\{{{_UUID_DIGITS}\}}|{_UUID_DIGITS})$"


class Unfit(ValueError):
    """A value that the column cannot hold."""


@dataclass(frozen=True)
class Fixed:
    """Values of one width: a row of bytes each. `absent` says which are null."""

    values: Matrix
    absent: np.ndarray[Any, np.dtype[np.bool_]] | None


#: What a column becomes: values of one width, or an Arrow array of bytes.
Encoded = Any
Encode = Callable[["pa.Array"], Encoded]


def encode_rows(batch: pa.RecordBatch, encoders: Sequence[Encode]) -> list[pa.Buffer]:
    """The rows of a batch, without header and trailer."""
    if batch.nbytes > BYTES_MAX and batch.num_rows > 1:
        half = batch.num_rows // 2
        return encode_rows(batch.slice(0, half), encoders) + encode_rows(batch.slice(half), encoders)
    named = zip(batch.schema.names, encoders, batch.columns, strict=True)
    columns = [_encoded(name, encode, array) for name, encode, array in named]
    count = _repeated(len(columns), ">i2", batch.num_rows)
    return [_data(_joined(columns, batch.num_rows, [count]))]


def _encoded(name: str, encode: Encode, array: pa.Array) -> Encoded:
    import pyarrow as pa

    try:
        return encode(array)
    except (pa.ArrowInvalid, Unfit) as error:
        raise Unfit(f"column {name}: {error}") from None


def _joined(columns: Sequence[Encoded], rows: int, before: Sequence[Matrix] = ()) -> pa.Array:
    """Each row: what goes before it, then its fields one after the other, each with its size."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    pieces: list[pa.Array] = []
    beside: list[Matrix] = list(before)

    def put(piece: pa.Array) -> None:
        pieces.extend([_as_array(np.hstack(beside)), piece] if beside else [piece])
        beside.clear()

    for column in columns:
        if not isinstance(column, Fixed):
            beside.append(_sizes(column).astype(">i4").view(np.uint8).reshape(rows, 4))
            put(column.fill_null(b"") if column.null_count else column)
        elif column.absent is None:
            beside += [_repeated(column.values.shape[1], ">i4", rows), column.values]
        else:
            put(_with_nulls(column))
    if beside:
        pieces.append(_as_array(np.hstack(beside)))
    return pieces[0] if len(pieces) == 1 else pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def _repeated(number: int, kind: str, rows: int) -> Matrix:
    import numpy as np

    one = np.array([number], kind).view(np.uint8)
    return np.broadcast_to(one, (rows, len(one)))


def _with_nulls(column: Fixed) -> pa.Array:
    """Size and value of each; for a null only the size."""
    import numpy as np
    import pyarrow as pa

    rows, width = column.values.shape
    absent: Any = column.absent
    sizes = np.where(absent, -1, width).astype(">i4").view(np.uint8).reshape(rows, 4)
    used = np.ones((rows, 4 + width), bool)
    used[absent, 4:] = False
    data = np.ascontiguousarray(np.hstack([sizes, column.values])[used])
    ends = np.cumsum(np.where(absent, 4, 4 + width))
    return _from_ends(ends, pa.py_buffer(data))


def _as_array(matrix: Matrix) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    rows, width = matrix.shape
    return _from_ends(np.arange(1, rows + 1) * width, pa.py_buffer(np.ascontiguousarray(matrix)))


def _from_ends(ends: np.ndarray[Any, Any], data: pa.Buffer) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), data])


def _sizes(array: pa.Array) -> np.ndarray[Any, Any]:
    """The bytes of each; -1 for null."""
    import pyarrow.compute as pc

    sizes: np.ndarray[Any, Any] = pc.binary_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
    return sizes


def _data(array: pa.Array) -> pa.Buffer:
    import numpy as np
    import pyarrow as pa

    _, offsets, data = array.buffers()
    if data is None:
        return pa.py_buffer(b"")
    ends = np.frombuffer(offsets, np.int32)
    first, last = int(ends[array.offset]), int(ends[array.offset + len(array)])
    return data.slice(first, last - first)


# Columns ------------------------------------------------------------------------------------------------------------


def numbers(arrow: Any, binary: str, less: int = 0) -> Encode:
    """Numbers of one width, cast to the Arrow type `arrow` and written as `binary`, each less a constant."""

    def encode(array: pa.Array) -> Fixed:
        import numpy as np
        import pyarrow as pa

        absent = _absent(array)
        # A cast that would change a value raises.
        values = array.cast(arrow)
        if pa.types.is_temporal(arrow):
            values = values.cast(pa.int32() if arrow.bit_width == 32 else pa.int64())
        plain = (values.fill_null(0) if absent is not None else values).to_numpy(zero_copy_only=False)
        # Beyond the lowest number it would go on with the highest, and the lowest itself means -infinity.
        if less and plain.min() <= np.iinfo(plain.dtype).min + less:
            raise Unfit("a date or time is earlier than PostgreSQL knows")
        written = (plain - less if less else plain).astype(binary)
        return Fixed(written.view(np.uint8).reshape(len(array), -1), absent)

    return encode


def dates() -> Encode:
    import pyarrow as pa

    return numbers(pa.date32(), ">i4", _DAYS_TO_2000)


def timestamps(zone: str | None) -> Encode:
    import pyarrow as pa

    return numbers(pa.timestamp("us", zone), ">i8", _MICROSECONDS_TO_2000)


def booleans(array: pa.Array) -> Fixed:
    import numpy as np

    absent = _absent(array)
    plain = array.fill_null(False) if absent is not None else array
    values = plain.to_numpy(zero_copy_only=False).astype(np.uint8).reshape(-1, 1)
    return Fixed(values, absent)


def text(array: pa.Array) -> pa.Array:
    """Text, and bytes."""
    import pyarrow as pa

    return array.cast(pa.binary())


def jsonb(array: pa.Array) -> pa.Array:
    """The number of the format goes first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_join_element_wise(
        pa.scalar(b"\x01", pa.binary()), array.cast(pa.binary()), pa.scalar(b"", pa.binary())
    )


def uuids(array: pa.Array) -> Fixed:
    """Text as PostgreSQL takes it: with or without hyphens and braces, in lower or upper case."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    absent = _absent(array)
    given = array.cast(pa.string()).fill_null("0" * 32)
    wrong = given.filter(pc.invert(pc.match_substring_regex(given, UUID)))
    if len(wrong):
        raise Unfit(f"{wrong[0].as_py()[:40]!r} is not a UUID")
    plain = pc.replace_substring_regex(given, "[-{}]", "")
    digits = np.frombuffer(_data(plain.cast(pa.binary())), np.uint8).reshape(-1, 32)
    # The letters a to f follow the digits with a gap, in lower case 32 further on.
    halves = np.where(digits <= ord("9"), digits - ord("0"), (digits | 0x20) - ord("a") + 10)
    return Fixed((halves[:, ::2] << 4 | halves[:, 1::2]).astype(np.uint8), absent)


def numerics(scale: int, precision: int) -> Encode:
    """Decimals: groups of four digits around the decimal point, with their count, place, sign and scale before them."""
    fraction = -(-scale // _NUMERIC_BASE_DIGITS)
    whole = -(-max(precision - scale, 1) // _NUMERIC_BASE_DIGITS)
    groups = fraction + whole
    # The last group may be filled in part.
    last = 10 ** (scale - (fraction - 1) * _NUMERIC_BASE_DIGITS) if fraction else _NUMERIC_BASE

    def encode(array: pa.Array) -> Fixed:
        import numpy as np

        absent = _absent(array)
        unscaled = _unscaled(array, precision, scale, absent)
        negative = unscaled < 0
        left = np.abs(unscaled)
        digits = np.zeros((len(array), groups), ">i2")
        for place in reversed(range(groups)):
            base = last if place == groups - 1 else _NUMERIC_BASE
            digits[:, place] = (left % base).astype(np.int64) * (_NUMERIC_BASE // base)
            left = left // base
        head = np.empty((len(array), 4), ">u2")
        head[:, 0], head[:, 1], head[:, 3] = groups, whole - 1, scale
        head[:, 2] = np.where(negative.astype(bool), _NUMERIC_NEGATIVE, 0)
        return Fixed(np.hstack([head.view(np.uint8), digits.view(np.uint8)]), absent)

    return encode


def _unscaled(array: pa.Array, precision: int, scale: int, absent: Any) -> np.ndarray[Any, Any]:
    """The decimals without their point, as integers of 64 bits where they fit, else as Python's own."""
    import numpy as np
    import pyarrow as pa

    array = array.cast(pa.decimal128(precision, scale))
    halves = np.frombuffer(array.buffers()[1], np.int64).reshape(-1, 2)[array.offset : array.offset + len(array)]
    low = halves[:, 0].copy()
    if absent is not None:
        low[absent] = 0
    if precision <= _INT64_DIGITS:
        return low
    high = np.where(absent, 0, halves[:, 1]) if absent is not None else halves[:, 1]
    joined: np.ndarray[Any, Any] = high.astype(object) * (1 << 64) + low.view(np.uint64).astype(object)
    return joined


def arrays(element: Encode, oid: int) -> Encode:
    """Lists of one dimension: a header, then each element with its size."""

    def encode(array: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        ends = np.asarray(array.offsets)
        values = array.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
        ends = ends - ends[0]
        counts = np.diff(ends)
        has_nulls = 1 if values.null_count else 0
        head = np.empty((len(array), 5), ">i4")
        head[:, 0], head[:, 1], head[:, 2], head[:, 3], head[:, 4] = 1, has_nulls, oid, counts, 1
        used = np.ones((len(array), 20), bool)
        empty = counts == 0
        head[empty, 0] = 0
        used[empty, 12:] = False
        heads = _from_ends(
            np.cumsum(np.where(empty, 12, 20)), pa.py_buffer(np.ascontiguousarray(head.view(np.uint8)[used]))
        )
        if len(values):
            inner = _joined([element(values)], len(values))
            starts = np.concatenate(([0], np.cumsum(_sizes(inner))))
            bodies = _from_ends(starts[ends[1:]], _data(inner))
        else:
            bodies = pa.array([b""] * len(array), pa.binary())
        joined = pc.binary_join_element_wise(heads, bodies, pa.scalar(b"", pa.binary()))
        return pc.if_else(array.is_valid(), joined, pa.scalar(None, pa.binary())) if array.null_count else joined

    return encode


def _absent(array: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    if not array.null_count:
        return None
    absent: np.ndarray[Any, Any] = array.is_null().to_numpy(zero_copy_only=False)
    return absent
