"""Two drivers on two copies of one checkpoint count alike. Neither may take the other's rows for its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import InDoubt
from semel.ids import Attempt, Branch
from semel.protocol.events import Committable, Outcome
from semel.runtime.batch import Coordinator
from semel.sinks.base import Participant, Sink, StagedPart
from semel.sinks.files import Files
from semel.sinks.sqlite import Sqlite
from semel.testing.harness import arrow, attempt, context, rows_of
from tests.planned import plans
from tests.sinks import mysql_rig, postgres_rig

BATCH = 3
OURS, THEIRS = "sha256:ours", "sha256:theirs"
#: What prepares in the store, and what the driver moves.
SINKS = ["sqlite", "files", "postgres:ledger", "postgres:prepared", "mysql:ledger", "mysql:xa"]


@pytest.fixture(params=SINKS)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sink]:
    kind, _, mode = request.param.partition(":")
    if kind in ("sqlite", "files"):
        yield Sqlite(str(tmp_path / "shop.db"), "orders") if kind == "sqlite" else Files(str(tmp_path / "lake"))
        return
    server = request.getfixturevalue("postgres_server" if kind == "postgres" else "mariadb_server")
    database: Any = (postgres_rig if kind == "postgres" else mysql_rig).Database(server.url)
    make: Callable[..., Sink] = database.keyed if kind == "postgres" else database.sink
    yield make(mode)
    database.end()


def driver(sink: Sink) -> Participant:
    participant = sink.participant(context())
    participant.fence()
    return participant


def prepared(participant: Participant, sink: Sink, which: Attempt, plan: str, *ids: int) -> tuple[Committable, ...]:
    writer = sink.writer(Branch(which, sink.name, 0, 0), plan=plan)
    writer.write(arrow(rows_of(*ids)))
    parts = [replace(writer.prepare(), plan=plan)]
    return tuple(replace(c, plan=plan) for c in participant.prepare(which, parts))


def shown(sink: Sink) -> set[tuple[int, str]]:
    return {(mark.rows, mark.plan) for mark in sink.evidence(context().pipeline, range(9)).marks}


def test_a_batch_of_another_plan_is_not_already_committed(sink: Sink) -> None:
    sink.check(arrow(rows_of(1)).schema)
    sink.check_store(context().pipeline)
    with closing(driver(sink)) as ours:
        mine = prepared(ours, sink, attempt(BATCH, 1), OURS, 1, 2)
    with closing(driver(sink)) as other:
        for committable in prepared(other, sink, attempt(BATCH, 0), THEIRS, 7, 8, 9):
            assert other.commit(committable) is Outcome.COMMITTED
    with closing(driver(sink)) as ours:
        for committable in mine:
            with pytest.raises(InDoubt, match=rf"Sink {sink.name} \(.*\) holds batch 3 of another plan"):
                ours.commit(committable)
        ours.abort(ours.recover().branches)
    assert shown(sink) == {(3, THEIRS)}


@pytest.mark.parametrize("plan", [OURS, ""])
def test_the_same_plan_and_one_that_is_not_said_are_already_committed(sink: Sink, plan: str) -> None:
    """An older decision does not say its plan."""
    sink.check(arrow(rows_of(1)).schema)
    sink.check_store(context().pipeline)
    with closing(driver(sink)) as first:
        mine = prepared(first, sink, attempt(BATCH, 0), OURS, 1, 2)
        for committable in mine:
            assert first.commit(committable) is Outcome.COMMITTED
    with closing(driver(sink)) as second:
        for committable in mine:
            assert second.commit(replace(committable, plan=plan)) is Outcome.ALREADY_COMMITTED


@pytest.mark.parametrize("sink", ["sqlite", "postgres:ledger", "mysql:ledger"], indirect=True)
def test_where_the_driver_moves_the_rows_it_is_found_before_the_decision(sink: Sink) -> None:
    sink.check(arrow(rows_of(1)).schema)
    sink.check_store(context().pipeline)
    with closing(driver(sink)) as other:
        for committable in prepared(other, sink, attempt(BATCH, 0), THEIRS, 7, 8, 9):
            other.commit(committable)
    with closing(driver(sink)) as ours, pytest.raises(InDoubt, match="holds batch 3 of another plan") as caught:
        prepared(ours, sink, attempt(BATCH, 0), OURS, 1, 2)
    assert "nothing of batch 3 was decided or written here" in caught.value.data_now


def test_the_error_says_where_the_batch_is_visible_and_what_to_do(tmp_path: Path) -> None:
    lake, shop = Files(str(tmp_path / "lake")), Sqlite(str(tmp_path / "shop.db"), "orders")
    log, planned = DecisionLog(MemoryStore()), plans(BATCH + 1)
    with closing(driver(lake)) as other:
        for committable in prepared(other, lake, attempt(BATCH), THEIRS, 7):
            other.commit(committable)
    log.claim()
    coordinator = Coordinator(context(), {s.name: driver(s) for s in (lake, shop)}, log, planned)

    def stage(
        attempt: Attempt, only: object = None, plan: str = "", again: object = None
    ) -> dict[str, list[StagedPart]]:
        found = {}
        for one in (lake, shop):
            writer = one.writer(Branch(attempt, one.name, 0, 0), plan=plan)
            writer.write(arrow(rows_of(1, 2)))
            found[one.name] = [replace(writer.prepare(), plan=plan)]
        return found

    with closing(coordinator), pytest.raises(InDoubt) as caught:
        coordinator.exactly_once(BATCH, stage)
    assert str(caught.value).splitlines() == [
        f"Sink files_lake (Parquet files in {tmp_path}/lake) holds batch 3 of another plan: another driver runs this "
        "pipeline on another copy of its checkpoint.",
        "  the data now: batch 3 is decided; visible in: sqlite_orders; still to commit: ",
        "  what to do: Stop the other driver and keep one of the two checkpoints. Rows that only the other one has "
        "read must be written by hand.",
    ]
