"""What is special about MySQL and MariaDB: values, modes, names, XA, LOAD DATA, and what they refuse."""

from __future__ import annotations

import datetime as dt
import logging
import math
import pickle
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from semel.dev.mariadb import MariaDbServer, mariadb
from semel.errors import BatchFailed, ConfigError, MissingExtra, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Attempt, Branch, Incarnation
from semel.protocol.events import Committable, Outcome
from semel.sinks import mysql_load, mysql_store
from semel.sinks.base import Context, Participant
from semel.sinks.memory import Memory
from semel.sinks.mysql import MySql
from semel.sinks.mysql_load import Field, Loader, quote
from semel.sinks.mysql_store import FREE, HELD, VISIBLE, Place, end_prepared, fate, parse_xid, settings_of, xid
from semel.sinks.mysql_types import Column, encoder
from tests.contract.harness import OURS, attempt, context, together

KEYED = ("upsert", "dedup", "versions")
MODES = ("ledger", "xa", *KEYED)
UTC = dt.timezone.utc


class Database:
    """The database of a server. Each test has tables of its own, all with the same ending."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.suffix = f"_{uuid.uuid4().hex[:8]}"
        self.table = f"orders{self.suffix}"

    @contextmanager
    def session(self) -> Iterator[Any]:
        with pymysql.connect(**settings_of(self.url), autocommit=True, charset="utf8mb4") as connection:
            cursor = connection.cursor()
            cursor.execute("SET time_zone = '+00:00'")
            yield cursor

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.session() as cursor:
            cursor.execute(sql, values or None)
            return list(cursor.fetchall())

    def create(self, columns: str, engine: str = "InnoDB") -> None:
        self.run(f"CREATE TABLE {self.table} ({columns}) ENGINE = {engine} CHARACTER SET utf8mb4")

    def rows(self, what: str = "*", order: str = "1, 2", view: str = "") -> list[tuple[Any, ...]]:
        return self.run(f"SELECT {what} FROM {self.table}{view} ORDER BY {order}")  # noqa: S608 - ours

    def sink(self, mode: str = "ledger", **settings: Any) -> MySql:
        """A sink of any mode; it creates its table."""
        given: dict[str, Any] = {"key": ["id"] if mode in KEYED else [], "create": True, "timeout_s": 5}
        table = settings.pop("table", self.table)
        name = settings.pop("name", f"mysql{self.suffix}")
        return MySql(settings.pop("url", self.url), table, mode=mode, name=name, **{**given, **settings})

    def staged(self) -> list[str]:
        """Whatever is staged or prepared by us."""
        tables = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = database() "
            "AND left(table_name, 12) = 'semel_stage_' AND locate(%s, table_comment) > 0",
            self.suffix,
        )
        prepared = [str(row[3]) for row in self.run("XA RECOVER") if self.suffix in str(row[3])]
        return [name for (name,) in tables] + prepared

    def end(self) -> None:
        ours = self.run("SHOW FULL TABLES WHERE locate(%s, tables_in_semel) > 0", self.suffix)
        for name, kind in sorted(ours, key=lambda row: row[1] != "VIEW"):
            self.run(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} IF EXISTS {quote(name)}")


@pytest.fixture
def db(mariadb_server: MariaDbServer) -> Iterator[Database]:
    database = Database(mariadb_server.url)
    yield database
    database.end()


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer]:
    """One that does not take data from clients, and may be killed."""
    with mariadb(tmp_path_factory.mktemp("mariadb_own"), settings={"local_infile": "OFF"}, say=print) as server:
        yield server


@contextmanager
def started(sink: MySql, who: Context | None = None) -> Iterator[Participant]:
    participant = sink.participant(who or context())
    try:
        participant.fence()
        yield participant
    finally:
        participant.close()


def prepare(participant: Participant, sink: MySql, which: Attempt, *batches: pa.RecordBatch) -> tuple[Committable, ...]:
    """One task per batch. A task that fails is told to abort, as the runtime does."""
    parts = []
    for task, batch in enumerate(batches):
        writer = sink.writer(Branch(which, sink.name, task, 0))
        try:
            writer.write(batch)
            parts.append(writer.prepare())
        except BaseException:
            writer.abort()
            participant.abort(participant.recover().branches)
            raise
    return participant.prepare(which, parts)


def commit(participant: Participant, committables: Sequence[Committable]) -> Outcome:
    return together([participant.commit(c) for c in committables])


def write(sink: MySql, *batches: pa.RecordBatch | Sequence[pa.RecordBatch], incarnation: int = 1) -> None:
    """Every argument is a batch of the stream: the rows of one task, or a list of those of several."""
    sink.check((batches[0] if isinstance(batches[0], pa.RecordBatch) else batches[0][0]).schema)
    with started(sink, context(incarnation)) as participant:
        for number, batch in enumerate(batches, 100 * (incarnation - 1)):
            tasks = [batch] if isinstance(batch, pa.RecordBatch) else batch
            promise = prepare(participant, sink, attempt(number, 0, incarnation), *tasks)
            assert commit(participant, promise) is Outcome.COMMITTED


def rows(*pairs: tuple[Any, ...], names: Sequence[str] = ("id", "text")) -> pa.RecordBatch:
    """Rows of an int64 and texts."""
    schema = pa.schema([(name, pa.string() if place else pa.int64()) for place, name in enumerate(names)])
    return pa.RecordBatch.from_pylist([dict(zip(names, pair, strict=True)) for pair in pairs], schema=schema)


def stamped(*triples: tuple[int, str, int | None]) -> pa.RecordBatch:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("at", pa.int32())])
    return pa.RecordBatch.from_pylist([{"id": i, "text": t, "at": a} for i, t, a in triples], schema=schema)


def column(values: Sequence[Any], kind: pa.DataType, name: str = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], [name])


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
    monkeypatch.setattr(mysql_load, "LOAD_BYTES_MAX", 10_000)
    monkeypatch.setattr(mysql_load, "BATCH_BYTES_MAX", 50_000)
    monkeypatch.setattr(mysql_load, "PACKET_BYTES_MAX", 1_000)
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
    "after 2038": ("timestamp(6)", pa.timestamp("us", "UTC"), [2**31 * 1_000_000], "rows were changed: .*'x' at row 1"),
    "microseconds": ("datetime(3)", pa.timestamp("us"), [MOMENT], "column x: the column holds 3 digits of a second"),
    "nanoseconds": ("datetime(6)", pa.timestamp("ns"), [1], "column x: .*lose data"),
    "short binary": ("binary(4)", pa.binary(), [b"abc"], "column x: the column holds exactly 4 bytes"),
    "long text": (
        "varchar(3)",
        pa.string(),
        ["abc", "abcd"],
        "rows were changed: Data truncated for column 'x' at row 2",
    ),
    "trailing spaces": ("varchar(3)", pa.string(), ["abc  "], "rows were changed: Data truncated for column 'x'"),
    "long bytes": ("varbinary(3)", pa.binary(), [b"abcd"], "rows were changed: Data truncated for column 'x'"),
    "letters": ("varchar(9) CHARACTER SET latin1", pa.string(), ["ž🐎"], "rows were changed: Incorrect string value"),
    "null": ("int NOT NULL", pa.int32(), [1, None], "column x: it takes no nulls"),
    "null for a number": ("int AUTO_INCREMENT PRIMARY KEY", pa.int32(), [None], "column x: it takes no nulls"),
    "json": ("json", pa.string(), ["{'a'"], "CONSTRAINT `.*x` failed|Invalid JSON text.*x"),
    "check": ("int NULL CHECK (x > 0)", pa.int32(), [1, 0], "CONSTRAINT `.*x` failed|Check constraint .* is violated"),
    "utf-8": ("varchar(9)", pa.string(), [b"\xff\xfe"], "Invalid utf8mb4|rows were changed: Incorrect string"),
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


# Columns and tables -----------------------------------------------------------------------------------------------


def test_a_table_is_created_with_types_that_fit(db: Database) -> None:
    instant = pa.timestamp("us", "UTC")
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()]
    kinds += [pa.binary(), pa.date32(), pa.timestamp("us"), instant, pa.decimal128(38, 18)]
    schema = pa.schema([("id", pa.string()), ("key", pa.binary())] + [(f"c{n}", k) for n, k in enumerate(kinds)])
    empty = dict.fromkeys(schema.names)
    write(db.sink("upsert", key=["id", "key"]), pa.RecordBatch.from_pylist([{**empty, "id": "a", "key": b"k"}], schema))
    found = db.run(
        "SELECT column_type, is_nullable, column_default, extra FROM information_schema.columns "
        "WHERE table_name = %s ORDER BY ordinal_position",
        db.table,
    )
    types = "tinyint(4) smallint(6) int(11) bigint(20) float double tinyint(1) longtext longblob date datetime(6)"
    expected = [*types.split(), "timestamp(6)", "decimal(38,18)"]
    assert [row[0] for row in found] == ["varchar(255)", "varbinary(255)", *expected]
    assert [row[1:] for row in found] == [("NO", None, "")] * 2 + [("YES", "NULL", "")] * len(kinds)
    assert db.run("SELECT engine FROM information_schema.tables WHERE table_name = %s", db.table) == [("InnoDB",)]


def test_keys_that_semel_creates_differ_in_case_accents_and_spaces(db: Database) -> None:
    sink = db.sink("upsert", key="text")
    write(sink, rows((1, "a"), (2, "A"), (3, "á"), (4, "a ")), rows((5, "A")))
    assert db.rows("id", "1") == [(1,), (3,), (4,), (5,)]


def test_keys_of_yours_are_equal_where_the_table_says_so(db: Database) -> None:
    db.create("id bigint, text varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY")
    write(db.sink("upsert", key="text"), [rows((1, "a"), (2, "A")), rows((3, "á"))])
    assert db.rows() == [(3, "A")]


@pytest.mark.parametrize("mode", MODES)
def test_columns_are_matched_by_name_and_the_others_get_their_defaults(db: Database, mode: str) -> None:
    key = {"upsert": ", UNIQUE (id)", "versions": ", UNIQUE (semel_version, id)"}.get(mode, "")
    db.create(
        "number int AUTO_INCREMENT PRIMARY KEY, Text text, state varchar(9) NOT NULL DEFAULT 'new', "
        f"ID bigint NOT NULL, semel_version bigint NOT NULL DEFAULT 0, twice bigint AS (id * 2) STORED{key}"
    )
    write(db.sink(mode, create=False), rows((1, "a"), (2, "b")))
    assert db.rows("ID, Text, state, twice") == [(1, "a", "new", 2), (2, "b", "new", 4)]


MISMATCHES: dict[str, tuple[str, dict[str, Any], pa.DataType, str]] = {
    "missing column": ("y int", {}, pa.int32(), "no column x"),
    "required column": ("x int, y int NOT NULL", {}, pa.int32(), "column y is required and the rows do not have it"),
    "computed column": ("y int, x int AS (y + 1)", {}, pa.int32(), "column x is computed by the server"),
    "type": ("x int", {}, pa.string(), r"column x is int(\(11\))?, the rows have string"),
    "double into float": ("x float", {}, pa.float64(), "column x is float, the rows have double"),
    "instant into datetime": ("x datetime(6)", {}, pa.timestamp("us", "UTC"), "TIMESTAMP_NTZ into a datetime"),
    "no zone into timestamp": ("x timestamp(6)", {}, pa.timestamp("us"), "goes into a timestamp"),
    "time": ("x time(6)", {}, pa.time64("us"), r"column x is time\(6\)"),
    "enum": ("x enum('a')", {}, pa.string(), r"column x is enum\('a'\)"),
    "array": ("x json", {}, pa.list_(pa.int32()), r"Turn x into text with to_json\(\)"),
    "struct": ("x text", {}, pa.struct([("a", pa.int32())]), r"Turn x into text with to_json\(\)"),
    "no key": ("x int", {"mode": "upsert", "key": "x"}, pa.int32(), r"no unique index on \(x\)"),
    "part of a key": (
        "x text, UNIQUE (x(9))",
        {"mode": "upsert", "key": "x"},
        pa.string(),
        r"no unique index on \(x\)",
    ),
    "another key": (
        "x int PRIMARY KEY, y int DEFAULT 1 UNIQUE",
        {"mode": "upsert", "key": "x"},
        pa.int32(),
        "unique index y could match another row than that of the key",
    ),
    "no version": ("x int PRIMARY KEY", {"mode": "versions", "key": "x"}, pa.int32(), "no column semel_version"),
    "text as an id": ("x text", {"mode": "dedup", "key": "x"}, pa.string(), r"key x is text.*varchar\(255\)"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_does_not_match_is_refused_by_name(db: Database, name: str) -> None:
    columns, settings, arrow, expected = MISMATCHES[name]
    db.create(columns)
    with pytest.raises(SchemaMismatch, match=expected):
        db.sink(**{"key": [], **settings}).check(pa.schema([("x", arrow)]))


@pytest.mark.parametrize("engine", ["MyISAM", "Aria", "MEMORY"])
def test_a_table_without_transactions_is_refused_by_name(db: Database, engine: str) -> None:
    db.create("id bigint, text varchar(20)", engine)
    expected = f"it is stored by {engine}, which has no transactions"
    with pytest.raises(SchemaMismatch, match=expected) as caught:
        db.sink().check(rows().schema)
    assert "ENGINE = InnoDB" in str(caught.value)
    with started(db.sink()) as participant, pytest.raises(BatchFailed, match=expected):
        prepare(participant, db.sink(), attempt(), rows((1, "a")))


def test_a_view_is_refused(db: Database) -> None:
    db.create("id bigint, text varchar(20)")
    db.run(f"CREATE VIEW view{db.suffix} AS SELECT * FROM {db.table}")  # noqa: S608 - ours
    with pytest.raises(SchemaMismatch, match="it is stored by VIEW"):
        db.sink(table=f"view{db.suffix}").check(rows().schema)


def test_a_missing_table_is_refused_unless_it_may_be_created(db: Database) -> None:
    with pytest.raises(SchemaMismatch, match=r"does not exist\.(.|\n)*create=True"):
        db.sink(create=False).check(rows().schema)
    with started(db.sink()) as participant, pytest.raises(BatchFailed, match="it does not exist"):
        prepare(participant, db.sink(create=False), attempt(), rows((1, "a")))
    with pytest.raises(SchemaMismatch, match=r"cannot hold these columns: x \(list<item: int32>\).(.|\n)*to_json"):
        db.sink().check(pa.schema([("x", pa.list_(pa.int32()))]))
    with pytest.raises(SchemaMismatch, match=r"cannot hold these columns: x \(decimal128\(38, 38\)\)"):
        db.sink().check(pa.schema([("x", pa.decimal128(38, 38))]))
    db.create("a int")
    with pytest.raises(SchemaMismatch, match="several columns a"):
        db.sink().check(pa.schema([("a", pa.int32()), ("A", pa.int32())]))


def test_tables_that_differ_in_case_are_two(db: Database) -> None:
    db.run(f"CREATE TABLE {db.table.upper()}{db.suffix} (other int)")
    write(db.sink(table=f"{db.table}{db.suffix}"), rows((1, "a")))
    assert db.run(f"SELECT * FROM {db.table}{db.suffix}") == [(1, "a")]  # noqa: S608 - ours


EVIL = "a`b'c\"d; DROP TABLE %s {x} -- \\ %(y)s ž"


@pytest.mark.parametrize("mode", MODES)
def test_names_and_values_that_look_like_sql(db: Database, mode: str) -> None:
    sink = db.sink(mode, key=[EVIL] if mode in KEYED else [], table=f"{EVIL}{db.suffix}")
    names = [EVIL, EVIL[::-1].strip()]
    write(
        sink,
        [rows((1, EVIL), names=names), rows((2, "'); DROP TABLE x; --"), names=names)],
        rows((3, None), names=names),
    )
    table = sink.target.removesuffix("`") + ("_latest`" if mode == "versions" else "`")
    found = db.run(f"SELECT * FROM {table} ORDER BY 1")  # noqa: S608 - ours
    assert [row[:2] for row in found] == [(1, EVIL), (2, "'); DROP TABLE x; --"), (3, None)]
    assert db.staged() == []


def test_another_database_of_the_server(db: Database) -> None:
    write(db.sink(schema="semel", url=db.url), rows((1, "a")))
    write(replace(db.sink(), table=f"semel.{db.table}", schema=""), rows((2, "b")), incarnation=2)
    assert db.rows() == [(1, "a"), (2, "b")]
    with pytest.raises(ConfigError, match="there is no database nowhere"):
        db.sink(schema="nowhere").check(rows().schema)


# Modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_append_adds_rows_of_every_task_and_batch(db: Database, mode: str) -> None:
    write(db.sink(mode), [rows((1, "a"), (2, "b")), rows((1, "a"))], rows((1, None)))
    assert db.rows(order="1, text IS NULL") == [(1, "a"), (1, "a"), (1, None), (2, "b")]
    assert db.staged() == []


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_a_duplicate_key_fails_the_batch_and_is_named(db: Database, mode: str) -> None:
    """LOAD DATA LOCAL leaves such rows out and says nothing."""
    db.create("id bigint PRIMARY KEY, text varchar(20)")
    sink = db.sink(mode)
    write(sink, rows((7, "there")))
    with started(sink, context(2)) as participant:
        with pytest.raises(BatchFailed, match=r"Duplicate entry '7' for key '(\w+\.)?PRIMARY'"):
            prepare(participant, sink, attempt(1, 0, 2), rows((5, "a")), rows((6, "b"), (7, "c"), (8, "d")))
        participant.abort(participant.recover().branches)
        assert (db.rows(), db.staged()) == ([(7, "there")], [])
        again = prepare(participant, sink, attempt(1, 1, 2), rows((5, "a")), rows((6, "b")))
        assert commit(participant, again) is Outcome.COMMITTED
    assert db.rows("id", "1") == [(5,), (6,), (7,)]


def test_the_newest_row_of_a_key_wins_within_a_task_across_tasks_and_across_batches(db: Database) -> None:
    first = [rows((1, "old"), (2, "kept"), (1, "newer")), rows((3, "x"), (1, "newest"))]
    write(db.sink("upsert"), first, rows((3, "next batch")))
    assert db.rows() == [(1, "newest"), (2, "kept"), (3, "next batch")]


@pytest.mark.parametrize("order", [("at", "text"), ("text", "at")])
def test_order_by_decides_within_a_task_across_tasks_and_across_batches(db: Database, order: tuple[str, ...]) -> None:
    """Wherever the column stands: MySQL sets one after the other."""
    sink = db.sink("upsert", order_by="at")
    first = [stamped((1, "late", 9), (1, "early", 2)), stamped((1, "middle", 5), (2, "a", 1))]
    second = stamped((1, "older", 8), (2, "same moment", 1), (3, "x", 1))
    write(sink, [batch.select(["id", *order]) for batch in first], second.select(["id", *order]))
    assert db.rows("id, text, at") == [(1, "late", 9), (2, "same moment", 1), (3, "x", 1)]


def test_a_row_without_a_moment_is_the_oldest(db: Database) -> None:
    sink = db.sink("upsert", order_by="at")
    write(sink, stamped((1, "unknown", None), (2, "unknown", None), (3, "known", 1)))
    second = stamped((1, "known", 1), (2, "still unknown", None), (3, "unknown", None), (3, "older", 0))
    write(sink, second, incarnation=2)
    assert db.rows() == [(1, "known", 1), (2, "still unknown", None), (3, "known", 1)]


def test_upsert_of_key_columns_only_adds_each_key_once(db: Database) -> None:
    sink = db.sink("upsert", key=["id", "text"])
    write(sink, [rows((1, "a"), (1, "b"), (1, "a")), rows((1, "a"))], rows((1, "b")))
    assert db.rows() == [(1, "a"), (1, "b")]


def test_an_id_is_written_once_within_a_task_across_tasks_and_across_batches(db: Database) -> None:
    sink = db.sink("dedup")
    first = [rows((1, "first"), (1, "second"), (2, "a")), rows((1, "third"), (3, "b"))]
    write(sink, first, rows((3, "again"), (4, "c")))
    assert db.rows() == [(1, "first"), (2, "a"), (3, "b"), (4, "c")]
    # The rows may go; the ids are remembered.
    db.run(f"DELETE FROM {db.table}")  # noqa: S608 - ours
    write(sink, rows((1, "x"), (5, "y")), incarnation=2)
    assert db.rows() == [(5, "y")]


def test_ids_are_forgotten_after_the_retention(db: Database) -> None:
    sink = db.sink("dedup", retention_s=0.3)
    write(sink, rows((1, "a"), (1, "b")))
    time.sleep(0.4)
    write(sink, rows((1, "c")), incarnation=2)
    assert db.rows() == [(1, "a"), (1, "c")]


def test_ids_may_be_remembered_forever(db: Database) -> None:
    write(db.sink("dedup", retention_s=math.inf), rows((1, "a")), rows((1, "b")))
    assert db.rows() == [(1, "a")]


def test_two_pipelines_that_bring_one_id_at_a_time_write_it_once(db: Database) -> None:
    sink = db.sink("dedup")
    write(sink, rows((0, "creates the tables")))
    other = replace(sink, name=f"other{db.suffix}")
    with started(sink, context(2)) as first, started(other, context(2)) as second:
        one = prepare(first, sink, attempt(5, 0, 2), rows((1, "a"), (2, "a")))
        timer = threading.Timer(0.5, lambda: commit(first, one))
        timer.start()
        two = prepare(second, other, attempt(5, 0, 2), rows((2, "b"), (3, "b")))
        timer.join()
        assert commit(second, two) is Outcome.COMMITTED
    assert db.rows()[1:] == [(1, "a"), (2, "a"), (3, "b")]


def test_every_batch_adds_a_version_and_the_view_shows_the_newest(db: Database) -> None:
    sink = db.sink("versions")
    write(sink, [rows((1, "a"), (2, "x")), rows((1, "b"))], rows((1, "c"), (1, "d")), rows((3, "z")))
    assert db.rows("id, text", view="_latest") == [(1, "d"), (2, "x"), (3, "z")]
    found = db.rows("id, text, semel_version", "1, 3")
    assert found == [(1, "b", 1), (1, "d", 2), (2, "x", 1), (3, "z", 3)]


def test_only_so_many_versions_are_kept(db: Database) -> None:
    sink = db.sink("versions", key=["id", "text"], versions_kept=2)
    batches = [stamped((1, "a", n), (1, "b", n)) if n < 2 else stamped((1, "a", n)) for n in range(5)]
    write(sink, *batches)
    assert db.rows("text, at") == [("a", 3), ("a", 4), ("b", 0), ("b", 1)]
    assert db.rows("text, at", view="_latest") == [("a", 4), ("b", 1)]


def test_order_by_decides_within_a_version(db: Database) -> None:
    first = [stamped((1, "late", 9), (1, "early", 2)), stamped((1, "middle", 5))]
    write(db.sink("versions", order_by="at"), first, stamped((1, "older, but newer here", 1)))
    assert db.rows("text, semel_version", "2") == [("late", 1), ("older, but newer here", 2)]


def test_versions_go_on_behind_those_that_are_there(db: Database) -> None:
    """The table was filled by somebody else, or its number was lost in a restore."""
    sink = db.sink("versions")
    write(sink, rows((1, "a")), rows((1, "b")))
    db.run("DELETE FROM semel_versions WHERE target = %s", db.table)
    write(sink, rows((1, "c")), incarnation=2)
    assert db.rows("text, semel_version", view="_latest") == [("c", 3)]


@pytest.mark.parametrize("mode", KEYED)
def test_a_row_without_a_key_is_refused_by_name(db: Database, mode: str) -> None:
    sink = db.sink(mode, key=["id", "text"])
    with started(sink) as participant:
        with pytest.raises(BatchFailed, match="have null in column text, which is part of the key"):
            prepare(participant, sink, attempt(), rows((1, "a"), (2, None)))
        assert db.staged() == []


@pytest.mark.parametrize("firm", [False, True])
def test_two_sinks_of_one_pipeline_in_one_database(db: Database, firm: bool) -> None:
    orders = db.sink(firm=firm)
    returns = db.sink("upsert", table=f"returns{db.suffix}", name=f"returns{db.suffix}", firm=firm)
    with started(orders) as first, started(returns) as second:
        promises = [(p, prepare(p, s, attempt(), rows((1, "a")))) for p, s in ((first, orders), (second, returns))]
        assert db.rows() == []
        for participant, promise in promises:
            assert commit(participant, promise) is Outcome.COMMITTED
    assert (db.rows(), db.run(f"SELECT * FROM returns{db.suffix}")) == ([(1, "a")], [(1, "a")])  # noqa: S608 - ours
    assert db.staged() == []


@pytest.mark.parametrize("mode", ["upsert", "dedup", "versions"])
def test_a_firm_promise_outlives_the_driver_in_every_mode(db: Database, mode: str) -> None:
    sink = db.sink(mode, firm=True)
    with started(sink) as participant:
        promise = prepare(participant, sink, attempt(), rows((1, "a")), rows((1, "b"), (2, "c")))
        assert db.rows("id, text") == []
    with started(sink, context(2)) as participant:
        assert commit(participant, promise) is Outcome.COMMITTED
        assert commit(participant, promise) is Outcome.ALREADY_COMMITTED
    assert db.rows("id, text") == [(1, "a" if mode == "dedup" else "b"), (2, "c")]
    assert db.staged() == []


def test_alone_a_sink_holds_its_transaction_and_beside_others_it_prepares_it(db: Database) -> None:
    alone, beside = db.sink("auto").among([db.sink()]), db.sink("auto").among([db.sink(), Memory("other")])
    assert isinstance(alone, MySql)
    assert isinstance(beside, MySql)
    assert (alone.mode, alone.firm, alone.uses_xa) == ("ledger", False, False)
    assert (beside.mode, beside.firm, beside.uses_xa) == ("ledger", True, True)


# XA ---------------------------------------------------------------------------------------------------------------


def test_names_of_xa_transactions_are_short_and_can_be_read_again() -> None:
    large = Branch(Attempt(OURS, 10**8, 99, Incarnation(10**5)), "s" * 40, 10**6, 99)
    for branch in (large, Branch(attempt(), "orders", 0, 0)):
        gtrid, bqual = (part.strip("'") for part in xid(branch).split(","))
        assert max(len(gtrid), len(bqual)) <= 64
        assert parse_xid(gtrid, bqual) == branch
    with pytest.raises(ValueError, match="not the name of an XA transaction"):
        xid(Branch(Attempt(OURS, 10**20, 10**9, Incarnation(1)), "orders", 0, 0))


@pytest.mark.parametrize(
    ("gtrid", "bqual"),
    [
        ("0" * 32 + "-b0a0i1t0r0", "orders"),
        ("0" * 32 + "-b00a0i1t0r0", "semel-orders"),
        ("0" * 32 + "-b0a0i1t0", "semel-orders"),
        ("0" * 31 + "-b0a0i1t0r0", "semel-orders"),
        ("0" * 32 + "-b0a0i1t0r0", "semel-Orders"),
        ("0" * 32 + "-b0a0i1t0r0", "semel-"),
        ("", ""),
    ],
)
def test_other_names_are_somebody_elses(gtrid: str, bqual: str) -> None:
    assert parse_xid(gtrid, bqual) is None


def test_what_another_format_or_length_says_is_somebody_elses() -> None:
    gtrid, bqual = (part.strip("'") for part in xid(Branch(attempt(), "orders", 0, 0)).split(","))
    data = (gtrid + bqual).encode()
    listed = [(2, len(gtrid), len(bqual), data), (1, len(gtrid) - 1, len(bqual) + 1, data), (1, 1, 1, b"\xff\xff")]
    assert mysql_store.prepared_branches(lambda _: listed) == set()
    assert mysql_store.prepared_branches(lambda _: [(1, len(gtrid), len(bqual), data)]) != set()


def test_an_answer_of_the_server_is_proven_by_the_ledger(db: Database) -> None:
    """MariaDB answers OK to an XA COMMIT that did nothing, for a moment after the session that prepared it is closed.

    No task waits for that here, as the writer does, so that it happens now and then.
    """
    sink = db.sink("xa")
    write(sink, rows((0, "creates the tables")))
    place = Place(db.url, "", 10)
    outcomes = []
    with closing(place.connect()) as connection:
        run = mysql_store.runner(connection, place)
        for number in range(150):
            branch = Branch(attempt(1, number), sink.name, 0, 0)
            with place.connect() as task:
                its = mysql_store.runner(task, place)
                its(f"XA START {xid(branch)}")
                its(f"INSERT INTO {db.table} VALUES (%s, 'x')", (number + 1,))  # noqa: S608 - ours
                mysql_store_mark(its, branch)
                its(f"XA END {xid(branch)}")
                its(f"XA PREPARE {xid(branch)}")
            known = end_prepared(place, run, "COMMIT", branch)
            outcomes.append((number + 1, known))
            assert fate(run, branch) == (VISIBLE if known else FREE)
    committed = [(number,) for number, known in outcomes if known]
    assert db.rows("id", "1")[1:] == committed
    assert len(committed) >= 100
    assert db.staged() == []


def mysql_store_mark(run: Any, branch: Branch) -> None:
    from semel.sinks.sql_participant import write_mark

    write_mark(run, branch.sink, branch.attempt, str(branch), 1)


def test_a_transaction_that_lost_its_name_is_rolled_back_and_not_taken_for_committed(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is OK, the ledger row is still held, and the server's list does not know the name."""
    branch = Branch(attempt(), "orders", 0, 0)
    answers = iter([HELD, FREE])
    freed: list[Branch] = []
    monkeypatch.setattr(mysql_store, "fate", lambda _run, _branch: next(answers))
    monkeypatch.setattr(mysql_store, "_roll_back_nameless", lambda _place, _run, which: freed.append(which))
    asked: list[str] = []

    def run(sql: str, *_: Any, **__: str) -> list[tuple[Any, ...]]:
        asked.append(sql)
        if sql.startswith("XA COMMIT") and freed:
            raise pymysql.err.OperationalError(1397, "XAER_NOTA: Unknown XID")
        return []

    assert end_prepared(Place(db.url, "", 5), run, "COMMIT", branch) is False
    assert freed == [branch]


