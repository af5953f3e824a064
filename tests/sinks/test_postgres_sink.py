"""The modes of the PostgreSQL sink: which rows are in the table afterwards, and what semel keeps beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from semel.errors import BatchFailed, SchemaMismatch
from semel.protocol.events import Outcome
from semel.sinks.postgres import Postgres
from semel.sinks.sql import participant as sql_participant
from semel.testing.harness import attempt, context
from tests.sinks.participants import prepare, rows, started
from tests.sinks.postgres_rig import MODES, Database, commit, db, quoted, write

__all__ = ["db"]


def stamped(*triples: tuple[int, str, int | None]) -> pa.RecordBatch:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("at", pa.int32())])
    return pa.RecordBatch.from_pylist([{"id": i, "text": t, "at": a} for i, t, a in triples], schema=schema)


# Append -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_append_adds_rows_of_every_task_and_batch(db: Database, mode: str) -> None:
    write(db.keyed(mode), [rows((1, "a"), (2, "b")), rows((1, "a"))], rows((1, None)))
    assert db.run("SELECT * FROM orders ORDER BY 1, 2") == [(1, "a"), (1, "a"), (1, None), (2, "b")]
    assert db.staged() == []


@pytest.mark.parametrize("mode", MODES)
def test_columns_are_matched_by_name_and_the_others_get_their_defaults(db: Database, mode: str) -> None:
    db.run(
        "CREATE TABLE orders (number serial, text text, state text NOT NULL DEFAULT 'new', id int8 NOT NULL, gone int, "
        "semel_version bigint NOT NULL DEFAULT 0, twice int8 GENERATED ALWAYS AS (id * 2) STORED)"
    )
    db.run("ALTER TABLE orders DROP gone")
    db.run(f"CREATE UNIQUE INDEX ON orders ({'id, semel_version' if mode == 'versions' else 'id'}) INCLUDE (state)")
    write(db.keyed(mode, create=False), rows((1, "a"), (2, "b")))
    assert db.run("SELECT id, text, state, twice FROM orders ORDER BY 1") == [(1, "a", "new", 2), (2, "b", "new", 4)]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_is_marked(db: Database, mode: str) -> None:
    sink = db.keyed(mode)
    write(sink, rows(), [rows(), rows()])
    with started(sink, context(2)) as participant:
        assert participant.recover().newest_batch == 1
    assert db.run("SELECT sum(row_count) FROM semel_ledger") == [(0,)]
    assert db.staged() == []


def test_a_partitioned_table(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text text) PARTITION BY RANGE (id)")
    db.run("CREATE TABLE low PARTITION OF orders FOR VALUES FROM (0) TO (10)")
    write(db.sink(), rows((1, "a")))
    write(db.sink(mode="prepared", name="other"), rows((2, "b")))
    assert db.run("SELECT * FROM low ORDER BY 1") == [(1, "a"), (2, "b")]


def test_triggers_see_rows_and_a_check_without_rows_does_not_fire_them(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text text)")
    db.run("CREATE TABLE fired (level text)")
    db.run(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO fired VALUES (TG_LEVEL); RETURN NULL; END'"
    )
    for level in ("ROW", "STATEMENT"):
        db.run(f"CREATE TRIGGER t_{level} AFTER INSERT ON orders FOR EACH {level} EXECUTE FUNCTION note()")
    with psycopg.connect(db.url, autocommit=True) as connection:
        user = connection.info.user
    db.run(f"ALTER ROLE {user} IN DATABASE semel SET search_path = {quoted(db.schema)}, public")
    try:
        db.sink().check(rows((1, "a")).schema)
        assert db.run("SELECT * FROM fired") == []
        write(db.sink(), rows((1, "a"), (2, "b")))
    finally:
        db.run(f"ALTER ROLE {user} IN DATABASE semel RESET search_path")
    assert db.run("SELECT level, count(*)::int FROM fired GROUP BY 1 ORDER BY 1") == [("ROW", 2), ("STATEMENT", 1)]


# Upsert -----------------------------------------------------------------------------------------------------------


def test_the_newest_row_of_a_key_wins_within_a_task_across_tasks_and_across_batches(db: Database) -> None:
    sink = db.keyed("upsert")
    first = [rows((1, "old"), (2, "kept"), (1, "newer")), rows((3, "x"), (1, "newest"))]
    write(sink, first, rows((3, "next batch")))
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "newest"), (2, "kept"), (3, "next batch")]


def test_rows_of_very_different_widths_keep_their_order(db: Database) -> None:
    """COPY puts a row on an earlier page that has room for it, unless it made the table in the same transaction."""
    dice = random.Random(7)  # noqa: S311 - the same in every run
    widths = [dice.choice([40, 100, 600, 1_900, 1_900]) for _ in range(6_000)]
    # Every key comes twice, one after the other.
    write(db.keyed("upsert"), rows(*((n // 2, f"{n} ".ljust(width, "x")) for n, width in enumerate(widths))))
    found = [int(text.split()[0]) for (text,) in db.run("SELECT text FROM orders ORDER BY id")]
    assert found == list(range(1, 6_000, 2))


def test_order_by_decides_within_a_task_across_tasks_and_across_batches(db: Database) -> None:
    sink = db.keyed("upsert", order_by="at")
    first = [stamped((1, "late", 9), (1, "early", 2)), stamped((1, "middle", 5), (2, "a", 1))]
    write(sink, first, stamped((1, "older", 8), (2, "same moment", 1)))
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "late", 9), (2, "same moment", 1)]


def test_a_row_without_a_moment_is_the_oldest(db: Database) -> None:
    sink = db.keyed("upsert", order_by="at")
    write(sink, stamped((1, "unknown", None), (2, "unknown", None), (3, "known", 1)))
    second = stamped((1, "known", 1), (2, "still unknown", None), (3, "unknown", None), (3, "older", 0))
    write(sink, second, incarnation=2)
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "known", 1), (2, "still unknown", None), (3, "known", 1)]


@pytest.mark.parametrize("mode", ["upsert", "dedup"])
def test_new_keys_before_and_after_one_that_is_there_already(db: Database, mode: str) -> None:
    """Keys are taken for new until one is not: what was done in that belief must not stay half done."""
    parts = [rows((1, "a"), (2, "a")), rows((3, "b"), (2, "b"), (4, "b")), rows((5, "c"), (4, "c"))]
    write(db.keyed(mode), parts, [rows((6, "d")), rows((1, "d"), (7, "d"))])
    newest = {1: "d", 2: "b", 3: "b", 4: "c", 5: "c", 6: "d", 7: "d"}
    first = {1: "a", 2: "a", 3: "b", 4: "b", 5: "c", 6: "d", 7: "d"}
    expected = newest if mode == "upsert" else first
    assert db.run("SELECT * FROM orders ORDER BY 1") == sorted(expected.items())


def test_upsert_of_key_columns_only_adds_each_key_once(db: Database) -> None:
    sink = db.keyed("upsert", key=["id", "text"])
    write(sink, [rows((1, "a"), (1, "b"), (1, "a")), rows((1, "a"))], rows((1, "b")))
    assert db.run("SELECT * FROM orders ORDER BY 1, 2") == [(1, "a"), (1, "b")]


def test_keys_are_equal_where_the_database_says_so(db: Database) -> None:
    db.run("CREATE EXTENSION IF NOT EXISTS citext SCHEMA public")
    db.run("CREATE TABLE orders (id int8, text citext UNIQUE)")
    write(db.keyed("upsert", key="text", create=False), rows((1, "A"), (2, "a")), rows((3, "A")))
    assert db.run("SELECT id FROM orders") == [(3,)]


def test_texts_that_are_one_key_stay_in_their_order(db: Database) -> None:
    """Only the server knows that they are one: sorted by their bytes, the older would come last and win."""
    db.run("CREATE EXTENSION IF NOT EXISTS citext SCHEMA public")
    db.run("CREATE TABLE orders (id int8, text citext UNIQUE)")
    write(db.keyed("upsert", key="text", create=False), rows((1, "a"), (2, "A")))
    assert db.run("SELECT id FROM orders") == [(2,)]


def test_moments_that_the_table_rounds_to_one_key_stay_in_their_order(db: Database) -> None:
    db.run("CREATE TABLE orders (at timestamp(0) PRIMARY KEY, text text)")
    moments = pa.array([300_000, 100_000], pa.timestamp("us"))
    batch = pa.RecordBatch.from_arrays([moments, pa.array(["first", "last"])], ["at", "text"])
    write(db.keyed("upsert", key="at", create=False), batch)
    assert db.run("SELECT text FROM orders") == [("last",)]


def test_whole_numbers_are_not_rounded_to_tens(db: Database) -> None:
    db.run("CREATE TABLE orders (id numeric(5, -1), text text)")
    with pytest.raises(SchemaMismatch, match="id"):
        db.sink(create=False).check(rows().schema)


# Dedup ------------------------------------------------------------------------------------------------------------


def test_an_id_is_written_once_within_a_task_across_tasks_and_across_batches(db: Database) -> None:
    sink = db.keyed("dedup")
    write(
        sink, [rows((1, "first"), (1, "second"), (2, "a")), rows((1, "third"), (3, "b"))], rows((3, "again"), (4, "c"))
    )
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "first"), (2, "a"), (3, "b"), (4, "c")]
    # The rows may go; the ids are remembered.
    db.run("DELETE FROM orders")
    write(sink, rows((1, "x"), (5, "y")), incarnation=2)
    assert db.run("SELECT * FROM orders") == [(5, "y")]


def ids_of(db: Database) -> tuple[str, str]:
    """The tables where ids are remembered, and where it is written down when they may be forgotten."""
    found = db.run("SELECT relname FROM pg_class WHERE relname ~ '^semel_(seen|due)_' AND relkind = 'r' ORDER BY 1")
    return found[1][0], found[0][0]


def test_ids_are_forgotten_after_the_retention(db: Database) -> None:
    sink = db.keyed("dedup", retention_s=60)
    write(sink, rows((1, "a"), (1, "b")), rows((1, "c")))
    seen, due = ids_of(db)
    db.run(f"UPDATE {due} SET semel_at = semel_at - interval '61 s'")  # noqa: S608 - ours
    write(sink, rows((1, "d")), incarnation=2)
    assert db.run("SELECT text FROM orders ORDER BY 1") == [("a",), ("d",)]
    assert db.run(f"SELECT count(*) FROM {seen}") == [(1,)]  # noqa: S608 - ours
    assert db.run(f"SELECT id FROM {due}") == [([1],)]  # noqa: S608 - ours


def test_only_ids_that_are_due_are_forgotten(db: Database) -> None:
    """Also where later rows have brought an id again: it is remembered since it was written, and no longer."""
    sink = db.keyed("dedup", key=["id", "text"], retention_s=60)
    write(sink, rows((1, "a"), (2, "b"), (2, "c")))
    seen, due = ids_of(db)
    db.run(f"UPDATE {due} SET semel_at = semel_at - interval '61 s'")  # noqa: S608 - ours
    write(replace(sink, retention_s=3600), rows((2, "b"), (3, "d")), incarnation=2)
    assert db.run(f"SELECT id, text FROM {seen} ORDER BY 1, 2") == [(1, "a"), (2, "b"), (2, "c"), (3, "d")]  # noqa: S608
    write(sink, rows((4, "e"), (2, "c")), incarnation=3)
    assert db.run(f"SELECT id, text FROM {seen} ORDER BY 1, 2") == [(2, "c"), (3, "d"), (4, "e")]  # noqa: S608 - ours
    assert db.run("SELECT * FROM orders ORDER BY 1, 2") == [
        (1, "a"),
        (2, "b"),
        (2, "c"),
        (2, "c"),
        (3, "d"),
        (4, "e"),
    ]


def test_what_is_due_is_written_down_in_lists_that_fit_into_memory(db: Database) -> None:
    assert [db.keyed("dedup", piece_rows=10**9).room(piece) for piece in (0, 1)] == [10_000, 50_000]
    assert [db.keyed("upsert", piece_rows=10**9).room(piece) for piece in (0, 1)] == [10_000, 10**9]


def test_an_array_cannot_be_an_id(db: Database) -> None:
    schema = pa.schema([("id", pa.list_(pa.int64()))])
    with pytest.raises(SchemaMismatch, match="an array cannot be an id in mode 'dedup': column id"):
        db.keyed("dedup").check(schema)


@pytest.mark.parametrize("forever", [float("inf"), 1e300])
def test_ids_may_be_remembered_forever(db: Database, forever: float) -> None:
    write(db.keyed("dedup", retention_s=forever), rows((1, "a")), rows((1, "b")))
    assert db.run("SELECT text FROM orders") == [("a",)]


def test_another_key_means_other_ids(db: Database) -> None:
    write(db.keyed("dedup"), rows((1, "a")))
    write(db.keyed("dedup", key=["id", "text"]), rows((1, "a"), (1, "b"), (1, "b")), incarnation=2)
    assert db.run("SELECT text FROM orders ORDER BY 1") == [("a",), ("a",), ("b",)]


def test_a_key_may_be_called_like_a_column_of_ours(db: Database) -> None:
    sink = db.keyed("dedup", key="seen_at")
    write(sink, rows((1, "a"), (2, "a"), names=["id", "seen_at"]), rows((3, "a"), names=["id", "seen_at"]))
    assert db.run("SELECT id FROM orders") == [(1,)]


@pytest.mark.parametrize("mode", ["upsert", "dedup", "versions"])
def test_a_row_without_a_key_is_refused_by_name(db: Database, mode: str) -> None:
    sink = db.keyed(mode, key=["id", "text"])
    sink.check(rows().schema)
    with started(sink) as participant:
        with pytest.raises(BatchFailed) as caught:
            prepare(participant, sink, attempt(), rows((1, "a"), (2, None)))
        assert db.staged() == []
        assert commit(participant, prepare(participant, sink, attempt(0, 1), rows((1, "a")))) == {Outcome.COMMITTED}
    assert (
        str(caught.value).splitlines()[0].endswith("rows of task 0 have null in column text, which is part of the key.")
    )


# Versions ---------------------------------------------------------------------------------------------------------


def test_every_batch_adds_a_version_and_the_view_shows_the_newest(db: Database) -> None:
    sink = db.keyed("versions")
    write(sink, [rows((1, "a"), (2, "x")), rows((1, "b"))], rows((1, "c"), (1, "d")), rows((3, "z")))
    assert db.run("SELECT id, text FROM orders_latest ORDER BY 1") == [(1, "d"), (2, "x"), (3, "z")]
    found = db.run("SELECT id, text, semel_version FROM orders ORDER BY 1, 3")
    assert found == [(1, "b", 1), (1, "d", 2), (2, "x", 1), (3, "z", 3)]


def test_only_so_many_versions_are_kept(db: Database) -> None:
    sink = db.keyed("versions", key=["id", "text"], versions_kept=2)
    batches = [stamped((1, "a", n), (1, "b", n)) if n < 2 else stamped((1, "a", n)) for n in range(5)]
    write(sink, *batches)
    assert db.run("SELECT text, at FROM orders ORDER BY 1, 2") == [("a", 3), ("a", 4), ("b", 0), ("b", 1)]
    assert db.run("SELECT text, at FROM orders_latest ORDER BY 1") == [("a", 4), ("b", 1)]


def test_a_key_may_have_a_name_that_we_need_ourselves(db: Database) -> None:
    """In the statement that drops old versions, each row of a key has a place."""
    sink = db.keyed("versions", key="place", versions_kept=1)
    write(sink, *(rows((1, text), names=["place", "text"]) for text in "abc"))
    assert db.run("SELECT place, text FROM orders") == [(1, "c")]


def test_order_by_decides_within_a_version(db: Database) -> None:
    sink = db.keyed("versions", order_by="at")
    write(
        sink,
        [stamped((1, "late", 9), (1, "early", 2)), stamped((1, "middle", 5))],
        stamped((1, "older, but newer here", 1)),
    )
    assert db.run("SELECT text, semel_version FROM orders ORDER BY 2") == [("late", 1), ("older, but newer here", 2)]


def test_versions_go_on_behind_those_that_are_there(db: Database) -> None:
    """The table was filled by somebody else, or its number was lost in a restore."""
    sink = db.keyed("versions")
    write(sink, rows((1, "a")), rows((1, "b")))
    db.run("DROP TABLE semel_versions")
    write(sink, rows((1, "c")), incarnation=2)
    assert db.run("SELECT text, semel_version FROM orders_latest") == [("c", 3)]


def test_a_version_table_of_your_own_has_the_view_that_you_make(db: Database) -> None:
    db.run("CREATE TABLE orders (id int8, text text, semel_version bigint, UNIQUE (semel_version, id))")
    write(db.keyed("versions", create=False), rows((1, "a")))
    assert db.run("SELECT to_regclass('orders_latest')") == [(None,)]
    write(db.keyed("versions"), rows((1, "b")), incarnation=2)
    assert db.run("SELECT text FROM orders_latest") == [("b",)]


# Beside other sinks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ledger", "upsert", "dedup", "versions"])
def test_a_firm_promise_outlives_the_driver_in_every_mode(db: Database, mode: str) -> None:
    sink = db.keyed(mode, firm=True)
    with started(sink) as participant:
        promise = prepare(participant, sink, attempt(), rows((1, "a")), rows((1, "b"), (2, "c")))
        assert db.run("SELECT id, text FROM orders") == []
    with started(sink, context(2)) as participant:
        assert commit(participant, promise) == {Outcome.COMMITTED}
        assert commit(participant, promise) == {Outcome.ALREADY_COMMITTED}
    of_the_first = {"ledger": ["a", "b"], "dedup": ["a"]}.get(mode, ["b"])
    expected = [*((1, text) for text in of_the_first), (2, "c")]
    assert db.run("SELECT id, text FROM orders ORDER BY 1, 2") == expected
    assert db.staged() == []


# Constraints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
@pytest.mark.parametrize("constraint", ["UNIQUE", "UNIQUE DEFERRABLE INITIALLY DEFERRED"])
def test_a_unique_violation_names_the_key_before_the_decision(db: Database, mode: str, constraint: str) -> None:
    """Also one that the server would look at only when the transaction commits: then it would be too late."""
    db.run(f"CREATE TABLE orders (id int8 {constraint}, text text)")
    sink = db.sink(mode=mode)
    write(sink, rows((7, "there")))
    with started(sink, context(2)) as participant:
        with pytest.raises(BatchFailed, match=r"Key \(id\)=\(7\) already exists"):
            prepare(participant, sink, attempt(1, 0, 2), rows((5, "a")), rows((6, "b"), (7, "c"), (8, "d")))
        participant.abort(participant.recover().branches)
        assert db.run("SELECT * FROM orders") == [(7, "there")]
        assert db.staged() == []
        again = prepare(participant, sink, attempt(1, 1, 2), rows((5, "a")), rows((6, "b")))
        assert commit(participant, again) == {Outcome.COMMITTED}
    assert db.run("SELECT id FROM orders ORDER BY 1") == [(5,), (6,), (7,)]


def test_a_deferred_foreign_key_is_looked_at_before_the_decision(db: Database) -> None:
    db.run("CREATE TABLE customers (id int8 PRIMARY KEY)")
    db.run("CREATE TABLE orders (id int8 REFERENCES customers DEFERRABLE INITIALLY DEFERRED, text text)")
    sink = db.sink()
    with started(sink) as participant, pytest.raises(BatchFailed, match=r"Key \(id\)=\(1\) is not present in table"):
        prepare(participant, sink, attempt(), rows((1, "a")))


# The ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_keeps_the_newest_markers(db: Database, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_participant, "PRUNED_EVERY_BATCHES", 10)
    monkeypatch.setattr(sql_participant, "LEDGER_BATCHES_KEPT", 20)
    sink, other = db.keyed(mode), db.keyed(mode, "returns", name="returns")
    write(other, rows((1, "a")))
    with started(sink) as participant:
        for number in range(0, 61, 3):
            tasks = [rows((number, "a")), rows((number, "b"))]
            commit(participant, prepare(participant, sink, attempt(number), *tasks))
        assert participant.recover().newest_batch == 60
    batches = [batch for (batch,) in db.run("SELECT DISTINCT batch FROM semel_ledger WHERE sink = %s", sink.name)]
    assert min(batches) >= 30
    assert len(batches) <= 11
    assert db.run("SELECT count(*) FROM semel_ledger WHERE sink = 'returns'") == [(1,)]


def test_what_the_ledger_says(db: Database) -> None:
    write(db.keyed("ledger"), [rows((1, "a")), rows((2, "b"))])
    found: list[Any] = db.run("SELECT pipeline, sink, batch, part, attempt, incarnation, row_count FROM semel_ledger")
    assert found == [(context().pipeline, "postgres_orders", 0, "", 0, 1, 2)]


def test_two_sinks_of_one_pipeline_in_one_database_commit_together(db: Database) -> None:
    orders, returns = db.keyed("ledger"), db.keyed("upsert", "returns")
    with started(orders) as first, started(returns) as second:
        promises = [(p, prepare(p, s, attempt(), rows((1, "a")))) for p, s in ((first, orders), (second, returns))]
        assert db.run("SELECT count(*) FROM orders") == [(0,)]
        assert commit(first, promises[0][1]) == {Outcome.COMMITTED}
        assert db.run("SELECT count(*) FROM returns") == [(1,)]
        assert commit(second, promises[1][1]) == {Outcome.COMMITTED}
    assert db.staged() == []
    assert db.sessions() == []


def test_the_table_must_have_a_key_for_a_mode_with_one() -> None:
    sink = Postgres("host=nowhere", "orders", mode="upsert", key="nr")
    with pytest.raises(SchemaMismatch, match="the rows have no column nr"):
        sink.check(rows().schema)
