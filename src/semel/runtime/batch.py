"""One batch, from the rows to the commit. No Spark in here: the simulation runs this very file.

The coordinator asks the protocol what to do in the state it is in, does it, and reports what happened. Every rule is in
`semel.protocol`; this file knows only how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.errors import (
    BatchFailed,
    CheckpointError,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    InDoubt,
    SemelError,
    SinkUnavailable,
)
from semel.failpoints import failpoint
from semel.ids import Attempt
from semel.protocol.events import (
    CommitAnswered,
    Committable,
    Decided,
    DecisionRecorded,
    DecisionRefused,
    DecisionUnanswered,
    Event,
    Journal,
    Outcome,
    Prepared,
    PrepareFailed,
    Started,
    Superseded,
)
from semel.protocol.invariants import (
    decision_covers_every_sink,
    decision_names_one_attempt,
    decision_takes_the_next_slot,
    require,
)
from semel.protocol.recovery import CommitForward, Facts, Run, StandDown, Unclear, resolve_batch
from semel.protocol.states import ACTIONS, FINAL, Action, State
from semel.protocol.step import Batch, ProtocolError, decided, step
from semel.runtime.command import start_again
from semel.runtime.mend import choose_parts, replace_gone
from semel.sinks.base import Context, Participant, StagedPart
from semel.sources.lag import Lag

#: Journals of this many checkpointed batches are kept for audits, as many as Spark keeps offsets of.
BATCHES_KEPT = 100
TIDY_EVERY_BATCHES = 100
COMMITS_AT_ONCE = 16

_LOG = logging.getLogger("semel")
T = TypeVar("T")

#: The sinks whose rows are wanted; None means all.
Only = Collection[str] | None


class Stage(Protocol):
    """Runs the batch's plan once and returns what its tasks staged, by sink."""

    def __call__(self, attempt: Attempt, only: Only = None) -> Mapping[str, Sequence[StagedPart]]: ...


