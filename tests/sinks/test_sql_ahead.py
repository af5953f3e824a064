"""Rows that the driver of PostgreSQL or MariaDB moves while tasks still stage others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from semel.errors import BatchFailed, ConfigError, Fenced
from semel.ids import Attempt, Branch
from semel.protocol.events import Outcome
from semel.sinks.base import StagedPart, Writer
from semel.sinks.sql import ahead as sql_ahead
from semel.sinks.sql.participant import SqlParticipant
from semel.sinks.sql.sink import SqlSink
from semel.testing.harness import attempt, context, together
from tests.sinks import mysql_rig, postgres_rig
from tests.sinks.participants import rows, started
from tests.sinks.postgres_rig import eventually

KINDS = ("postgres", "mysql")
KEYED = ("upsert", "dedup", "versions")
WHICH = attempt(1, 0, 2)


@dataclass
class World:
    """A database, and sinks whose tasks begin a new piece after every second row."""

    kind: str
    database: Any
    make: Callable[..., SqlSink]
    writers: list[Writer] = field(default_factory=list)

    def task(
        self, sink: SqlSink, *pieces: Sequence[tuple[int, str]], of: Attempt | None = None, retry: int = 0
    ) -> Writer:
        """A task that has written these rows, and could write more."""
        writer = sink.writer(Branch(of or WHICH, sink.name, 0, retry))
        self.writers.append(writer)
        for piece in pieces:
            writer.write(rows(*piece))
        return writer

    def rows(self, sink: SqlSink) -> list[tuple[Any, ...]]:
        table = sink.place.named(f"{sink.table}_latest" if sink.mode == "versions" else sink.table)
        found: list[tuple[Any, ...]] = self.database.run(f"SELECT id, text FROM {table} ORDER BY 1, 2")  # noqa: S608 - ours
        return found

    def end_driver_sessions(self, participant: SqlParticipant) -> None:
        connection = participant.store._holder
        if self.kind == "postgres":
            self.database.run("SELECT pg_terminate_backend(%s, 5000)", connection.info.backend_pid)
        else:
            self.database.run(f"KILL CONNECTION {connection.thread_id()}")


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(sql_ahead, "LOOK_PAUSE_S", 0.01)
    monkeypatch.setattr(sql_ahead, "LOOK_SHARE", 0)
    kind = request.param
    server = request.getfixturevalue("postgres_server" if kind == "postgres" else "mariadb_server")
    database: Any = (postgres_rig if kind == "postgres" else mysql_rig).Database(server.url)
    made = World(kind, database, partial(database.keyed if kind == "postgres" else database.sink, piece_rows=2))
    try:
        yield made
    finally:
        # A test that failed has left some open, and they hold locks.
        for writer in made.writers:
            writer.abort()
        database.end()


def begin(world: World, mode: str, **settings: Any) -> SqlSink:
    """A sink whose table is there and has a row."""
    sink = world.make(mode, **settings)
    with started(sink) as participant:
        finish(participant, attempt(), world.task(sink, [(0, "there")], of=attempt()).prepare())
    return sink


def finish(participant: Any, which: Any, *parts: StagedPart) -> None:
    assert together([participant.commit(c) for c in participant.prepare(which, parts)]) is Outcome.COMMITTED


def moved(participant: Any) -> list[int]:
    return list(participant._ahead.moved.values())


ONE, TWO, THREE = ((1, "a"), (2, "b")), ((3, "c"), (4, "d")), ((5, "e"), (6, "f"))
ALL = [(0, "there"), *ONE, *TWO, *THREE]


@pytest.mark.parametrize("mode", ["ledger", *KEYED])
@pytest.mark.parametrize("firm", [False, True])
def test_whole_pieces_are_moved_while_their_task_goes_on_and_stay_unseen(world: World, mode: str, firm: bool) -> None:
    sink = begin(world, mode, firm=firm)
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(sink, ONE, TWO, THREE)
        # The third may still grow.
        assert eventually(lambda: moved(participant) == [2, 2])
        assert world.rows(sink) == [(0, "there")]
        finish(participant, WHICH, writer.prepare())
        assert world.rows(sink) == ALL
    assert world.database.staged() == []


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize("mode", ["ledger", "upsert"])
def test_rows_of_a_try_that_was_lost_are_rolled_back(world: World, mode: str, firm: bool) -> None:
    sink = begin(world, mode, firm=firm)
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        lost = world.task(sink, ((1, "lost"), (2, "lost")), ((3, "lost"), (9, "lost")))
        assert eventually(lambda: moved(participant) == [2])
        won = world.task(sink, ONE, TWO, THREE, retry=1)
        finish(participant, WHICH, won.prepare())
        assert world.rows(sink) == ALL
        lost.abort()
        participant.abort(participant.recover().branches)
    assert world.database.staged() == []


def test_a_task_that_fails_does_not_wait_for_the_driver_to_let_go_of_its_rows(world: World) -> None:
    sink = begin(world, "ledger")
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(sink, ONE, TWO)
        assert eventually(lambda: moved(participant) == [2])
        writer.abort()
        # It left what is locked, and the driver drops that.
        participant.abort(participant.recover().branches)
        assert world.database.staged() == []
        assert world.rows(sink) == [(0, "there")]
        participant.expect(WHICH)
        finish(participant, WHICH, world.task(sink, ONE, TWO, THREE).prepare())
        assert world.rows(sink) == ALL


def test_a_lost_connection_costs_what_was_moved_ahead_and_nothing_else(world: World) -> None:
    sink = begin(world, "upsert")
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(sink, ONE, TWO)
        assert eventually(lambda: moved(participant) == [2])
        assert isinstance(participant, SqlParticipant)
        world.end_driver_sessions(participant)
        writer.write(rows(*THREE))
        ahead = participant._ahead
        assert ahead
        assert eventually(lambda: ahead._failed)
        finish(participant, WHICH, writer.prepare())
        assert world.rows(sink) == ALL
    assert world.database.staged() == []


@pytest.mark.parametrize("pieces_later", [1, 0])
def test_rows_moved_ahead_in_a_transaction_that_is_gone_are_moved_again(world: World, pieces_later: int) -> None:
    """Whether that is noticed with the next piece, or at the end."""
    sink = begin(world, "ledger")
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(sink, ONE, TWO)
        assert eventually(lambda: moved(participant) == [2])
        assert isinstance(participant, SqlParticipant)
        participant.store.forget()
        ahead = participant._ahead
        assert ahead
        for _ in range(pieces_later):
            writer.write(rows(*THREE))
            assert eventually(lambda: ahead._failed)
        finish(participant, WHICH, writer.prepare())
        assert world.rows(sink) == ALL[: 5 + 2 * pieces_later]
    assert world.database.staged() == []


def test_a_row_that_is_refused_ahead_is_named_when_the_batch_is_prepared(world: World) -> None:
    begin(world, "upsert")
    plain = world.make("ledger", create=False)
    with started(plain, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(plain, ((7, "x"), (0, "taken")), TWO)
        ahead = participant._ahead  # type: ignore[attr-defined]
        assert eventually(lambda: ahead._failed)
        with pytest.raises(BatchFailed, match=r"\(0\)|'0'"):
            participant.prepare(WHICH, [writer.prepare()])
        participant.abort(participant.recover().branches)
        assert world.rows(plain) == [(0, "there")]
    assert world.database.staged() == []


def test_the_last_row_of_a_key_wins_also_across_pieces(world: World) -> None:
    sink = begin(world, "upsert")
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        writer = world.task(sink, ((1, "first"), (2, "b")), ((1, "second"), (0, "new")), ((1, "last"), (4, "d")))
        assert eventually(lambda: moved(participant) == [2, 2])
        finish(participant, WHICH, writer.prepare())
        assert world.rows(sink) == [(0, "new"), (1, "last"), (2, "b"), (4, "d")]


def test_a_batch_that_is_visible_already_is_not_moved_again(world: World) -> None:
    sink = begin(world, "ledger")
    with started(sink, context(2)) as participant:
        participant.expect(WHICH)
        finish(participant, WHICH, world.task(sink, ONE, TWO, THREE).prepare())
        again = attempt(1, 1, 2)
        participant.expect(again)
        writer = world.task(sink, ONE, TWO, THREE, of=again)
        ahead = participant._ahead  # type: ignore[attr-defined]
        assert eventually(lambda: not ahead._thread.is_alive())
        promise = participant.prepare(again, [writer.prepare()])
        assert [participant.commit(c) for c in promise] == [Outcome.ALREADY_COMMITTED]
        assert world.rows(sink) == ALL
    assert world.database.staged() == []


def test_a_driver_that_was_superseded_locks_no_rows(world: World) -> None:
    sink = begin(world, "upsert")
    with started(sink, context(2)) as zombie:
        zombie.expect(WHICH)
        with started(sink, context(3)) as newer:
            world.task(sink, ONE, TWO, THREE)
            ahead = zombie._ahead  # type: ignore[attr-defined]
            assert eventually(lambda: ahead._failed)
            assert ahead.moved == {}
            again = attempt(1, 1, 3)
            finish(newer, again, world.task(sink, ONE, TWO, THREE, of=again).prepare())
        with pytest.raises(Fenced):
            zombie.prepare(WHICH, [])
        assert world.rows(sink) == ALL


def test_rows_are_cut_into_pieces_wherever_their_batches_end(world: World) -> None:
    sink = begin(world, "upsert")
    with started(sink, context(2)) as participant:
        writer = world.task(sink, [(1, "a")], [(2, "b"), (3, "c"), (4, "d"), (5, "e"), (6, "f")])
        part = writer.prepare()
        assert part.payload == {"pieces": [2, 2, 2]}
        finish(participant, WHICH, part)
        assert world.rows(sink) == ALL
    assert world.database.staged() == []
    with pytest.raises(ConfigError, match="piece_rows is at least 1, not 0"):
        world.make("upsert", piece_rows=0)


def test_two_sinks_of_one_database_do_not_begin_ahead(world: World) -> None:
    sink = begin(world, "ledger")
    with started(sink, context(2)) as one, started(sink, context(2)) as other:
        one.expect(WHICH)
        other.expect(WHICH)
        assert (one._ahead, other._ahead) == (None, None)  # type: ignore[attr-defined]


DRIVER = """
import sys, time
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.sinks.sql import ahead as sql_ahead
from semel.sinks.base import Context
from semel.sinks.kinds import kinds
import pyarrow as pa

