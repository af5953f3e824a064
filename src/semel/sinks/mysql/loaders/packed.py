"""Rows that wait in MariaDB as the requests that will insert them.

A task could stage rows in a table like the target, for the driver to move with INSERT .. SELECT: then the server takes
every row apart twice. Here the task stores whole requests of `bulk` as blobs, and the driver sends them as they
are: to stage a row costs a fifth, and to move it what it cost before (docs/performance.md).

    a packed stage    number | rows | layout | keys, in mode dedup | body

The layout says of each column of the body its name, type and flag, which columns the keys are, and the number of this
format: mode dedup keeps the keys for as long as it remembers them.

A server without such requests, a row that fills a packet, and modes that must look at rows once more in SQL have plain
stages (`writer`, `moves`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from semel import formats
from semel.sinks.mysql.connection import number_of, pymysql_, quote
from semel.sinks.mysql.loaders.base import Loader, require_taken
from semel.sinks.mysql.loaders.bulk import BLOB, LONG, TOO_MANY_STATEMENTS, VAR_STRING, Binary, Bulk, encode
from semel.sinks.mysql.types import Unfit
from semel.sinks.mysql.wire import STMT_BULK_OPERATIONS, Statement

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.sql.store import Session

#: No column of a user's is named so.
COLUMNS = (
    "semel_number int unsigned NOT NULL PRIMARY KEY, semel_rows int unsigned NOT NULL, "
    "semel_layout longtext CHARACTER SET utf8mb4 NOT NULL, semel_keys longblob NULL, semel_body longblob NOT NULL"
)
NUMBERS = "SELECT semel_number FROM {stage} ORDER BY 1"
FIRST_LAYOUT = "SELECT semel_layout FROM {stage} ORDER BY semel_number LIMIT 1"
ONE_OF_ALL = "SELECT semel_rows, semel_layout, semel_body FROM {stage} WHERE semel_number = %s"
ONE_OF_KEYS = "SELECT semel_rows, semel_layout, semel_keys FROM {stage} WHERE semel_number = %s"
#: What a value takes that is no text and no bytes, at most: a decimal of 65 digits. And the size of one that is.
CELL_BYTES_MAX = 80
#: The server's number for a value that it has changed.
DATA_TRUNCATED = 1265


def can_pack(connection: Any) -> bool:
    """Whether a server takes requests of many rows, and has room for the statement that they need."""
    if not connection.extensions & STMT_BULK_OPERATIONS:
        return False
    try:
        Statement(connection, "DO 1").close()
    except pymysql_().Error as error:
        if number_of(error) != TOO_MANY_STATEMENTS:
            raise
        return False
    return True


def is_packed(columns: Sequence[str]) -> bool:
    return "semel_body" in columns


# The task ---------------------------------------------------------------------------------------------------------


class Packer(Bulk):
    """Stores requests where another loader would send them. With `key`, also one that inserts only those columns."""

    def __init__(self, other: Loader, key: Sequence[str]) -> None:
        self.key = key
        self._number = 0
        self._with_keys: list[pa.RecordBatch] = []
        super().__init__(other)

    def statement(self) -> str:
        return f"INSERT INTO {self.table} VALUES (?, ?, ?, ?, ?)"  # noqa: S608 - quoted

    @property
    def packet_room(self) -> int:
        """The names of columns travel along, and keys may be all that a row has."""
        names = sum(len(name.encode()) for name in (*(field.name for field in self.fields), *self.key))
        room = super().packet_room - 4 * names - 32 * len(self.fields)
        return room // 2 if self.key else room

    def fits(self, batch: pa.RecordBatch) -> bool:
        """Whether every row fits a request. Where that takes a closer look, the answer may be no too often."""
        return batch.nbytes < self.packet_room // 8 or _row_bytes_max(batch) < self.packet_room

    def head(self, batch: pa.RecordBatch, ways: Sequence[Binary]) -> bytes:
        columns = [(name, way.type, way.flag) for name, way in zip(batch.schema.names, ways, strict=True)]
        return json.dumps({"format": formats.REQUESTS, "columns": columns, "key": list(self.key)}).encode()

    def keep(self, part: pa.RecordBatch, first: int, count: int) -> None:
        if self.key:
            self._with_keys.append(part.slice(first, count).select(list(self.key)))

    def send(self, rows: int, body: Sequence[memoryview]) -> None:
        keys, self._with_keys = self._with_keys, []
        request = [
            self._statement.head([(LONG, 0), (LONG, 0), (VAR_STRING, 0), (BLOB, 0), (BLOB, 0)]),
            struct.pack("<BIBI", 0, self._number, 0, rows),
            *_bytes([self._head]),
            *(_bytes(self._packed(keys)) if self.key else [b"\1"]),
            *_bytes(body),
        ]
        self._number += 1
        self._statement.execute_bulk(request)
        require_taken(self.connection, 1)

    def _packed(self, batches: Sequence[pa.RecordBatch]) -> Iterator[memoryview]:
        fields = {field.name: field for field in self.fields}
        for batch in batches:
            rows = encode(batch, [fields[name] for name in self.key], self.ways(batch))
            yield memoryview(rows.buffers()[2])


def _bytes(pieces: Any) -> list[Any]:
    """A value that is not null, after its size."""
    found = list(pieces)
    return [struct.pack("<BBQ", 0, 254, sum(map(len, found))), *found]


def _row_bytes_max(batch: pa.RecordBatch) -> int:
    """No row takes more: the largest values of all columns, as if they stood in one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    t = pa.types
    varying = (t.is_string, t.is_large_string, t.is_binary, t.is_large_binary)
    largest = [pc.max(pc.binary_length(c)).as_py() for c in batch.columns if any(kind(c.type) for kind in varying)]
    return int(CELL_BYTES_MAX * batch.num_columns + sum(filter(None, largest)))


