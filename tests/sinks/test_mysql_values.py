"""Values that come back as they were, those that a column cannot hold, and the ways in: by bulk, LOAD DATA, INSERT."""

from __future__ import annotations

import datetime as dt
import math
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.dev.mariadb import MariaDbServer
from semel.errors import BatchFailed, ConfigError
from semel.protocol.events import Outcome
from semel.sinks.mysql import connection as mysql_connection
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.connection import MySqlPlace
from semel.sinks.mysql.loaders import base as mysql_loaders
from semel.sinks.mysql.loaders import bulk as mysql_bulk
from semel.sinks.mysql.loaders import text as mysql_text
from semel.sinks.mysql.loaders.base import Field, Loader
from semel.sinks.mysql.loaders.bulk import Bulk
from semel.sinks.mysql.loaders.packed import Packer
from semel.sinks.mysql.loaders.text import Inserts, LoadData
from semel.sinks.mysql.types import Column, encoder
from semel.sinks.mysql.writer import MySqlWriter
from semel.testing.harness import attempt
from tests.sinks.mysql_rig import Database, commit, db, own_server, write
from tests.sinks.participants import column, prepare, rows, started

__all__ = ["db", "own_server"]
UTC = dt.timezone.utc


# Values -----------------------------------------------------------------------------------------------------------

MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 123456)
TEXTS = ["", "\\N", "NULL", "a\tb\nc\r\\d\0e\x1a'\"`;--", "žluťoučký 🐎", " spaces ", "%s {x} %%", "\\", "\t"]
FLOATS = [0.1, -1e308, 1.7976931348623157e308, 5e-310, 1 / 3, -0.0, 123456789.123456789]
BYTES = [b"", bytes(range(256)), b"\\N", "ž".encode()]

#: type of the column, type of the rows, values; each is written and read again, with nulls between.
VALUES: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "tinyint": ("tinyint", pa.int8(), [-128, 0, 127]),
    "smallint": ("smallint", pa.int16(), [-(2**15), 2**15 - 1]),
    "mediumint": ("mediumint", pa.int32(), [-(2**23), 2**23 - 1]),
    "int": ("int", pa.int32(), [-(2**31), 2**31 - 1]),
    "bigint": ("bigint", pa.int64(), [-(2**63), 2**63 - 1]),
    "unsigned": ("bigint unsigned", pa.int64(), [0, 2**63 - 1]),
    "narrower": ("tinyint unsigned", pa.int64(), [0, 255]),
    "integer into decimal": ("decimal(20,1)", pa.int64(), [-(2**63), 2**63 - 1]),
    "double": ("double", pa.float64(), FLOATS),
    "float into double": ("double", pa.float32(), [0.5, -1.25, 2.0**100]),
    "decimal": ("decimal(38,18)", pa.decimal128(38, 18), [Decimal("-1.000000000000000001"), Decimal("1E-18"), 0]),
    "wider decimal": ("decimal(65,20)", pa.decimal128(10, 2), [Decimal("99999999.99"), Decimal("-0.01")]),
    "boolean": ("boolean", pa.bool_(), [True, False]),
    "bit": ("bit(1)", pa.bool_(), [True, False]),
    "char": ("char(10)", pa.string(), ["", "abc"]),
    "varchar": ("varchar(100)", pa.string(), TEXTS),
    "text": ("text", pa.large_string(), TEXTS),
    "json": ("json", pa.string(), ['{"a": "b\\\\n\\"", "ž": [1, null]}']),
    "binary": ("binary(4)", pa.binary(), [b"\0\0\0\0", b"\xff\t\n\\"]),
    "varbinary": ("varbinary(300)", pa.binary(), BYTES),
    "blob": ("blob", pa.large_binary(), BYTES),
    "date": ("date", pa.date32(), [dt.date(1000, 1, 1), dt.date(9999, 12, 31), dt.date(2024, 2, 29)]),
    "datetime": ("datetime(6)", pa.timestamp("us"), [MOMENT, dt.datetime(1000, 1, 1), dt.datetime(9999, 12, 31)]),
    "whole seconds": ("datetime", pa.timestamp("us"), [MOMENT.replace(microsecond=0)]),
    "milliseconds": ("datetime(3)", pa.timestamp("ms"), [MOMENT.replace(microsecond=123000)]),
}


