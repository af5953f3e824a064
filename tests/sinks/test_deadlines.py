"""Real servers that keep a decided batch waiting: a standby that is away, somebody else's locks, a halted broker.

The coordinator gives up when its seconds are over, says what is visible and what is not, and what comes after it
commits the batch, once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.dev.kafka import KafkaCluster
from semel.dev.mariadb import MariaDbServer
from semel.dev.postgres import PostgresServer
from semel.errors import CommitStalled, SinkUnavailable
from semel.ids import Attempt
from semel.protocol.events import Committable, Outcome
from semel.runtime.startup import close_open_slot, sweep
from semel.sinks.base import Sink, StagedPart
from semel.sinks.sql import participant as sql_participant
from semel.sinks.sql.store import Held
from semel.testing.harness import context
from tests.processes import wait_until
from tests.sinks import kafka_rig, mysql_rig
from tests.sinks.kafka_rig import Rig
from tests.sinks.postgres_rig import Database, eventually
from tests.sinks.waiting import PATIENCE_S, SLACK_S, Life, living, standby_away


@pytest.fixture
def db(postgres_server: PostgresServer) -> Iterator[Database]:
    database = Database(postgres_server.url)
    yield database
    database.end()


@pytest.fixture
def maria(mariadb_server: MariaDbServer) -> Iterator[mysql_rig.Database]:
    database = mysql_rig.Database(mariadb_server.url)
    yield database
    database.end()


# A standby that is away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ledger", "firm", "prepared"])
def test_a_commit_that_waits_for_a_standby_which_is_away_is_given_up_and_completed_once_later(
    db: Database, postgres_server: PostgresServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = db.keyed("prepared" if kind == "prepared" else "ledger", firm=kind == "firm")
    log = MemoryStore()
    with standby_away(postgres_server) as wait_for_one:
        with living(sink, log, 1) as life:
            life.before_each_commit(wait_for_one)
            error = life.stalls()
            assert "no answer within" in error.what or "is busy" in error.what, error
        # Nobody reads what no standby has: the server itself hides it.
        assert db.run("SELECT count(*) FROM orders") == [(0,)]
        if kind == "ledger":
            # A start does not wait for ever, either.
            monkeypatch.setattr(sql_participant, "FENCE_S_MIN", 1.0)
            hasty = sink.participant(context(2))
            object.__setattr__(hasty.sink, "timeout_s", 1.0)  # type: ignore[attr-defined]
            try:
                with pytest.raises(SinkUnavailable, match="did not let us fence: no answer within"):
                    hasty.fence()
            finally:
                hasty.close()
                object.__setattr__(sink, "timeout_s", 5.0)
    with living(sink, log, 3) as life:
        assert life.run().how == "forwarded"
        assert life.told == []
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]
    assert db.run("SELECT batch, row_count FROM semel_ledger") == [(1, 3)]
    assert db.staged() == []


def before_each_prepare(life: Life, act: Callable[[], object]) -> None:
    real = life.participant.prepare

    def prepare(attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        act()
        return real(attempt, parts)

    life.participant.prepare = prepare  # type: ignore[method-assign]


@pytest.mark.parametrize(("kind", "when"), [("ledger", "staged"), ("prepared", "staged"), ("firm", "prepared")])
def test_a_batch_that_waits_for_a_standby_before_its_decision_fails_in_time_and_runs_again(
    db: Database, postgres_server: PostgresServer, kind: str, when: str
) -> None:
    db.run("CREATE TABLE orders (id bigint, text text)")
    sink = db.keyed("prepared" if kind == "prepared" else "ledger", firm=kind == "firm", timeout_s=2)
    log = MemoryStore()
    with standby_away(postgres_server) as wait_for_one, living(sink, log, 1) as life:
        life.coordinator.limits = replace(life.coordinator.limits, stage_patience_s=0.0)
        if when == "prepared":
            before_each_prepare(life, wait_for_one)
        else:
            wait_for_one()
        with pytest.raises(SinkUnavailable, match="no answer within"):
            life.run()
        assert life.seconds < 3 * SLACK_S
    with living(sink, log, 2) as life:
        journal = close_open_slot(DecisionLog(log), life.coordinator.attempt(1, 0))
        sweep(life.coordinator, {sink.name: life.participant.recover()}, 1, {1: journal})
        assert life.run().how == "committed"
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]
    assert db.staged() == []


# Somebody else's locks ------------------------------------------------------------------------------------------------


def decided_and_lost(sink: Sink, log: MemoryStore) -> None:
    """A driver that has decided the batch and died: the next one has nothing but what is staged."""
    with living(sink, log, 1) as life:

        def commit(committable: Committable) -> Outcome:
            raise TypeError("this driver commits nothing")

        life.participant.commit = commit  # type: ignore[method-assign]
        with pytest.raises(CommitStalled, match="this driver commits nothing"):
            life.run()


def test_a_lock_that_somebody_holds_in_postgresql_is_waited_for_until_the_time_is_over(db: Database) -> None:
    sink, log = db.keyed("ledger", timeout_s=60), MemoryStore()
    decided_and_lost(sink, log)
    with living(sink, log, 2) as life, db.session() as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE semel_ledger IN EXCLUSIVE MODE")
        assert "no answer within" in life.stalls().what
        other.execute("ROLLBACK")
        assert db.run("SELECT count(*) FROM orders") == [(0,)]
        # The same driver, as after a moment.
        assert life.run().how == "forwarded"
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]
    assert db.staged() == []


def test_a_lock_that_somebody_holds_in_mariadb_is_waited_for_until_the_time_is_over(maria: mysql_rig.Database) -> None:
    sink, log = maria.sink("ledger", timeout_s=60), MemoryStore()
    decided_and_lost(sink, log)
    with living(sink, log, 2) as life, maria.session() as other:
        other.execute(f"LOCK TABLES {maria.table} WRITE")
        assert "timed out" in life.stalls().what
        other.execute("UNLOCK TABLES")
        assert maria.rows("count(*)", "1") == [(0,)]
        assert life.run().how == "forwarded"
    assert maria.rows() == [(1, "a"), (2, "b"), (3, "c")]
    assert maria.staged() == []


# Work that takes long -------------------------------------------------------------------------------------------------

SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END';
CREATE TRIGGER slow BEFORE INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION slow();
"""