def test_a_transaction_whose_session_is_open_is_waited_for_and_never_taken_for_gone(db: Database) -> None:
    sink = db.sink("xa", timeout_s=1)
    write(sink, rows((0, "creates the tables")))
    branch = Branch(attempt(1), sink.name, 0, 0)
    place = sink.place
    task = place.connect()
    its = mysql_store.runner(task, place)
    its(f"XA START {xid(branch)}")
    its(f"INSERT INTO {db.table} VALUES (1, 'x')")  # noqa: S608 - ours
    mysql_store_mark(its, branch)
    its(f"XA END {xid(branch)}")
    its(f"XA PREPARE {xid(branch)}")
    with closing(place.connect()) as connection:
        run = mysql_store.runner(connection, place)
        with pytest.raises(SinkUnavailable, match=r"still holds the rows of semel-.* and lets nobody end it"):
            end_prepared(place, run, "COMMIT", branch)
        assert fate(run, branch) == HELD
        timer = threading.Timer(0.3, task.close)
        timer.start()
        known = end_prepared(replace(place, timeout_s=10), run, "COMMIT", branch)
        timer.join()
        assert fate(run, branch) == (VISIBLE if known else FREE)
    assert db.staged() == []


@pytest.mark.parametrize("mode", ["xa", "ledger"])
def test_what_is_prepared_survives_kill_9_of_the_server(own_server: MariaDbServer, mode: str) -> None:
    db = Database(own_server.url)
    sink = db.sink(mode, firm=True)
    other = replace(sink, name=f"other{db.suffix}")
    with started(sink) as participant, started(other) as second:
        promise = prepare(participant, sink, attempt(), rows((1, "a")), rows((2, "b")))
        dropped = prepare(second, other, attempt(), rows((3, "c")))
        own_server.kill()
        with pytest.raises(SinkUnavailable):
            commit(participant, promise)
        own_server.start()
        assert db.rows() == []
        assert commit(participant, promise) is Outcome.COMMITTED
        assert commit(participant, promise) is Outcome.ALREADY_COMMITTED
    with started(other, context(2)) as participant:
        left = participant.recover().branches
        assert [str(b) for b in left] == [name for c in dropped for name in c.branches]
        participant.abort(left)
    assert (db.rows(), db.staged()) == ([(1, "a"), (2, "b")], [])


