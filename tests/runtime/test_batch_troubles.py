"""The coordinator when the log fails, another driver takes over, or a store is away: when it stops, what it tidies."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace

import pytest

from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import (
    BatchFailed,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    SinkUnavailable,
)
from semel.ids import Attempt, Branch
from semel.protocol.events import Aborted, Decided, Outcome
from semel.runtime.commits import Waiting
from semel.runtime.hands import Written
from semel.runtime.phases import TIDY_AGAIN_S, TIDY_EVERY_BATCHES, TIDY_SHARE, Only, Parts
from semel.runtime.startup import close_open_slot
from semel.sinks.base import Remains, Sight
from tests.runtime.scripted import PAUSES, Scripted, coordinator, stage


@pytest.fixture(autouse=True)
def _no_pauses() -> None:
    PAUSES.clear()


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

    def stage_slowly(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
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

    def stage_slowly(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
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

    def slowly(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
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

    def cancelled(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
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