def test_a_start_that_moves_the_rows_of_a_dead_driver_takes_as_long_as_that_takes(db: Database) -> None:
    """If it had no more than the seconds of a commit, every start would stall again."""
    sink, log = db.keyed("ledger", piece_rows=1, timeout_s=60), MemoryStore()
    db.run("CREATE TABLE orders (id bigint, text text)")
    decided_and_lost(sink, log)
    db.run(SLOW.format(seconds=0.7 * PATIENCE_S))
    with living(sink, log, 2) as life:
        assert life.run().how == "forwarded"
        assert life.seconds > 2 * PATIENCE_S
        assert {(w.sinks, w.visible) for w in life.told} == {((sink.name,), ())}
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]
    assert db.staged() == []


Lock = Callable[[], object]


# A commit that comes to pass after it was given up --------------------------------------------------------------------


def test_a_commit_that_a_standby_held_up_and_then_let_pass_is_found_by_the_try_after_it(
    db: Database, postgres_server: PostgresServer
) -> None:
    """The second try waits for the first one's ledger row, and meets it when that is visible: a duplicate."""
    sink = db.keyed("ledger", timeout_s=60)
    with standby_away(postgres_server) as wait_for_one, living(sink, MemoryStore(), 1) as life:
        life.coordinator.limits = replace(life.coordinator.limits, commit_patience_s=2 * SLACK_S)
        asked: list[None] = []

        def before() -> None:
            wait_for_one() if not asked else None
            asked.append(None)

        life.before_each_commit(before)
        with ThreadPoolExecutor(1) as batches:
            batch = batches.submit(life.run)
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO%ledger%'"
            assert eventually(lambda: db.run(waits) != [], 2 * SLACK_S)
            db.run("ALTER SYSTEM RESET synchronous_standby_names")
            db.run("SELECT pg_reload_conf()")
            assert batch.result(2 * SLACK_S).how == "committed"
        assert len(asked) == 2
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]
    assert db.run("SELECT batch, row_count FROM semel_ledger") == [(1, 3)]
    assert db.staged() == []