def test_a_sleeping_driver_of_an_older_incarnation_loses_its_locks_and_nobody_else_does(db: Database) -> None:
    sink = db.sink("upsert")
    write(sink, rows((1, "a")))
    other = db.sink("ledger", table=f"others{db.suffix}", name=f"others{db.suffix}")
    strangers = context(1, pipeline=type(OURS)("00000000-0000-4000-8000-000000000002"))
    with started(sink, context(2)) as older, started(other, strangers) as stranger:
        prepare(older, sink, attempt(1, 0, 2), rows((1, "held")))
        theirs = prepare(stranger, other, attempt(0, 0, 1, strangers.pipeline), rows((9, "z")))
        with started(sink, context(3)) as newer:
            newer.abort(newer.recover().branches)
            promise = prepare(newer, sink, attempt(1, 1, 3), rows((1, "newer")))
            assert commit(newer, promise) is Outcome.COMMITTED
        assert commit(stranger, theirs) is Outcome.COMMITTED
    assert db.rows() == [(1, "newer")]


def test_a_lock_that_somebody_holds_is_a_reason_to_come_back_later(db: Database) -> None:
    sink = db.sink("upsert", timeout_s=1)
    write(sink, rows((1, "a")))
    with db.session() as cursor, started(sink, context(2)) as participant:
        cursor.execute("BEGIN")
        cursor.execute(f"UPDATE {db.table} SET text = 'held'")  # noqa: S608 - ours
        with pytest.raises(SinkUnavailable, match="Lock wait timeout exceeded"):
            prepare(participant, sink, attempt(1, 0, 2), rows((1, "b")))
        cursor.execute("ROLLBACK")
        participant.abort(participant.recover().branches)
        assert commit(participant, prepare(participant, sink, attempt(1, 1, 2), rows((1, "c")))) is Outcome.COMMITTED
    assert db.rows() == [(1, "c")]


