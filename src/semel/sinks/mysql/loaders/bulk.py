"""Rows into a table of MariaDB by one prepared INSERT that takes many rows at once, in binary form.

It costs the server half to two thirds of LOAD DATA, which must look for the ends of fields and read numbers out of
text. The rows are made from whole Arrow columns, without a Python call per row: the numbers that stand side by side in
a row are laid out for all rows at once, and Arrow joins them with the bytes that vary in length.

Of each value there is a byte that says whether it is null, then the value as prepared statements have it ("Binary
parameter encoding" at https://mariadb.com/kb/en/com_stmt_execute/ and https://mariadb.com/kb/en/com_stmt_bulk_execute/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.sinks.mysql.connection import pymysql_, quote
from semel.sinks.mysql.loaders.base import Field, Loader, encoded, parts
from semel.sinks.mysql.types import Column
from semel.sinks.mysql.wire import STMT_BULK_OPERATIONS, Statement

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    Numbers = np.ndarray[Any, np.dtype[Any]]

#: How much one request carries, unless it is a single row: the server answers each, and holds it in memory as a whole.
BULK_BYTES_MAX = 4 * 1024 * 1024
#: The bytes that a packet keeps for its head beside the types.
HEAD_BYTES_MAX = 1024
#: The server has no room for one more prepared statement, or is set to have none.
TOO_MANY_STATEMENTS = 1461

#: Types of parameters, by the names that MariaDB gives them.
TINY, SHORT, LONG, DOUBLE, LONGLONG, DATE, DATETIME = 1, 2, 3, 5, 8, 10, 12
NEWDECIMAL, BLOB, VAR_STRING = 246, 252, 253
INTEGERS = {8: TINY, 16: SHORT, 32: LONG, 64: LONGLONG}
UNSIGNED = 128
#: Character sets whose bytes are those of an Arrow text. In the second, letters of four bytes are refused.
UTF8 = frozenset({"utf8mb4", "utf8mb3", "utf8"})

_DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Cells:
    """What a column adds to each row: numbers, with numpy's names of their forms, and perhaps bytes behind them."""

    numbers: Sequence[tuple[str, Numbers | int]]
    tail: pa.Array | None = None


@dataclass(frozen=True)
class Binary:
    """How a column is sent: the type and the flag of its parameter, and what makes its cells."""

    type: int
    cells: Callable[[Field, pa.Array], Cells]
    flag: int = 0


# The loader ---------------------------------------------------------------------------------------------------------


def bulk_loader(other: Loader) -> Loader:
    """A loader that does what another one does in less time, where the server lets it; else that one."""
    if not other.connection.extensions & STMT_BULK_OPERATIONS:
        return other
    try:
        return Bulk(other)
    except pymysql_().Error as error:
        if error.args[0] != TOO_MANY_STATEMENTS:
            raise
        return other


class Bulk(Loader):
    """A row that no packet can carry is left to the other loader, which can or says so."""

    def __init__(self, other: Loader) -> None:
        super().__init__(other.connection, other.table, other.fields, other.packet_bytes_max)
        self.other = other
        self.turn = other.turn
        self._statement = Statement(self.connection, self.statement())
        self._head = b""
        self._waiting: list[memoryview] = []
        self._rows = self._bytes = 0

    def statement(self) -> str:
        names = ", ".join(quote(field.name) for field in self.fields)
        places = ", ".join("?" for _ in self.fields)
        return f"INSERT INTO {self.table} ({names}) VALUES ({places})"  # noqa: S608 - quoted

    @property
    def packet_room(self) -> int:
        """How many bytes of rows the server takes at once."""
        return self.packet_bytes_max - HEAD_BYTES_MAX - 2 * len(self.fields)

    def add(self, batch: pa.RecordBatch) -> None:
        ways = self.ways(batch)
        head = self.head(batch, ways)
        if head != self._head and self._waiting:
            self._send()
        self._head = head
        for part in parts(batch):
            self._add(part, encode(part, self.fields, ways))

    def ways(self, batch: pa.RecordBatch) -> list[Binary]:
        """How the columns of a batch are sent, which may be some of ours."""
        ours = {field.name: field for field in self.fields}
        return [binary(field.type, ours[field.name].column) for field in batch.schema]

    def head(self, batch: pa.RecordBatch, ways: Sequence[Binary]) -> bytes:  # noqa: ARG002 - for those who need names
        """What the rows of a batch need before them. Batches that differ in it share no request."""
        return self._statement.head([(way.type, way.flag) for way in ways])

    def _add(self, part: pa.RecordBatch, rows: pa.Array) -> None:
        """Fill one request after the other with whole rows."""
        import numpy as np

        data, ends = memoryview(rows.buffers()[2]), _offsets(rows).astype(np.int64)
        room, at = min(BULK_BYTES_MAX, self.packet_room), 0
        while at < len(rows):
            end = int(np.searchsorted(ends, ends[at] + room - self._bytes, "right")) - 1
            if end <= at and self._waiting:
                self._send()
                continue
            end = max(end, at + 1)
            piece = data[int(ends[at]) : int(ends[end])]
            if len(piece) <= self.packet_room:
                self._waiting.append(piece)
                self._rows, self._bytes = self._rows + end - at, self._bytes + len(piece)
                self.keep(part, at, end - at)
            else:
                self.other.add(part.slice(at, 1))
                self.other.flush()
            at = end

    def _send(self) -> None:
        rows, waiting = self._rows, self._waiting
        self._rows, self._bytes, self._waiting = 0, 0, []
        self.send(rows, waiting)

    def keep(self, part: pa.RecordBatch, first: int, count: int) -> None:
        """Called with the rows that go into the request in hand."""

    def send(self, rows: int, body: Sequence[memoryview]) -> None:
        self._send_in_turn(lambda: self._statement.execute_bulk([self._head, *body]), rows)

    def flush(self) -> None:
        if self._waiting:
            self._send()
        self._statement.close()


