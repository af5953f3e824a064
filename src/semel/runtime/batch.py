"""One batch, from the rows to the commit. No Spark in here: the simulation runs this very file.

The coordinator asks the protocol what to do in the state it is in, does it, and reports what happened. Every rule is in
`semel.protocol`; this file knows only how.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeVar

from semel.deadline import within
from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.errors import (
    BatchFailed,
    CheckpointError,
    CheckpointUnusable,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    InDoubt,
    QueryStopped,
    SemelError,
    SinkUnavailable,
)
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch
from semel.protocol.events import (
    CommitAnswered,
    Committable,
    Decided,
    DecisionRecorded,
    DecisionRefused,
    DecisionUnanswered,
    Event,
    Outcome,
    Prepared,
    PrepareFailed,
    Started,
    Superseded,
)
from semel.protocol.invariants import (
    decision_carries_its_plan,
    decision_covers_every_sink,
    decision_names_one_attempt,
    decision_takes_the_next_slot,
    require,
)
from semel.protocol.order import order_to_commit
from semel.protocol.plans import Plan
from semel.protocol.recovery import CommitForward, Facts, Run, StandDown, Unclear, decided_plan, resolve_batch
from semel.protocol.states import ACTIONS, FINAL, Action, State
from semel.protocol.step import Batch, ProtocolError, decided, step
from semel.runtime.command import start_again
from semel.runtime.commits import LOOK_EVERY_S, TELL_AFTER_S, Committers, Rhythm, Waiting, finished
from semel.runtime.mend import choose_parts, replace_gone
from semel.runtime.plans import Plans
from semel.runtime.restore import StrangeMarks, restored, settle_plan
from semel.runtime.work import Work, batch_failed, cause_of, may_mend_itself, mended_by, stalled
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

#: By these words a query is known that only has to be started again.
PLAN_OVERWRITTEN = "Another driver has written it meanwhile"

_LOG = logging.getLogger("semel")
T = TypeVar("T")

#: The sinks whose rows are wanted; None means all.
Only = Collection[str] | None


class Stage(Protocol):
    """Runs the batch's plan once and returns what its tasks staged, by sink. `plan` is its digest, for markers."""

    def __call__(self, attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]: ...


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
    ms: Mapping[str, float] = field(default_factory=dict)
    lag: Lag | None = None
    warning: str = ""


