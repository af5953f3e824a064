"""What every guarantee does with its sinks: stage and prepare, commit within its seconds, roll back, tidy, let go."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from semel.deadline import within
from semel.decisions.log import DecisionLog
from semel.errors import CheckpointUnusable, InDoubt, SemelError, SinkUnavailable
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch
from semel.protocol.events import Committable, Outcome
from semel.protocol.step import ProtocolError
from semel.runtime.commits import LOOK_EVERY_S, TELL_AFTER_S, Committers, Rhythm, Waiting, finished
from semel.runtime.hands import Written
from semel.runtime.plans import Plans
from semel.runtime.work import Work, cause_of, may_mend_itself
from semel.sinks.base import Context, Participant, StagedPart
from semel.sources.lag import Lag

#: Journals of this many checkpointed batches are kept for audits, as many as Spark keeps offsets of.
BATCHES_KEPT = 100
TIDY_EVERY_BATCHES = 100
#: How much longer than its seconds a commit is waited for, so that a call which was given them can say why it failed.
LAST_WORDS_S = 1.0
CLOSE_S_MAX = 5.0
#: What is dropped only to be tidy holds up no batch for longer, in each sink: the next tidying or start drops it.
TIDY_S_MAX = 30.0
#: After a tidying that was not complete: the pause, and how much longer than that tidying it is at the least.
TIDY_AGAIN_S = 10.0
TIDY_SHARE = 10

_LOG = logging.getLogger("semel")
T = TypeVar("T")

#: The sinks whose rows are wanted; None means all.
Only = Collection[str] | None
#: What tasks staged, by sink.
Parts = Mapping[str, Sequence[StagedPart]]


class Stage(Protocol):
    """Runs the batch's plan once and returns what its tasks staged, by sink. `plan` is its digest, for markers.

    `again` says how the batch was written when it was decided; None the first time.
    """

    def __call__(self, attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts: ...


@dataclass(frozen=True)
class Limits:
    """How often and how long a batch tries before the pipeline stops. All of it is the caller's.

    By default a store may be away for half a minute before the decision, and for a minute after it: a pipeline that
    stops then leaves a batch visible in some stores and not in others. `commit_patience_s` is all that the commit of a
    decided batch may take, tries and pauses included, whatever a store does. It begins again with each part of the
    rows that a commit has to move once more, because the driver that had moved them is dead.
    """

    stage_patience_s: float = 40.0
    stage_pause_s: float = 0.25
    stage_pause_s_max: float = 5.0
    commit_patience_s: float = 60.0
    commit_pause_s: float = 0.25
    commit_pause_s_max: float = 5.0
    mends: int = 3
    #: A commit that takes longer is told, with what it waits for.
    tell_after_s: float = TELL_AFTER_S


@dataclass(frozen=True)
class Report:
    """How a batch ended: "committed", "forwarded" (found decided, not run again) or "skipped" (at-most-once)."""

    batch: int
    how: str
    rows: int = 0
    attempt: int = 0
    staged: bool = True
    #: Who wrote the rows: the driver, or how many tasks; see `runtime.hands`.
    hands: str = ""
    ms: Mapping[str, float] = field(default_factory=dict)
    lag: Lag | None = None
    warning: str = ""


@dataclass
class Phases(ABC):
    """One run of one pipeline: the log, the plans, the participants, and the incarnation that it claimed.

    Below exactly-once no plan is kept, and at-least-once has no log.
    """

    context: Context
    participants: Mapping[str, Participant]
    log: DecisionLog | None = None
    plans: Plans | None = None
    limits: Limits = Limits()
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    #: A store was away since the last tidying: it may hold what a lost try left.
    had_trouble: bool = False
    #: Hears of a decided batch that waits for a sink.
    tell: Callable[[Waiting], None] = lambda _: None
    #: Whether the query is being stopped, asked while a commit takes long.
    is_stopped: Callable[[], bool] = lambda: False
    _tidy_not_before: float = float("-inf")
    _abandoned: threading.Event = field(default_factory=threading.Event)

    @abstractmethod
    def run(self, batch: int, stage: Stage) -> Report:
        """A batch that Spark asks for, as the guarantee says."""

    def undone(self) -> SemelError | None:
        """What must be said of the batch at hand if this process ends now."""
        return None

    def attempt(self, batch: int, number: int) -> Attempt:
        return Attempt(self.context.pipeline, batch, number, self.context.incarnation)

    @cached_property
    def _committers(self) -> Committers:
        return Committers()

    def close(self) -> None:
        """Let go of the sinks. One that does not come back is left to the end of the process."""
        self.abandon()
        if "_committers" in self.__dict__:
            self._committers.shutdown()
        if not finished(self._close_participants, CLOSE_S_MAX, "semel-close"):
            _LOG.warning(
                "a sink did not let go of its connections within %.0f s; they end with this process", CLOSE_S_MAX
            )

    def _close_participants(self) -> None:
        for participant in self.participants.values():
            participant.close()

    def abandon(self) -> None:
        """Wait for no commit any more. What is decided stays decided, and the next start completes it."""
        self._abandoned.set()

    def tidy(self, batch: int) -> None:
        """Once in a while forget old journals; then, and after trouble, drop what is left up to this committed batch.

        Lost tries of tasks and of the batch leave something behind. A store that is away is tidied another time, and
        the longer it took to find it away, the later.
        """
        is_due = batch % TIDY_EVERY_BATCHES == TIDY_EVERY_BATCHES - 1
        if is_due and self.log is not None:
            self.log.prune(before_batch=batch - BATCHES_KEPT)
        began = self.clock()
        if not (is_due or (self.had_trouble and began >= self._tidy_not_before)):
            return
        undone = [why for p in self.participants.values() if (why := self._drop(p, lambda b: b.attempt.batch <= batch))]
        self.had_trouble = bool(undone)
        if undone:
            now = self.clock()
            self._tidy_not_before = now + max(TIDY_AGAIN_S, TIDY_SHARE * (now - began))
            why = " ".join(undone)
            _LOG.warning("batch %s is committed; what lost tries of it left is not dropped yet: %s", batch, why)

    def _drop(self, participant: Participant, is_lost: Callable[[Branch], bool]) -> str:
        """Abort what is lost and in sight. Returns what kept it from being all; a start finds the rest."""
        try:
            with within(TIDY_S_MAX):
                sight = participant.in_sight()
                participant.abort(branch for branch in sight.branches if is_lost(branch))
        except Exception as error:  # noqa: BLE001 - nothing of a batch depends on it
            return f"{cause_of(error)}."
        return f"{sight.missing}." if sight.missing else ""

    def roll_back(self, attempt: Attempt) -> None:
        """Abort all branches of an attempt, those of tasks that never reported included. Best effort: starts sweep.

        The cause is being raised already, or told.
        """
        for participant in self.participants.values():
            if self._drop(participant, lambda branch: branch.attempt == attempt):
                self.had_trouble = True

    def make_durable(self, batch: int) -> None:
        """Bring to disk what Spark has written of a batch, its state included. A weaker guarantee rests on none."""
        if self.plans is not None:
            self.plans.make_durable(batch)

    def make_state_durable(self, batch: int) -> None:
        """A decided batch was computed once more: its tasks wrote the state anew, over what was synced."""
        try:
            self.make_durable(batch)
        except OSError as error:
            raise CheckpointUnusable(
                f"Batch {batch} is decided, and the state that its tasks wrote cannot be made durable: {error}.",
                data_now="the batch is visible in every sink; Spark does not take it for done",
                remedy="Mend the disk of the checkpoint, then start again: the batch is not written a second time.",
            ) from error

    def _patiently(self, attempt: Attempt, prepare: Callable[[], T]) -> T:
        """Try again while a store is away. What the last try left in it would be in the way, so it goes first."""
        pause_s, give_up_at = self.limits.stage_pause_s, float("inf")
        while True:
            try:
                return prepare()
            except SinkUnavailable as error:
                self.had_trouble = True
                give_up_at = min(give_up_at, self.clock() + self.limits.stage_patience_s)
                pause_s = min(pause_s, give_up_at - self.clock())
                if pause_s <= 0 or self._abandoned.is_set() or self.is_stopped():
                    raise
                _LOG.warning("%s: %s Trying again in %.2f s.", attempt, error.what, pause_s)
            self.sleep(pause_s)
            pause_s = min(pause_s * 2, self.limits.stage_pause_s_max)
            self.roll_back(attempt)

    def _staged(self, attempt: Attempt, stage: Stage, plan: str = "") -> Parts:
        for participant in self.participants.values():
            participant.expect(attempt)
        return stage(attempt, None, plan)

    def _prepare(self, attempt: Attempt, parts: Parts) -> tuple[Committable, ...]:
        failpoint("batch.staged")
        prepared: list[Committable] = []
        for sink, participant in self.participants.items():
            prepared += participant.prepare(attempt, parts.get(sink, ()))
        return tuple(prepared)

    def _begin_to_commit(self, work: Work) -> None:
        """From now on the seconds of the batch run: of all its commits together, those after a mend included."""
        if work.rhythm is None:
            work.rhythm = Rhythm(self.clock(), self.limits.tell_after_s)
            work.give_up_at = self.clock() + self.limits.commit_patience_s

    def _commit_all(self, pending: Sequence[Committable], work: Work) -> list[Outcome]:
        """The answers of the sinks. What gave none before the time was over is to be asked again at the next start."""
        answers = self._committers.answers(
            lambda committable: self._commit_one(committable, work),
            pending,
            lambda: self._waits_on(work),
            lambda committable: committable.sink,
        )
        for committable, outcome in zip(pending, answers, strict=True):
            if outcome is None:
                self.had_trouble = work.is_given_up = work.ran_out = True
                work.unanswered.add(committable.key)
        return [Outcome.RETRY if outcome is None else outcome for outcome in answers]

    def _waits_on(self, work: Work) -> bool:
        """Whether to wait for what is still open. While we wait, we say so, and look whether we still should."""
        now, rhythm = self.clock(), work.rhythm
        is_told = rhythm is not None and now - rhythm.began > self.limits.tell_after_s
        if self._abandoned.is_set() or (is_told and self.is_stopped()):
            work.was_stopped = True
            self.abandon()
            return False
        self._tell_if_due(work)
        return now < work.give_up_at + LAST_WORDS_S

    def _tell_if_due(self, work: Work) -> None:
        now, rhythm = self.clock(), work.rhythm
        if rhythm is None or not rhythm.is_due(now):
            return
        waited_s, patience_s = now - rhythm.began, work.give_up_at - rhythm.began
        sinks, visible = tuple(work.open_now), tuple(work.visible_sinks)
        waiting = Waiting(work.id, sinks, visible, rhythm.since, waited_s, patience_s, work.said_last)
        _LOG.warning("%s", waiting)
        with suppress(Exception):  # whoever shows it must not end a batch that is decided
            self.tell(waiting)

    @contextmanager
    def _telling(self, work: Work) -> Iterator[None]:
        """What is done in here holds this thread, and may take long: another one says that the batch waits."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(LOOK_EVERY_S):
                self._tell_if_due(work)

        thread = threading.Thread(target=tell, name="semel-tell", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _commit_one(self, committable: Committable, work: Work) -> Outcome:
        """Ask until the sink gives an answer that is not "retry", or the time of the batch is over."""
        pause_s = self.limits.commit_pause_s
        # What still stands in line behind a call that hangs is not asked when the batch has been given up.
        while not work.is_given_up:
            try:
                with within(work.give_up_at - self.clock(), self._grant(committable, work)):
                    outcome = self.participants[committable.sink].commit(committable)
            except InDoubt as error:
                work.errors[committable.key] = error
                outcome = Outcome.IN_DOUBT
            except Exception as error:  # noqa: BLE001 - the batch is decided, and this sink has no answer
                work.errors[committable.key] = error
                outcome = Outcome.RETRY
                if not may_mend_itself(error):
                    self.had_trouble = True
                    return outcome
                # An error is not an answer: ask again, the marker tells.
            if outcome is not Outcome.RETRY:
                work.outcomes[committable.key] = outcome
                return outcome
            self.had_trouble = True
            if pause_s > work.give_up_at - self.clock():
                work.ran_out = True
                return Outcome.RETRY
            why = cause_of(work.errors.get(committable.key))
            _LOG.warning("%s: %s is decided and not committed yet: %s.", committable.attempt, committable.key, why)
            self.sleep(pause_s)
            if self._abandoned.is_set():
                return Outcome.RETRY
            pause_s = min(pause_s * 2, self.limits.commit_pause_s_max)
        return Outcome.RETRY

    def _grant(self, committable: Committable, work: Work) -> Callable[[object], float | None]:
        """A commit may have to move all rows once more, when the driver that had moved them is dead.

        That is work of any length, of which a start that gives up after a minute would never see the end. So the
        seconds begin again with each part of it: once for each, so that they come to an end.
        """

        def grant(part: object) -> float | None:
            if work.is_given_up or (committable.key, part) in work.progress:
                return None
            work.progress.add((committable.key, part))
            seconds = self.limits.commit_patience_s
            work.give_up_at = max(work.give_up_at, self.clock() + seconds)
            return seconds

        return grant

    @property
    def _log(self) -> DecisionLog:
        if self.log is None:
            raise ProtocolError("this guarantee has no decision log")
        return self.log