# LOAD DATA and INSERT ---------------------------------------------------------------------------------------------


def every_type() -> pa.RecordBatch:
    arrays, names = [], []
    for name, (_, arrow, values) in VALUES.items():
        given = padded(values)
        arrays.append(pa.array((given * 50)[:100], arrow))
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names)


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_load_data_and_insert_give_the_same_rows(
    db: Database, own_server: MariaDbServer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql_load, "INSERT_BYTES_MAX", 5_000)
    ways = [db, Database(own_server.url)]
    for way in ways:
        way.create(", ".join(f"`{name}` {kind} NULL" for name, (kind, _, _) in VALUES.items()))
        write(way.sink(mode), every_type())
    assert [bool(way.run("SELECT @@local_infile")[0][0]) for way in ways] == [True, False]
    found = [sorted(map(repr, way.rows(order="1"))) for way in ways]
    assert found[0] == found[1]
    assert len(found[0]) == 100


@pytest.mark.parametrize("name", ["long text", "letters", "null", "check", "nan", "after 2038", "utf-8"])
def test_insert_refuses_what_load_data_refuses(own_server: MariaDbServer, name: str) -> None:
    db = Database(own_server.url)
    kind, arrow, values, _ = UNFIT[name]
    db.create(f"x {kind}")
    array = pa.array(values, arrow if name != "utf-8" else pa.binary())
    array = array if name != "utf-8" else pa.Array.from_buffers(pa.string(), 1, array.buffers())
    with started(db.sink()) as participant:
        with pytest.raises(BatchFailed):
            prepare(participant, db.sink(), attempt(), pa.RecordBatch.from_arrays([array], ["x"]))
        participant.abort(participant.recover().branches)
    assert (db.rows(order="1"), db.staged()) == ([], [])


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
    connection = Place(server.url, "", 5).connect()
    encode = encoder(pa.string(), Column("x", "text", "text"))
    assert encode is not None
    loader = Loader(connection, "`t`", [Field("x", encode, True)], local=True, packet_bytes_max=2**20)
    loader.add(column(["our own rows"], pa.string()))
    ask = loader.flush if when == b"LOAD DATA" else lambda: mysql_store.execute(connection, "SELECT 1")
    with pytest.raises(ConfigError, match="asked for a file of this machine that nobody offered: '/etc/passwd'"):
        ask()
    server.join(10)
    assert (server.asked, server.received, connection.open) == (True, b"", False)


