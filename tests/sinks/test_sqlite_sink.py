"""What is special about SQLite: readers, modes, types, identifiers, and what it refuses."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import closing
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Attempt, Branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Participant
from semel.sinks.sqlite import Sqlite
from semel.sinks.sqlite import database as database_module
from semel.sinks.sqlite.sink import _SqliteParticipant
from semel.testing.harness import arrow, attempt, context, rows_of
from tests.sinks.participants import started

TWO_COLUMNS = pa.schema([("id", pa.int64()), ("text", pa.string())])


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "shop.db")


def prepare_one(participant: Participant, sink: Sqlite, which: Attempt, *batches: pa.RecordBatch) -> Committable:
    """One task per batch."""
    parts = []
    for task, batch in enumerate(batches):
        writer = sink.writer(Branch(which, sink.name, task, 0))
        writer.write(batch)
        parts.append(writer.prepare())
    (committable,) = participant.prepare(which, parts)
    return committable


def write(sink: Sqlite, *batches: pa.RecordBatch) -> None:
    """Every batch is a batch of the stream, through prepare and commit."""
    with started(sink) as participant:
        for number, batch in enumerate(batches):
            assert participant.commit(prepare_one(participant, sink, attempt(number), batch)) is Outcome.COMMITTED


def query(db: str, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(db, timeout=0)) as reader:
        return reader.execute(sql).fetchall()


def execute(db: str, *statements: str) -> None:
    with closing(sqlite3.connect(db)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


# Readers and writers ----------------------------------------------------------------------------------------------


def test_readers_are_never_blocked_while_a_batch_is_prepared(db: str) -> None:
    sink = Sqlite(db, "orders")
    write(sink, arrow(rows_of(1)))
    with started(sink, context(2)) as participant, closing(sqlite3.connect(db, timeout=0)) as reader:
        committable = prepare_one(participant, sink, attempt(1, 0, 2), arrow(rows_of(2)))
        # The transaction is open, and neither a new reader nor one inside a transaction has to wait.
        assert query(db, "SELECT id FROM orders") == [(1,)]
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM orders").fetchone() == (1,)
        assert participant.commit(committable) is Outcome.COMMITTED
        assert reader.execute("SELECT count(*) FROM orders").fetchone() == (1,)
        reader.execute("ROLLBACK")
        assert reader.execute("SELECT count(*) FROM orders").fetchone() == (2,)


def test_the_database_is_in_wal_mode(db: str) -> None:
    write(Sqlite(db, "orders"), arrow(rows_of(1)))
    assert query(db, "PRAGMA journal_mode") == [("wal",)]


def test_a_locked_database_gives_a_clear_error_within_the_timeout(db: str) -> None:
    sink = Sqlite(db, "orders", timeout_s=0.3)
    write(sink, arrow(rows_of(1)))
    with started(sink, context(2)) as participant, closing(sqlite3.connect(db)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(SinkUnavailable) as caught:
            prepare_one(participant, sink, attempt(1, 0, 2), arrow(rows_of(2)))
        assert 0.2 < time.monotonic() - began < 5
        other.execute("ROLLBACK")
    assert str(caught.value) == (
        f"The SQLite database {db} did not let us prepare: database is locked.\n"
        "  the data now: nothing was changed by this call\n"
        "  what to do: End the process that holds a write transaction on it (`fuser` names it), then start again."
    )


def test_a_commit_that_finds_the_database_locked_is_tried_again(db: str) -> None:
    sink = Sqlite(db, "orders", timeout_s=0.1)
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(1)))
    with started(sink, context(2)) as participant, closing(sqlite3.connect(db)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkUnavailable, match="did not let us commit: database is locked"):
            participant.commit(committable)
        other.execute("ROLLBACK")
        assert participant.commit(committable) is Outcome.COMMITTED
    assert query(db, "SELECT id FROM orders") == [(1,)]


TAKE_AWAY: dict[str, tuple[str, str]] = {
    "no such table: semel_ledger": (
        "ALTER TABLE semel_ledger RENAME TO away",
        "ALTER TABLE away RENAME TO semel_ledger",
    ),
    "UNIQUE constraint failed": ("INSERT INTO orders VALUES (1, 'another')", "DELETE FROM orders"),
    "attempt to write a readonly database": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
}


@pytest.mark.parametrize("told", TAKE_AWAY)
def test_what_does_not_mend_itself_is_told_as_such_and_commits_when_somebody_has_mended_it(db: str, told: str) -> None:
    sink = Sqlite(db, "orders", mode="append")
    execute(db, "CREATE TABLE orders (id INTEGER PRIMARY KEY, text TEXT)")
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(1)))
    with started(sink, context(2)) as participant:
        assert isinstance(participant, _SqliteParticipant)
        take_away, bring_back = TAKE_AWAY[told]
        participant.database.execute(take_away)
        with pytest.raises(ConfigError, match=f"did not let us commit: {told}"):
            participant.commit(committable)
        participant.database.execute(bring_back)
        assert query(db, "SELECT id FROM orders") == []
        assert participant.commit(committable) is Outcome.COMMITTED
    assert query(db, "SELECT id FROM orders") == [(1,)]


def test_a_database_that_is_full_may_have_room_again(db: str) -> None:
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(*range(10_000))))
    with started(sink, context(2)) as participant:
        assert isinstance(participant, _SqliteParticipant)
        participant.database.execute("PRAGMA max_page_count = 8")
        with pytest.raises(SinkUnavailable, match="did not let us commit: database or disk is full"):
            participant.commit(committable)
        participant.database.execute("PRAGMA max_page_count = 100000")
        assert participant.commit(committable) is Outcome.COMMITTED
    assert query(db, "SELECT count(*) FROM orders") == [(10_000,)]


def test_an_error_without_a_code_is_known_by_its_words() -> None:
    """Python 3.10 gives none."""
    assert database_module.may_pass(sqlite3.OperationalError("database is locked"))
    assert database_module.may_pass(sqlite3.OperationalError("database table is locked: orders"))
    assert not database_module.may_pass(sqlite3.OperationalError("no such table: orders"))
    assert not database_module.may_pass(sqlite3.DatabaseError("database disk image is malformed"))


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, ConfigError), (errno.EIO, SinkUnavailable)])
def test_staged_rows_that_cannot_be_read_are_not_told_as_gone(
    db: str, number: int, kind: type[SemelError], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(1)))
    with started(sink, context(2)) as participant:

        def memory_map(path: str) -> None:
            raise OSError(number, os.strerror(number), path)

        with monkeypatch.context() as patch:
            patch.setattr(pa, "memory_map", memory_map)
            with pytest.raises(kind, match=os.strerror(number)):
                participant.commit(committable)
        assert participant.commit(committable) is Outcome.COMMITTED


def test_staged_rows_that_cannot_be_dropped_hold_up_no_batch_that_is_committed(
    db: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(1)))

        def unlink(path: Path, missing_ok: bool = False) -> None:
            raise OSError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "unlink", unlink)
        assert participant.commit(committable) is Outcome.COMMITTED
    assert ["keeps what was staged of a batch that is committed" in text for text in caplog.messages] == [True]


def test_the_marker_of_a_prepared_batch_is_not_taken_for_a_committed_one(db: str) -> None:
    """The connection that holds the transaction sees both; the rows of the next attempt must still be tried."""
    sink = Sqlite(db, "orders")
    execute(db, "CREATE TABLE orders (id INTEGER PRIMARY KEY, text TEXT)")
    with started(sink) as participant:
        prepare_one(participant, sink, attempt(0, 0), arrow(rows_of(1)))
        assert participant.recover().newest_batch is None
        with pytest.raises(BatchFailed, match="UNIQUE constraint failed"):
            prepare_one(participant, sink, attempt(0, 1), arrow([(1, "a"), (1, "b")]))
        again = prepare_one(participant, sink, attempt(0, 2), arrow(rows_of(1)))
        assert participant.commit(again) is Outcome.COMMITTED
    assert query(db, "SELECT id FROM orders") == [(1,)]


def test_a_truncated_spool_file_is_gone(db: str) -> None:
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), arrow(rows_of(*range(500))))
    path = sink.spool / f"{committable.branches[0]}.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with started(sink, context(2)) as participant:
        assert participant.commit(committable) is Outcome.GONE
        assert participant.recover().newest_batch is None
    assert query(db, "SELECT name FROM sqlite_master WHERE name = 'orders'") == []


def test_a_unique_violation_is_found_at_prepare_and_nothing_is_visible(db: str) -> None:
    execute(db, "CREATE TABLE orders (id INTEGER PRIMARY KEY, text TEXT)")
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        with pytest.raises(BatchFailed) as caught:
            prepare_one(participant, sink, attempt(), arrow(rows_of(1, 2)), arrow(rows_of(2)))
        assert query(db, "SELECT * FROM orders") == []
        assert participant.recover().newest_batch is None
    assert str(caught.value) == (
        f"SQLite table orders in {db} refused the rows of batch 0: UNIQUE constraint failed: orders.id.\n"
        "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
        "  what to do: Mend the cause and start the pipeline again: the batch runs again from the same offsets."
    )


def test_the_ledger_keeps_the_newest_markers(db: str) -> None:
    sink = Sqlite(db, "orders")
    with started(sink) as participant:
        for number in (0, 1, 1500):
            participant.commit(prepare_one(participant, sink, attempt(number), arrow(rows_of(number))))
    assert query(db, "SELECT pipeline, sink, batch, attempt, incarnation, rows, name FROM semel_ledger") == [
        (context().pipeline, sink.name, 1500, 0, 1, 1, "shop")
    ]


# Modes ------------------------------------------------------------------------------------------------------------


def test_append_adds_rows(db: str) -> None:
    write(Sqlite(db, "orders"), arrow(rows_of(1)), arrow(rows_of(1)))
    assert query(db, "SELECT * FROM orders") == [*rows_of(1), *rows_of(1)]


def test_upsert_keeps_the_newest_row_of_a_key(db: str) -> None:
    sink = Sqlite(db, "orders", mode="upsert", key=("id",))
    write(sink, arrow([(1, "old"), (2, "kept")]), arrow([(1, "newer"), (1, "newest"), (3, "new")]))
    assert query(db, "SELECT * FROM orders ORDER BY id") == [(1, "newest"), (2, "kept"), (3, "new")]


def test_upsert_of_key_columns_only_adds_each_key_once(db: str) -> None:
    sink = Sqlite(db, "orders", mode="upsert", key=("id", "text"))
    write(sink, arrow([(1, "a"), (1, "b")]), arrow([(1, "a")]))
    assert query(db, "SELECT * FROM orders ORDER BY 1, 2") == [(1, "a"), (1, "b")]


def test_upsert_refuses_a_null_key(db: str) -> None:
    """SQLite would put a number of its own choice into an integer key."""
    sink = Sqlite(db, "orders", mode="upsert", key=("id",))
    batch = pa.RecordBatch.from_pylist([{"id": None, "text": "x"}], schema=TWO_COLUMNS)
    with started(sink) as participant, pytest.raises(BatchFailed, match=r"NOT NULL constraint failed: orders\.id"):
        prepare_one(participant, sink, attempt(), batch)


@pytest.mark.parametrize("spelling", ["orders", "Orders"])
def test_replace_makes_each_batch_the_whole_table(db: str, spelling: str) -> None:
    """Names of tables are the same in upper and lower case, so the old rows go in either spelling."""
    write(Sqlite(db, "orders"), arrow(rows_of(1, 2)))
    sink = Sqlite(db, spelling, mode="replace", name="whole")
    write(sink, arrow(rows_of(3, 4)), arrow(rows_of(5)))
    assert query(db, "SELECT * FROM orders") == rows_of(5)


def test_replace_by_an_empty_batch_empties_the_table(db: str) -> None:
    write(Sqlite(db, "orders", mode="replace"), arrow(rows_of(1)), arrow([]))
    assert query(db, "SELECT * FROM orders") == []


# Types ------------------------------------------------------------------------------------------------------------

NOON = datetime(2024, 7, 1, 12, 0, 0, 5)
LONG = "12345678901234567890.123456789012345678"
TYPES: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.int8(), [-128, 127], [-128, 127]),
    (pa.int16(), [-32768], [-32768]),
    (pa.int32(), [2**31 - 1], [2**31 - 1]),
    (pa.int64(), [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
    (pa.float32(), [0.5, -0.0], [0.5, 0.0]),
    (pa.float64(), [1e300, float("inf"), float("-inf")], [1e300, float("inf"), float("-inf")]),
    (pa.decimal128(38, 18), [Decimal(LONG)], [LONG]),
    (pa.decimal128(18, 8), [Decimal("0"), Decimal("-1E-8"), Decimal("7")], ["0.00000000", "-0.00000001", "7.00000000"]),
    (pa.bool_(), [True, False], [1, 0]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)], ["0001-01-01", "9999-12-31"]),
    (pa.timestamp("us"), [NOON], ["2024-07-01 12:00:00.000005"]),
    (pa.timestamp("us", "UTC"), [NOON.replace(tzinfo=timezone.utc)], ["2024-07-01 12:00:00.000005"]),
    (pa.timestamp("us", "Europe/Berlin"), [NOON.replace(tzinfo=timezone.utc)], ["2024-07-01 12:00:00.000005"]),
    (pa.string(), ["", "Grüße 🎉", "a\x00b"], ["", "Grüße 🎉", "a\x00b"]),
    (pa.large_string(), ["x"], ["x"]),
    (pa.binary(), [b"", b"\x00\xff"], [b"", b"\x00\xff"]),
    (pa.null(), [None], [None]),
]


@pytest.mark.parametrize(("kind", "values", "stored"), TYPES, ids=[str(kind) for kind, _, _ in TYPES])
def test_every_spark_type_is_kept(db: str, kind: pa.DataType, values: list[Any], stored: list[Any]) -> None:
    schema = pa.schema([("n", pa.int64()), ("v", kind)])
    columns = [pa.array(range(len(values) + 1)), pa.array([*values, None], kind)]
    sink = Sqlite(db, "kinds")
    sink.check(schema)
    write(sink, pa.RecordBatch.from_arrays(columns, schema=schema))
    assert [v for (v,) in query(db, "SELECT v FROM kinds ORDER BY n")] == [*stored, None]
    sink.check(schema)


def test_nested_columns_are_refused_by_name(db: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string())), ("at", pa.struct([("x", pa.int32())]))])
    with pytest.raises(SchemaMismatch) as caught:
        Sqlite(db, "orders").check(schema)
    assert str(caught.value) == (
        "SQLite cannot hold these columns: tags (list<item: string>), at (struct<x: int32>).\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Turn them into text with to_json(), or leave them out with select=[...]."
    )


def test_nan_is_refused_in_three_lines(db: str) -> None:
    sink = Sqlite(db, "orders")
    writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
    with pytest.raises(BatchFailed) as caught:
        writer.write(pa.RecordBatch.from_pydict({"price": [1.0, float("nan"), None]}))
    writer.abort()
    assert str(caught.value) == (
        "Column price holds NaN, which SQLite cannot store (it would become NULL).\n"
        "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
        "  what to do: Replace it before the sink, for example with nanvl(price, NULL)."
    )


# Identifiers and values -------------------------------------------------------------------------------------------

HOSTILE = ['a"b', "a'b", "x; DROP TABLE orders; --", "with space", "größe", "注文", "select", "[a]", "`a`", "a%s?:b"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_values_are_only_names_and_values(db: str, text: str) -> None:
    execute(db, "CREATE TABLE orders (id INTEGER)", "INSERT INTO orders VALUES (42)")
    schema = pa.schema([(text, pa.string()), (f"{text}2", pa.int64())])
    batch = pa.RecordBatch.from_arrays([pa.array([text]), pa.array([1])], schema=schema)
    for sink in (Sqlite(db, f"t{text}"), Sqlite(db, f"k{text}", mode="upsert", key=(text,))):
        sink.check(schema)
        write(sink, batch)
        sink.check(schema)
        quoted = sink.table.replace('"', '""')
        assert query(db, f'SELECT * FROM "{quoted}"') == [(text, 1)]  # noqa: S608 - what the test is about
    assert query(db, "SELECT * FROM orders") == [(42,)]


@pytest.mark.parametrize("table", ["", "a\x00b", "sqlite_master", "semel_ledger", "SEMEL_FENCE", "Sqlite_x"])
def test_tables_of_sqlite_and_of_semel_cannot_be_written(db: str, table: str) -> None:
    with pytest.raises(ConfigError, match="cannot write to a table named"):
        Sqlite(db, table)


def test_a_database_path_with_odd_characters_works(tmp_path: Path) -> None:
    db = str(tmp_path / "my shop? #1 %41.db")
    sink = Sqlite(db, "orders")
    write(sink, arrow(rows_of(1)))
    sink.check(TWO_COLUMNS)
    assert query(db, "SELECT * FROM orders") == rows_of(1)


# What check refuses -----------------------------------------------------------------------------------------------


def test_settings_are_validated_when_made(db: str) -> None:
    with pytest.raises(ConfigError, match="Sqlite has no mode 'merge'; use one of append, upsert, replace"):
        Sqlite(db, "orders", mode="merge")
    with pytest.raises(ConfigError, match="mode 'upsert' and `key` go together"):
        Sqlite(db, "orders", mode="upsert")
    with pytest.raises(ConfigError, match="mode 'upsert' and `key` go together"):
        Sqlite(db, "orders", key=("id",))


def test_a_schema_mismatch_lists_every_problem(db: str) -> None:
    execute(db, "CREATE TABLE orders (id TEXT, amount REAL, shop INTEGER NOT NULL, note TEXT NOT NULL DEFAULT '')")
    sink = Sqlite(db, "orders", mode="upsert", key=("id",))
    with pytest.raises(SchemaMismatch) as caught:
        sink.check(pa.schema([("id", pa.int64()), ("amount", pa.decimal128(10, 2)), ("extra", pa.string())]))
    assert str(caught.value) == (
        f"SQLite table orders in {db} does not match the rows: no column extra; "
        "column id is TEXT, the rows have int64; column amount is REAL, the rows have decimal128(10, 2); "
        "column shop is required and the rows do not have it; "
        "no unique index on (id), which mode 'upsert' needs.\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Select or cast the columns so that they match the sink, or name another table or folder."
    )


def test_a_key_that_the_rows_lack_is_named(db: str) -> None:
    with pytest.raises(SchemaMismatch, match="the rows have no key column order_id"):
        Sqlite(db, "orders", mode="upsert", key="order_id").check(TWO_COLUMNS)


@pytest.mark.parametrize("unique", ["PRIMARY KEY (id)", "UNIQUE (id)"])
def test_upsert_into_an_existing_table_needs_a_unique_index(db: str, unique: str) -> None:
    execute(db, f"CREATE TABLE orders (id INTEGER NOT NULL, text TEXT, {unique})")
    sink = Sqlite(db, "orders", mode="upsert", key=("id",))
    sink.check(TWO_COLUMNS)
    write(sink, arrow([(1, "old")]), arrow([(1, "new")]))
    assert query(db, "SELECT * FROM orders") == [(1, "new")]


def test_check_writes_nothing(db: str, tmp_path: Path) -> None:
    Sqlite(db, "orders").check(TWO_COLUMNS)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_a_file_that_is_no_database_are_named(db: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder .*nowhere is missing or cannot be written"):
        Sqlite(str(tmp_path / "nowhere" / "shop.db"), "orders").check(TWO_COLUMNS)
    Path(db).write_text("this is a text and not a database, and it is long enough to be read as one" * 10)
    with pytest.raises(ConfigError, match="cannot be read as an SQLite database: file is not a database"):
        Sqlite(db, "orders").check(TWO_COLUMNS)
    with pytest.raises(SinkUnavailable, match="cannot be opened: file is not a database"):
        Sqlite(db, "orders").participant(context())