class OnItsWay:
    """The COMMIT of what is held is under way: it comes to pass when it is let go, and nobody hears the answer."""

    def __init__(self, participant: Any) -> None:
        self.store = participant.store
        self.connection: Any = None
        self.store.commit = self.commit

    def commit(self, held: Held | None) -> bool:
        if held is None or not self.store.holds(held):
            return False
        self.connection, self.store._holder, self.store._held = self.store._holder, None, None
        raise SinkUnavailable("no answer to COMMIT")

    def let_go(self) -> None:
        self.store.run(self.connection, "COMMIT")
        self.connection.close()


def waits_for_the_first_try(sink: Sink, is_waiting: Callable[[], bool]) -> str:
    """How a batch ends whose first COMMIT comes to pass while the second try waits for it."""
    with living(sink, MemoryStore(), 1) as life:
        life.coordinator.limits = replace(life.coordinator.limits, commit_patience_s=2 * SLACK_S)
        first = OnItsWay(life.participant)
        with ThreadPoolExecutor(1) as batches:
            batch = batches.submit(life.run)
            try:
                assert eventually(is_waiting, 2 * SLACK_S)
            finally:
                first.let_go()
            return batch.result(2 * SLACK_S).how


@pytest.mark.parametrize("unique", ["the ledger", "the rows"])
def test_a_commit_whose_answer_is_lost_in_mariadb_is_found_by_the_try_after_it(
    maria: mysql_rig.Database, unique: str
) -> None:
    if unique == "the rows":
        maria.create("id bigint PRIMARY KEY, text text")
    sink = maria.sink("ledger", timeout_s=60)
    waits = (
        "SELECT 1 FROM information_schema.processlist WHERE info LIKE 'INSERT INTO%%' AND locate(%s, info) > 0 "
        "AND time_ms > 500"
    )
    table = "semel_ledger" if unique == "the ledger" else maria.suffix
    assert waits_for_the_first_try(sink, lambda: maria.run(waits, table) != []) == "committed"
    assert maria.rows() == [(1, "a"), (2, "b"), (3, "c")]
    assert maria.run("SELECT row_count FROM semel_ledger WHERE sink = %s", sink.name) == [(3,)]
    assert maria.staged() == []


def test_rows_that_somebody_else_has_written_stay_in_the_way_and_are_not_taken_for_ours(db: Database) -> None:
    """A duplicate that is none of ours proves nothing."""
    db.run("CREATE TABLE orders (id bigint PRIMARY KEY, text text)")
    sink, log = db.keyed("ledger"), MemoryStore()
    decided_and_lost(sink, log)
    db.run("INSERT INTO orders VALUES (2, 'another')")
    with living(sink, log, 2) as life, pytest.raises(CommitStalled, match="duplicate key") as caught:
        life.run()
    assert caught.value.data_now == f"batch 1 is decided; visible in: no sink yet; still to commit: {sink.name}"
    assert caught.value.remedy.startswith("This error does not mend itself: ")
    assert db.run("SELECT * FROM orders") == [(2, "another")]
    assert db.run("SELECT * FROM semel_ledger") == []


# What does not mend itself --------------------------------------------------------------------------------------------


def commits_only_when_the_table_is_back(
    sink: Sink, log: MemoryStore, take_away: Callable[[], object], bring_back: Callable[[], object]
) -> CommitStalled:
    decided_and_lost(sink, log)
    with living(sink, log, 2) as life:
        asked: list[None] = []
        life.before_each_commit(lambda: asked.append(None))
        take_away()
        with pytest.raises(CommitStalled) as caught:
            life.run()
        assert len(asked) == 1
        bring_back()
        assert life.run().how == "forwarded"
    assert caught.value.remedy.startswith("This error does not mend itself: ")
    return caught.value