@dataclass(frozen=True)
class Limits:
    """How often and how long a batch tries before the pipeline stops. All of it is the caller's.

    By default a store may be away for half a minute before the decision, and for a minute after it: a pipeline that
    stops then leaves a batch visible in some stores and not in others.
    """

    stage_patience_s: float = 40.0
    stage_pause_s: float = 0.25
    stage_pause_s_max: float = 5.0
    commit_tries: int = 16
    commit_pause_s: float = 0.25
    commit_pause_s_max: float = 5.0
    mends: int = 3


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
    """One run of one pipeline: the log, the participants, and the incarnation that it claimed."""

    context: Context
    participants: Mapping[str, Participant]
    log: DecisionLog | None = None
    limits: Limits = Limits()
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    #: A store was away since the last tidying: it may hold what a lost try left.
    had_trouble: bool = False
    #: Puts on the disk what a decision of a batch presupposes, before it is decided. Raises OSError when it cannot.
    make_durable: Callable[[int], None] = lambda batch: None  # noqa: ARG005
    #: The same for what Spark planned, before anything is staged.
    make_plan_durable: Callable[[int], None] = lambda batch: None  # noqa: ARG005

    def attempt(self, batch: int, number: int) -> Attempt:
        return Attempt(self.context.pipeline, batch, number, self.context.incarnation)

    @cached_property
    def _committers(self) -> ThreadPoolExecutor:
        """Threads are kept from batch to batch: to start some takes as long as to commit."""
        return ThreadPoolExecutor(COMMITS_AT_ONCE, "semel-commit")

    def close(self) -> None:
        if "_committers" in self.__dict__:
            self._committers.shutdown()
        for participant in self.participants.values():
            participant.close()

    def tidy(self, batch: int) -> None:
        """Once in a while forget old journals; then, and after trouble, drop what is left up to this committed batch.

        Lost tries of tasks and of the batch leave something behind. A store that is away is tidied another time.
        """
        is_due = batch % TIDY_EVERY_BATCHES == TIDY_EVERY_BATCHES - 1
        if is_due and self.log is not None:
            self.log.prune(before_batch=batch - BATCHES_KEPT)
        if not (is_due or self.had_trouble):
            return
        try:
            for participant in self.participants.values():
                participant.abort(b for b in participant.recover().branches if b.attempt.batch <= batch)
            self.had_trouble = False
        except SinkUnavailable as error:
            self.had_trouble = True
            _LOG.warning("batch %s is committed; what lost tries of it left is not dropped yet: %s", batch, error.what)

    # Exactly once -----------------------------------------------------------------------------------------------------

    def exactly_once(self, batch: int, stage: Stage) -> Report:
        """Run, decide and commit a batch; or commit forward one that is found decided."""
        failpoint("batch.began")
        work = self.open_work(batch)
        forwarded = work.state is not State.OPEN
        staged = self.drive(work, stage)
        failpoint("batch.committed")
        rows = sum(c.rows for c in work.committables.values())
        how = "forwarded" if forwarded else "committed"
        return Report(batch, how, rows, work.batch.attempt - 1, staged, work.ms)

    def open_work(self, batch: int) -> _Work:
        """Read the journal, then look for a newer claim, in this order, and ask the protocol what follows."""
        log = self._log
        journal = log.journal(batch)
        newest = self.context.incarnation + log.superseded(self.context.incarnation)
        resolution = resolve_batch(Facts(journal, False, self.context.incarnation, newest))
        if isinstance(resolution, Run):
            return _Work(batch, Batch(resolution.attempt), journal)
        if isinstance(resolution, CommitForward):
            known = {c.key: c for c in resolution.committables}
            self._require_known_sinks(known.values(), batch)
            return _Work(batch, decided(resolution.attempt, resolution.committables), journal, known)
        if isinstance(resolution, StandDown):
            raise self._fenced(batch)
        if isinstance(resolution, Unclear):
            raise CheckpointError(
                f"Batch {batch} was begun under at-most-once, so nobody can say whether it was written.",
                data_now="unchanged by this start; the batch is visible in full, in part, or not at all",
                remedy="Start once more with guarantee='at-most-once', which leaves the batch as it is, then switch.",
            )
        raise ProtocolError(f"{resolution} cannot come of a batch that Spark asks for")

    def drive(self, work: _Work, stage: Stage | None) -> bool:
        """Act until the protocol says that this driver is done with the batch. Returns whether rows were staged.

        Without a stage there are no rows to write: what is gone is left for when Spark brings them.
        """
        staged = False
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

    def _perform(self, action: Action, work: _Work, stage: Stage | None) -> Iterable[Event]:
        if stage is not None and action is Action.STAGE:
            yield self._stage(work, stage)
        elif stage is not None and action is Action.RESTAGE:
            yield self._restage(work, stage)
        elif action is Action.DECIDE:
            yield self._decide(work)
        elif action is Action.COMMIT:
            if self._log.superseded(self.context.incarnation):
                yield Superseded()
            else:
                yield from self._commit(work)
        else:
            raise ProtocolError(f"nothing to perform for {action}")

    def _stage(self, work: _Work, stage: Stage) -> Event:
        attempt = self.attempt(work.id, work.batch.attempt)
        return self._propose(work, lambda: self._prepare(attempt, self._staged(attempt, stage)))

    def _restage(self, work: _Work, stage: Stage) -> Event:
        """Run the plan again for every sink of which something is gone, and prepare what brings it back."""
        attempt = self.attempt(work.id, work.batch.attempt)
        work.mends += 1
        if work.mends > self.limits.mends:
            work.error = BatchFailed(
                f"Batch {work.id} was written again {self.limits.mends} times and vanished each time."
            )
            return PrepareFailed()
        event = self._propose(work, lambda: self._mend(work, attempt, stage(attempt, work.broken_sinks)))
        if isinstance(event, PrepareFailed):
            # The batch stays decided; what was staged now is dropped.
            self.roll_back(attempt)
        return event

    def _propose(self, work: _Work, prepare: Callable[[], tuple[Committable, ...]]) -> Event:
        """Stage and prepare. Whatever fails, the error is kept for whoever rolls the batch back."""
        attempt = self.attempt(work.id, work.batch.attempt)
        try:
            self.make_plan_durable(work.id)
            work.proposal = self._patiently(attempt, prepare)
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
                if pause_s <= 0:
                    raise
                _LOG.warning("%s: %s Trying again in %.2f s.", attempt, error.what, pause_s)
            self.sleep(pause_s)
            pause_s = min(pause_s * 2, self.limits.stage_pause_s_max)
            self.roll_back(attempt)

    def _staged(self, attempt: Attempt, stage: Stage) -> Mapping[str, Sequence[StagedPart]]:
        for participant in self.participants.values():
            participant.expect(attempt)
        return stage(attempt)

    def _prepare(self, attempt: Attempt, parts: Mapping[str, Sequence[StagedPart]]) -> tuple[Committable, ...]:
        failpoint("batch.staged")
        prepared: list[Committable] = []
        for sink, participant in self.participants.items():
            prepared += participant.prepare(attempt, parts.get(sink, ()))
        return tuple(prepared)

    def _mend(
        self, work: _Work, attempt: Attempt, parts: Mapping[str, Sequence[StagedPart]]
    ) -> tuple[Committable, ...]:
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

    def _decide(self, work: _Work) -> Event:
        decision = Decided(self.attempt(work.id, work.batch.attempt), work.proposal, mends=work.state is State.MENDED)
        require(decision_takes_the_next_slot(decision, work.journal))
        require(decision_names_one_attempt(decision))
        if not decision.mends:
            require(decision_covers_every_sink(decision, self.participants))
        try:
            recorded = self._log.append(decision)
        except (StoreUnanswered, OSError) as error:
            work.error = error
            return DecisionUnanswered()
        if not recorded:
            return DecisionRefused()
        failpoint("batch.decided")
        work.journal = (*work.journal, decision)
        work.committables |= {c.key: c for c in decision.committables}
        return DecisionRecorded()

    def _commit(self, work: _Work) -> Iterable[Event]:
        # Participants prepare in their order, and commit in the opposite one: what can expire is last, then first.
        place = {sink: -index for index, sink in enumerate(self.participants)}
        waiting = [work.committables[key] for key in work.batch.pending]
        pending = sorted(waiting, key=lambda c: (place[c.sink], c.key))
        if len(pending) == 1:
            outcomes = [self._commit_one(pending[0], work)]
        else:
            outcomes = list(self._committers.map(lambda c: self._commit_one(c, work), pending))
        for committable, outcome in zip(pending, outcomes, strict=True):
            yield CommitAnswered(committable.key, outcome)

    def _commit_one(self, committable: Committable, work: _Work) -> Outcome:
        """Ask until the sink gives an answer that is not "retry", within the limits."""
        pause_s = self.limits.commit_pause_s
        for tries_left in reversed(range(self.limits.commit_tries)):
            try:
                outcome = self.participants[committable.sink].commit(committable)
            except Exception as error:  # noqa: BLE001 - an error is not an answer: ask again, the marker tells
                work.error = error
                outcome = Outcome.RETRY
            if outcome is not Outcome.RETRY:
                return outcome
            self.had_trouble = True
            if tries_left:
                why = _cause(work.error)
                _LOG.warning("%s: %s is decided and not committed yet: %s.", committable.attempt, committable.key, why)
                self.sleep(pause_s)
                pause_s = min(pause_s * 2, self.limits.commit_pause_s_max)
        return Outcome.RETRY

    def _conclude(self, work: _Work) -> None:
        """Return for a committed batch; raise what the user must know otherwise."""
        if work.state is State.COMMITTED:
            return
        if work.state is State.ABORTED:
            self.roll_back(self.attempt(work.id, work.batch.attempt))
            raise _batch_failed(work) from work.error
        if work.state is State.REFUSED:
            self.roll_back(self.attempt(work.id, work.batch.attempt))
            raise self._fenced(work.id)
        if work.state is State.FENCED:
            raise self._fenced(work.id)
        if work.state is State.UNKNOWN:
            raise DecisionUnknown(
                f"The decision log {self._log.store.describe()} did not say whether it took the decision "
                f"of batch {work.id}: {_cause(work.error)}."
            ) from work.error
        open_ = ", ".join(work.open_sinks)
        done = ", ".join(work.visible_sinks) or "no sink yet"
        now = f"batch {work.id} is decided; visible in: {done}; still to commit: {open_}"
        if work.state is State.STALLED:
            if work.unmendable:
                raise _batch_failed(work)
            raise CommitStalled(
                f"Batch {work.id} is decided but could not be committed to {open_}: {_cause(work.error)}.",
                data_now=now,
                remedy=f"Bring the sink back and {start_again()}: it commits what is left and runs nothing twice.",
            ) from work.error
        doubt = ", ".join(work.sinks_of(work.batch.having(Outcome.IN_DOUBT)))
        raise InDoubt(f"Nobody can say whether batch {work.id} was committed to {doubt}.", data_now=now)

    def roll_back(self, attempt: Attempt) -> None:
        """Abort all branches of an attempt, those of tasks that never reported included. Best effort: starts sweep."""
        for participant in self.participants.values():
            try:
                participant.abort(b for b in participant.recover().branches if b.attempt == attempt)
            except Exception:  # noqa: BLE001, S112 - the cause is being raised already; the next start sweeps
                continue

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
        newest = self._log.newest_claim()
        return Fenced(
            f"Incarnation {self.context.incarnation} stopped at batch {batch}: incarnation {newest} "
            f"claimed this pipeline ({self._log.holder(newest)})."
        )

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
        work = _Work(batch, Batch(0), ())
        try:
            prepared = self._patiently(attempt, lambda: self._prepare(attempt, self._staged(attempt, stage)))
            failpoint("batch.prepared")
        except Exception as error:
            work.error = error
            self.roll_back(attempt)
            raise _batch_failed(work) from error
        for committable in prepared:
            outcome = self._commit_one(committable, work)
            if outcome not in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED):
                raise CommitStalled(
                    f"Batch {batch} could not be committed to {committable.sink}: {_cause(work.error)}.",
                    data_now=f"some sinks may show batch {batch} already",
                    remedy=f"Bring the sink back and {start_again()}: {then}.",
                ) from work.error
        failpoint("batch.committed")
        return Report(batch, "committed", sum(c.rows for c in prepared))


