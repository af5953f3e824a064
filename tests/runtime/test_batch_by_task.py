"""The coordinator with a sink that commits task by task: what is gone of a batch is found in a replay, by content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import (
    CommitStalled,
    RowsGone,
)
from semel.ids import Attempt, Branch, Incarnation, parse_branch
from semel.protocol.events import Committable, Decided, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.hands import Written
from semel.runtime.phases import Limits, Only, Parts, Stage
from semel.sinks.base import Context, Participant, Remains, StagedPart, committable_for
from tests.planned import plans
from tests.runtime.scripted import PIPELINE

Rows = tuple[str, ...]


@dataclass
class ByTask(Participant):
    """A store in which each task has a transaction of its own, and some of them are gone when they shall commit."""

    name: str
    loses: set[int] = field(default_factory=set)
    staged: dict[str, Rows] = field(default_factory=dict)
    visible: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def fence(self) -> None: ...

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        made = [committable_for(self.name, attempt, [p], {}, key=f"{self.name}/{p.branch.task}") for p in parts]
        return tuple(reversed(made))

    def commit(self, committable: Committable) -> Outcome:
        (name,) = committable.branches
        branch = parse_branch(name)
        assert branch is not None
        if name in self.done:
            return Outcome.ALREADY_COMMITTED
        if not committable.mends and branch.task in self.loses:
            self.staged.pop(name, None)
        if name not in self.staged:
            return Outcome.GONE
        self.visible += self.staged.pop(name)
        self.done.add(name)
        return Outcome.COMMITTED

    def abort(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self.staged.pop(str(branch), None)

    def recover(self) -> Remains:
        return Remains(tuple(branch for name in self.staged if (branch := parse_branch(name))))

    def close(self) -> None: ...


def stages(store: ByTask, first: Sequence[Rows], then: Sequence[Rows]) -> Stage:
    """Tasks that write these rows at first, and those in a replay."""

    def stage(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
        assert only in (None, [store.name])
        parts = []
        for task, rows in enumerate(first if only is None else then):
            parts.append(StagedPart(Branch(attempt, store.name, task, 0), len(rows), {}, f"{len(rows)}:{sorted(rows)}"))
            store.staged[str(parts[-1].branch)] = rows
        return {store.name: parts}

    return stage


def by_task(store: ByTask, log: MemoryStore, incarnation: int = 1) -> Coordinator:
    claims = DecisionLog(log)
    while claims.newest_claim() < incarnation:
        claims.claim()
    return Coordinator(Context(PIPELINE, "orders", Incarnation(incarnation)), {store.name: store}, claims, plans())


def test_of_a_batch_that_is_gone_in_part_only_the_gone_rows_are_committed_again() -> None:
    """The replay numbers its tasks otherwise, and gives the rows of a task in another order."""
    log, store = MemoryStore(), ByTask("k", loses={1})
    run = stages(store, [("a", "b"), ("c", "d"), ("e",)], [("d", "c"), ("e",), ("a", "b")])
    report = by_task(store, log).exactly_once(4, run)
    assert (report.how, report.rows, report.attempt) == ("committed", 5, 1)
    assert sorted(store.visible) == ["a", "b", "c", "d", "e"]
    assert store.staged == {}
    first, second = DecisionLog(log).journal(4)
    assert isinstance(first, Decided)
    assert isinstance(second, Decided)
    assert [(c.key, c.mends) for c in sorted(first.committables, key=lambda c: c.key)] == [
        ("k/0", False),
        ("k/1", False),
        ("k/2", False),
    ]
    # Task 0 of the replay stands in for task 1.
    replayed = str(Branch(Attempt(PIPELINE, 4, 1, Incarnation(1)), "k", 0, 0))
    assert [(c.key, c.mends, c.branches) for c in second.committables] == [("k/1", True, (replayed,))]


def test_the_next_start_mends_what_the_last_one_left_and_the_one_after_it_finds_all_committed() -> None:
    log, store = MemoryStore(), ByTask("k", loses={0})
    run = stages(store, [("a",), ("b",)], [("b",), ("a",)])
    died = by_task(store, log)
    died.limits = Limits(mends=0)
    with pytest.raises(CommitStalled):
        died.exactly_once(4, run)
    assert store.visible == ["b"]
    assert by_task(store, log, 2).exactly_once(4, run).how == "forwarded"
    last = by_task(store, log, 3).exactly_once(4, run)
    assert (last.how, last.staged, sorted(store.visible), store.staged) == ("forwarded", False, ["a", "b"], {})


def test_when_a_replay_brings_other_rows_the_pipeline_stops_and_nothing_is_doubled() -> None:
    log, store = MemoryStore(), ByTask("k", loses={1})
    run = stages(store, [("a",), ("b",)], [("a",), ("c",)])
    for incarnation in (1, 2):
        with pytest.raises(RowsGone) as caught:
            by_task(store, log, incarnation).exactly_once(4, run)
        assert str(caught.value) == (
            "Of batch 4 the rows of k/1 are gone from k, and a replay did not bring them again.\n"
            "  the data now: the batch is decided; what is named here is not visible, the rest is\n"
            "  what to do: Write the missing rows by hand from the offsets of the batch."
        )
        assert (store.visible, store.staged) == (["a"], {})
    assert len(DecisionLog(log).journal(4)) == 1