kind, url, table, schema, name, pipeline, firm = sys.argv[1:]
sql_ahead.LOOK_PAUSE_S = 0.01
settings = dict(schema=schema, name=name, mode="upsert", key=["id"], firm=firm == "True", piece_rows=2)
sink = kinds()[kind].sink(url, table, **settings)
participant = sink.participant(Context(PipelineId(pipeline), "test", Incarnation(2)))
participant.fence()
which = Attempt(PipelineId(pipeline), 1, 0, Incarnation(2))
participant.expect(which)
writer = sink.writer(Branch(which, sink.name, 0, 0))
for n in range(3):
    writer.write(pa.RecordBatch.from_pylist([{"id": 2 * n + 1, "text": "x"}, {"id": 2 * n + 2, "text": "y"}]))
time.sleep(20)
"""


@pytest.mark.parametrize("firm", [False, True])
def test_a_driver_killed_while_it_moves_ahead_leaves_nothing_that_the_next_cannot_sweep(
    world: World, firm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = begin(world, "upsert", firm=firm)
    monkeypatch.setenv("SEMEL_FAILPOINTS", f"{world.kind}.ahead@2")
    pipeline = context().pipeline
    given = [world.kind, sink.url, sink.table, sink.schema, sink.name, pipeline, str(firm)]
    killed = subprocess.run([sys.executable, "-c", DRIVER, *given], timeout=30, check=False)
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.delenv("SEMEL_FAILPOINTS")
    with started(sink, context(3)) as participant:
        left = participant.recover().branches
        assert {(branch.task, branch.retry) for branch in left} == {(0, 0)}
        participant.abort(left)
        assert world.rows(sink) == [(0, "there")]
        assert world.database.staged() == []
        again = attempt(1, 1, 3)
        participant.expect(again)
        writer = world.task(sink, ONE, TWO, THREE, of=again)
        finish(participant, again, writer.prepare())
        assert world.rows(sink) == ALL
    assert world.database.staged() == []
