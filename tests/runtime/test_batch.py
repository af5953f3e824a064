"""The coordinator without Spark: what it does when a sink or the log misbehaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import BatchFailed, CommitStalled, DecisionUnknown, Fenced, InDoubt
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Aborted, Committable, Decided, Outcome
from semel.runtime.batch import TIDY_EVERY_BATCHES, Coordinator, Limits, Only
from semel.runtime.startup import close_open_slot
from semel.sinks.base import Context, Participant, Remains, StagedPart, committable_for

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")


@dataclass
class Scripted(Participant):
    """A participant that answers commits from a script, then with COMMITTED."""

    name: str
    answers: list[Outcome | Exception] = field(default_factory=list)
    refuses: Exception | None = None
    calls: list[str] = field(default_factory=list)
    left: tuple[Branch, ...] = ()

    def fence(self) -> None:
        self.calls.append("fence")

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        self.calls.append(f"prepare {attempt.attempt}")
        if self.refuses:
            raise self.refuses
        return (committable_for(self.name, attempt, parts, {}),)

    def commit(self, committable: Committable) -> Outcome:
        self.calls.append(f"commit {committable.attempt.attempt}")
        answer = self.answers.pop(0) if self.answers else Outcome.COMMITTED
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self, branches: Iterable[Branch]) -> None:
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
    limits = Limits(commit_tries=3, commit_pause_s=0.1, mends=2)
    return Coordinator(context, {s.name: s for s in sinks}, log, limits, sleep=PAUSES.append)


PAUSES: list[float] = []


@pytest.fixture(autouse=True)
def _no_pauses() -> None:
    PAUSES.clear()


def stage(attempt: Attempt, only: Only = None) -> Mapping[str, Sequence[StagedPart]]:
    names = ("a", "b") if only is None else only
    tasks = {name: (0, 1) if only is None else sorted(only[name]) for name in names}
    return {name: [StagedPart(Branch(attempt, name, t, 0), 5) for t in tasks[name]] for name in names}


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


def test_a_commit_is_retried_within_its_limit_then_stalls_and_the_others_commit() -> None:
    a, b = Scripted("a", [Outcome.RETRY, OSError("away"), Outcome.RETRY]), Scripted("b")
    store = MemoryStore()
    with pytest.raises(CommitStalled) as caught:
        coordinator(a, b, store=store).exactly_once(4, stage)
    assert str(caught.value) == (
        "Batch 4 is decided but could not be committed to a: OSError: away.\n"
        "  the data now: batch 4 is decided; visible in: b; still to commit: a\n"
        "  what to do: Bring the sink back and start the pipeline again: "
        "it commits what is left and runs nothing twice."
    )
    assert PAUSES == [0.1, 0.2]
    assert a.calls == ["prepare 0", "commit 0", "commit 0", "commit 0"]
    later = Scripted("a")
    report = coordinator(later, Scripted("b", [Outcome.ALREADY_COMMITTED]), store=store, incarnation=2)
    assert report.exactly_once(4, stage).how == "forwarded"
    assert later.calls == ["commit 0"]


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
    def other(attempt: Attempt, only: Only = None) -> Mapping[str, Sequence[StagedPart]]:
        staged = dict(stage(attempt, only))
        return staged if only is None else {"b": staged["b"][:1]}

    with pytest.raises(CommitStalled, match="has another task layout than when it was decided"):
        coordinator(Scripted("a"), Scripted("b", [Outcome.GONE])).exactly_once(4, other)


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

    def stage_slowly(attempt: Attempt, only: Only = None) -> Mapping[str, Sequence[StagedPart]]:
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

    def stage_slowly(attempt: Attempt, only: Only = None) -> Mapping[str, Sequence[StagedPart]]:
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
