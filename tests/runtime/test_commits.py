"""A decided batch whose sinks do not answer: what is waited for, what is told, and that nobody is held up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from semel.deadline import SECONDS_MIN, limited, progressed, seconds_left
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.errors import CommitStalled, DecisionUnknown, SinkUnavailable
from semel.ids import Attempt, Incarnation
from semel.protocol.events import Committable, Decided, Outcome
from semel.runtime import phases as phases_module
from semel.runtime.batch import Coordinator
from semel.runtime.commits import COMMITS_AT_ONCE, Committers, Rhythm, Waiting, finished
from semel.runtime.hands import Written
from semel.runtime.phases import Limits, Only, Parts, Report
from semel.runtime.startup import start_exactly_once
from semel.runtime.weaker import Weaker
from semel.sinks import Memory
from semel.sinks.base import Context, StagedPart, committable_for
from tests.planned import plans
from tests.processes import wait_until
from tests.runtime.scripted import PIPELINE, Scripted, stage

#: Whoever must not be held up has so long on a machine that is busy with other tests.
SLACK_S = 10.0


@dataclass
class Hanging(Scripted):
    """Its store never answers, until the test is over."""

    released: threading.Event = field(default_factory=threading.Event)
    hangs: bool = True
    close_hangs: bool = False
    given_s: list[float | None] = field(default_factory=list)

    def commit(self, committable: Committable) -> Outcome:
        outcome = super().commit(committable)
        self.given_s.append(seconds_left())
        if self.hangs:
            self.released.wait()
        return outcome

    def close(self) -> None:
        if self.close_hangs:
            self.released.wait()
        super().close()


def started(
    *sinks: Scripted, store: MemoryStore | None = None, incarnation: int = 1, kind: Any = Coordinator, **limits: Any
) -> Any:
    log = DecisionLog(store or MemoryStore())
    while log.newest_claim() < incarnation:
        log.claim()
    given = Limits(**{"commit_patience_s": 0.5, "commit_pause_s": 0.05, **limits})
    return kind(Context(PIPELINE, "orders", Incarnation(incarnation)), {s.name: s for s in sinks}, log, plans(), given)


@contextmanager
def let_go(*sinks: Hanging) -> Any:
    try:
        yield
    finally:
        for sink in sinks:
            sink.released.set()


def running(coordinator: Coordinator) -> Future[Report]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(coordinator.exactly_once, 4, stage)
    finally:
        pool.shutdown(wait=False)


# The time that there is ----------------------------------------------------------------------------------------------


def test_a_store_that_hangs_for_ever_stalls_the_batch_in_time_and_the_others_commit() -> None:
    a, b, store = Hanging("a"), Scripted("b"), MemoryStore()
    with let_go(a):
        began = time.monotonic()
        with pytest.raises(CommitStalled) as caught:
            started(a, b, store=store).exactly_once(4, stage)
        assert 0.5 <= time.monotonic() - began < 0.5 + phases_module.LAST_WORDS_S + SLACK_S
    assert str(caught.value).splitlines()[:2] == [
        "Batch 4 is decided but could not be committed to a: it gave no answer.",
        "  the data now: batch 4 is decided; visible in: b; still to commit: a",
    ]
    assert "commit_patience_s" in caught.value.remedy
    assert a.calls == ["prepare 0", "commit 0"]
    (given_s,) = a.given_s
    assert given_s is not None
    assert given_s <= 0.5
    heir = started(
        Scripted("a", [Outcome.COMMITTED]), Scripted("b", [Outcome.ALREADY_COMMITTED]), store=store, incarnation=2
    )
    assert heir.exactly_once(4, stage).how == "forwarded"


def test_below_exactly_once_a_store_that_hangs_stops_the_query_in_time_too() -> None:
    a = Hanging("a")
    with (
        let_go(a),
        pytest.raises(CommitStalled, match="Batch 4 could not be committed to a: it gave no answer") as caught,
    ):
        started(a, kind=Weaker).at_least_once(4, stage)
    assert caught.value.remedy == (
        "Bring the sink back, or give it more time (commit_limits, commit_patience_s), "
        "and start the pipeline again: the batch runs again."
    )


def test_an_answer_that_comes_when_nobody_waits_any_more_changes_nothing() -> None:
    a, store = Hanging("a"), MemoryStore()
    c = started(a, Scripted("b"), store=store)
    with let_go(a):
        with pytest.raises(CommitStalled):
            c.exactly_once(4, stage)
        undone = c.undone()
    wait_until(lambda: c.undone() is None)
    assert "visible in: b; still to commit: a" in str(undone)
    assert [type(r) for r in DecisionLog(store).journal(4)] == [Decided]


def test_more_commits_than_threads_are_all_asked_for() -> None:
    asked: list[int] = []

    def ask(item: int) -> int:
        asked.append(item)
        return item * 2

    committers = Committers(3)
    for _ in range(2):
        assert committers.answers(ask, range(50), lambda: True) == [item * 2 for item in range(50)]
    assert sorted(asked) == sorted([*range(50)] * 2)
    threads = [t for t in threading.enumerate() if t.name.startswith("semel-commit")]
    assert all(thread.daemon for thread in threads)
    committers.shutdown()


@dataclass
class HangingByTask(Hanging):
    """Has more to commit than there are threads, and all of it hangs."""

    number: int = COMMITS_AT_ONCE + 4

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        super().prepare(attempt, parts)
        keys = [f"{self.name}/{task}" for task in range(self.number)]
        return tuple(committable_for(self.name, attempt, [], {}, key=key) for key in keys)


def test_a_store_that_hangs_in_all_its_threads_keeps_no_other_from_being_asked() -> None:
    hanging, b = HangingByTask("kafka"), Scripted("b", [SinkUnavailable("The second store is away.")] * 99)
    a = Scripted("a")

    def with_all(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
        return {**stage(attempt, only, plan), "kafka": []}

    # What is last in this order commits first.
    c = started(a, b, hanging)
    with let_go(hanging):
        with pytest.raises(CommitStalled) as caught:
            c.exactly_once(4, with_all)
        assert str(caught.value).splitlines()[:2] == [
            "Batch 4 is decided but could not be committed to b: The second store is away; kafka: it gave no answer.",
            "  the data now: batch 4 is decided; visible in: a; still to commit: b, kafka",
        ]
        assert len(b.calls) > 2
        assert hanging.calls.count("commit 0") == COMMITS_AT_ONCE
    c.close()
    # Those that stood in line were given up with the batch: nobody asks for them late.
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("semel-commit-kafka")])
    assert hanging.calls.count("commit 0") == COMMITS_AT_ONCE


def test_an_error_of_the_asking_itself_is_raised_where_the_answers_are_waited_for() -> None:
    def ask(item: int) -> int:
        raise RuntimeError(f"no {item}")

    with pytest.raises(RuntimeError, match="no 7"):
        Committers(1).answers(ask, [7], lambda: True)


class Moving(Scripted):
    """Its commit has to move the rows once more, which takes three times as long as anybody waits."""

    def __init__(self, name: str, parts: Sequence[str]) -> None:
        super().__init__(name)
        self.parts = parts

    def commit(self, committable: Committable) -> Outcome:
        for part in self.parts:
            time.sleep(0.3)
            if limited(60.0) <= SECONDS_MIN:
                raise SinkUnavailable("The time is over.")
            progressed(part)
        return super().commit(committable)


def test_the_seconds_begin_again_with_each_part_of_the_rows_that_is_moved_once_more() -> None:
    c = started(Moving("a", ["1", "2", "3", "4", "5"]), Scripted("b"), commit_patience_s=0.5)
    began = time.monotonic()
    assert c.exactly_once(4, stage).how == "committed"
    assert time.monotonic() - began > 1.5


def test_to_do_the_same_again_and_again_is_no_progress() -> None:
    with pytest.raises(CommitStalled, match="could not be committed to a: The time is over") as caught:
        started(Moving("a", ["1"] * 99), Scripted("b"), commit_patience_s=0.5).exactly_once(4, stage)
    assert "or give it more time (commit_limits, commit_patience_s)" in caught.value.remedy


# Errors ---------------------------------------------------------------------------------------------------------------


def test_each_sink_is_told_with_its_own_cause() -> None:
    a = Scripted("a", [SinkUnavailable("The first store is away.")] * 99)
    b = Scripted("b", [SinkUnavailable("The second store is away.")] * 99)

    def with_c(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
        return {**stage(attempt, only, plan), "c": []}

    with pytest.raises(CommitStalled) as caught:
        started(a, b, Scripted("c")).exactly_once(4, with_c)
    assert str(caught.value).splitlines()[:2] == [
        "Batch 4 is decided but could not be committed to a: The first store is away; b: The second store is away.",
        "  the data now: batch 4 is decided; visible in: c; still to commit: a, b",
    ]
    assert len(a.calls) > 2


def test_the_error_of_a_sink_that_committed_in_the_end_is_not_told_of_another() -> None:
    a, b = Scripted("a", [SinkUnavailable("Away for a moment.")]), Scripted("b", [Outcome.RETRY] * 99)
    with pytest.raises(CommitStalled, match="could not be committed to b: the sink gave no reason"):
        started(a, b).exactly_once(4, stage)


@pytest.mark.parametrize("error", [TypeError("not a text"), KeyError("id"), AttributeError("None has no id")])
def test_an_error_of_a_program_is_not_tried_again_and_the_batch_stays_decided(error: Exception) -> None:
    a, b, store = Scripted("a", [error]), Scripted("b"), MemoryStore()
    with pytest.raises(CommitStalled) as caught:
        started(a, b, store=store).exactly_once(4, stage)
    assert a.calls == ["prepare 0", "commit 0"]
    assert type(error).__name__ in caught.value.what
    assert caught.value.data_now == "batch 4 is decided; visible in: b; still to commit: a"
    assert caught.value.remedy.startswith("This error does not mend itself: correct the sink")
    assert [type(r) for r in DecisionLog(store).journal(4)] == [Decided]


# What is told ---------------------------------------------------------------------------------------------------------


def test_who_waits_says_for_which_sink_of_which_batch_and_since_when(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Waiting] = []
    a = Hanging("a")
    c = started(a, Scripted("b"), commit_patience_s=60, tell_after_s=0.3)

    def tell(waiting: Waiting) -> None:
        told.append(waiting)
        if len(told) == 2:
            a.released.set()
        raise RuntimeError("whoever shows it has trouble of its own")

    c.tell = tell
    with let_go(a):
        assert c.exactly_once(4, stage).how == "committed"
    assert [(w.batch, w.sinks, w.visible) for w in told] == [(4, ("a",), ("b",))] * 2
    assert 0.3 <= told[0].seconds < told[1].seconds
    assert told[0].since == told[1].since
    words = [message for message in caplog.messages if "is decided and waits for" in message]
    assert len(words) == 2
    assert words[0].startswith(f"batch 4 is decided and waits for a since {told[0].since}, ")
    assert words[0].endswith("; visible in: b")


def test_what_is_quick_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    c = started(Scripted("a"), Scripted("b"))
    c.exactly_once(4, stage)
    assert caplog.messages == []


def test_it_is_told_again_after_twice_the_time_and_then_every_minute() -> None:
    rhythm = Rhythm(100.0)
    assert [s for s in range(300) if rhythm.is_due(100.0 + s)] == [5, 10, 20, 40, 80, 140, 200, 260]


# Stops ----------------------------------------------------------------------------------------------------------------


def stopped_while_it_waits(stop: Callable[[Coordinator], None]) -> CommitStalled:
    a, b = Hanging("a"), Scripted("b")
    c = started(a, b, commit_patience_s=600, tell_after_s=0.3)
    with let_go(a):
        batch = running(c)
        wait_until(lambda: a.given_s)
        began = time.monotonic()
        stop(c)
        with pytest.raises(CommitStalled) as caught:
            batch.result(SLACK_S * 2)
        assert time.monotonic() - began < SLACK_S
        return caught.value


TOLD = [
    "Batch 4 is decided and was stopped before it was committed to a: it gave no answer.",
    "  the data now: batch 4 is decided; visible in: b; still to commit: a",
]


def test_a_stop_ends_the_waiting_and_says_where_the_batch_is_visible_and_where_not() -> None:
    assert str(stopped_while_it_waits(Coordinator.abandon)).splitlines()[:2] == TOLD


def test_a_query_that_is_stopped_by_spark_ends_the_waiting_too() -> None:
    assert str(stopped_while_it_waits(lambda c: setattr(c, "is_stopped", lambda: True))).splitlines()[:2] == TOLD


def test_a_start_that_commits_forward_gives_up_when_it_is_stopped() -> None:
    store, sink = MemoryStore(), Memory("of-a-stopped-start", name="a")
    first = started(Scripted("a", [SinkUnavailable("Away.")] * 99), store=store)
    with pytest.raises(CommitStalled):
        first.exactly_once(0, stage)
    a = Hanging("a")
    given = Limits(commit_patience_s=600, tell_after_s=0.3)
    with let_go(a), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "participant", lambda *_: a)
        began = time.monotonic()
        with pytest.raises(CommitStalled) as caught:
            start_exactly_once(
                DecisionLog(store), plans(1), [sink], Identity(PIPELINE), limits=given, is_stopped=lambda: True
            )
        assert time.monotonic() - began < SLACK_S
    assert caught.value.what == "Batch 0 is decided and was stopped before it was committed to a: it gave no answer."


def test_what_is_open_can_be_asked_for_while_the_batch_waits() -> None:
    a, b = Hanging("a"), Scripted("b")
    c = started(a, b, commit_patience_s=600)
    assert c.undone() is None
    with let_go(a):
        batch = running(c)
        wait_until(lambda: a.given_s and "visible in: b" in str(c.undone()))
        undone = c.undone()
        assert isinstance(undone, CommitStalled)
        assert str(undone).splitlines()[1] == TOLD[1]
    assert batch.result(SLACK_S).how == "committed"
    assert c.undone() is None


def test_a_stop_while_the_log_writes_the_decision_says_that_nobody_knows() -> None:
    written = threading.Event()

    class Slow(MemoryStore):
        def create(self, path: str, content: bytes) -> bool:
            if path.startswith("decisions/"):
                written.wait(SLACK_S)
            return super().create(path, content)

    c = started(Scripted("a"), Scripted("b"), store=Slow())
    batch = running(c)
    try:
        wait_until(lambda: isinstance(c.undone(), DecisionUnknown))
    finally:
        written.set()
    assert batch.result(SLACK_S).how == "committed"


def test_a_sink_whose_close_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(phases_module, "CLOSE_S_MAX", 0.2)
    a = Hanging("a", close_hangs=True)
    c = started(a)
    with let_go(a):
        began = time.monotonic()
        c.close()
        assert time.monotonic() - began < SLACK_S
    assert ["did not let go of its connections" in message for message in caplog.messages] == [True]


def test_an_error_of_what_has_a_limit_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert finished(lambda: None, SLACK_S, "semel-test")
    with pytest.raises(ValueError, match="no"):
        finished(fail, SLACK_S, "semel-test")


EXITS = """
import threading
from tests.runtime.test_commits import Hanging, started, stage
from semel.errors import CommitStalled
c = started(Hanging("a", close_hangs=True), commit_patience_s=0.1)
try:
    c.exactly_once(4, stage)
except CommitStalled as error:
    print(error.what, flush=True)
c.close()
"""


def test_a_process_ends_though_a_commit_hangs_in_it() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        "Batch 4 is decided but could not be committed to a: it gave no answer.\n",
    ), done.stderr
