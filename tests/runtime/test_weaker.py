"""Below exactly-once: what exactly-once has left behind is not dropped, and a batch is begun once."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

import semel
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.errors import CheckpointError, PlanChanged
from semel.ids import Attempt, Incarnation
from semel.protocol.events import Aborted, Committable, Decided, Journal, Started
from semel.runtime import startup
from semel.runtime.hands import Written
from semel.runtime.phases import Only
from semel.runtime.plans import SparkPlans
from semel.runtime.startup import start_exactly_once, start_weaker
from semel.runtime.weaker import Weaker
from semel.sinks.base import Context, StagedPart
from semel.testing.harness import OURS, arrow, rows_of
from tests.planned import offsets
from tests.sinks.participants import prepare

BATCH = 1


class World:
    """A checkpoint whose batch 0 is over, two sinks, and what an exactly-once run left in them of batch 1."""

    def __init__(self) -> None:
        self.checkpoint = MemoryStore()
        self.plans = SparkPlans(self.checkpoint)
        self.log = DecisionLog(MemoryStore())
        self.sinks = [semel.Memory(f"weaker-{uuid.uuid4().hex}", name=name) for name in ("orders", "returns")]
        self.identity = Identity(OURS, "billing")
        self.log.create_identity(self.identity)
        self.incarnation = self.log.claim(sinks={sink.name: sink.describe() for sink in self.sinks})
        self.plan(0)
        self.decide(0)
        self.checkpoint.create("commits/0", b"v1\n{}")
        self.plan(BATCH)

    def plan(self, batch: int) -> None:
        self.checkpoint.create(f"offsets/{batch}", offsets(batch))

    def attempt(self, batch: int, slot: int = 0) -> Attempt:
        return Attempt(OURS, batch, slot, Incarnation(self.incarnation))

    def decide(self, batch: int, *committables: Committable) -> None:
        assert self.log.append(Decided(self.attempt(batch), committables, plan=self.plans.read(batch)))

    def decided_and_committed_to_the_first(self) -> None:
        context = Context(OURS, "billing", Incarnation(self.incarnation))
        made: list[Committable] = []
        for number, sink in enumerate(self.sinks):
            participant = sink.participant(context)
            made += prepare(participant, sink, self.attempt(BATCH), arrow(rows_of(2 * number, 2 * number + 1)))
        self.decide(BATCH, *made)
        self.sinks[0].participant(context).commit(made[0])

    def visible(self) -> list[int]:
        return [len(sink.rows()) for sink in self.sinks]

    def weaker(self, guarantee: str = "at-most-once", under_way: int | None = None) -> Weaker:
        keeps = guarantee == "at-most-once"
        return start_weaker(
            self.log if keeps else None,
            self.sinks,
            self.identity,
            self.plans,
            under_way=under_way,
            decisions=self.log,
        )


def no_rows(
    attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None
) -> dict[str, list[StagedPart]]:
    return {}


@pytest.fixture
def world() -> World:
    return World()


REFUSED = (
    "Batch 1 was decided under exactly-once, and the checkpoint does not say that it is over: it may be visible in "
    "some sinks and not in others."
)


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once"])
@pytest.mark.parametrize("under_way", [None, BATCH])
def test_a_decided_batch_that_is_not_committed_everywhere_is_not_dropped(
    world: World, guarantee: str, under_way: int | None
) -> None:
    world.decided_and_committed_to_the_first()
    claims = world.log.newest_claim()
    with pytest.raises(CheckpointError) as caught:
        world.weaker(guarantee, under_way)
    assert not isinstance(caught.value, PlanChanged)
    what, data_now, remedy = str(caught.value).split("\n")
    assert what == REFUSED
    assert data_now == "  the data now: this start wrote nothing; batch 1 is decided, and what is staged of it is kept"
    assert remedy.startswith("  what to do: Start once with guarantee='exactly-once' and the sinks that the batch has")
    assert world.log.newest_claim() == claims
    assert world.visible() == [2, 0]
    # What it says helps.
    start_exactly_once(world.log, world.plans, world.sinks, world.identity).close()
    assert world.visible() == [2, 2]


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once"])
def test_behind_a_batch_that_is_over_a_weaker_guarantee_goes_on(world: World, guarantee: str) -> None:
    world.decided_and_committed_to_the_first()
    start_exactly_once(world.log, world.plans, world.sinks, world.identity).close()
    world.checkpoint.create("commits/1", b"v1\n{}")
    world.weaker(guarantee).close()
    assert world.visible() == [2, 2]


def test_a_batch_that_is_decided_while_the_older_driver_leaves_is_kept_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look found nothing: the older driver decided it in the last moment before the claim."""
    claim = startup._claim

    def late(*values: object, **named: object) -> Context:
        context = claim(*values, **named)  # type: ignore[arg-type]
        world.decided_and_committed_to_the_first()
        return context

    monkeypatch.setattr(startup, "_claim", late)
    with pytest.raises(CheckpointError, match=REFUSED):
        world.weaker()
    monkeypatch.undo()
    start_exactly_once(world.log, world.plans, world.sinks, world.identity).close()
    assert world.visible() == [2, 2]


def test_a_batch_that_an_older_driver_has_decided_after_the_start_is_not_called_skipped(world: World) -> None:
    weaker = world.weaker()
    world.decided_and_committed_to_the_first()
    with pytest.raises(CheckpointError, match=REFUSED):
        weaker.run(BATCH, no_rows)


def test_a_batch_whose_slots_were_closed_has_not_begun_and_is_written(world: World) -> None:
    """Each exactly-once start but the first closes one, and may be stopped before rows come."""
    for slot in range(2):
        assert world.log.append(Aborted(world.attempt(BATCH, slot)))
    weaker = world.weaker()
    assert weaker.run(BATCH, no_rows).how == "committed"
    records = world.log.journal(BATCH)
    assert [type(record) for record in records] == [Aborted, Aborted, Started]
    # Once, whoever asks: this run or the next one.
    assert [w.run(BATCH, no_rows).how for w in (weaker, world.weaker())] == ["skipped", "skipped"]
    assert world.log.journal(BATCH) == records


def test_of_two_drivers_that_begin_a_batch_one_does(world: World) -> None:
    assert world.log.append(Aborted(world.attempt(BATCH)))
    first, second = world.weaker(), world.weaker()
    seen = [world.log.journal(BATCH)]

    class Late(DecisionLog):
        """Reads once what was there before the other one began."""

        def journal(self, batch: int) -> Journal:
            return seen.pop() if seen else super().journal(batch)

    late = replace(second, log=Late(world.log.store))
    assert first.run(BATCH, no_rows).how == "committed"
    assert late.run(BATCH, no_rows).how == "skipped"
