"""Tables of MySQL: what semel creates, what it refuses by name, and names that look like SQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from semel.errors import BatchFailed, ConfigError, SchemaMismatch
from semel.testing.harness import attempt
from tests.sinks.mysql_rig import KEYED, MODES, Database, db, write
from tests.sinks.participants import prepare, rows, started

__all__ = ["db"]


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
    # The key itself stays as it was written first.
    assert db.rows() == [(3, "a")]


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


def of_columns(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({f"c{n}": pa.array([n], pa.int32()) for n in range(number)})


@pytest.mark.parametrize(("mode", "columns_max"), [("ledger", 1016), ("xa", 1017), ("versions", 1016)])
def test_more_columns_than_a_table_can_have_are_refused_before_the_first_row(
    db: Database, mode: str, columns_max: int
) -> None:
    sink = db.sink(mode, key="c0" if mode == "versions" else ())
    for number in (0, columns_max + 1, 1_600):
        expected = f"the rows have {number:,} columns, and must have 1 to {columns_max:,}"
        with pytest.raises(SchemaMismatch, match=expected):
            sink.check(of_columns(number).schema if number else pa.schema([]))
    write(sink, of_columns(columns_max))
    assert db.rows(f"c{columns_max - 1}", "1") == [(columns_max - 1,)]


@pytest.mark.parametrize("name", ["", " ", "a ", "x" * 65])
def test_names_that_a_column_cannot_have_are_refused_before_a_table_is_made(db: Database, name: str) -> None:
    with pytest.raises(SchemaMismatch, match="a column's name has 1 to 64 letters and no space at its end"):
        db.sink().check(pa.schema([(name, pa.int32())]))


@pytest.mark.parametrize("name", ["semel_order", "semel_place", "Semel_Place", "semel_token"])
def test_names_that_are_ours_are_refused(db: Database, name: str) -> None:
    db.create(f"id bigint, {name} bigint")
    with pytest.raises(SchemaMismatch, match=f"a column cannot be named {name}: such names are semel's own"):
        db.sink().check(pa.schema([("id", pa.int64()), (name, pa.int64())]))


def test_numbers_of_versions_may_be_copied(db: Database) -> None:
    write(db.sink(), rows((7, "a"), names=["semel_version", "text"]))
    assert db.rows() == [(7, "a")]


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


def test_texts_that_are_one_key_stay_in_their_order(db: Database) -> None:
    """Only the server knows that they are one: sorted by their bytes, the older would come last and win."""
    db.create("id bigint, text varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY")
    write(db.sink("upsert", key="text"), rows((1, "a"), (2, "A")))
    assert db.rows("id", "1") == [(2,)]