@dataclass
class Coordinator:
    """One run of one pipeline: the log, the plans, the participants, and the incarnation that it claimed.

    Below exactly-once there are no plans, and at-least-once there is no log.
    """

    context: Context
    participants: Mapping[str, Participant]
    log: DecisionLog | None = None
    plans: Plans | None = None
    limits: Limits = Limits()
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    #: What the sinks show of a batch that its decision does not name; see `restore.settle_plan`.
    strange_marks: StrangeMarks = lambda _batch, _journal: ""
    #: The files of the plan as Spark has them in memory, path -> digest, where that is known: it read them once, when
    #: the query began, and another start may have put them back since.
    in_hand: Callable[[], Mapping[str, str]] = dict
    #: A store was away since the last tidying: it may hold what a lost try left.
    had_trouble: bool = False
    #: Hears of a decided batch that waits for a sink.
    tell: Callable[[Waiting], None] = lambda _: None
    #: Whether the query is being stopped, asked while a commit takes long.
    is_stopped: Callable[[], bool] = lambda: False
    _tidy_not_before: float = float("-inf")
    _under_way: Work | None = None
    _abandoned: threading.Event = field(default_factory=threading.Event)

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

    def undone(self) -> SemelError | None:
        """What must be said of the batch at hand if this process ends now: it is decided and not visible everywhere."""
        work = self._under_way
        if work is None:
            return None
        if work.is_deciding:
            return DecisionUnknown(f"Batch {work.id} was stopped while its decision was being written.")
        return self._stalled(work, is_stopped=True) if work.open_now else None

    def _stalled(self, work: Work, *, is_stopped: bool) -> CommitStalled:
        return stalled(work, f"the decision log {self._log.store.describe()}", is_stopped=is_stopped)

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

    # Exactly once -----------------------------------------------------------------------------------------------------

    def exactly_once(self, batch: int, stage: Stage) -> Report:
        """Run, decide and commit a batch; or commit forward one that is found decided."""
        failpoint("batch.began")
        work = self.open_work(batch)
        forwarded = work.state is not State.OPEN
        if forwarded:
            self._require_decided_plan(work)
        else:
            work.plan = self._plan_in_hand(batch)
        staged = self.drive(work, stage)
        failpoint("batch.committed")
        rows = sum(c.rows for c in work.committables.values())
        how = "forwarded" if forwarded else "committed"
        return Report(batch, how, rows, work.batch.attempt - 1, staged, work.ms)

    def open_work(self, batch: int) -> Work:
        """Read the journal, then look for a newer claim, in this order, and ask the protocol what follows."""
        log = self._log
        journal = log.journal(batch)
        newest = self.context.incarnation + log.superseded(self.context.incarnation)
        resolution = resolve_batch(Facts(journal, self.context.incarnation, newest))
        if isinstance(resolution, Run):
            return Work(batch, Batch(resolution.attempt), journal)
        if isinstance(resolution, CommitForward):
            known = {c.key: c for c in resolution.committables}
            self._require_known_sinks(known.values(), batch)
            work = Work(batch, decided(resolution.attempt, resolution.committables), journal)
            work.take_on(known.values())
            work.plan = decided_plan(journal)
            return work
        if isinstance(resolution, StandDown):
            raise self._fenced(batch)
        if isinstance(resolution, Unclear):
            raise CheckpointError(
                f"Batch {batch} was begun under at-most-once, so nobody can say whether it was written.",
                data_now="unchanged by this start; the batch is visible in full, in part, or not at all",
                remedy="Start once more with guarantee='at-most-once', which leaves the batch as it is, then switch.",
            )
        raise ProtocolError(f"{resolution} cannot come of a batch that Spark asks for")

    def make_durable(self, batch: int) -> None:
        """Bring to disk what Spark has written of a batch, its state included. A weaker guarantee rests on none."""
        if self.plans is not None:
            self.plans.make_durable(batch)

    def make_state_durable(self, batch: int) -> None:
        """Of a decided batch that was computed once more: its tasks wrote the state anew, over what was synced."""
        try:
            self.make_durable(batch)
        except OSError as error:
            raise CheckpointUnusable(
                f"Batch {batch} is decided, and the state that its tasks wrote cannot be made durable: {error}.",
                data_now="the batch is visible in every sink; Spark does not take it for done",
                remedy="Mend the disk of the checkpoint, then start again: the batch is not written a second time.",
            ) from error

    def _plan_in_hand(self, batch: int) -> Plan:
        """What the decision will say that the rows follow from: it must be what Spark has handed over the rows of.

        A driver that is being fenced may write the file at the same time: on local disks Spark looks and then renames.
        """
        plan, in_hand = self._plans.read(batch), self.in_hand()
        other = [file.path for file in plan.files if in_hand.get(file.path, file.digest) != file.digest]
        if other:
            raise BatchFailed(
                f"Batch {batch} was not begun: {', '.join(other)} says something else than Spark has planned. "
                f"{PLAN_OVERWRITTEN}.",
                data_now="nothing of the batch was written",
                remedy=f"S{start_again()[1:]}: Spark then reads what is there.",
            )
        return plan

    def _require_decided_plan(self, work: Work) -> None:
        """Spark has handed over the rows of a decided batch: they must be those that it was decided for."""
        told = settle_plan(
            self._plans, work.id, work.journal, work.id, self.strange_marks, is_under_way=True, in_hand=self.in_hand()
        )
        if told is not None:
            raise restored(work.id, told)

    def drive(self, work: Work, stage: Stage | None) -> bool:
        """Act until the protocol says that this driver is done with the batch. Returns whether rows were staged.

        Without a stage there are no rows to write: what is gone is left for when Spark brings them.
        """
        staged = False
        self._under_way = work
        while work.state not in FINAL:
            action = ACTIONS[work.state]
            if action in (Action.STAGE, Action.RESTAGE):
                if stage is None:
                    return False
                staged = True
            began = time.perf_counter()
            for event in self._perform(action, work, stage):
                work.batch = step(work.batch, event)
            work.ms[action.name.lower()] = (time.perf_counter() - began) * 1000
        self._conclude(work)
        return staged

    def _perform(self, action: Action, work: Work, stage: Stage | None) -> Iterable[Event]:
        if stage is not None and action is Action.STAGE:
            yield self._stage(work, stage)
        elif stage is not None and action is Action.RESTAGE:
            began = self.clock()
            with self._telling(work):
                event = self._restage(work, stage)
            # To write rows again is no waiting for a sink, and takes as long as it takes.
            work.give_up_at += self.clock() - began
            yield event
        elif action is Action.DECIDE:
            yield self._decide(work)
        elif action is Action.COMMIT:
            yield from self._commit(work)
        else:
            raise ProtocolError(f"nothing to perform for {action}")

    def _stage(self, work: Work, stage: Stage) -> Event:
        attempt = self.attempt(work.id, work.batch.attempt)
        return self._propose(work, lambda: self._prepare(attempt, self._staged(attempt, stage, work.digest)))

    def _restage(self, work: Work, stage: Stage) -> Event:
        """Run the plan again for every sink of which something is gone, and prepare what brings it back."""
        attempt = self.attempt(work.id, work.batch.attempt)
        work.mends += 1
        if work.mends > self.limits.mends:
            work.error = BatchFailed(
                f"Batch {work.id} was written again {self.limits.mends} times and vanished each time."
            )
            return PrepareFailed()
        event = self._propose(work, lambda: self._mend(work, attempt, stage(attempt, work.broken_sinks, work.digest)))
        if isinstance(event, PrepareFailed):
            # The batch stays decided; what was staged now is dropped.
            self.roll_back(attempt)
            if not work.unmendable and (self._abandoned.is_set() or self.is_stopped()):
                # What Spark says of a job that was cancelled helps nobody.
                work.was_stopped, work.error = True, QueryStopped("its rows were gone and were being written again")
        return event

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

    def _propose(self, work: Work, prepare: Callable[[], tuple[Committable, ...]]) -> Event:
        """Stage and prepare. Whatever fails, the error is kept for whoever rolls the batch back."""
        attempt = self.attempt(work.id, work.batch.attempt)
        try:
            work.proposal = tuple(replace(c, plan=work.digest) for c in self._patiently(attempt, prepare))
            # Tasks that run again for a mend write the state of the batch anew, over what was synced.
            self.make_durable(work.id)
        except Exception as error:  # noqa: BLE001 - see above
            work.error = error
            return PrepareFailed()
        failpoint("batch.prepared")
        return Prepared(frozenset(c.key for c in work.proposal))

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

    def _staged(self, attempt: Attempt, stage: Stage, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
        for participant in self.participants.values():
            participant.expect(attempt)
        return stage(attempt, None, plan)

    def _prepare(self, attempt: Attempt, parts: Mapping[str, Sequence[StagedPart]]) -> tuple[Committable, ...]:
        failpoint("batch.staged")
        prepared: list[Committable] = []
        for sink, participant in self.participants.items():
            prepared += participant.prepare(attempt, parts.get(sink, ()))
        return tuple(prepared)

    def _mend(self, work: Work, attempt: Attempt, parts: Mapping[str, Sequence[StagedPart]]) -> tuple[Committable, ...]:
        """What is gone is chosen for every sink before anything of it is prepared."""
        failpoint("batch.staged")
        try:
            mends = {s: choose_parts(work.of(s), work.batch.gone, parts.get(s, ())) for s in work.broken_sinks}
        except BatchFailed:
            work.unmendable = True
            raise
        prepared: list[Committable] = []
        for sink, mend in mends.items():
            participant = self.participants[sink]
            if mend.spare:
                # Their rows are visible already, and an open transaction would hold up readers.
                participant.abort([part.branch for part in mend.spare])
            prepared += replace_gone(mend, work.of(sink), participant.prepare(attempt, mend.wanted))
        return tuple(prepared)

    def _decide(self, work: Work) -> Event:
        mends = work.state is State.MENDED
        attempt = self.attempt(work.id, work.batch.attempt)
        decision = Decided(attempt, work.proposal, mends, None if mends else work.plan)
        require(decision_takes_the_next_slot(decision, work.journal))
        require(decision_names_one_attempt(decision))
        if not decision.mends:
            require(decision_covers_every_sink(decision, self.participants))
            require(decision_carries_its_plan(decision))
        work.is_deciding = True
        try:
            recorded = self._log.append(decision)
        except (StoreUnanswered, OSError) as error:
            work.error = error
            return DecisionUnanswered()
        if recorded:
            work.take_on(decision.committables)
        work.is_deciding = False
        if not recorded:
            return DecisionRefused()
        failpoint("batch.decided")
        work.journal = (*work.journal, decision)
        return DecisionRecorded()

    def _commit(self, work: Work) -> Iterable[Event]:
        pending = order_to_commit((work.committables[key] for key in work.batch.pending), list(self.participants))
        self._begin_to_commit(work)
        superseded = self._is_superseded(work)
        if superseded:
            yield Superseded()
            return
        unasked = superseded is None
        answers = [Outcome.RETRY] * len(pending) if unasked else self._commit_all(pending, work)
        for committable, outcome in zip(pending, answers, strict=True):
            yield CommitAnswered(committable.key, outcome)

    def _begin_to_commit(self, work: Work) -> None:
        """From now on the seconds of the batch run: of all its commits together, those after a mend included."""
        if work.rhythm is None:
            work.rhythm = Rhythm(self.clock(), self.limits.tell_after_s)
            work.give_up_at = self.clock() + self.limits.commit_patience_s

    def _is_superseded(self, work: Work) -> bool | None:
        """Whether a newer incarnation runs this pipeline; None when the log has not said so before the time was over.

        The batch is decided: a disk or a name node that is in trouble for a moment must not leave it half visible.
        """
        pause_s = self.limits.commit_pause_s
        while True:
            try:
                superseded = self._log.superseded(self.context.incarnation)
            except (StoreUnanswered, OSError) as error:
                work.log_error = error
            else:
                work.log_error = None
                return superseded
            lasts = not may_mend_itself(work.log_error)
            if lasts or not self._waits_on(work):
                return None
            if pause_s > work.give_up_at - self.clock():
                work.ran_out = True
                return None
            _LOG.warning("batch %s is decided and not committed yet: %s.", work.id, work.said_last)
            self.sleep(pause_s)
            pause_s = min(pause_s * 2, self.limits.commit_pause_s_max)

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
        """Whether to wait for what is still open. Who waits says so, and looks whether anybody wants it to."""
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

    def _commit_one(self, committable: Committable, work: Work) -> Outcome:
        """Ask until the sink gives an answer that is not "retry", or the time of the batch is over."""
        pause_s = self.limits.commit_pause_s
        # What still stands in line behind a call that hangs is not asked when the batch has been given up.
        while not work.is_given_up:
            try:
                with within(work.give_up_at - self.clock(), self._grant(committable, work)):
                    outcome = self.participants[committable.sink].commit(committable)
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

    def _conclude(self, work: Work) -> None:
        """Do what the table says of the final state: return, or raise what the user must know."""
        action = ACTIONS[work.state]
        if action is Action.RETURN:
            return
        if action in (Action.ROLL_BACK, Action.WITHDRAW):
            self.roll_back(self.attempt(work.id, work.batch.attempt))
        if action is Action.ROLL_BACK:
            raise batch_failed(work) from work.error
        if action in (Action.WITHDRAW, Action.STAND_DOWN):
            raise self._fenced(work.id)
        if work.state is State.UNKNOWN:
            raise DecisionUnknown(
                f"The decision log {self._log.store.describe()} did not say whether it took the decision "
                f"of batch {work.id}: {cause_of(work.error)}."
            ) from work.error
        if work.state is State.STALLED:
            if work.unmendable:
                raise batch_failed(work)
            raise self._stalled(work, is_stopped=work.was_stopped) from work.log_error or work.error_of_open
        doubt = ", ".join(work.sinks_of(work.batch.having(Outcome.IN_DOUBT)))
        raise InDoubt(f"Nobody can say whether batch {work.id} was committed to {doubt}.", data_now=work.data_now)

    def roll_back(self, attempt: Attempt) -> None:
        """Abort all branches of an attempt, those of tasks that never reported included. Best effort: starts sweep.

        The cause is being raised already, or told.
        """
        for participant in self.participants.values():
            if self._drop(participant, lambda branch: branch.attempt == attempt):
                self.had_trouble = True

    def _require_known_sinks(self, committables: Iterable[Committable], batch: int) -> None:
        unknown = sorted({c.sink for c in committables} - set(self.participants))
        if unknown:
            raise CheckpointError(
                f"Batch {batch} is decided and has yet to be committed to {', '.join(unknown)}, "
                "which this pipeline does not have any more.",
                data_now=f"batch {batch} is decided; it may be visible in some of its sinks",
                remedy="Start once with the sinks that the batch was decided with, then change them.",
            )

    def _fenced(self, batch: int) -> Fenced:
        who = "a newer incarnation claimed this pipeline"
        with suppress(StoreUnanswered, OSError):  # that there is one is known, and who it is only helps
            newest = self._log.newest_claim()
            who = f"incarnation {newest} claimed this pipeline ({self._log.holder(newest)})"
        return Fenced(f"Incarnation {self.context.incarnation} stopped at batch {batch}: {who}.")

    @property
    def _plans(self) -> Plans:
        if self.plans is None:
            raise ProtocolError("this guarantee has no plans")
        return self.plans

    @property
    def _log(self) -> DecisionLog:
        if self.log is None:
            raise ProtocolError("this guarantee has no decision log")
        return self.log

    # The weaker guarantees --------------------------------------------------------------------------------------------

    def at_least_once(self, batch: int, stage: Stage) -> Report:
        """Write and commit. No log, no marker: a batch that runs again is written again."""
        failpoint("batch.began")
        return self._write_through(batch, stage, "the batch runs again")

    def at_most_once(self, batch: int, stage: Stage) -> Report:
        """Record that the batch began, then write it. A batch that began once is not written again."""
        failpoint("batch.began")
        if not self._log.append(Started(self.attempt(batch, 0))):
            return Report(batch, "skipped", staged=False)
        return self._write_through(batch, stage, "the pipeline goes on with the next batch")

    def _write_through(self, batch: int, stage: Stage, then: str) -> Report:
        attempt = self.attempt(batch, 0)
        work = Work(batch, Batch(0), ())
        try:
            prepared = self._patiently(attempt, lambda: self._prepare(attempt, self._staged(attempt, stage)))
            failpoint("batch.prepared")
        except Exception as error:
            work.error = error
            self.roll_back(attempt)
            raise batch_failed(work) from error
        self._begin_to_commit(work)
        work.take_on(prepared)
        for committable in prepared:
            (outcome,) = self._commit_all([committable], work)
            if outcome not in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED):
                why = work.errors.get(committable.key)
                raise CommitStalled(
                    f"Batch {batch} could not be committed to {committable.sink}: {work.why_open(committable.sink)}.",
                    data_now=f"some sinks may show batch {batch} already",
                    remedy=f"{mended_by(work, is_stopped=work.was_stopped)}{start_again()}: {then}.",
                ) from why
        failpoint("batch.committed")
        return Report(batch, "committed", sum(c.rows for c in prepared))