# What goes wrong --------------------------------------------------------------------------------------------------


def test_a_wrong_login_is_an_error_of_the_pipeline_and_shows_no_password(db: Database) -> None:
    settings = settings_of(db.url)
    where = f"{settings['host']}:{settings['port']}"
    urls = [
        f"mysql://semel:geheim-42@{where}/semel",
        f"mysql://nobody:geheim-42@{where}/semel",
        db.url.removesuffix("/semel") + "/nowhere",
        db.url + "?ssl_ca=/nowhere/geheim-42.pem",
    ]
    for url in urls:
        with pytest.raises(ConfigError) as caught:
            db.sink(url=url).check(rows().schema)
        assert "geheim-42" not in "".join(map(str, _chain(caught.value))).replace("/nowhere/geheim-42.pem", "")
        assert settings["password"].decode() not in "".join(map(repr, _chain(caught.value)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_a_server_that_is_away_is_waited_for(db: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sink = db.sink(url=f"mysql://u:geheim-42@127.0.0.1:{port}/semel", timeout_s=1)
        began = time.monotonic()
        with pytest.raises(SinkUnavailable, match="MySQL cannot be reached"):
            sink.check(rows().schema)
        assert time.monotonic() - began < 10
    with pytest.raises(SinkUnavailable, match="MySQL cannot be reached: Can't connect") as caught:
        sink.check(rows().schema)
    assert "geheim-42" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:geheim-42@h/db",
        "mysql://u:geheim-42@h:port/db",
        "mysql://u:12/geheim-42@h/db",
        "mysql://u:geheim@-42@h/db",
        "mysql://u:1?geheim-42=x@h/db",
        "mysql://u:1#geheim-42@h/db",
        "mysql://h/db",
        "mysql://u:geheim-42@/db",
        "mysql://u:geheim-42@h/",
        "mysql://u:geheim-42@h/db?ssl_nonsense=geheim-42",
        "geheim-42",
    ],
)
def test_a_url_that_cannot_be_used_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MySql(url, "orders")
    assert "geheim" not in "".join(map(repr, _chain(caught.value)))


def test_what_a_url_says() -> None:
    found = settings_of("mysql://us%40er:p%C5%BE%2F%3F@h:3307/my%20db?ssl_ca=/ca.pem&ssl_verify_identity=true")
    expected = {"host": "h", "port": 3307, "user": "us@er", "password": "pž/?".encode(), "database": "my db"}
    assert found == expected | {"ssl_ca": "/ca.pem", "ssl_verify_identity": True, "ssl_verify_cert": True}
    assert settings_of("mariadb://u@h/db")["port"] == 3306


def test_the_password_is_shown_nowhere(db: Database) -> None:
    sink = db.sink(url="mysql://u:geheim-42@h/db")
    shown = f"{sink!r} {sink} {sink.describe()} {sink.place!r} {sink.name}"
    assert "geheim-42" not in shown
    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - our own bytes
    assert sink.describe() == f"MySQL table {db.table} in db at h"


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="no names of more than 64 letters"):
        MySql("mysql://u@h/db", "x" * 65)
    with pytest.raises(ConfigError, match=r"no names of more than 64 letters: '.*_latest'"):
        MySql("mysql://u@h/db", "x" * 60, mode="versions", key="id")


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pymysql", None)
    with pytest.raises(MissingExtra, match=r"The MySql sink needs PyMySQL(.|\n)*pip install 'semel\[mysql\]'"):
        MySql("mysql://u@h/db", "orders").check(rows().schema)