# Rows ---------------------------------------------------------------------------------------------------------------


def encode(batch: pa.RecordBatch, fields: Sequence[Field], ways: Sequence[Binary]) -> pa.Array:
    """An Arrow array of bytes: the rows, one after the other."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pieces = list(_pieces(batch, fields, ways))
    return pieces[0] if len(pieces) == 1 else pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def _pieces(batch: pa.RecordBatch, fields: Sequence[Field], ways: Sequence[Binary]) -> Iterator[pa.Array]:
    """Blocks of numbers, with the bytes of varying length between them."""
    block = Block(batch.num_rows)
    for field, way, array in zip(fields, ways, batch.columns, strict=True):
        cells: Cells = encoded(field, array, lambda a, f=field, w=way: w.cells(f, a))  # type: ignore[misc]
        block.put(cells.numbers, array)
        if cells.tail is not None:
            yield block.rows()
            yield cells.tail
            block = Block(batch.num_rows)
    if block.forms:
        yield block.rows()


class Block:
    """Numbers that stand side by side in each row. For a null there is only the byte that says so."""

    def __init__(self, rows: int) -> None:
        self.count = rows
        self.forms: list[tuple[str, str]] = []
        self.values: list[Numbers | int] = []
        self.width = 0
        #: Which rows are without the bytes from here to there.
        self.gaps: list[tuple[Numbers, int, int]] = []

    def put(self, numbers: Sequence[tuple[str, Numbers | int]], array: pa.Array) -> None:
        import numpy as np

        absent = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        first = self.width + 1
        for form, values in [("u1", 0 if absent is None else absent), *numbers]:
            self.forms.append((f"f{len(self.forms)}", form))
            self.values.append(values)
            self.width += np.dtype(form).itemsize
        if absent is not None and self.width > first:
            self.gaps.append((absent, first, self.width))

    def rows(self) -> pa.Array:
        import numpy as np

        table = np.empty(self.count, np.dtype(self.forms))
        for (name, _), values in zip(self.forms, self.values, strict=True):
            table[name] = values
        cells = table.view(np.uint8)
        sizes = np.full(self.count, self.width)
        if self.gaps:
            used = np.ones((self.count, self.width), bool)
            for absent, first, end in self.gaps:
                used[absent, first:end] = False
                sizes -= absent * (end - first)
            cells = cells[used.ravel()]
        return _from_sizes(sizes, cells)


def _from_sizes(sizes: Numbers, data: Numbers) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _offsets(array: pa.Array) -> Numbers:
    import numpy as np

    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


# Columns ------------------------------------------------------------------------------------------------------------
# What a column cannot hold is refused by its text form, which also says why: that form is made of the smallest and the
# largest value, and of all of them where something is wrong with one.


def binary(arrow: Any, column: Column) -> Binary:
    """How values of an Arrow type are sent. The server turns them into what the column holds."""
    import pyarrow as pa

    t = pa.types
    if t.is_integer(arrow):
        return Binary(INTEGERS[arrow.bit_width], _integers, UNSIGNED if t.is_unsigned_integer(arrow) else 0)
    fixed = {
        Binary(DOUBLE, _floats): t.is_floating,
        Binary(TINY, _booleans): t.is_boolean,
        Binary(NEWDECIMAL, _texts): t.is_decimal,
        Binary(DATE, _dates): t.is_date,
        Binary(DATETIME, _timestamps): t.is_timestamp,
        # As bytes where they are what the column holds: the server would count the letters of each text, and then look
        # at them all the same when it stores them.
        Binary(BLOB if column.charset in UTF8 else VAR_STRING, _texts): lambda a: (
            t.is_string(a) or t.is_large_string(a)
        ),
    }
    return next((way for way, fits in fixed.items() if fits(arrow)), Binary(BLOB, _bytes))


def _values(array: pa.Array, form: str) -> Numbers:
    """Arrow's own memory. What stands in the place of a null does not matter."""
    import numpy as np

    return np.frombuffer(array.buffers()[1], form)[array.offset : array.offset + len(array)]