def padded(values: Sequence[Any]) -> list[Any]:
    """With a null before, between and after."""
    return [None, *(item for value in values for item in (value, None))]


def as_read(kind: str, value: Any) -> Any:
    """What the client makes of a value."""
    if value is None:
        return None
    if kind.startswith(("boolean", "bit")):
        return bytes([value]) if kind.startswith("bit") else int(value)
    return Decimal(value) if kind.startswith("decimal") else value


@pytest.mark.parametrize("mode", ["ledger", "xa"])
@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(db: Database, name: str, mode: str) -> None:
    kind, arrow, values = VALUES[name]
    db.create(f"n int, x {kind} NULL")
    given = padded(values)
    batch = pa.RecordBatch.from_arrays([pa.array(range(len(given)), pa.int32()), pa.array(given, arrow)], ["n", "x"])
    write(db.sink(mode), batch)
    assert [x for _, x in db.rows(order="n")] == [as_read(kind, value) for value in given]


def test_every_value_of_a_float_is_kept(db: Database) -> None:
    """A float is shown with six digits, but it has more."""
    db.create("n int, x float")
    values = [0.1, 1 / 3, 16777216.0, 3.4028234663852886e38, 1.17549435e-38]
    batch = pa.RecordBatch.from_arrays([pa.array(range(5), pa.int32()), pa.array(values, pa.float32())], ["n", "x"])
    write(db.sink(), batch)
    found = [struct.pack("f", x) for (x,) in db.rows("x * 1e0", "n")]
    assert found == [struct.pack("f", value) for value in values]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Prague", "+05:30"])
def test_an_instant_is_the_same_instant_in_a_timestamp(db: Database, zone: str) -> None:
    db.create("x timestamp(6) NULL")
    values = [dt.datetime(2024, 7, 1, 12, 0, 0, 1, tzinfo=UTC), dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), None]
    write(db.sink(), column(values, pa.timestamp("us", zone)))
    found = db.rows("unix_timestamp(x)", "x IS NULL, x DESC")
    assert found == [(Decimal("1719835200.000001"),), (Decimal("1.000000"),), (None,)]


def test_a_slice_of_a_batch_is_written_and_nothing_beside_it(db: Database) -> None:
    db.create("x varbinary(10), y varchar(10)")
    whole = pa.RecordBatch.from_arrays(
        [pa.array([b"a", b"b", None, b"d"]), pa.array(["1\t", None, "3\n", "4\\"])], ["x", "y"]
    )
    write(db.sink(), [whole.slice(1, 2), whole.slice(3)])
    assert db.rows(order="y IS NULL, y") == [(None, "3\n"), (b"d", "4\\"), (b"b", None)]


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_large_values(db: Database, mode: str) -> None:
    sink = db.sink(mode)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("data", pa.binary())])
    text, data = "ž\t" * 5_000_000, bytes(range(256)) * 16_000
    write(sink, pa.RecordBatch.from_pylist([{"id": 1, "text": text, "data": data}], schema=schema))
    assert db.rows("id, sha2(text, 256) = sha2(repeat('ž\\t', 5000000), 256), length(data)") == [(1, 1, len(data))]


