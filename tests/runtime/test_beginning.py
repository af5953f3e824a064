"""With which batch a sink begins, without Spark: what the records say, and what they cannot say any more."""

from __future__ import annotations

from typing import Any

import pytest

import semel
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.decisions.records import encode
from semel.errors import PlanRestored, Refused
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Committable, Decided, Started
from semel.runtime import startup
from semel.runtime.beginning import check_beginnings
from semel.runtime.plans import SparkPlans
from semel.runtime.startup import start_exactly_once, start_weaker
from semel.sinks.base import Sink
from semel.sinks.evidence import Evidence, Mark
from tests.planned import offsets

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
ORDERS = semel.Sqlite("/nowhere/shop.db", "orders")
RETURNS = semel.Sqlite("/nowhere/shop.db", "returns")


class World:
    """A checkpoint and a log that batches went through."""

    def __init__(self) -> None:
        self.checkpoint = MemoryStore()
        self.plans = SparkPlans(self.checkpoint)
        self.log = DecisionLog(MemoryStore())

    def did(self, batch: int, *sinks: Sink, records: bool = True, is_over: bool = True) -> None:
        incarnation = self.log.claim(sinks={sink.name: sink.describe() for sink in sinks}) if sinks else 0
        self.checkpoint.create(f"offsets/{batch}", offsets(batch))
        if records and sinks:
            attempt = Attempt(PIPELINE, batch, 0, Incarnation(incarnation))
            self.log.append(Decided(attempt, tuple(Committable(s.name, s.name, attempt, 1) for s in sinks)))
        if is_over:
            self.checkpoint.create(f"commits/{batch}", b"v1\n{}")

    def check(self, *sinks: Sink) -> None:
        check_beginnings(self.log, self.plans, sinks, PIPELINE)


@pytest.fixture
def world() -> World:
    return World()


def test_a_fresh_checkpoint_takes_any_sink(world: World) -> None:
    world.check(ORDERS, RETURNS)


def test_a_sink_that_had_the_batch_before_goes_on(world: World) -> None:
    world.did(0, ORDERS)
    world.did(1, ORDERS, RETURNS)
    world.check(ORDERS, RETURNS)


def test_a_decided_batch_that_is_not_over_is_one_that_a_sink_had(world: World) -> None:
    world.did(0, ORDERS, is_over=False)
    world.check(ORDERS)
    with pytest.raises(Refused, match=r"Sink sqlite_returns .* would begin at batch 1, behind offsets .* only"):
        world.check(ORDERS, RETURNS)


def test_who_was_refused_before_is_refused_again(world: World) -> None:
    """A claim alone proves nothing: it may be of a start that came to nothing."""
    world.did(0, ORDERS)
    world.log.claim(sinks={ORDERS.name: ORDERS.describe(), RETURNS.name: RETURNS.describe()})
    with pytest.raises(Refused, match="Sink sqlite_returns"):
        world.check(ORDERS, RETURNS)


def test_a_batch_begun_at_most_once_counts(world: World) -> None:
    world.did(0, ORDERS, records=False)
    world.log.append(Started(Attempt(PIPELINE, 0, 0, Incarnation(1))))
    world.check(ORDERS)


def test_where_a_claim_does_not_say_its_sinks_the_decision_does(world: World) -> None:
    world.did(0, ORDERS)
    path = "incarnations/0000000001.json"
    world.log.store.replace(path, encode({"incarnation": 1, "host": "h", "pid": 1, "claimed_at": "then"}))
    world.check(ORDERS)
    with pytest.raises(Refused, match="batch 0 went to sqlite_orders only"):
        world.check(RETURNS)


def test_an_address_that_changed_is_settled_by_markers_and_a_table_that_changed_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    evidence = semel.Sqlite.evidence

    def watched(self: semel.Sqlite, pipeline: PipelineId, batches: range) -> Any:
        asked.append(self.describe())
        return evidence(self, pipeline, batches)

    monkeypatch.setattr(semel.Sqlite, "evidence", watched)
    world.did(0, ORDERS)
    world.check(ORDERS)
    assert asked == []
    moved = semel.Sqlite("/elsewhere/shop.db", "orders")
    with pytest.raises(Refused, match=r"under this name batch 0 went to SQLite table orders in /nowhere/shop\.db"):
        world.check(moved)
    assert asked == [moved.describe()]
    with pytest.raises(Refused, match="under this name batch 0 went to"):
        world.check(semel.Sqlite("/nowhere/shop.db", "returns", name="sqlite_orders"))
    assert asked == [moved.describe()]


@pytest.mark.parametrize("marked", [(), (0,), (1,), (0, 1)])
def test_behind_an_address_that_changed_a_batch_that_is_not_over_needs_no_marker_yet(
    world: World, monkeypatch: pytest.MonkeyPatch, marked: tuple[int, ...]
) -> None:
    """This start commits it. Of the batches before there must be one."""
    marks = [Mark(batch, "", 0, 1, 1) for batch in marked]

    def evidence(_sink: semel.Sqlite, _pipeline: PipelineId, batches: range) -> Evidence:
        return Evidence(tuple(mark for mark in marks if mark.batch in batches))

    monkeypatch.setattr(semel.Sqlite, "evidence", evidence)
    moved = semel.Sqlite("/elsewhere/shop.db", "orders")
    world.did(0, ORDERS, is_over=False)
    world.check(moved)
    world.checkpoint.create("commits/0", b"v1\n{}")
    world.did(1, ORDERS, is_over=False)
    if not marked:
        with pytest.raises(Refused, match="under this name batch 1 went to"):
            world.check(moved)
    else:
        world.check(moved)
    world.checkpoint.create("commits/1", b"v1\n{}")
    if 1 in marked:
        world.check(moved)
    else:
        with pytest.raises(Refused, match="under this name batch 1 went to"):
            world.check(moved)