#: number of the error -> what it is for the coordinator.
ERRORS: dict[int, type[SemelError]] = {
    1205: SinkUnavailable,
    1213: SinkUnavailable,
    1040: SinkUnavailable,
    1053: SinkUnavailable,
    1290: SinkUnavailable,
    1614: SinkUnavailable,
    1927: SinkUnavailable,
    2002: SinkUnavailable,
    2003: SinkUnavailable,
    2006: SinkUnavailable,
    2013: SinkUnavailable,
    1062: BatchFailed,
    1142: BatchFailed,
    1146: BatchFailed,
    1264: BatchFailed,
}


@pytest.mark.parametrize("number", ERRORS)
def test_errors_of_the_server_are_told_apart(number: int) -> None:
    sink = MySql("mysql://u@h/db", "orders")
    with (
        pytest.raises(ERRORS[number]) as caught,
        sink.translated("refused", refused=BatchFailed),
    ):
        raise pymysql.err.OperationalError(number, "said the server")
    assert str(caught.value).startswith("MySQL table orders in db at h refused: said the server.\n")
    assert ("GRANT" in str(caught.value)) == (number == 1142)


def test_a_closed_connection_is_away() -> None:
    sink = MySql("mysql://u@h/db", "orders")
    with pytest.raises(SinkUnavailable, match="the connection is closed"), sink.translated("x", refused=BatchFailed):
        raise pymysql.err.InterfaceError(0, "")