def test_many_rows_go_in_several_statements(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_wire, "WANTED", 0)
    monkeypatch.setattr(mysql_text, "LOAD_BYTES_MAX", 10_000)
    monkeypatch.setattr(mysql_loaders, "BATCH_BYTES_MAX", 50_000)
    monkeypatch.setattr(mysql_text, "PACKET_BYTES_MAX", 1_000)
    write(db.sink(), [rows(*((n, f"row {n}") for n in range(20_000))), rows(*((n, "x") for n in range(100)))])
    assert db.rows("count(*), sum(id), count(DISTINCT text)", "1") == [(20_100, 199_990_000 + 4_950, 20_001)]


NAN = float("nan")
#: type of the column, type of the rows, values, what the error says.
UNFIT: dict[str, tuple[str, pa.DataType, list[Any], str]] = {
    "nan": ("double", pa.float64(), [1.0, NAN], "column x: MySQL has no NaN and no infinity"),
    "infinity": ("float", pa.float32(), [math.inf], "column x: MySQL has no NaN and no infinity"),
    "large integer": ("int", pa.int64(), [1, 2**31], "column x: 2147483648 is out of range"),
    "mediumint": ("mediumint", pa.int32(), [-(2**23) - 1], "column x: -8388609 is out of range"),
    "negative": ("int unsigned", pa.int32(), [-1], "column x: -1 is out of range"),
    "digits before the point": ("decimal(4,2)", pa.decimal128(6, 2), [Decimal("100.00")], "column x: .*precision"),
    "digits behind the point": ("decimal(4,1)", pa.decimal128(6, 2), [Decimal("1.25")], "column x: .*data loss"),
    "integer into decimal": ("decimal(4,1)", pa.int64(), [1000], "column x: 1000 is out of range"),
    "year 10000": ("datetime(6)", pa.timestamp("us"), [253402300800000000], "column x: 10000-01-01 .* out of range"),
    "year 999": ("date", pa.date32(), [dt.date(999, 12, 31)], "column x: 0999-12-31 is out of range"),
    "before 1970": ("timestamp(6)", pa.timestamp("us", "UTC"), [0], "column x: 1970-01-01 .* out of range"),
    "after 2038": ("timestamp(6)", pa.timestamp("us", "UTC"), [2**31 * 1_000_000], "'?x[`']? at row 1"),
    "microseconds": ("datetime(3)", pa.timestamp("us"), [MOMENT], "column x: the column holds 3 digits of a second"),
    "nanoseconds": ("datetime(6)", pa.timestamp("ns"), [1], "column x: .*lose data"),
    "short binary": ("binary(4)", pa.binary(), [b"abc"], "column x: the column holds exactly 4 bytes"),
    "long text": (
        "varchar(3)",
        pa.string(),
        ["abc", "abcd"],
        "Data (truncated|too long) for column 'x' at row 2",
    ),
    "trailing spaces": ("varchar(3)", pa.string(), ["abc  "], "rows were changed: Data truncated for column 'x'"),
    "long bytes": ("varbinary(3)", pa.binary(), [b"abcd"], "Data (truncated|too long) for column 'x'"),
    "letters": ("varchar(9) CHARACTER SET latin1", pa.string(), ["ž🐎"], "Incorrect string value"),
    "null": ("int NOT NULL", pa.int32(), [1, None], "column x: it takes no nulls"),
    "null for a number": ("int AUTO_INCREMENT PRIMARY KEY", pa.int32(), [None], "column x: it takes no nulls"),
    "json": ("json", pa.string(), ["{'a'"], "CONSTRAINT `.*x` failed|Invalid JSON text.*x"),
    "check": ("int NULL CHECK (x > 0)", pa.int32(), [1, 0], "CONSTRAINT `.*x` failed|Check constraint .* is violated"),
    "utf-8": ("varchar(9)", pa.string(), [b"\xff\xfe"], "Invalid utf8mb4|Incorrect string"),
}