def test_a_table_that_is_gone_in_postgresql_is_not_asked_for_again_and_again(db: Database) -> None:
    error = commits_only_when_the_table_is_back(
        db.keyed("ledger"),
        MemoryStore(),
        lambda: db.run("ALTER TABLE orders RENAME TO away"),
        lambda: db.run("ALTER TABLE away RENAME TO orders"),
    )
    assert 'orders" does not exist' in error.what
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]


def test_a_table_that_is_gone_in_mariadb_is_not_asked_for_again_and_again(maria: mysql_rig.Database) -> None:
    away = f"away{maria.suffix}"
    error = commits_only_when_the_table_is_back(
        maria.sink("ledger"),
        MemoryStore(),
        lambda: maria.run(f"RENAME TABLE {maria.table} TO {away}"),
        lambda: maria.run(f"RENAME TABLE {away} TO {maria.table}"),
    )
    assert "doesn't exist" in error.what
    assert maria.rows() == [(1, "a"), (2, "b"), (3, "c")]


# A dump that is being made --------------------------------------------------------------------------------------------


@contextmanager
def backup(session: AbstractContextManager[Any], staged: Callable[[], list[str]]) -> Iterator[tuple[Lock, Lock]]:
    """As a dump does, it reads every table that is there, staging tables included, and keeps its locks.

    What is yielded begins it and ends it.
    """
    with session as other:

        def begin() -> None:
            other.execute("START TRANSACTION")
            for name in staged():
                other.execute(f"SELECT count(*) FROM {name}")  # noqa: S608 - our own

        try:
            yield begin, lambda: other.execute("ROLLBACK")
        finally:
            other.execute("ROLLBACK")


def commits_beside_a_backup(
    sink: Sink, session: AbstractContextManager[Any], staged: Callable[[], list[str]], log: pytest.LogCaptureFixture
) -> None:
    with living(sink, MemoryStore(), 1) as life, backup(session, staged) as (begin, end):
        life.before_each_commit(begin)
        assert life.run().how == "committed"
        assert life.seconds < sql_participant.DROP_S_MAX + SLACK_S
        # What it has locked is left behind, and goes when it has let go of it.
        assert staged() != []
        end()
        life.coordinator.had_trouble = True
        life.coordinator.tidy(1)
        assert staged() == []
    told = [m for m in log.messages if "did not drop its staging tables yet, though batch 1 is committed" in m]
    assert len(told) == 1


def test_a_backup_that_has_read_the_staging_tables_of_postgresql_holds_up_no_commit(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    commits_beside_a_backup(db.keyed("ledger", timeout_s=60), db.session(), db.staged, caplog)
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "b"), (3, "c")]


def test_a_backup_that_has_read_the_staging_tables_of_mariadb_holds_up_no_commit(
    maria: mysql_rig.Database, caplog: pytest.LogCaptureFixture
) -> None:
    commits_beside_a_backup(maria.sink("ledger", timeout_s=60), maria.session(), maria.staged, caplog)
    assert maria.rows() == [(1, "a"), (2, "b"), (3, "c")]


# A broker that accepts and never answers ------------------------------------------------------------------------------


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def halting(cluster: KafkaCluster) -> Iterator[Callable[[], None]]:
    """What is yielded halts the broker: its port accepts connections, and nobody answers on them."""
    (pid,) = [member.process.pid for member in cluster.members()]

    def halt() -> None:
        os.kill(pid, signal.SIGSTOP)
        # A thread that runs on another processor may answer one more request before it hears of it.
        wait_until(lambda: {state_of(task) for task in Path(f"/proc/{pid}/task").iterdir()} == {"T"})

    try:
        yield halt
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_broker_that_accepts_and_never_answers_is_given_up_in_time(rig: Rig, kafka_cluster: KafkaCluster) -> None:
    topic = rig.topic()
    sink, log = rig.sink(topic, timeout_s=60), MemoryStore()
    batch = kafka_rig.records_of(1, 2, 3)
    with living(sink, log, 1, batch) as life, halting(kafka_cluster) as halt:
        life.before_each_commit(halt)
        life.stalls()
    with living(sink, log, 2, batch) as life:
        assert life.run().how == "forwarded"
    assert rig.visible(topic) == [1, 2, 3]
    assert rig.open_ids() == []