def _check_ends(field: Field, array: pa.Array) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    ends = pc.min_max(array)
    field.encode.text(pa.concat_arrays([pa.repeat(ends[end], 1) for end in ("min", "max")]))


def _integers(field: Field, array: pa.Array) -> Cells:
    import pyarrow as pa

    _check_ends(field, array)
    letter = "u" if pa.types.is_unsigned_integer(array.type) else "i"
    form = f"<{letter}{array.type.bit_width // 8}"
    return Cells([(form, _values(array, form))])


def _floats(field: Field, array: pa.Array) -> Cells:
    import numpy as np
    import pyarrow as pa

    values = _values(array.cast(pa.float64()), "<f8")
    if not np.isfinite(values).all():
        # Unless it is one that stands in the place of a null.
        field.encode.text(array)
    return Cells([("<f8", values)])


def _booleans(_: Field, array: pa.Array) -> Cells:
    import pyarrow as pa

    return Cells([("u1", _values(array.cast(pa.uint8()), "u1"))])


def _texts(field: Field, array: pa.Array) -> Cells:
    """Text, and decimals."""
    import pyarrow as pa

    return _counted(field.encode.text(array).cast(pa.binary()))


def _bytes(field: Field, array: pa.Array) -> Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    plain = array.cast(pa.binary())
    sizes = pc.min_max(pc.binary_length(plain)).as_py()
    if field.column.type == "binary" and {*sizes.values()} - {field.column.octets, None}:
        field.encode.text(array)
    return _counted(plain)


def _counted(array: pa.Array) -> Cells:
    """Bytes after their number, which is in one of the longer forms for all rows if one of them needs it."""
    import numpy as np

    array = array.fill_null(b"") if array.null_count else array
    sizes = np.diff(_offsets(array))
    most = int(sizes.max())
    if most < 251:
        return Cells([("u1", sizes)], array)
    mark, form = (252, "<u2") if most < 1 << 16 else (254, "<u8")
    return Cells([("u1", mark), (form, sizes)], array)


def _dates(field: Field, array: pa.Array) -> Cells:
    import pyarrow as pa

    _check_ends(field, array)
    return Cells([("u1", 4), *_date(_values(array.cast(pa.date32()), "<i4"))])


def _timestamps(field: Field, array: pa.Array) -> Cells:
    """The time in UTC."""
    import numpy as np
    import pyarrow as pa

    _check_ends(field, array)
    moments = _values(array.cast(pa.timestamp("us", array.type.tz)), "<i8")
    if field.column.fraction < 6 and (moments % 10 ** (6 - field.column.fraction)).any():
        field.encode.text(array)
    days = moments // _DAY_US
    left = moments - days * _DAY_US
    seconds = (left // 1_000_000).astype(np.int32)
    minutes = seconds // 60
    hours = minutes // 60
    clock = [("u1", hours), ("u1", minutes - hours * 60), ("u1", seconds - minutes * 60)]
    return Cells([("u1", 11), *_date(days), *clock, ("<u4", left - seconds.astype(np.int64) * 1_000_000)])


def _date(days: Numbers) -> list[tuple[str, Numbers]]:
    import numpy as np

    months = days.astype("M8[D]").astype("M8[M]")
    number = months.astype(np.int64)
    years = number // 12
    first_days = months.astype("M8[D]").astype(np.int64)
    return [("<u2", years + 1970), ("u1", number - years * 12 + 1), ("u1", days - first_days + 1)]