@pytest.mark.parametrize("mode", ["ledger", "xa"])
@pytest.mark.parametrize("name", UNFIT)
def test_what_a_column_cannot_hold_fails_the_batch(db: Database, name: str, mode: str) -> None:
    kind, arrow, values, expected = UNFIT[name]
    db.create(f"x {kind}" if "NULL" in kind or "PRIMARY" in kind else f"x {kind} NULL")
    if name == "utf-8":
        made = pa.array(values, pa.binary())
        array = pa.Array.from_buffers(pa.string(), len(made), made.buffers())
        batch = pa.RecordBatch.from_arrays([array], ["x"])
    else:
        batch = column(values, arrow)
    sink = db.sink(mode)
    sink.check(batch.schema)
    with started(sink) as participant:
        with pytest.raises(BatchFailed, match=expected):
            prepare(participant, sink, attempt(), batch)
        participant.abort(participant.recover().branches)
    assert (db.rows(order="1"), db.staged()) == ([], [])


def test_zero_is_a_number_and_not_a_wish_for_the_next_one(db: Database) -> None:
    db.create("id bigint AUTO_INCREMENT PRIMARY KEY, text varchar(9)")
    write(db.sink(), rows((0, "zero"), (-1, "minus one")))
    assert db.rows() == [(-1, "minus one"), (0, "zero")]


# Three ways in ------------------------------------------------------------------------------------------------------

WAYS: dict[str, type[Loader]] = {"bulk": Bulk, "load data": LoadData, "insert": Inserts}
#: What comes back in another form than it was given.
MORE: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "float": ("float", pa.float32(), [0.1, 1 / 3, 3.4028234663852886e38]),
    "instant": ("timestamp(6)", pa.timestamp("us", "Europe/Prague"), [MOMENT, dt.datetime(2038, 1, 19, 3, 14, 7)]),
    "large": ("bigint unsigned", pa.uint64(), [2**64 - 1, 0]),
}
EVERY = VALUES | MORE
#: What the server refuses and not we.
REFUSED = ("after 2038", "long text", "trailing spaces", "long bytes", "letters", "json", "check", "utf-8")


def every_type() -> pa.RecordBatch:
    arrays, names = [], []
    for name, (_, arrow, values) in EVERY.items():
        given = padded(values)
        arrays.append(pa.array((given * 50)[:100], arrow))
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[type[Loader]]:
    """The ways in that tasks have chosen."""
    found: list[type[Loader]] = []
    plain = MySqlWriter._begin_piece

    def choose(writer: MySqlWriter) -> Loader:
        loader = plain(writer)
        found.append(type(loader))
        return loader

    monkeypatch.setattr(MySqlWriter, "_begin_piece", choose)
    return found