# The driver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The requests of one packed stage, whose name is quoted."""

    session: Session
    stage: str

    def names(self) -> list[str]:
        """The columns of the rows; none where there are no rows."""
        return [name for name, _, _ in self._first.get("columns", ())]

    def has_keys(self, key: Sequence[str]) -> bool:
        """Whether there are requests of these columns alone. A sink may have had another key when it stored them."""
        return self._first.get("key") == list(key)

    @cached_property
    def _first(self) -> dict[str, Any]:
        """The layout of the first request."""
        found = self.session(FIRST_LAYOUT, stage=self.stage)
        return dict(json.loads(found[0][0])) if found else {}

    def send(self, insert: Callable[[Sequence[str]], str], *, key: Sequence[str] = (), counted: bool = True) -> int:
        """Send each request, with the statement that `insert` makes of the names of its columns. Returns the rows.

        With `key`, the requests that insert only those columns. One by one: a stage may be larger than our memory. The
        next one is fetched while the server works on the one before, if there is a connection for that.
        """
        sent, prepared = 0, {}
        requests = self._requests(ONE_OF_KEYS if key else ONE_OF_ALL)
        found = next(requests, None)
        try:
            while found is not None:
                rows, layout, body = found
                described = {name: (kind, flag) for name, kind, flag in layout["columns"]}
                names = tuple(key or described)
                if names not in prepared:
                    prepared[names] = Statement(self.session.connection, insert(names))
                head = prepared[names].head([described[name] for name in names])
                with prepared[names].executing_bulk([head, body]):
                    found = next(requests, None) if self.session.beside else None
                self._expect(rows if counted else None)
                sent += rows
                if not self.session.beside:
                    found = next(requests, None)
        finally:
            # The connection outlives the batch, and a server holds so many statements and no more.
            for statement in prepared.values():
                with suppress(Exception):  # on a dead connection there is none
                    statement.close()
        return sent

    def _requests(self, sql: str) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        """The numbers are asked for in the transaction: so the table cannot go until it ends."""
        fetch = self.session.beside or self.session
        for (number,) in self.session(NUMBERS, stage=self.stage):
            ((rows, layout, body),) = fetch(sql, (number,), stage=self.stage)
            yield rows, json.loads(layout), body

    def _expect(self, rows: int | None) -> None:
        """What the server did to rows without calling it an error is one of its errors here."""
        try:
            require_taken(self.session.connection, rows)
        except Unfit as error:
            raise pymysql_().err.DataError(DATA_TRUNCATED, str(error)) from None


def inserting(target: str, more: Sequence[tuple[str, str]] = (), updates: str = "") -> Callable[[Sequence[str]], str]:
    """Makes statements that insert into a table, with literals for some more columns."""

    def statement(names: Sequence[str]) -> str:
        columns = ", ".join([*map(quote, names), *(quote(name) for name, _ in more)])
        values = ", ".join([*("?" for _ in names), *(literal for _, literal in more)])
        return f"INSERT INTO {target} ({columns}) VALUES ({values}){updates}"  # noqa: S608 - quoted, and our own

    return statement