@dataclass
class _Work:
    """What the coordinator holds while it works on one batch."""

    id: int
    batch: Batch
    journal: Journal
    committables: dict[str, Committable] = field(default_factory=dict)
    proposal: tuple[Committable, ...] = ()
    error: BaseException | None = None
    mends: int = 0
    #: The rows that are gone are not in a replay: to start again does not help.
    unmendable: bool = False
    ms: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.batch.state

    @property
    def broken_sinks(self) -> list[str]:
        """The sinks of which something is gone."""
        return self.sinks_of(self.batch.gone)

    @property
    def open_sinks(self) -> list[str]:
        """The sinks that have yet to commit something."""
        return self.sinks_of(self.batch.having(Outcome.RETRY) | self.batch.gone)

    @property
    def visible_sinks(self) -> list[str]:
        """The sinks that show the batch, and those that show a part of it."""
        done = self.batch.having(Outcome.COMMITTED) | self.batch.having(Outcome.ALREADY_COMMITTED)
        undone = self.sinks_of(set(self.committables) - done)
        return [f"part of {sink}" if sink in undone else sink for sink in self.sinks_of(done)]

    def sinks_of(self, keys: Iterable[str]) -> list[str]:
        """A sink may have a committable for each of its tasks. Users know sinks."""
        return sorted({self.committables[key].sink for key in keys})

    def of(self, sink: str) -> list[Committable]:
        return [c for c in self.committables.values() if c.sink == sink]


def _batch_failed(work: _Work) -> SemelError:
    if isinstance(work.error, SemelError):
        return work.error
    return BatchFailed(f"Batch {work.id} failed before it was decided: {_cause(work.error)}.")


def _cause(error: BaseException | None) -> str:
    """The first line of an error, for the first line of ours."""
    if error is None:
        return "the sink gave no reason"
    if isinstance(error, SemelError):
        return error.what.rstrip(".")
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(". ")