def going(way: str, db: Database, own_server: MariaDbServer, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database that rows go into this way."""
    if way != "bulk":
        monkeypatch.setattr(mysql_wire, "WANTED", 0)
    return Database(own_server.url) if way == "insert" else db


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_every_way_in_gives_the_same_rows(
    db: Database, own_server: MariaDbServer, noted: list[type[Loader]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql_text, "INSERT_BYTES_MAX", 5_000)
    monkeypatch.setattr(mysql_bulk, "BULK_BYTES_MAX", 5_000)
    found = []
    for way in WAYS:
        to = going(way, db, own_server, monkeypatch)
        to.create(", ".join(f"`{name}` {kind} NULL" for name, (kind, _, _) in EVERY.items()))
        write(to.sink(mode, name=f"{way[:4]}{to.suffix}"), every_type())
        found.append(sorted(map(repr, to.rows("*, `float` * 1e0", order="1"))))
        to.run(f"DROP TABLE {to.table}")
    assert noted == [Packer if way is Bulk and mode == "ledger" else way for way in WAYS.values()]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 100


@pytest.mark.parametrize("way", ["load data", "insert"])
@pytest.mark.parametrize("name", REFUSED)
def test_every_way_in_refuses_the_same(
    db: Database, own_server: MariaDbServer, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bulk they were all refused above."""
    to = going(way, db, own_server, monkeypatch)
    kind, arrow, values, _ = UNFIT[name]
    to.create(f"x {kind}")
    array = pa.array(values, arrow if name != "utf-8" else pa.binary())
    array = array if name != "utf-8" else pa.Array.from_buffers(pa.string(), 1, array.buffers())
    with started(to.sink()) as participant:
        with pytest.raises(BatchFailed):
            prepare(participant, to.sink(), attempt(), pa.RecordBatch.from_arrays([array], ["x"]))
        participant.abort(participant.recover().branches)
    assert (to.rows(order="1"), to.staged()) == ([], [])


def test_insert_names_a_row_that_no_packet_can_carry(own_server: MariaDbServer) -> None:
    db = Database(own_server.url)
    with started(db.sink()) as participant:
        with pytest.raises(
            BatchFailed, match=r"a row needs 20,0.* bytes, more than .* \(max_allowed_packet is 16,777,216\)"
        ):
            prepare(participant, db.sink(), attempt(), rows((1, "a" * 20_000_000)))
        promise = prepare(participant, db.sink(), attempt(0, 1), rows((1, "a" * 10_000_000), (2, "b")))
        assert commit(participant, promise) is Outcome.COMMITTED
    assert db.rows("id, length(text)") == [(1, 10_000_000), (2, 1)]


class HostileServer(threading.Thread):
    """Speaks just enough of the protocol to log a client in, and then asks for a file when a statement comes."""

    def __init__(self, wish: bytes, when: bytes) -> None:
        super().__init__(daemon=True)
        self.wish, self.when = wish, when
        self.received = b""
        self.asked = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mysql://user:secret@127.0.0.1:{self.listener.getsockname()[1]}/shop"

    def run(self) -> None:
        client, _ = self.listener.accept()
        with client, suppress(OSError):
            client.settimeout(10)
            capabilities = 0x000FA68F
            greeting = b"\x0a10.11.1-MariaDB\0" + struct.pack("<I", 7) + b"abcdefgh\0"
            greeting += struct.pack("<HBHHB", capabilities & 0xFFFF, 45, 2, capabilities >> 16, 21) + bytes(10)
            greeting += b"ijklmnopqrst\0mysql_native_password\0"
            self.send(client, 0, greeting)
            self.receive(client)
            self.send(client, 2, b"\0\0\0\2\0\0\0")
            while True:
                statement = self.receive(client)
                if self.when in statement:
                    break
                self.send(client, 1, b"\0\0\0\2\0\0\0")
            self.send(client, 1, b"\xfb" + self.wish)
            self.asked = True
            while piece := client.recv(65536):
                self.received += piece

    @staticmethod
    def send(client: socket.socket, number: int, content: bytes) -> None:
        client.sendall(struct.pack("<I", len(content))[:3] + bytes([number]) + content)

    @staticmethod
    def receive(client: socket.socket) -> bytes:
        head = client.recv(4, socket.MSG_WAITALL)
        return client.recv(int.from_bytes(head[:3], "little"), socket.MSG_WAITALL)


@pytest.mark.parametrize("when", [b"SELECT", b"LOAD DATA"])
def test_a_hostile_server_that_asks_for_a_file_gets_nothing(when: bytes) -> None:
    server = HostileServer(b"/etc/passwd", when)
    server.start()
    connection = MySqlPlace(server.url, "", 5).connect()
    text = Column("x", "text", "text")
    encode = encoder(pa.string(), text)
    assert encode is not None
    loader = LoadData(connection, "`t`", [Field("x", encode, text)], 2**20)
    loader.add(column(["our own rows"], pa.string()))
    ask = loader.flush if when == b"LOAD DATA" else lambda: mysql_connection.execute(connection, "SELECT 1")
    with pytest.raises(ConfigError, match="asked for a file of this machine that nobody offered: '/etc/passwd'"):
        ask()
    server.join(10)
    assert (server.asked, server.received, connection.open) == (True, b"", False)
