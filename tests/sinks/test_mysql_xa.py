"""XA transactions: their names, what the server says of them and what is true, kill -9, and locks of others."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pymysql
import pytest

from semel.dev.mariadb import MariaDbServer
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch, Incarnation
from semel.protocol.events import Outcome
from semel.sinks.mysql import connection as mysql_connection
from semel.sinks.mysql import xa as mysql_xa
from semel.sinks.mysql.connection import MySqlPlace
from semel.sinks.mysql.loaders import base as mysql_loaders
from semel.sinks.mysql.xa import FREE, HELD, VISIBLE, end_prepared, fate, parse_xid, xid
from semel.testing.harness import OURS, attempt, context
from tests.sinks.mysql_rig import MODES, Database, commit, db, own_server, write
from tests.sinks.participants import prepare, rows, started

__all__ = ["db", "own_server"]


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
    assert mysql_xa.prepared_branches(lambda _: listed) == set()
    assert mysql_xa.prepared_branches(lambda _: [(1, len(gtrid), len(bqual), data)]) != set()


def test_an_answer_of_the_server_is_proven_by_the_ledger(db: Database) -> None:
    """MariaDB answers OK to an XA COMMIT that did nothing, for a moment after the session that prepared it is closed.

    No task waits for that here, as the writer does, so that it happens now and then.
    """
    sink = db.sink("xa")
    write(sink, rows((0, "creates the tables")))
    place = MySqlPlace(db.url, "", 10)
    outcomes = []
    with closing(place.connect()) as connection:
        run = mysql_connection.runner(connection, place)
        for number in range(150):
            branch = Branch(attempt(1, number), sink.name, 0, 0)
            with place.connect() as task:
                its = mysql_connection.runner(task, place)
                its(f"XA START {xid(branch)}")
                its(f"INSERT INTO {db.table} VALUES (%s, 'x')", (number + 1,))  # noqa: S608 - ours
                write_ledger_row(its, branch)
                its(f"XA END {xid(branch)}")
                its(f"XA PREPARE {xid(branch)}")
            known = end_prepared(place, run, "COMMIT", branch)
            outcomes.append((number + 1, known))
            assert fate(run, branch) == (VISIBLE if known else FREE)
    committed = [(number,) for number, known in outcomes if known]
    assert db.rows("id", "1")[1:] == committed
    assert len(committed) >= 100
    assert db.staged() == []


def write_ledger_row(run: Any, branch: Branch) -> None:
    from semel.sinks.sql.participant import write_mark

    write_mark(run, branch.sink, branch.attempt, str(branch), 1)


def test_a_transaction_that_lost_its_name_is_rolled_back_and_not_taken_for_committed(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is OK, the ledger row is still held, and the server's list does not know the name."""
    branch = Branch(attempt(), "orders", 0, 0)
    answers = iter([HELD, FREE])
    freed: list[Branch] = []
    monkeypatch.setattr(mysql_xa, "fate", lambda _run, _branch: next(answers))
    monkeypatch.setattr(mysql_xa, "_roll_back_nameless", lambda _place, _run, which: freed.append(which))
    asked: list[str] = []

    def run(sql: str, *_: Any, **__: str) -> list[tuple[Any, ...]]:
        asked.append(sql)
        if sql.startswith("XA COMMIT") and freed:
            raise pymysql.err.OperationalError(1397, "XAER_NOTA: Unknown XID")
        return []

    assert end_prepared(MySqlPlace(db.url, "", 5), run, "COMMIT", branch) is False
    assert freed == [branch]


def test_a_transaction_whose_session_is_open_is_waited_for_and_never_taken_for_gone(db: Database) -> None:
    sink = db.sink("xa", timeout_s=1)
    write(sink, rows((0, "creates the tables")))
    branch = Branch(attempt(1), sink.name, 0, 0)
    place = sink.place
    task = place.connect()
    its = mysql_connection.runner(task, place)
    its(f"XA START {xid(branch)}")
    its(f"INSERT INTO {db.table} VALUES (1, 'x')")  # noqa: S608 - ours
    write_ledger_row(its, branch)
    its(f"XA END {xid(branch)}")
    its(f"XA PREPARE {xid(branch)}")
    with closing(place.connect()) as connection:
        run = mysql_connection.runner(connection, place)
        with pytest.raises(SinkUnavailable, match=r"still holds the rows of semel-.* and lets nobody end it"):
            end_prepared(place, run, "COMMIT", branch)
        assert fate(run, branch) == HELD
        timer = threading.Timer(0.3, task.close)
        timer.start()
        known = end_prepared(replace(place, timeout_s=10), run, "COMMIT", branch)
        timer.join()
        assert fate(run, branch) == (VISIBLE if known else FREE)
    assert db.staged() == []


@pytest.mark.parametrize("mode", MODES)
def test_what_is_prepared_survives_kill_9_of_the_server(own_server: MariaDbServer, mode: str) -> None:
    db = Database(own_server.url)
    sink = db.sink(mode, firm=True)
    other = replace(sink, name=f"other{db.suffix}", table=f"others{db.suffix}")
    with started(sink) as participant, started(other) as second:
        promise = prepare(participant, sink, attempt(), rows((1, "a")), rows((2, "b")))
        dropped = prepare(second, other, attempt(), rows((3, "c")))
        own_server.kill()
        with pytest.raises(SinkUnavailable):
            commit(participant, promise)
        own_server.start()
        assert db.rows("id, text") == []
        assert commit(participant, promise) is Outcome.COMMITTED
        assert commit(participant, promise) is Outcome.ALREADY_COMMITTED
    with started(other, context(2)) as participant:
        left = participant.recover().branches
        assert [str(b) for b in left] == [name for c in dropped for name in c.branches]
        participant.abort(left)
    assert (db.rows("id, text"), db.staged()) == ([(1, "a"), (2, "b")], [])


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


@pytest.mark.parametrize(
    ("columns", "take_turns"),
    [
        ("id bigint, text varchar(9)", True),
        ("n bigint AUTO_INCREMENT PRIMARY KEY, id bigint, text varchar(9)", True),
        ("id bigint PRIMARY KEY, text varchar(9)", False),
    ],
)
def test_tasks_take_turns_where_all_append_to_the_end_of_a_table(db: Database, columns: str, take_turns: bool) -> None:
    db.create(columns)
    sink = db.sink("xa", create=False)
    with started(sink) as participant:
        writers = [sink.writer(Branch(attempt(), sink.name, task, 0)) for task in range(2)]
        for task, writer in enumerate(writers):
            writer.write(rows((task, "a")))
        assert [bool(writer._loader.turn) for writer in writers] == [take_turns] * 2  # type: ignore[attr-defined]
        # A turn lasts for one request: both are in the middle of their transactions.
        promise = participant.prepare(attempt(), [writer.prepare() for writer in writers])
        assert commit(participant, promise) is Outcome.COMMITTED
    assert db.rows("id, text") == [(0, "a"), (1, "a")]


def test_a_task_that_waits_too_long_for_its_turn_goes_ahead(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    db.create("id bigint, text varchar(9)")
    sink = db.sink("xa", create=False)
    monkeypatch.setattr(mysql_loaders, "TURN_S_MAX", 0)
    with started(sink) as participant, db.session() as other:
        other.execute("SELECT GET_LOCK(%s, 0)", (mysql_loaders.turn_of(sink.target),))
        assert other.fetchall() == ((1,),)
        assert commit(participant, prepare(participant, sink, attempt(), rows((1, "a")))) is Outcome.COMMITTED
    assert db.rows() == [(1, "a")]