def test_a_user_who_may_not_list_xa_transactions_is_told_so(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """MySQL asks for XA_RECOVER_ADMIN; MariaDB does not, so the refusal is played."""

    def refused(_run: Any) -> set[Branch]:
        raise pymysql.err.OperationalError(1401, "XAER_RMERR: Fatal error occurred in the transaction branch")

    monkeypatch.setattr("semel.sinks.mysql.prepared_branches", refused)
    monkeypatch.setattr(mysql_store, "prepared_branches", refused)
    for sink in (db.sink("xa"), db.sink(firm=True)):
        with pytest.raises(ConfigError, match="GRANT XA_RECOVER_ADMIN"):
            sink.check(rows().schema)
    # Where there are none to end the right is not needed.
    write(db.sink(), rows((1, "a")))
    assert db.rows() == [(1, "a")]


@pytest.mark.parametrize(
    ("version", "fits"),
    [("8.0.36", True), ("5.7.44-log", False), ("5.5.5-10.11.2-MariaDB", True), ("10.4.1-MariaDB", False)],
)
def test_servers_that_are_too_old_are_refused(db: Database, version: str, fits: bool) -> None:
    class Old:
        def get_server_info(self) -> str:
            return version

    with closing(db.sink().place.connect()) as connection:
        run = mysql_store.runner(connection, db.sink().place)
        if fits:
            db.sink()._check_server(Old(), run)
        else:
            with pytest.raises(ConfigError, match="which is too old"):
                db.sink()._check_server(Old(), run)


def test_mariadb_with_a_binary_log_is_warned_of(own_server: MariaDbServer, caplog: pytest.LogCaptureFixture) -> None:
    """MDEV-21469. The same server without it, and modes without XA, are left in peace."""
    db = Database(own_server.url)
    caplog.set_level(logging.WARNING, "semel")
    db.sink("xa").check(rows().schema)
    assert caplog.messages == []
    own_server.stop()
    own_server.settings.update({"log_bin": "bin", "server_id": "1", "innodb_flush_log_at_trx_commit": "2"})
    own_server.start()
    try:
        db.sink().check(rows().schema)
        assert [message.split(": ")[1] for message in caplog.messages] == ["innodb_flush_log_at_trx_commit is 2"]
        for sink in (db.sink("xa"), db.sink(firm=True)):
            caplog.clear()
            sink.check(rows().schema)
            assert "MDEV-21469" in caplog.messages[1]
        write(db.sink("xa"), rows((1, "a")), rows((2, "b")))
        assert db.rows() == [(1, "a"), (2, "b")]
    finally:
        own_server.stop()
        for name in ("log_bin", "server_id"):
            del own_server.settings[name]
        own_server.settings["innodb_flush_log_at_trx_commit"] = "1"
        own_server.start()