def test_a_journal_that_a_live_driver_forgets_while_we_look_refuses_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation, seed 932: we knew of batch 0 only, and its journal was pruned when we looked for it."""
    world.did(0, ORDERS)
    journal, looked_for = world.log.journal, list[int]()

    def forgotten_while_looked_for(batch: int) -> Any:
        looked_for.append(batch)
        if looked_for == [0, 1, 0]:
            world.did(1, ORDERS)
            world.log.prune(before_batch=1)
        return journal(batch)

    monkeypatch.setattr(world.log, "journal", forgotten_while_looked_for)
    world.check(ORDERS)
    assert looked_for[:3] == [0, 1, 0]
    assert world.plans.next_batch() == 2


def test_a_query_that_another_driver_has_overtaken_ends_before_it_fences_anybody(world: World) -> None:
    """With `semel.sink` Spark has read the checkpoint long before we are asked."""
    world.did(0, ORDERS)
    for planned in (0, 1):
        world.checkpoint.create(f"offsets/{planned}", offsets(planned))
    check_beginnings(world.log, world.plans, [ORDERS], PIPELINE, under_way=1)
    with pytest.raises(PlanRestored, match="This query runs batch 0, and the checkpoint is at batch 1 by now"):
        check_beginnings(world.log, world.plans, [ORDERS], PIPELINE, under_way=0)
    claims = world.log.newest_claim()
    with pytest.raises(PlanRestored, match="another driver of this pipeline has gone on"):
        start_exactly_once(world.log, world.plans, [ORDERS], Identity(PIPELINE), under_way=0)
    assert world.log.newest_claim() == claims


def test_a_copy_that_knows_the_end_of_a_batch_and_not_its_plan_overtakes_nobody(world: World) -> None:
    """Found by the simulation, seed 846: what was decided must be put back, and for that somebody has to start."""
    for batch in range(3):
        world.did(batch, ORDERS)
    world.checkpoint.delete("offsets/2")
    assert world.plans.next_batch() == 3
    check_beginnings(world.log, world.plans, [ORDERS], PIPELINE, under_way=1)


def ended(world: World, batch: int) -> None:
    """As the older driver does it, which then waits for its trigger."""
    world.did(batch, ORDERS, is_over=False)
    check_beginnings(world.log, world.plans, [ORDERS], PIPELINE, under_way=batch)
    world.checkpoint.create(f"commits/{batch}", b"v1\n{}")


def test_a_query_whose_batch_another_driver_has_ended_and_that_waits_for_its_trigger_fences_nobody(
    world: World,
) -> None:
    """Nobody has planned the next batch. The newer one cannot write `commits/1` a second time."""
    world.did(0, ORDERS)
    ended(world, 1)
    claims = world.log.newest_claim()
    overtaken = "This query runs batch 1, and the checkpoint is at batch 2 by now"
    with pytest.raises(PlanRestored, match=overtaken):
        start_exactly_once(world.log, world.plans, [ORDERS], Identity(PIPELINE), under_way=1)
    with pytest.raises(PlanRestored, match=overtaken):
        start_weaker(world.log, [ORDERS], Identity(PIPELINE), world.plans, under_way=1)
    assert world.log.newest_claim() == claims


def test_it_is_asked_again_right_before_the_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks ask stores, which takes its time."""
    claims = list[int]()

    def slowly(*values: Any, **named: Any) -> None:
        check_beginnings(*values, **named)
        ended(world, 0)
        claims.append(world.log.newest_claim())

    monkeypatch.setattr(startup, "check_beginnings", slowly)
    with pytest.raises(PlanRestored, match="This query runs batch 0, and the checkpoint is at batch 1 by now"):
        start_exactly_once(world.log, world.plans, [semel.Memory("overtaken")], Identity(PIPELINE), under_way=0)
    assert claims == [world.log.newest_claim()]


def test_a_store_that_cannot_keep_the_guarantee_is_refused_before_anybody_is_fenced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_sink: semel.Sqlite, _pipeline: PipelineId) -> None:
        raise Refused("an election may lose what was acknowledged")

    monkeypatch.setattr(semel.Sqlite, "check_store", refuse)
    world.did(0, ORDERS)
    claims = world.log.newest_claim()
    with pytest.raises(Refused, match="an election may lose"):
        start_exactly_once(world.log, world.plans, [ORDERS], Identity(PIPELINE))
    assert world.log.newest_claim() == claims


def test_long_offsets_are_cut(world: World) -> None:
    world.did(0)
    world.checkpoint.replace("offsets/0", b'v1\n{}\n{"orders":' + b"9" * 1_000 + b"}")
    with pytest.raises(Refused) as caught:
        world.check(ORDERS)
    assert len(caught.value.what) < 600
    assert "999 ..." in caught.value.what
