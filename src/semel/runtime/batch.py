"""One batch, from the rows to the commit. No Spark in here: the simulation runs this very file.

The coordinator asks the protocol what to do in the state it is in, does it, and reports what happened. Every rule is in
`semel.protocol`; this file knows only how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from semel.decisions.base import StoreUnanswered
from semel.errors import (
    BatchFailed,
    CheckpointError,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    InDoubt,
    PlanRestored,
    QueryStopped,
    RowsGone,
    SemelError,
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
    Outcome,
    Prepared,
    PrepareFailed,
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
from semel.protocol.plans import Plan, begins_elsewhere, digest_of, is_behind
from semel.protocol.recovery import CommitForward, Facts, Run, StandDown, Unclear, decided_plan, resolve_batch
from semel.protocol.states import ACTIONS, FINAL, Action, State
from semel.protocol.step import Batch, ProtocolError, decided, step
from semel.runtime.command import start_again
from semel.runtime.mend import choose_parts, replace_gone
from semel.runtime.offsets import offsets_of
from semel.runtime.phases import Parts, Phases, Report, Stage
from semel.runtime.plans import Plans
from semel.runtime.restore import Seen, StrangeMarks, drop_plan_behind, known_since, restored, settle_plan
from semel.runtime.work import Work, batch_failed, cause_of, may_mend_itself, stalled

#: By these words a query is known that only has to be started again.
PLAN_OVERWRITTEN = "Another driver has written it meanwhile"

_LOG = logging.getLogger("semel")


@dataclass
class Coordinator(Phases):
    """One run of one pipeline that is exactly-once."""

    #: What the sinks show of a batch that its decision does not name; see `restore.settle_plan`.
    strange_marks: StrangeMarks = lambda _batch, _journal: ""
    #: The files of the plan as Spark has them in memory, path -> digest, where that is known: it read them once, when
    #: the query began, and another start may have put them back since.
    in_hand: Callable[[], Mapping[str, str]] = dict
    #: The same of the plan behind which the query began.
    begins_behind: Callable[[], Mapping[str, str]] = dict
    #: The first batch that is to be run, as the start has settled it.
    first: int = 0
    _has_begun_at: int | None = None
    _under_way: Work | None = None

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

    def run(self, batch: int, stage: Stage) -> Report:
        return self.exactly_once(batch, stage)

    def exactly_once(self, batch: int, stage: Stage) -> Report:
        """Run, decide and commit a batch; or commit forward one that is found decided."""
        failpoint("batch.began")
        work = self.open_work(batch)
        forwarded = work.state is not State.OPEN
        if self._has_begun_at is None:
            self._require_beginning(work)
            self._has_begun_at = batch
        if forwarded:
            self._require_decided_plan(work)
        else:
            work.plan = self._plan_in_hand(batch)
        staged = self.drive(work, stage)
        failpoint("batch.committed")
        rows = sum(c.rows for c in work.committables.values())
        how = "forwarded" if forwarded else "committed"
        return Report(batch, how, rows, work.batch.attempt - 1, staged, ms=work.ms)

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
        journals = {**known_since(self._log, work.id), work.id: work.journal}
        seen = Seen(self.strange_marks, is_under_way=True, in_hand=self.in_hand(), journals=journals)
        told = settle_plan(self._plans, work.id, work.journal, work.id, seen)
        if told is not None:
            raise restored(work.id, told)

    def _require_beginning(self, work: Work) -> None:
        """A query begins where the decided batch before it ends, in the checkpoint and in Spark's memory.

        An older start may have put that plan back when Spark had read another one.
        """
        if is_behind(work.id, self.first):
            raise PlanRestored(
                f"Batch {work.id} was not begun: the next one is {self.first}, and the checkpoint has lost its plans "
                "since this start looked at it.",
                data_now="nothing of the batch was written",
            )
        before = work.id - 1
        plan = decided_plan(self._log.journal(before)) if work.id else None
        file = next((f for f in plan.files if f.path == offsets_of(before)), None) if plan is not None else None
        if plan is None or file is None:
            return
        there = self._plans.text(file.path)
        found = None if there is None else digest_of(there)
        if begins_elsewhere(file.digest, found, self.begins_behind().get(file.path)):
            if work.state is State.OPEN:
                drop_plan_behind(self._plans, before, plan)
            raise PlanRestored(
                f"Batch {work.id} was not begun: Spark begins elsewhere than batch {before}, as decided, ends.",
                data_now="nothing of the batch was written",
            )

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

        def staged_again() -> Parts:
            return stage(attempt, work.broken_sinks, work.digest, work.written)

        event = self._propose(work, lambda: self._mend(work, attempt, staged_again()))
        if isinstance(event, PrepareFailed):
            # The batch stays decided; what was staged now is dropped.
            self.roll_back(attempt)
            if not work.unmendable and (self._abandoned.is_set() or self.is_stopped()):
                # What Spark says of a job that was cancelled helps nobody.
                work.was_stopped, work.error = True, QueryStopped("its rows were gone and were being written again")
        return event

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

    def _mend(self, work: Work, attempt: Attempt, parts: Parts) -> tuple[Committable, ...]:
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
                failed = batch_failed(work)
                raise RowsGone(failed.what, data_now=failed.data_now, remedy=failed.remedy) from work.error
            raise self._stalled(work, is_stopped=work.was_stopped) from work.log_error or work.error_of_open
        doubtful = work.batch.having(Outcome.IN_DOUBT)
        said = next((e for key in sorted(doubtful) if isinstance(e := work.errors.get(key), InDoubt)), None)
        if said is not None:
            raise InDoubt(said.what, data_now=work.data_now, remedy=said.remedy) from said
        doubt = ", ".join(work.sinks_of(doubtful))
        raise InDoubt(f"Nobody can say whether batch {work.id} was committed to {doubt}.", data_now=work.data_now)

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
