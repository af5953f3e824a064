"""Rows as text: by LOAD DATA where the server lets clients send data, else by INSERT with many rows.

What MariaDB takes with less effort is in `bulk`.

The text of LOAD DATA is made from whole Arrow columns without a Python call per row. A LOAD DATA LOCAL turns errors
into warnings, rows that break a key or a constraint it leaves out ("LOCAL" at
https://dev.mysql.com/doc/refman/8.4/en/load-data.html), so rows and warnings are counted after each.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.sinks.mysql.connection import quote
from semel.sinks.mysql.loaders.base import Field, Loader, as_text, parts
from semel.sinks.mysql.types import Unfit

if TYPE_CHECKING:
    import pyarrow as pa

#: How much text one statement carries: enough to be quick, little enough for memory and for the server's patience.
LOAD_BYTES_MAX = 16 * 1024 * 1024
INSERT_BYTES_MAX = 4 * 1024 * 1024
PACKET_BYTES_MAX = 1024 * 1024
#: In this order: what is put in for the others has a backslash.
ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\0": "\\0"}


class LoadData(Loader):
    def __init__(self, connection: Any, table: str, fields: Sequence[Field], packet_bytes_max: int) -> None:
        super().__init__(connection, table, fields, packet_bytes_max)
        self._waiting: list[pa.Buffer] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        for part in parts(batch):
            self._waiting.append(_lines(as_text(part, self.fields), self.fields))
            self._rows += part.num_rows
            if sum(len(lines) for lines in self._waiting) >= LOAD_BYTES_MAX:
                self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        name = f"semel-{secrets.token_hex(8)}"
        size = min(PACKET_BYTES_MAX, self.packet_bytes_max)
        pieces = [memoryview(lines)[at : at + size] for lines in self._waiting for at in range(0, len(lines), size)]
        rows, self._waiting, self._rows = self._rows, [], 0
        self.connection.offer(name.encode(), pieces)
        self._run(self._load_statement(name), rows)

    def _load_statement(self, name: str) -> str:
        places, values = [], []
        for number, field in enumerate(self.fields):
            plain = field.encode.expression == "{}"
            places.append(quote(field.name) if plain else f"@semel_{number}")
            if not plain:
                values.append(f"{quote(field.name)} = {field.encode.expression.format(f'@semel_{number}')}")
        return (
            f"LOAD DATA LOCAL INFILE '{name}' INTO TABLE {self.table} CHARACTER SET utf8mb4 "
            r"FIELDS TERMINATED BY '\t' ENCLOSED BY '' ESCAPED BY '\\' LINES TERMINATED BY '\n' STARTING BY '' "
            f"({', '.join(places)})" + (f" SET {', '.join(values)}" if values else "")
        )


class Inserts(Loader):
    """Rows as parameters, as many in a statement as fit a packet."""

    def flush(self) -> None:
        """Nothing waits: a statement is sent when it is full, or its batch ends."""

    def add(self, batch: pa.RecordBatch) -> None:
        for part in parts(batch):
            self._insert(as_text(part, self.fields))

    def _insert(self, columns: Sequence[pa.Array]) -> None:
        names = ", ".join(quote(field.name) for field in self.fields)
        start = f"INSERT INTO {self.table} ({names}) VALUES "  # noqa: S608 - quoted names, no values
        row = "(" + ", ".join(field.encode.expression.format("%s") for field in self.fields) + ")"
        room = min(INSERT_BYTES_MAX, self.packet_bytes_max) - len(start.encode()) - 64
        cursor = self.connection.cursor()
        chosen: list[str] = []
        taken = 0
        for values in zip(*(_listed(column) for column in columns), strict=True):
            text = cursor.mogrify(row, values)
            size = len(text.encode()) + 1
            if chosen and taken + size > room:
                self._run(start + ",".join(chosen), len(chosen))
                chosen, taken = [], 0
            if size + len(start.encode()) > self.packet_bytes_max - 64:
                raise Unfit(
                    f"a row needs {size:,} bytes, more than the server takes at once "
                    f"(max_allowed_packet is {self.packet_bytes_max:,})"
                )
            chosen.append(text)
            taken += size
        if chosen:
            self._run(start + ",".join(chosen), len(chosen))


def _listed(column: pa.Array) -> list[str | None]:
    try:
        listed: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        raise Unfit("a text is not valid UTF-8") from None
    return listed


def _lines(columns: Sequence[pa.Array], fields: Sequence[Field]) -> pa.Buffer:
    """Rows as LOAD DATA reads them: fields between tabs, a line each, \\N for null."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = [_escaped(column) if field.encode.free else column for column, field in zip(columns, fields, strict=True)]
    # A piece in front of each line end takes the nulls out of the last column.
    texts[-1] = pc.binary_join_element_wise(
        texts[-1], "", pa.scalar("\n"), null_handling="replace", null_replacement="\\N"
    )
    lines = pc.binary_join_element_wise(*texts, pa.scalar("\t"), null_handling="replace", null_replacement="\\N")
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)
    return data.slice(int(ends[0]), int(ends[len(lines)] - ends[0]))


def _escaped(array: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    data = bytes(array.buffers()[2] or b"")
    # Few texts need it, and to look is quicker than to replace.
    for plain, escaped in ESCAPES.items():
        if plain.encode() in data:
            array = pc.replace_substring(array, plain, escaped)
    return array
