"""A task of PostgreSQL or MariaDB whose connection ends while it writes, as poolers and administrators end them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

import semel.sinks.mysql.loaders.bulk
import semel.sinks.mysql.loaders.text
import semel.sinks.mysql.wire
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch
from semel.protocol.events import Outcome
from semel.sinks.base import Participant, StagedPart, Writer
from semel.sinks.sql.sink import SqlSink
from semel.testing.harness import attempt, context, together
from tests.sinks import mysql_rig, postgres_rig
from tests.sinks.participants import rows, started
from tests.sinks.pooler import HangUp, Pooler, pooler_before
from tests.sinks.postgres_rig import eventually

#: Sink, mode and way -> what a task says last, as it is on the wire.
LAST_WORDS = {
    "postgres-ledger": b"COMMIT\0",
    "postgres-prepared": b"PREPARE TRANSACTION",
    "mysql-ledger": b"\x03COMMIT",
    "mysql-xa": b"\x03XA PREPARE",
    "mysql-ledger-load": b"\x03COMMIT",
    "mysql-xa-load": b"\x03XA PREPARE",
}
#: A task sends 2 MB.
BATCHES, BATCH_ROWS = 20, 1_000
MIDDLE_BYTES = 700_000
ABORT_S_MAX = 3.0


@dataclass
class World:
    """A sink whose tasks and driver come through a pooler, and eyes that do not."""

    kind: str
    sink: SqlSink
    database: Any
    pooler: Pooler

    def ids(self) -> list[int]:
        return [i for (i,) in self.database.run(f"SELECT id FROM {self.sink.target} ORDER BY 1")]  # noqa: S608 - ours


@pytest.fixture(params=list(LAST_WORDS))
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    kind, mode, *way = request.param.split("-")
    if way:
        # To MariaDB rows go in bulk, to MySQL by LOAD DATA.
        monkeypatch.setattr(semel.sinks.mysql.wire, "WANTED", 0)
    # So that the middle of a task is also the middle of a LOAD DATA.
    monkeypatch.setattr(semel.sinks.mysql.loaders.text, "LOAD_BYTES_MAX", 200_000)
    monkeypatch.setattr(semel.sinks.mysql.loaders.bulk, "BULK_BYTES_MAX", 200_000)
    server = request.getfixturevalue("postgres_server" if kind == "postgres" else "mariadb_server")
    database: Any = (postgres_rig if kind == "postgres" else mysql_rig).Database(server.url)
    make: Callable[..., SqlSink] = database.keyed if kind == "postgres" else database.sink
    port = urlsplit(server.url).port
    assert port
    try:
        with pooler_before(port) as pooler:
            url = server.url.replace(f":{port}", f":{pooler.port}")
            write_first(make(mode))
            yield World(request.param, make(mode, url=url), database, pooler)
    finally:
        database.end()


def write_first(sink: SqlSink) -> None:
    """So that there is a table."""
    with started(sink) as participant:
        part = staged(sink.writer(Branch(attempt(), sink.name, 0, 0)), rows((-1, "there")))
        commit(participant, attempt(), part)


def staged(writer: Writer, *batches: pa.RecordBatch) -> StagedPart:
    for batch in batches:
        writer.write(batch)
    return writer.prepare()


def commit(participant: Participant, which: Attempt, *parts: StagedPart) -> None:
    promise = participant.prepare(which, parts)
    assert together([participant.commit(c) for c in promise]) is Outcome.COMMITTED


WHICH = attempt(1, 0, 2)
BATCHES_OF_A_TASK = [
    rows(*((n, "text" * 25) for n in range(start, start + BATCH_ROWS)))
    for start in range(0, BATCHES * BATCH_ROWS, BATCH_ROWS)
]


def writer_of(world: World, retry: int) -> Writer:
    return world.sink.writer(Branch(WHICH, world.sink.name, 0, retry))


def broken_try(world: World) -> str:
    """A try that fails as one that is to be tried again, and is aborted. Returns the first line of the error."""
    writer = writer_of(world, 0)
    with pytest.raises(SinkUnavailable) as caught:
        staged(writer, *BATCHES_OF_A_TASK)
    abort(writer)
    return caught.value.what


def abort(writer: Writer) -> None:
    began = time.monotonic()
    writer.abort()
    writer.abort()
    assert time.monotonic() - began < ABORT_S_MAX


def assert_nothing_is_left_and_another_try_succeeds(world: World, participant: Participant) -> None:
    assert eventually(lambda: world.database.staged() == [])
    assert participant.recover().branches == ()
    assert world.ids() == [-1]
    commit(participant, WHICH, staged(writer_of(world, 1), *BATCHES_OF_A_TASK))
    assert world.ids() == list(range(-1, BATCHES * BATCH_ROWS))
    assert world.database.staged() == []


@pytest.mark.parametrize("resets", [False, True])
def test_a_pooler_that_hangs_up_in_the_middle_of_the_rows(world: World, resets: bool) -> None:
    with started(world.sink, context(2)) as participant:
        world.pooler.plan = plan = HangUp(after_bytes=MIDDLE_BYTES, resets=resets)
        text = broken_try(world)
        assert plan.done.wait(5)
        assert text.startswith(f"{world.sink.describe()} did not take rows of task 0: ")
        assert "connection" in text or "server" in text
        assert_nothing_is_left_and_another_try_succeeds(world, participant)


def test_a_pooler_that_hangs_up_before_the_task_hears_that_its_rows_are_safe(world: World) -> None:
    """They are, and are dropped."""
    with started(world.sink, context(2)) as participant:
        world.pooler.plan = plan = HangUp(instead_of_the_answer_to=LAST_WORDS[world.kind])
        broken_try(world)
        assert plan.done.wait(5)
        assert_nothing_is_left_and_another_try_succeeds(world, participant)


def test_an_administrator_who_ends_the_session_of_a_task_while_it_writes(world: World) -> None:
    half = len(BATCHES_OF_A_TASK) // 2
    with started(world.sink, context(2)) as participant:
        writer = writer_of(world, 0)
        for batch in BATCHES_OF_A_TASK[:half]:
            writer.write(batch)
        end_session(world, writer)
        with pytest.raises(SinkUnavailable, match="did not take rows of task 0: "):
            staged(writer, *BATCHES_OF_A_TASK[half:])
        abort(writer)
        assert_nothing_is_left_and_another_try_succeeds(world, participant)


def end_session(world: World, writer: Any) -> None:
    if world.sink.kind == "postgres":
        assert world.database.run("SELECT pg_terminate_backend(%s, 5000)", writer._connection.info.backend_pid)
    else:
        world.database.run(f"KILL CONNECTION {writer._connection.thread_id()}")
