"""The coordinator without Spark: what it does when a sink or the log misbehaves."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import (
    BatchFailed,
    CheckpointUnusable,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    InDoubt,
    RowsGone,
    SinkUnavailable,
)
from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch
from semel.protocol.events import Aborted, Committable, Decided, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.commits import Committers, Waiting
from semel.runtime.phases import TIDY_AGAIN_S, TIDY_EVERY_BATCHES, TIDY_SHARE, Limits, Only, Stage
from semel.runtime.startup import close_open_slot
from semel.runtime.weaker import Weaker
from semel.sinks.base import Context, Participant, Remains, Sight, StagedPart, committable_for
from tests.planned import plans

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")


@dataclass
class Scripted(Participant):
    """A participant that answers commits from a script, then with COMMITTED."""

    name: str
    answers: list[Outcome | Exception] = field(default_factory=list)
    refuses: Exception | None = None
    #: So often its store is away when it is to prepare.
    away: int = 0
    #: And so often when it is to roll back.
    cannot_abort: int = 0
    calls: list[str] = field(default_factory=list)
    left: tuple[Branch, ...] = ()

    def fence(self) -> None:
        self.calls.append("fence")

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        self.calls.append(f"prepare {attempt.attempt}")
        if self.refuses:
            raise self.refuses
        if self.away:
            self.away -= 1
            raise SinkUnavailable("The store is away.")
        return (committable_for(self.name, attempt, parts, {}),)

    def commit(self, committable: Committable) -> Outcome:
        self.calls.append(f"commit {committable.attempt.attempt}")
        answer = self.answers.pop(0) if self.answers else Outcome.COMMITTED
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self, branches: Iterable[Branch]) -> None:
        if self.cannot_abort:
            self.cannot_abort -= 1
            self.calls.append("abort away")
            raise SinkUnavailable("The store is away.")
        self.calls.append(f"abort {[b.task for b in branches]}")

    def recover(self) -> Remains:
        return Remains(self.left)

    def close(self) -> None:
        self.calls.append("close")


def coordinator(*sinks: Scripted, store: MemoryStore | None = None, incarnation: int = 1) -> Coordinator:
    log = DecisionLog(store or MemoryStore())
    while log.newest_claim() < incarnation:
        log.claim()
    context = Context(PIPELINE, "orders", Incarnation(incarnation))
    limits = Limits(stage_patience_s=1.0, stage_pause_s=0.1, commit_patience_s=0.35, commit_pause_s=0.1, mends=2)
    participants = {s.name: s for s in sinks}
    return Coordinator(context, participants, log, plans(), limits, sleep=PAUSES.append, clock=lambda: sum(PAUSES))


PAUSES: list[float] = []


@pytest.fixture(autouse=True)
def _no_pauses() -> None:
    PAUSES.clear()


def stage(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
    names = ("a", "b") if only is None else only
    return {name: [StagedPart(Branch(attempt, name, t, 0), 5) for t in (0, 1)] for name in names}


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
    def other(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
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

    def away(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        if only is None:
            return stage(attempt)
        raise OSError("no executor")

    with pytest.raises(CommitStalled, match="could not be committed to b: OSError: no executor"):
        c.exactly_once(4, away)
    assert b.calls == ["prepare 0", "commit 0", "abort [7]"]


# A sink that commits task by task -------------------------------------------------------------------------------------

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

    def stage(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
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


def test_a_log_that_does_not_answer_leaves_everything_as_it_is() -> None:
    class Silent(MemoryStore):
        def create(self, path: str, content: bytes) -> bool:
            if path.startswith("decisions/"):
                raise StoreUnanswered("timed out")
            return super().create(path, content)

    a = Scripted("a")
    with pytest.raises(DecisionUnknown) as caught:
        coordinator(a, Scripted("b"), store=Silent()).exactly_once(4, stage)
    assert str(caught.value) == (
        "The decision log memory did not say whether it took the decision of batch 4: StoreUnanswered: timed out.\n"
        "  the data now: nothing of the batch is visible; whether it was decided is not known yet\n"
        "  what to do: Start the pipeline again: it reads the log, then commits the batch or rolls it back."
    )
    assert a.calls == ["prepare 0"]


def test_a_driver_whose_slot_was_closed_stands_down() -> None:
    store = MemoryStore()
    zombie = coordinator(a := Scripted("a"), Scripted("b"), store=store)

    def stage_slowly(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        heir = coordinator(Scripted("a"), Scripted("b"), store=store, incarnation=2)
        assert heir.log is not None
        journal = close_open_slot(heir.log, heir.attempt(4, 0))
        assert [type(r) for r in journal] == [Aborted]
        return stage(attempt, only)

    with pytest.raises(Fenced, match="Incarnation 1 stopped at batch 4: incarnation 2 claimed this pipeline"):
        zombie.exactly_once(4, stage_slowly)
    # Its slot is somebody else's, so nobody will ever decide for its branches: it takes them back.
    assert [call.split()[0] for call in a.calls] == ["prepare", "abort"]


def test_a_driver_that_decided_and_was_superseded_leaves_the_commit_to_its_heir() -> None:
    store = MemoryStore()
    zombie = coordinator(a := Scripted("a"), Scripted("b"), store=store)

    def stage_slowly(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        DecisionLog(store).claim()
        return stage(attempt, only)

    with pytest.raises(Fenced):
        zombie.exactly_once(4, stage_slowly)
    assert a.calls == ["prepare 0"]
    heir = coordinator(b := Scripted("a"), Scripted("b"), store=store, incarnation=2)
    assert heir.exactly_once(4, stage).how == "forwarded"
    assert b.calls == ["commit 0"]


def test_a_superseded_driver_does_not_begin() -> None:
    store = MemoryStore()
    old = coordinator(a := Scripted("a"), Scripted("b"), store=store)
    DecisionLog(store).claim()
    with pytest.raises(Fenced):
        old.exactly_once(4, stage)
    assert a.calls == []


class Failing(MemoryStore):
    """When the batch is decided, it fails so often to say whether a record is there."""

    def __init__(self, times: int, error: Exception) -> None:
        super().__init__()
        self.times, self.error = times, error
        self.asked = 0

    def exists(self, path: str) -> bool:
        if super().list("decisions"):
            self.asked += 1
            if self.asked <= self.times:
                raise self.error
        return super().exists(path)


INPUT_OUTPUT = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("error", [INPUT_OUTPUT, StoreUnanswered("no name node")])
def test_a_log_that_fails_once_after_the_decision_is_asked_again_and_the_batch_commits(error: Exception) -> None:
    a, b, store = Scripted("a"), Scripted("b"), Failing(2, error)
    assert coordinator(a, b, store=store).exactly_once(4, stage).how == "committed"
    assert PAUSES == [0.1, 0.2]
    assert a.calls == b.calls == ["prepare 0", "commit 0"]


def test_a_log_that_fails_for_ever_after_the_decision_stalls_the_batch_in_time() -> None:
    a, b, store = Scripted("a"), Scripted("b"), Failing(999, INPUT_OUTPUT)
    told: list[str] = []
    c = coordinator(a, b, store=store)
    c.limits = replace(c.limits, tell_after_s=0.2)
    c.tell = lambda waiting: told.append(waiting.why)
    with pytest.raises(CommitStalled) as caught:
        c.exactly_once(4, stage)
    assert str(caught.value) == (
        f"Batch 4 is decided but could not be committed to a, b: the decision log {store.describe()} did not say "
        "whether a newer driver runs this pipeline: OSError: [Errno 5] Input/output error.\n"
        "  the data now: batch 4 is decided; visible in: no sink yet; still to commit: a, b\n"
        "  what to do: Bring the disk or the service of the decision log back, or give it more time (commit_limits, "
        "commit_patience_s), and start the pipeline again: it commits what is left and runs nothing twice."
    )
    assert caught.value.__cause__ is INPUT_OUTPUT
    assert PAUSES == [0.1, 0.2]
    assert told == ["the decision log: OSError: [Errno 5] Input/output error"]
    assert a.calls == b.calls == ["prepare 0"]
    store.times = 0
    assert coordinator(a, b, store=store, incarnation=2).exactly_once(4, stage).how == "forwarded"


def test_a_log_that_may_not_be_read_any_more_is_not_asked_again_and_again() -> None:
    store = Failing(999, OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(CommitStalled, match="could not be committed to a, b: the decision log") as caught:
        coordinator(Scripted("a"), Scripted("b"), store=store).exactly_once(4, stage)
    assert (store.asked, PAUSES) == (1, [])
    assert caught.value.remedy.startswith("This error does not mend itself: ")


def test_who_is_superseded_stands_down_also_when_the_log_does_not_say_by_whom() -> None:
    class Nameless(MemoryStore):
        def list(self, folder: str) -> list[str]:
            if self.exists("incarnations/0000000002.json"):
                raise INPUT_OUTPUT
            return super().list(folder)

    store = Nameless()
    zombie = coordinator(a := Scripted("a"), Scripted("b"), store=store)

    with pytest.raises(OSError, match="Input/output"):
        DecisionLog(store).claim()
    with pytest.raises(Fenced, match="stopped at batch 4: a newer incarnation claimed this pipeline"):
        zombie.exactly_once(4, stage)
    assert a.calls == []


def test_all_commits_of_a_batch_together_have_its_seconds_and_to_write_rows_again_takes_none_of_them() -> None:
    b = Scripted("b", [Outcome.RETRY, Outcome.RETRY, Outcome.GONE, *[Outcome.RETRY] * 9])

    def slowly(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        if only is not None:
            PAUSES.append(1000.0)
        return stage(attempt, only, plan)

    with pytest.raises(CommitStalled, match="could not be committed to b"):
        coordinator(Scripted("a"), b).exactly_once(4, slowly)
    # Of 0.35 s the first commits took 0.3: there is no time to ask twice more, but there was to ask.
    assert PAUSES == [0.1, 0.2, 1000.0]
    assert b.calls == ["prepare 0", *["commit 0"] * 3, "prepare 1", "commit 1"]


def test_a_decided_batch_whose_rows_are_written_again_is_told_while_it_waits_and_ends_with_a_stop() -> None:
    b, told, stopped = Scripted("b", [Outcome.GONE]), [], threading.Event()
    c = coordinator(Scripted("a"), b)
    c.limits = replace(c.limits, tell_after_s=0.1)
    c.clock, c.sleep = time.monotonic, time.sleep

    def tell(waiting: Waiting) -> None:
        told.append((waiting.sinks, waiting.visible))
        c.abandon()
        stopped.set()

    def cancelled(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        if only is not None:
            assert stopped.wait(20)
            raise RuntimeError("Job 7 cancelled part of cancelled job group")
        return stage(attempt, only, plan)

    c.tell = tell
    with pytest.raises(CommitStalled) as caught:
        c.exactly_once(4, cancelled)
    assert told == [(("b",), ("a",))]
    assert str(caught.value) == (
        "Batch 4 is decided and was stopped before it was committed to b: "
        "its rows were gone and were being written again.\n"
        "  the data now: batch 4 is decided; visible in: a; still to commit: b\n"
        "  what to do: Start the pipeline again: it commits what is left and runs nothing twice."
    )


def test_a_stop_ends_the_waiting_for_a_store_that_is_away_before_the_decision() -> None:
    a = Scripted("a", away=99)
    c = coordinator(a, Scripted("b"))
    c.is_stopped = lambda: len(PAUSES) == 1
    with pytest.raises(SinkUnavailable):
        c.exactly_once(4, stage)
    assert a.calls.count("prepare 0") == 2


def test_closing_meets_a_decision_and_leaves_it_standing() -> None:
    store = MemoryStore()
    coordinator(Scripted("a"), Scripted("b"), store=store).exactly_once(4, stage)
    heir = coordinator(Scripted("a"), Scripted("b"), store=store, incarnation=2)
    assert heir.log is not None
    assert [type(r) for r in close_open_slot(heir.log, heir.attempt(4, 0))] == [Decided, Aborted]


def test_old_journals_and_lost_retries_are_tidied_once_in_a_while() -> None:
    a = Scripted("a")
    c = coordinator(a)
    assert c.log is not None
    for batch in (0, TIDY_EVERY_BATCHES, 2 * TIDY_EVERY_BATCHES - 1):
        c.log.append(Aborted(c.attempt(batch, 0)))
    a.left = (Branch(c.attempt(5, 0), "a", 3, 9),)
    for batch in range(2 * TIDY_EVERY_BATCHES):
        c.tidy(batch)
    assert c.log.batches() == [TIDY_EVERY_BATCHES, 2 * TIDY_EVERY_BATCHES - 1]
    assert a.calls == ["abort [3]", "abort [3]"]


@pytest.mark.parametrize("when", ["before the decision", "after it"])
def test_after_trouble_what_lost_tries_left_is_tidied_as_soon_as_the_store_is_there(when: str) -> None:
    """The store may have been away whenever a try was rolled back."""
    away = when == "before the decision"
    a, b = Scripted("a", away=int(away), answers=[] if away else [Outcome.RETRY]), Scripted("b")
    c = coordinator(a, b)
    c.tidy(0)
    c.exactly_once(4, stage)
    a.left = (Branch(c.attempt(4, 0), "a", 7, 0),)
    a.calls.clear()
    a.cannot_abort = 1
    c.tidy(4)
    # The other store is tidied all the same.
    assert (a.calls, b.calls[-1]) == (["abort away"], "abort []")
    c.tidy(5)
    assert a.calls == ["abort away"]
    PAUSES.append(TIDY_AGAIN_S)
    c.tidy(6)
    assert a.calls == ["abort away", "abort [7]"]
    c.tidy(7)
    assert len(a.calls) == 2


class OneBrokerAway(Scripted):
    """Of its branches those of task 1 are on a broker that does not answer, which is found out after a while."""

    takes_s = 4.0
    is_away = True

    def recover(self) -> Remains:
        raise SinkUnavailable("ListTransactions: one broker is away.")

    def in_sight(self) -> Sight:
        self.calls.append("in sight")
        if not self.is_away:
            return Sight(self.left)
        PAUSES.append(self.takes_s)
        return Sight(tuple(b for b in self.left if b.task != 1), "no answer from broker 2")


def test_a_broker_that_is_away_is_waited_for_by_few_batches_and_its_branches_are_not_forgotten() -> None:
    a = OneBrokerAway("a")
    c = coordinator(a)
    c.had_trouble = True
    a.left = tuple(Branch(c.attempt(4, 0), "a", task, 9) for task in (0, 1))
    began = sum(PAUSES)
    for batch in range(4, 4 + 90):
        c.tidy(batch)
        PAUSES.append(1.0)
    waited_s = a.calls.count("in sight") * a.takes_s
    assert 0 < waited_s < (sum(PAUSES) - began) / TIDY_SHARE + 2 * a.takes_s
    assert c.had_trouble
    assert "abort [0]" in a.calls
    a.is_away = False
    PAUSES.append(TIDY_SHARE * a.takes_s)
    a.calls.clear()
    c.tidy(96)
    assert a.calls == ["in sight", "abort [0, 1]"]
    assert not c.had_trouble


def test_what_is_in_sight_is_rolled_back_though_a_broker_is_away() -> None:
    a, b = OneBrokerAway("a"), Scripted("b", refuses=BatchFailed("A row does not fit."))
    c = coordinator(a, b)
    a.left = tuple(Branch(c.attempt(4, 0), "a", task, 0) for task in (0, 1, 2))
    with pytest.raises(BatchFailed, match="does not fit"):
        c.exactly_once(4, stage)
    assert a.calls == ["prepare 0", "in sight", "abort [0, 2]"]
    # The rest is for the tidying after a later batch, or for the next start, which asks for all.
    assert c.had_trouble
