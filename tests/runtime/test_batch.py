"""The coordinator without Spark: what it does when a sink or the log misbehaves."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from semel.decisions.memory import MemoryStore
from semel.errors import (
    BatchFailed,
    CheckpointUnusable,
    CommitStalled,
    InDoubt,
    PlanRestored,
    RowsGone,
    SinkUnavailable,
)
from semel.ids import Attempt, Branch, Incarnation
from semel.protocol.events import Committable, Decided, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.commits import Committers
from semel.runtime.hands import Written
from semel.runtime.phases import Only, Parts
from semel.runtime.weaker import Weaker
from semel.sinks.base import StagedPart, committable_for
from tests.planned import offsets, plans
from tests.runtime.scripted import PAUSES, PIPELINE, Scripted, coordinator, stage


@pytest.fixture(autouse=True)
def _no_pauses() -> None:
    PAUSES.clear()


def test_a_batch_is_prepared_decided_and_committed() -> None:
    a, b = Scripted("a"), Scripted("b")
    c = coordinator(a, b)
    report = c.exactly_once(4, stage)
    assert (report.how, report.rows, report.attempt, report.staged) == ("committed", 20, 0, True)
    assert a.calls == b.calls == ["prepare 0", "commit 0"]
    assert c.log is not None
    assert [type(r) for r in c.log.journal(4)] == [Decided]


def test_a_decided_batch_is_committed_forward_and_not_staged() -> None:
    store = MemoryStore()
    coordinator(Scripted("a"), Scripted("b"), store=store).exactly_once(4, stage)
    a, b = Scripted("a", [Outcome.ALREADY_COMMITTED]), Scripted("b")
    report = coordinator(a, b, store=store, incarnation=2).exactly_once(4, stage)
    assert (report.how, report.staged) == ("forwarded", False)
    assert a.calls == b.calls == ["commit 0"]


def test_a_batch_whose_plan_somebody_else_has_written_is_not_begun() -> None:
    """The decision would say that its rows follow from a plan of which Spark has not read a word."""
    a, b = Scripted("a"), Scripted("b")
    c = coordinator(a, b)
    c.in_hand = lambda: {"offsets/4": "in memory: another"}
    with pytest.raises(BatchFailed) as caught:
        c.exactly_once(4, stage)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what.startswith("Batch 4 was not begun: offsets/4 says something else than Spark has planned.")
    assert data_now == "  the data now: nothing of the batch was written"
    assert remedy.startswith("  what to do: Start the pipeline again")
    assert a.calls == b.calls == []
    assert c.log is not None
    assert c.log.journal(4) == ()


def began_behind(in_memory: str = "", in_checkpoint: int | None = None) -> Coordinator:
    """Batch 3 was decided for its plan; Spark has read another one of it, or the checkpoint has one by now."""
    c = coordinator(Scripted("a"), Scripted("b"))
    decided = c.plans.read(3) if c.plans is not None else None
    store = MemoryStore()
    c.plans = plans(store=store)
    if in_checkpoint is not None:
        store.replace("offsets/3", offsets(3, end=in_checkpoint))
    if c.log is not None:
        c.log.append(Decided(Attempt(PIPELINE, 3, 0, Incarnation(1)), (), plan=decided))
    c.begins_behind = lambda: {"offsets/3": in_memory} if in_memory else {}
    return c


def test_a_query_that_begins_where_the_decided_batch_before_ends_goes_on() -> None:
    assert began_behind().exactly_once(4, stage).how == "committed"


@pytest.mark.parametrize("amiss", [{"in_memory": "in memory: another"}, {"in_checkpoint": 999}])
def test_a_query_that_begins_elsewhere_than_the_decided_batch_before_ends_is_stopped(amiss: dict[str, Any]) -> None:
    """And what it has planned there is dropped: nobody sees of a plan where it begins."""
    c = began_behind(**amiss)
    with pytest.raises(PlanRestored) as caught:
        c.exactly_once(4, stage)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what == "Batch 4 was not begun: Spark begins elsewhere than batch 3, as decided, ends."
    assert data_now == "  the data now: nothing of the batch was written"
    assert remedy.startswith("  what to do: Start the pipeline again")
    assert c.plans is not None
    assert not c.plans.has_planned(4)
    assert c.log is not None
    assert c.log.journal(4) == ()


def test_only_the_first_batch_of_a_query_is_asked_where_it_begins() -> None:
    c = began_behind()
    c.exactly_once(4, stage)
    c.begins_behind = lambda: pytest.fail("it begins where its own batch has ended")
    assert c.exactly_once(5, stage).how == "committed"


def test_a_batch_before_the_one_that_the_start_has_settled_is_not_begun() -> None:
    """Spark has lost its plans since then. The journal of that batch may be forgotten: it would be written again."""
    c = coordinator(Scripted("a"), Scripted("b"))
    c.first = 5
    with pytest.raises(PlanRestored, match="Batch 4 was not begun: the next one is 5"):
        c.exactly_once(4, stage)
    assert c.log is not None
    assert c.log.journal(4) == ()


def test_what_spark_wrote_is_durable_before_each_decision() -> None:
    """A mend runs the tasks again, and they write the state of the batch anew."""
    c = coordinator(Scripted("a"), Scripted("b", [Outcome.GONE]))
    assert c.log is not None
    log, seen = c.log, []
    c.plans = plans()
    c.plans.make_durable = lambda batch: seen.append((batch, len(log.journal(batch))))
    c.exactly_once(4, stage)
    assert seen == [(4, 0), (4, 1)]
    assert len(log.journal(4)) == 2


def test_state_that_cannot_be_made_durable_a_second_time_is_told_in_three_lines() -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "state/0/0/5.delta cannot be made durable: Input/output error")

    c = coordinator(Scripted("a"))
    c.plans = plans()
    c.plans.make_durable = fail
    with pytest.raises(CheckpointUnusable) as caught:
        c.make_state_durable(4)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what.startswith("Batch 4 is decided, and the state that its tasks wrote cannot be made durable: ")
    assert "5.delta" in what
    assert data_now == "  the data now: the batch is visible in every sink; Spark does not take it for done"
    assert remedy.startswith("  what to do: Mend the disk of the checkpoint, then start again")


def test_if_one_sink_cannot_prepare_none_commits() -> None:
    a, b = Scripted("a"), Scripted("b", refuses=ValueError("no room"))
    c = coordinator(a, b)
    a.left = (Branch(c.attempt(4, 0), "a", 7, 0), Branch(c.attempt(3, 0), "a", 8, 0))
    with pytest.raises(BatchFailed) as caught:
        c.exactly_once(4, stage)
    assert str(caught.value) == (
        "Batch 4 failed before it was decided: ValueError: no room.\n"
        "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
        "  what to do: Mend the cause and start the pipeline again: the batch runs again from the same offsets."
    )
    assert a.calls == ["prepare 0", "abort [7]"]
    assert b.calls == ["prepare 0", "abort []"]
    assert c.log is not None
    assert c.log.journal(4) == ()


def test_a_store_that_is_away_before_the_decision_is_waited_for() -> None:
    a, b = Scripted("a"), Scripted("b", away=3)
    c = coordinator(a, b)
    a.left = (Branch(c.attempt(4, 0), "a", 7, 0),)
    assert c.exactly_once(4, stage).how == "committed"
    # What a try left behind is rolled back before the next one.
    assert a.calls == ["prepare 0", "abort [7]"] * 3 + ["prepare 0", "commit 0"]
    assert pytest.approx([0.1, 0.2, 0.4]) == PAUSES


def test_a_store_that_stays_away_fails_the_batch_in_its_own_words() -> None:
    a, b = Scripted("a"), Scripted("b", away=99)
    c = coordinator(a, b)
    with pytest.raises(SinkUnavailable, match="The store is away"):
        c.exactly_once(4, stage)
    # The last one ends where the patience does.
    assert pytest.approx([0.1, 0.2, 0.4, 0.3]) == PAUSES
    assert "commit 0" not in a.calls + b.calls
    assert c.log is not None
    assert c.log.journal(4) == ()


def test_below_exactly_once_a_store_is_waited_for_too() -> None:
    a = Scripted("a", away=2)
    c = coordinator(a)
    weaker = Weaker(c.context, c.participants, limits=c.limits, sleep=c.sleep, clock=c.clock)
    assert weaker.at_least_once(4, stage).how == "committed"
    assert a.calls == ["prepare 0", "abort []"] * 2 + ["prepare 0", "commit 0"]


@dataclass
class InTurn(Scripted):
    """Says when it was asked."""

    asked: list[str] = field(default_factory=list)

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        self.asked.append(f"prepare {self.name}")
        return super().prepare(attempt, parts)

    def commit(self, committable: Committable) -> Outcome:
        self.asked.append(f"commit {self.name}")
        return super().commit(committable)


def test_participants_commit_in_the_opposite_order_of_their_preparing() -> None:
    asked: list[str] = []
    c = coordinator(InTurn("b", asked=asked), InTurn("a", asked=asked))
    c.__dict__["_committers"] = Committers(1, apart=False)
    c.exactly_once(4, stage)
    c.close()
    assert asked == ["prepare b", "prepare a", "commit a", "commit b"]


def test_a_commit_is_retried_within_its_limit_then_stalls_and_the_others_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/semel", "run", "orders.py"])
    a, b = Scripted("a", [Outcome.RETRY, OSError("away"), Outcome.RETRY]), Scripted("b")
    store = MemoryStore()
    with pytest.raises(CommitStalled) as caught:
        coordinator(a, b, store=store).exactly_once(4, stage)
    assert str(caught.value) == (
        "Batch 4 is decided but could not be committed to a: OSError: away.\n"
        "  the data now: batch 4 is decided; visible in: b; still to commit: a\n"
        "  what to do: Bring the sink back, or give it more time (commit_limits, commit_patience_s), and start the "
        "pipeline again (semel run orders.py): it commits what is left and runs nothing twice."
    )
    # A third one would not end before the patience does.
    assert PAUSES == [0.1, 0.2]
    assert a.calls == ["prepare 0", "commit 0", "commit 0", "commit 0"]
    later = Scripted("a")
    report = coordinator(later, Scripted("b", [Outcome.ALREADY_COMMITTED]), store=store, incarnation=2)
    assert report.exactly_once(4, stage).how == "forwarded"
    assert later.calls == ["commit 0"]


class ScriptedByTask(Scripted):
    """Commits each task for itself."""

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        return tuple(committable_for(self.name, attempt, [p], {}, key=f"{self.name}/{p.branch.task}") for p in parts)


def test_sinks_are_told_by_name_and_not_task_by_task() -> None:
    a, b = ScriptedByTask("a", [Outcome.COMMITTED, *[Outcome.RETRY] * 3]), ScriptedByTask("b")
    c = coordinator(a, b)
    c.__dict__["_committers"] = Committers(1, apart=False)
    with pytest.raises(CommitStalled) as caught:
        c.exactly_once(4, stage)
    assert str(caught.value).splitlines()[:2] == [
        "Batch 4 is decided but could not be committed to a: the sink gave no reason.",
        "  the data now: batch 4 is decided; visible in: part of a, b; still to commit: a",
    ]


def test_in_doubt_stops_and_names_the_sink() -> None:
    with pytest.raises(InDoubt) as caught:
        coordinator(Scripted("a", [Outcome.IN_DOUBT]), Scripted("b")).exactly_once(4, stage)
    assert str(caught.value).splitlines()[:2] == [
        "Nobody can say whether batch 4 was committed to a.",
        "  the data now: batch 4 is decided; visible in: b; still to commit: ",
    ]


def test_what_is_gone_is_staged_again_and_nothing_else() -> None:
    a, b = Scripted("a"), Scripted("b", [Outcome.GONE])
    c = coordinator(a, b)
    report = c.exactly_once(4, stage)
    assert (report.how, report.rows, report.attempt) == ("committed", 20, 1)
    assert a.calls == ["prepare 0", "commit 0"]
    assert b.calls == ["prepare 0", "commit 0", "prepare 1", "commit 1"]
    assert c.log is not None
    assert [getattr(r, "mends", None) for r in c.log.journal(4)] == [False, True]


def test_what_vanishes_again_and_again_is_given_up_within_the_limit() -> None:
    b = Scripted("b", [Outcome.GONE] * 9)
    with pytest.raises(CommitStalled, match="was written again 2 times and vanished each time"):
        coordinator(Scripted("a"), b).exactly_once(4, stage)
    assert b.calls.count("commit 1") == b.calls.count("commit 2") == 1


def test_a_changed_task_layout_is_not_mended() -> None:
    def other(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
        staged = dict(stage(attempt, only))
        return staged if only is None else {"b": staged["b"][:1]}

    b = Scripted("b", [Outcome.GONE])
    with pytest.raises(RowsGone) as caught:
        coordinator(Scripted("a"), b).exactly_once(4, other)
    assert str(caught.value) == (
        "Batch 4 has another task layout than when it was decided: 1 tasks for b, not 2.\n"
        "  the data now: the batch is decided; what is named here is not visible, the rest is\n"
        "  what to do: Start with the number of partitions that the batch was decided with."
    )
    assert b.calls == ["prepare 0", "commit 0", "abort []"]


def test_a_mend_that_fails_is_rolled_back_and_the_batch_stays_decided() -> None:
    b = Scripted("b", [Outcome.GONE])
    c = coordinator(Scripted("a"), b)
    b.left = (Branch(c.attempt(4, 1), "b", 7, 0), Branch(c.attempt(4, 0), "b", 8, 0))

    def away(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
        if only is None:
            return stage(attempt)
        raise OSError("no executor")

    with pytest.raises(CommitStalled, match="could not be committed to b: OSError: no executor"):
        c.exactly_once(4, away)
    assert b.calls == ["prepare 0", "commit 0", "abort [7]"]
