"""A start that is refused leaves the driver that runs alone: what can be found before the claim is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import semel
from semel import formats
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.errors import AnotherPipeline, CheckpointRolledBack, Fenced, NewerRecord, SemelError, SinkUnavailable
from semel.ids import Attempt, PipelineId
from semel.protocol.events import Decided
from semel.runtime import startup
from semel.runtime.batch import Coordinator
from semel.runtime.beginning import check_overtaken
from semel.runtime.hands import Written
from semel.runtime.phases import Only
from semel.runtime.plans import SparkPlans
from semel.runtime.restore import first_to_run
from semel.runtime.startup import start_exactly_once
from semel.sinks.base import Remains, Sink, StagedPart
from semel.sinks.sqlite import Sqlite
from semel.testing.harness import OTHERS, OURS, arrow, rows_of
from tests.planned import offsets

NAME = "orders"


class World:
    """A pipeline that runs, with its checkpoint: batch 0 is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = MemoryStore()
        self.plans = SparkPlans(self.checkpoint)
        self.log = DecisionLog(MemoryStore())
        self.main = Sqlite(str(folder / "shop.db"), "orders")
        self.live = start_exactly_once(self.log, self.plans, [self.main], Identity(OURS, NAME))
        self.batch(0)

    def batch(self, number: int) -> None:
        self.checkpoint.create(f"offsets/{number}", offsets(number))
        stage = staging([self.main], number)
        assert self.live.exactly_once(number, stage).how == "committed"
        self.checkpoint.create(f"commits/{number}", b"v1\n{}")

    def refused(self, *sinks: Sink, kind: type[SemelError]) -> SemelError:
        """A second start is refused, and the driver that runs goes on with its next batch."""
        with pytest.raises(kind) as caught:
            start_exactly_once(self.log, self.plans, sinks, Identity(OURS, NAME))
        assert self.log.newest_claim() == self.live.context.incarnation
        self.batch(self.plans.next_batch())
        return caught.value


def staging(sinks: Sequence[Sink], number: int) -> semel.runtime.phases.Stage:
    def stage(
        attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None
    ) -> dict[str, list[StagedPart]]:
        found = {}
        for sink in sinks:
            writer = sink.writer(semel.ids.Branch(attempt, sink.name, 0, 0), plan=plan)
            writer.write(arrow(rows_of(number)))
            found[sink.name] = [writer.prepare()]
        return found

    return stage


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.live.close()


def another_checkpoint_wrote(sink: Sqlite, pipeline: PipelineId = OTHERS, batches: int = 1) -> Coordinator:
    store = MemoryStore()
    coordinator = start_exactly_once(DecisionLog(MemoryStore()), SparkPlans(store), [sink], Identity(pipeline, NAME))
    for number in range(batches):
        store.create(f"offsets/{number}", offsets(number))
        coordinator.exactly_once(number, staging([sink], number))
    coordinator.close()
    return coordinator


def test_a_sink_that_another_checkpoint_wrote_to_is_refused_before_the_claim(world: World) -> None:
    """Found by a review: the older driver was fenced, the newer one refused, and nobody was left."""
    returns = Sqlite(str(world.folder / "shop.db"), "returns", starts="now")
    another_checkpoint_wrote(returns)
    error = world.refused(world.main, returns, kind=AnotherPipeline)
    assert "Sink sqlite_returns holds batches that pipeline 'orders' wrote under another checkpoint" in error.what


def test_a_sink_that_knows_more_than_the_checkpoint_is_refused_before_the_claim(world: World) -> None:
    returns = Sqlite(str(world.folder / "shop.db"), "returns", starts="now")
    another_checkpoint_wrote(returns, OURS, batches=5)
    # The live one has a newer claim than the sinks have seen.
    error = world.refused(world.main, returns, kind=CheckpointRolledBack)
    assert error.what.startswith("Sink sqlite_returns has seen batch 4, but the checkpoint knows batches only up to 0")


def test_markers_of_a_newer_semel_are_refused_before_the_claim(world: World) -> None:
    returns = Sqlite(str(world.folder / "returns.db"), "returns", starts="now")
    another_checkpoint_wrote(returns, OURS)
    with sqlite3.connect(returns.path) as connection:
        connection.execute("UPDATE semel_ledger SET format = ?", (formats.LEDGER + 1,))
    connection.close()
    error = world.refused(world.main, returns, kind=NewerRecord)
    assert "returns" in error.what


def test_a_store_that_is_away_is_found_out_before_the_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(world.live.participants[world.main.name])

    def away(_: object) -> Remains:
        raise SinkUnavailable("the store is away")

    monkeypatch.setattr(kind, "recover", away)
    error = world.refused(world.main, kind=SinkUnavailable)
    assert error.what == "the store is away"


def test_a_driver_that_goes_on_while_we_look_is_not_taken_for_one_that_knows_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stores are asked first: what they show is decided, and in the log, by the time that we read that."""
    goes_on = [True]

    def meanwhile(log: DecisionLog, next_batch: int) -> int:
        if goes_on:
            goes_on.clear()
            world.batch(1)
            world.batch(2)
        return first_to_run(log, next_batch)

    monkeypatch.setattr(startup, "first_to_run", meanwhile)
    newer = start_exactly_once(world.log, world.plans, [world.main], Identity(OURS, NAME))
    newer.close()
    assert goes_on == []
    with pytest.raises(Fenced):
        world.batch(3)


def test_what_is_found_only_after_the_claim_is_refused_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint wrote its first batch in the moment between the two looks."""
    returns = Sqlite(str(world.folder / "shop.db"), "returns", starts="now")

    def late(*values: object) -> None:
        check_overtaken(*values)  # type: ignore[arg-type]
        monkeypatch.undo()
        another_checkpoint_wrote(returns)

    monkeypatch.setattr(startup, "check_overtaken", late)
    with pytest.raises(AnotherPipeline):
        start_exactly_once(world.log, world.plans, [world.main, returns], Identity(OURS, NAME))


@pytest.mark.parametrize("has_left", [True, False])
def test_where_nobody_runs_the_stores_are_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch, has_left: bool
) -> None:
    """A look costs a connection to each store, and the seconds of a recovery are short."""
    kind = type(world.live.participants[world.main.name])
    recover, asked = kind.recover, []

    def counted(participant: object) -> Remains:
        asked.append(participant)
        return recover(participant)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "recover", counted)
    if has_left:
        world.log.leave(world.live.context.incarnation)
    start_exactly_once(world.log, world.plans, [world.main], Identity(OURS, NAME)).close()
    assert len(asked) == (1 if has_left else 2)


def test_the_decision_of_a_batch_is_not_needed_to_look(world: World) -> None:
    """What is decided and open while another one runs is for that one to end."""
    world.checkpoint.create("offsets/1", offsets(1))
    attempt = Attempt(OURS, 1, 0, world.live.context.incarnation)
    assert world.log.append(Decided(attempt, (), plan=world.plans.read(1)))
    start_exactly_once(world.log, world.plans, [world.main], Identity(OURS, NAME)).close()
    assert world.log.newest_claim() == world.live.context.incarnation + 1
