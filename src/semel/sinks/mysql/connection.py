"""Rows into a table: by LOAD DATA where the server lets clients send data, else by INSERT with many rows.

What MariaDB takes with less effort is in mysql_bulk.

The text of LOAD DATA is made from whole Arrow columns without a Python call per row. A LOAD DATA LOCAL turns errors
into warnings, rows that break a key or a constraint it leaves out ("LOCAL" at
https://dev.mysql.com/doc/refman/8.4/en/load-data.html), so rows and warnings are counted after each.
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, MissingExtra
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.types import Column, Encode, Unfit

if TYPE_CHECKING:
    import pyarrow as pa

#: How much text one statement carries: enough to be quick, little enough for memory and for the server's patience.
LOAD_BYTES_MAX = 16 * 1024 * 1024
INSERT_BYTES_MAX = 4 * 1024 * 1024
PACKET_BYTES_MAX = 1024 * 1024
#: One Arrow array of text holds 2 GiB; what is larger is encoded in parts.
BATCH_BYTES_MAX = 64 * 1024 * 1024
WARNINGS_SHOWN = 3
TURN_S_MAX = 5

#: After these the connection is of no use: killed, shut down, idle for too long.
CONNECTION_ENDED = frozenset({1053, 1079, 1080, 1152, 1184, 1927, 2006, 2013, 2055, 4031})

#: In this order: what is put in for the others has a backslash.
ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\0": "\\0"}


# The client ---------------------------------------------------------------------------------------------------------


def pymysql_() -> Any:
    try:
        import pymysql
        import pymysql.connections
    except ImportError:
        raise MissingExtra("The MySql sink needs PyMySQL, which is not installed.", extra="mysql") from None
    return pymysql


@cache
def unchecked_tls() -> ssl.SSLContext:
    """For a server that nobody asked to prove who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class QuickTls:
    """Goes before PyMySQL's connection, which would read all authorities of this machine first, for every connection,
    also where it asks none of them: 20 ms, for which a task has to wait."""

    def _create_ssl_ctx(self, settings: Any) -> Any:
        return super()._create_ssl_ctx(settings) if settings else unchecked_tls()  # type: ignore[misc]


@cache
def connection_type() -> Any:
    """PyMySQL's connection, but one that never opens a file, and agrees on what PyMySQL does not know.

    In LOAD DATA LOCAL it is the server that names the file to send, in answer to any statement: a hostile server could
    ask for any file of this machine. Ours sends the bytes that were offered for that statement, and nothing else.
    """
    client = pymysql_()

    class Result(client.connections.MySQLResult):  # type: ignore[misc, name-defined] # the client has no types
        def _read_load_local_packet(self, first_packet: Any) -> None:
            connection = self.connection
            asked = bytes(first_packet.get_all_data()[1:])
            name, pieces = connection.take_offer()
            if asked != name:
                connection._force_close()
                raise ConfigError(
                    f"The MySQL server at {connection.host} asked for a file of this machine that nobody offered: "
                    f"{asked.decode(errors='replace')!r}. Nothing was sent.",
                    data_now="nothing of the batch is visible",
                    remedy="Do not trust this server before you know why it asks.",
                )
            for piece in pieces:
                connection.write_packet(piece)
            connection.write_packet(b"")
            self._read_ok_packet(connection._read_packet())

    class Connection(QuickTls, mysql_wire.Extended, client.connections.Connection):  # type: ignore[misc, name-defined]
        _offer: tuple[bytes, Sequence[Any]] = (b"", ())

        def offer(self, name: bytes, pieces: Sequence[Any]) -> None:
            self._offer = (name, pieces)

        def take_offer(self) -> tuple[bytes, Sequence[Any]]:
            """What may be sent: once."""
            offer, self._offer = self._offer, (b"", ())
            return offer

        def _read_query_result(self, unbuffered: bool = False) -> Any:  # noqa: ARG002 - we read all at once
            self._result = None
            result = Result(self)
            try:
                result.read()
            except client.Error as error:
                if error.args and error.args[0] in CONNECTION_ENDED:
                    self._force_close()
                raise
            self._result = result
            if result.server_status is not None:
                self.server_status = result.server_status
            return result.affected_rows

    return Connection


