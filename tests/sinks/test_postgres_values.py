"""Values that a table cannot hold, names and values that look like SQL, and rows that are wide or large."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.errors import BatchFailed, ConfigError, SchemaMismatch
from semel.protocol.events import Outcome
from semel.sinks.postgres import Postgres
from semel.testing.harness import attempt
from tests.sinks.participants import column, prepare, rows, started
from tests.sinks.postgres_rig import KEYED, MODES, Database, commit, db, quoted, write

__all__ = ["db"]

# Values that do not fit -------------------------------------------------------------------------------------------

UNFIT: dict[str, tuple[str, Any, list[Any], str]] = {
    "int64 into int4": ("int4", pa.int64(), [1, 2**31], r"column x: Integer value 2147483648 not in range"),
    "long text": (
        "varchar(3)",
        pa.string(),
        ["abc", "abcd"],
        r"too long for type character varying\(3\).*line 2, column x",
    ),
    "long char": ("char(3)", pa.string(), ["abc", "abcd"], r"too long for type character\(3\).*line 2, column x"),
    "large decimal": (
        "numeric(4,2)",
        pa.decimal128(6, 2),
        [Decimal("99.99"), Decimal("100.00")],
        "numeric field overflow.*line 2, column x",
    ),
    "large integer": ("numeric(3,0)", pa.int64(), [999, 1000], "numeric field overflow.*line 2, column x"),
    "NUL in text": ("text", pa.string(), ["a", "b\0c"], "invalid byte sequence.*0x00.*line 2, column x"),
    "no uuid": ("uuid", pa.string(), ["0" * 32, "nonsense"], "column x: 'nonsense' is not a UUID"),
    "no json": ("json", pa.string(), ["{}", "{'a'"], "invalid input syntax for type json.*"),
    "no jsonb": ("jsonb", pa.string(), ["{}", ""], "invalid input syntax for type json.*"),
    "null": ("int4 NOT NULL", pa.int32(), [1, None], 'null value in column "x" of relation "orders" violates not-null'),
    "enum": ("mood", pa.string(), ["sad", "glad"], 'invalid input value for enum.*mood: "glad".*line 2, column x'),
    "domain": ("positive", pa.int32(), [1, 0], "value for domain.*positive violates check constraint"),
    "check": ("int4 CHECK (x > 0)", pa.int32(), [1, 0], "violates check constraint"),
    "date": ("date", pa.int32(), [0, 2**31 - 1], "date out of range"),
}


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
@pytest.mark.parametrize("case", UNFIT)
def test_a_value_that_does_not_fit_fails_the_batch_and_the_next_one_works(db: Database, case: str, mode: str) -> None:
    kind, arrow, (fine, unfit), said = UNFIT[case]
    db.run("CREATE TYPE mood AS ENUM ('sad')")
    db.run("CREATE DOMAIN positive AS int4 CHECK (VALUE > 0)")
    kind = kind.replace("mood", f"{quoted(db.schema)}.mood").replace("positive", f"{quoted(db.schema)}.positive")
    db.run(f"CREATE TABLE orders (x {kind})")
    sink = db.sink(mode=mode)

    def batch(*values: Any) -> pa.RecordBatch:
        made = column(values, arrow)
        return pa.RecordBatch.from_arrays([made["x"].cast(pa.date32())], ["x"]) if kind == "date" else made

    sink.check(batch(fine).schema)
    with started(sink) as participant:
        with pytest.raises(BatchFailed, match=said) as caught:
            prepare(participant, sink, attempt(), batch(fine), batch(fine, unfit))
        participant.abort(participant.recover().branches)
        assert len(str(caught.value).splitlines()) == 3
        assert db.run("SELECT * FROM orders") == []
        assert db.staged() == []
        assert commit(participant, prepare(participant, sink, attempt(0, 1), batch(fine))) == {Outcome.COMMITTED}
    assert db.run("SELECT count(*) FROM orders") == [(1,)]


def test_a_wrong_row_among_many_stops_the_task_early(db: Database) -> None:
    """The server refuses while rows are still being sent: what it said must not be lost behind a broken pipe."""
    db.run("CREATE TABLE orders (x varchar(3))")
    sink = db.sink()
    texts = ["abc"] * 200_000
    with started(sink) as participant:
        wrong = column([*texts[:5], "abcd", *texts], pa.string())
        with pytest.raises(BatchFailed, match=r"too long for type character varying.*line 6, column x"):
            prepare(participant, sink, attempt(), wrong)
        assert db.staged() == []


# Names ------------------------------------------------------------------------------------------------------------

HOSTILE = [
    'say "hi" and it\'s',
    "100% %s %(x)s %% {0} {target} {{}}",
    "back\\slash $$; DROP TABLE orders; -- tab\tnew\nline",
    " größe 日本 🎉 ",
    "select",
    "a.b.C",
    "x" * 63,
]


@pytest.mark.parametrize("mode", MODES)
def test_hostile_names_of_schema_table_and_columns(postgres_url: str, mode: str) -> None:
    for number, name in enumerate(HOSTILE):
        # The longest names have no room for more: the view of mode "versions" has a longer one than the table.
        database = Database(postgres_url, schema=name)
        try:
            other = HOSTILE[number - 1]
            columns = list(dict.fromkeys([name, other, "plain"]))
            table = name[:20] if mode == "versions" else name
            sink = database.keyed(
                mode, table, key=[name] if mode in KEYED else [], order_by=other if mode == "upsert" else ""
            )
            write(sink, rows((1, "a", name), (2, "b", None), names=columns), rows((1, "c", other), names=columns))
            visible = f"{table}_latest" if mode == "versions" else table
            found = database.run(f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(visible)} ORDER BY 1, 2")  # noqa: S608
            expected = {
                "ledger": [(1, "a", name), (1, "c", other), (2, "b", None)],
                "dedup": [(1, "a", name), (2, "b", None)],
            }
            expected["prepared"] = expected["ledger"]
            assert found == expected.get(mode, [(1, "c", other), (2, "b", None)])
            assert database.staged() == []
        finally:
            database.end()


@pytest.fixture
def postgres_url(db: Database) -> str:
    return db.url


def test_names_that_are_too_long_are_refused_by_name(db: Database) -> None:
    """The server would cut them off, and two names could become one."""
    schema = rows(names=["id", "t" * 64]).schema
    with pytest.raises(SchemaMismatch, match=f"a name has at most 63 bytes and no NUL, not '{'t' * 64}'"):
        db.sink(create=True).check(schema)
    with pytest.raises(SchemaMismatch, match="at most 63 bytes and no NUL, not 'ééé"):
        db.sink("é" * 32, create=True).check(rows().schema)
    with pytest.raises(SchemaMismatch, match=r"at most 63 bytes and no NUL, not .*o_latest"):
        db.keyed("versions", "o" * 57).check(rows().schema)
    assert db.run("SELECT count(*) FROM pg_class WHERE relnamespace = %s::regnamespace", db.schema) == [(0,)]


@pytest.mark.parametrize("name", ["ctid", "xmin", "", "a\0b"])
def test_names_that_the_server_refuses_are_refused_before_the_first_row(db: Database, name: str) -> None:
    with pytest.raises(ConfigError, match=r"(cannot take the rows: .*(system column|zero-length)|and no NUL)"):
        db.sink(create=True).check(rows(names=["id", name]).schema)


@pytest.mark.parametrize("table", ["", "a\0b", "semel_ledger", "SEMEL_x"])
def test_tables_that_are_not_to_be_written(table: str) -> None:
    with pytest.raises(ConfigError, match="cannot write to a table named"):
        Postgres("host=h", table)


# Values -----------------------------------------------------------------------------------------------------------

TEXTS = [*HOSTILE, "", "\\N", "\\.", "'; DROP TABLE orders; --", "\r\n\t\x01\x7f", "NULL", "\ufffe\U0010ffff"]


@pytest.mark.parametrize("mode", MODES)
def test_hostile_values(db: Database, mode: str) -> None:
    sink = db.keyed(mode, key="text" if mode in KEYED else [])
    write(sink, rows(*enumerate(TEXTS)))
    assert db.run("SELECT id, text FROM orders ORDER BY 1") == list(enumerate(TEXTS))


def test_a_text_of_ten_megabytes(db: Database) -> None:
    text = "0123456789" * 1_000_000
    batch = rows((1, text), (2, text[::-1]), (3, None))
    write(db.keyed("ledger"), batch)
    write(db.keyed("prepared", name="other"), batch.slice(1))
    assert db.run("SELECT id, length(text), md5(text) = md5(%s) FROM orders ORDER BY 1", text) == [
        (1, 10_000_000, True),
        (2, 10_000_000, False),
        (2, 10_000_000, False),
        (3, None, None),
        (3, None, None),
    ]


# Wide rows --------------------------------------------------------------------------------------------------------


def wide(columns: int) -> pa.RecordBatch:
    """Narrow values of four kinds, with nulls."""
    kinds = [pa.int16(), pa.bool_(), pa.int8(), pa.string()]
    arrays = []
    for n in range(columns):
        kind = kinds[n % 4]
        value: Any = n % 2 == 0 if kind == pa.bool_() else str(n % 10) if kind == pa.string() else n % 100
        arrays.append(pa.array([value, None] if n % 3 else [value, value], kind))
    return pa.RecordBatch.from_arrays(arrays, [f"c{n}" for n in range(columns)])


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_sixteen_hundred_columns(db: Database, mode: str) -> None:
    batch = wide(1600)
    write(db.keyed(mode), batch)
    found = db.run("SELECT * FROM orders")
    assert found == [tuple(row.values()) for row in batch.to_pylist()]


@pytest.mark.parametrize(("mode", "columns"), [("ledger", 1601), ("prepared", 1601), ("versions", 1600)])
def test_more_columns_than_a_table_can_have_are_refused_before_the_first_row(
    db: Database, mode: str, columns: int
) -> None:
    with pytest.raises(ConfigError, match="tables can have at most 1600 columns"):
        db.keyed(mode, key="c0" if mode == "versions" else []).check(wide(columns).schema)


def test_a_row_that_is_too_wide_for_a_page_fails_the_batch(db: Database) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([2**40])] * 1600, [f"c{n}" for n in range(1600)])
    sink = db.keyed("ledger")
    with started(sink) as participant, pytest.raises(BatchFailed, match="row is too big"):
        prepare(participant, sink, attempt(), batch)


@pytest.mark.parametrize("create", [True, False])
def test_rows_without_columns_are_refused(db: Database, create: bool) -> None:
    db.run("CREATE TABLE returns (id int8)")
    with pytest.raises(SchemaMismatch, match="the rows have no columns"):
        db.sink("orders" if create else "returns", create=create).check(pa.schema([]))
