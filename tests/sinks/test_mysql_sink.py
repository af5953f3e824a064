"""The modes of the MySQL sink: which rows are in the table afterwards."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from semel.errors import BatchFailed
from semel.protocol.events import Outcome
from semel.sinks.memory import Memory
from semel.sinks.mysql import MySql
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.ids import forget_old
from semel.sinks.sql import participant as sql_participant
from semel.testing.harness import attempt, context
from tests.sinks.mysql_rig import KEYED, MODES, Database, commit, db, stamped, write
from tests.sinks.participants import prepare, rows, started

__all__ = ["db"]


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_append_adds_rows_of_every_task_and_batch(db: Database, mode: str) -> None:
    write(db.sink(mode), [rows((1, "a"), (2, "b")), rows((1, "a"))], rows((1, None)))
    assert db.rows(order="1, text IS NULL") == [(1, "a"), (1, "a"), (1, None), (2, "b")]
    assert db.staged() == []


@pytest.mark.parametrize("way", ["bulk", "load"])
@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_a_duplicate_key_fails_the_batch_and_is_named(
    db: Database, mode: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOAD DATA LOCAL leaves such rows out and says nothing."""
    if way == "load":
        monkeypatch.setattr(mysql_wire, "WANTED", 0)
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


@pytest.fixture(params=["packed", "plain"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether ids are stored as requests, or as rows, as on a server of MySQL."""
    if request.param == "plain":
        monkeypatch.setattr(mysql_wire, "WANTED", 0)
    return str(request.param)


def age(db: Database, sink: MySql) -> None:
    """All that is remembered is older by 61 seconds."""
    due = sink.place.named(sink.due_table)
    db.run(f"UPDATE {due} SET semel_at = semel_at - INTERVAL 61 SECOND")  # noqa: S608 - ours


def remembered(db: Database, sink: MySql) -> list[tuple[Any, ...]]:
    names = ", ".join(sink.key)
    return db.run(f"SELECT {names} FROM {sink.place.named(sink.seen_table)} ORDER BY {names}")  # noqa: S608 - ours


def test_ids_are_forgotten_after_the_retention(db: Database, staging: str) -> None:
    """Those that were taken for new, and those of rows that brought some twice."""
    sink = db.sink("dedup", retention_s=60)
    write(sink, rows((1, "a"), (2, "b")), rows((3, "c"), (3, "d")))
    age(db, sink)
    write(sink, rows((1, "e"), (4, "f")), incarnation=2)
    assert remembered(db, sink) == [(1,), (4,)]
    write(sink, rows((3, "g"), (4, "h")), incarnation=3)
    assert db.rows() == [(1, "a"), (1, "e"), (2, "b"), (3, "c"), (3, "g"), (4, "f")]
    assert len(db.run(f"SELECT 1 FROM {sink.place.named(sink.due_table)}")) == 2  # noqa: S608 - ours


def test_only_ids_that_are_due_are_forgotten(db: Database, staging: str) -> None:
    """Also where later rows have brought an id again: it is remembered since it was written, and no longer."""
    sink = db.sink("dedup", key=["id", "text"], retention_s=60)
    write(sink, rows((1, "a"), (2, "b"), (2, "c")))
    age(db, sink)
    write(replace(sink, retention_s=3600), rows((2, "b"), (3, "d")), incarnation=2)
    assert remembered(db, sink) == [(1, "a"), (2, "b"), (2, "c"), (3, "d")]
    write(sink, rows((4, "e"), (2, "c")), incarnation=3)
    assert remembered(db, sink) == [(2, "c"), (3, "d"), (4, "e")]
    assert db.rows() == [(1, "a"), (2, "b"), (2, "c"), (2, "c"), (3, "d"), (4, "e")]


def test_an_id_that_somebody_else_has_brought_anew_stays(db: Database, staging: str) -> None:
    """Of two pipelines that share ids, both may find the same ones due, and one of them bring some again meanwhile."""
    sink = db.sink("dedup", retention_s=60)
    write(sink, rows((1, "a"), (2, "b")))
    age(db, sink)
    seen = sink.place.named(sink.seen_table)
    db.run(f"UPDATE {seen} SET semel_token = semel_token - 1 WHERE id = 2")  # noqa: S608 - ours
    write(sink, rows((1, "c"), (2, "d")), incarnation=2)
    assert (remembered(db, sink), db.rows()) == ([(1,), (2,)], [(1, "a"), (1, "c"), (2, "b")])


def test_what_was_stored_as_requests_waits_for_a_connection_that_can_send_them(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = db.sink("dedup", retention_s=60)
    write(sink, rows((1, "a")))
    age(db, sink)
    with monkeypatch.context() as hidden:
        hidden.setattr(mysql_wire, "WANTED", 0)
        write(sink, rows((2, "b")), incarnation=2)
    assert remembered(db, sink) == [(1,), (2,)]
    write(sink, rows((1, "c")), incarnation=3)
    assert (remembered(db, sink), db.rows()) == ([(1,), (2,)], [(1, "a"), (1, "c"), (2, "b")])


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ("JSON_SET(semel_layout, '$.format', 2)", [(1,), (2,), (3,)]),
        ("JSON_REMOVE(semel_layout, '$.format')", [(3,)]),
    ],
    ids=["newer", "of 0.1.0"],
)
def test_requests_that_a_newer_semel_has_stored_are_left_to_it(db: Database, changed: str, kept: list[Any]) -> None:
    sink = db.sink("dedup", retention_s=60)
    write(sink, rows((1, "a"), (2, "b")))
    due = sink.place.named(sink.due_table)
    db.run(f"UPDATE {due} SET semel_layout = {changed}")  # noqa: S608 - ours
    age(db, sink)
    write(sink, rows((3, "c")), incarnation=2)
    assert remembered(db, sink) == kept


def test_old_ids_are_found_by_an_index(db: Database, staging: str) -> None:
    """By the key where requests delete them, also if it is a text, else by the token."""
    sink = db.sink("dedup", key=["text"], retention_s=60)
    write(sink, rows(*((n, f"old {n}") for n in range(100))))
    age(db, sink)
    write(replace(sink, retention_s=3600), rows(*((n, f"new {n}") for n in range(3000))), incarnation=2)
    store = sink.store(context(incarnation=2))
    with store.transaction() as run:
        read = "SHOW SESSION STATUS LIKE 'Handler_read_rnd_next'"
        before = int(run(read)[0][1])
        forget_old(sink, run)
        read_one_by_one = int(run(read)[0][1]) - before
    store.release()
    assert len(remembered(db, sink)) == 3000
    # Those are tables in which the server describes others.
    assert read_one_by_one < 1000


@pytest.mark.parametrize("mode", ["upsert", "dedup"])
def test_new_keys_before_and_after_one_that_is_there_already(db: Database, mode: str) -> None:
    """Keys are taken for new until one is not: what was done in that belief must not stay half done."""
    parts = [rows((1, "a"), (2, "a")), rows((3, "b"), (2, "b"), (4, "b")), rows((5, "c"), (4, "c"))]
    write(db.sink(mode), parts, [rows((6, "d")), rows((1, "d"), (7, "d"))])
    newest = {1: "d", 2: "b", 3: "b", 4: "c", 5: "c", 6: "d", 7: "d"}
    first = {1: "a", 2: "a", 3: "b", 4: "b", 5: "c", 6: "d", 7: "d"}
    assert db.rows() == sorted((newest if mode == "upsert" else first).items())


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


def test_a_key_may_have_a_name_that_we_need_ourselves(db: Database) -> None:
    """In the statement that drops old versions, each row of a key has a place."""
    sink = db.sink("versions", key="place", versions_kept=1)
    write(sink, *(rows((1, text), names=["place", "text"]) for text in "abc"))
    assert db.rows("place, text") == [(1, "c")]


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


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_keeps_the_newest_markers(db: Database, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_participant, "PRUNED_EVERY_BATCHES", 10)
    monkeypatch.setattr(sql_participant, "LEDGER_BATCHES_KEPT", 20)
    sink, other = db.sink(mode), db.sink(mode, table=f"returns{db.suffix}", name=f"returns{db.suffix}")
    write(other, rows((1, "a")))
    with started(sink) as participant:
        for number in range(0, 61, 10):
            commit(participant, prepare(participant, sink, attempt(number), rows((number, "a"))))
        assert participant.recover().newest_batch == 60
    assert db.run("SELECT batch FROM semel_ledger WHERE sink = %s ORDER BY 1", sink.name) == [(40,), (50,), (60,)]
    assert db.run("SELECT count(*) FROM semel_ledger WHERE sink = %s", other.name) == [(1,)]


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