def quote(identifier: str) -> str:
    return "`" + identifier.replace("`", "``") + "`"


def turn_of(target: str) -> str:
    """By which the tasks that load one table take turns, where all of them append to the same end of it.

    A table without a key of its own is an index over a number that counts up. Two sessions that fill its last page at a
    time spend as much on waiting for each other as on their rows (docs/performance.md); one after the other, the one
    loads while the other encodes.
    """
    return f"semel-turn-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


# The loader ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A column of the rows: where it goes and how. One that takes no nulls gets none."""

    name: str
    encode: Encode
    column: Column


class Loader(ABC):
    """Loads batches into one table. What `add` keeps back is sent by `flush`, which comes last."""

    #: A user lock of the server. Who has one sends its rows when nobody else with the same does (`turn_of`).
    turn = ""

    def __init__(self, connection: Any, table: str, fields: Sequence[Field], packet_bytes_max: int) -> None:
        self.connection = connection
        self.table = table
        self.fields = fields
        self.packet_bytes_max = packet_bytes_max

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    def _run(self, statement: str, rows: int) -> None:
        self._send_in_turn(lambda: self.connection.cursor().execute(statement), rows)

    def _send_in_turn(self, send: Callable[[], Any], rows: int) -> None:
        """A turn is for speed only: whoever waits for one too long goes ahead, and takes none any more.

        A turn ends with its connection at the latest.
        """
        if self.turn:
            cursor = self.connection.cursor()
            cursor.execute("SELECT GET_LOCK(%s, %s)", (self.turn, TURN_S_MAX))
            if cursor.fetchone() != (1,):
                self.turn = ""
        send()
        expect(self.connection, rows)
        if self.turn:
            self.connection.cursor().execute("SELECT RELEASE_LOCK(%s)", (self.turn,))


def expect(connection: Any, rows: int | None) -> None:
    """A row that was left out or changed fails the batch, whatever the server thinks of it.

    Without a number, rows are not counted: a row that replaces another counts as two, or as none.
    """
    result = connection._result
    taken, warnings = result.affected_rows, result.warning_count
    if rows in (None, taken) and not warnings:
        return
    cursor = connection.cursor()
    cursor.execute(f"SHOW WARNINGS LIMIT {WARNINGS_SHOWN}")
    said = "; ".join(dict.fromkeys(str(row[2]).rstrip(".") for row in cursor.fetchall()))
    what = f"{rows - taken} of {rows} rows were left out" if rows not in (None, taken) else "rows were changed"
    raise Unfit(f"{what}: {said or 'the server does not say why'}")


class LoadData(Loader):
    def __init__(self, connection: Any, table: str, fields: Sequence[Field], packet_bytes_max: int) -> None:
        super().__init__(connection, table, fields, packet_bytes_max)
        self._waiting: list[pa.Buffer] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        for part in parts(batch):
            self._waiting.append(_lines(_columns(part, self.fields), self.fields))
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
            self._insert(_columns(part, self.fields))

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


def parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes > BATCH_BYTES_MAX and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from parts(batch.slice(0, half))
        yield from parts(batch.slice(half))
    else:
        yield batch


def _columns(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[pa.Array]:
    return [encoded(field, array, field.encode.text) for field, array in zip(fields, batch.columns, strict=True)]


def encoded(field: Field, array: pa.Array, encode: Callable[[pa.Array], Any]) -> Any:
    """A column in another form; what it cannot hold is named."""
    import pyarrow as pa

    if array.null_count and not field.column.nullable:
        raise Unfit(f"column {field.name}: it takes no nulls")
    try:
        return encode(array)
    except (pa.ArrowInvalid, Unfit) as error:
        raise Unfit(f"column {field.name}: {error}") from None


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
