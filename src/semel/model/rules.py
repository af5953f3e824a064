"""The production functions of the protocol, called with codes.

A model has few distinct arguments and asks for each very often, so every answer is computed once, by the production
function, and remembered. What the functions have answered is also the record of what the search has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from semel.ids import Attempt, Branch, Incarnation, parse_branch, pipeline_id
from semel.model.world import (
    ABORTED,
    MENDS,
    STARTED,
    CommittableCode,
    JournalCode,
    RecordCode,
    WorkCode,
    content,
    pack,
    unpack,
)
from semel.protocol import invariants
from semel.protocol.events import Aborted, Committable, Decided, Event, Outcome, Record, Started
from semel.protocol.plans import Behind, Plan, PlanAction, PlanFacts, PlannedFile, compare, digest_of, what_is_read
from semel.protocol.plans import begins_elsewhere as production_begins_elsewhere
from semel.protocol.plans import gone_on_from as production_gone_on_from
from semel.protocol.plans import is_behind as production_is_behind
from semel.protocol.plans import must_start_again as production_must_start_again
from semel.protocol.plans import plan_to_drop as production_plan_to_drop
from semel.protocol.plans import resolve_plan as production_resolve_plan
from semel.protocol.recovery import CommitForward, Facts, Fate, Resolution, Run
from semel.protocol.recovery import decided_plan as production_decided_plan
from semel.protocol.recovery import effective_committables as production_effective_committables
from semel.protocol.recovery import resolve_batch as production_resolve_batch
from semel.protocol.recovery import resolve_leftover as production_resolve_leftover
from semel.protocol.refusals import SinkFacts
from semel.protocol.refusals import refuse_overtaken as production_refuse_overtaken
from semel.protocol.refusals import refuse_rolled_back as production_refuse_rolled_back
from semel.protocol.states import ACTIONS, Action, State
from semel.protocol.step import Batch
from semel.protocol.step import decided as production_decided
from semel.protocol.step import step as production_step
from semel.runtime.mend import choose_parts as production_choose_parts
from semel.runtime.mend import replace_gone as production_replace_gone
from semel.sinks.base import StagedPart

PIPELINE = pipeline_id("00000000-0000-4000-8000-000000000000")


@dataclass
class Rules:
    """Every rule that the model follows. A mutant replaces one of them."""

    tasks: int
    step: Callable[[Batch, Event], Batch] = production_step
    decided: Callable[..., Batch] = production_decided
    resolve_batch: Callable[[Facts], Resolution] = production_resolve_batch
    resolve_leftover: Callable[..., Fate] = production_resolve_leftover
    effective_committables: Callable[..., tuple[Committable, ...] | None] = production_effective_committables
    resolve_plan: Callable[[PlanFacts], PlanAction] = production_resolve_plan
    decided_plan: Callable[..., Plan | None] = production_decided_plan
    must_start_again: Callable[..., bool] = production_must_start_again
    gone_on_from: Callable[[int, Behind], str] = production_gone_on_from
    plan_to_drop: Callable[[int, Behind], int | None] = production_plan_to_drop
    is_behind: Callable[[int, int], bool] = production_is_behind
    begins_elsewhere: Callable[..., bool] = production_begins_elsewhere
    refuse_overtaken: Callable[..., Any] = production_refuse_overtaken
    refuse_rolled_back: Callable[..., Any] = production_refuse_rolled_back
    choose_parts: Callable[..., Any] = production_choose_parts
    replace_gone: Callable[..., list[Committable]] = production_replace_gone
    actions: Mapping[State, Action] = field(default_factory=lambda: ACTIONS)
    #: What was reached: (kind, name).
    seen: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.advance = lru_cache(None)(self._advance)
        self.resolve = lru_cache(None)(self._resolve)
        self.fate = lru_cache(None)(self._fate)
        self.effective = lru_cache(None)(self._effective)
        self.faults_of_a_decision = lru_cache(None)(self._faults_of_a_decision)
        self.mend = lru_cache(None)(self._mend)
        self.plan_of = lru_cache(None)(self._plan_of)
        self.plan_action = lru_cache(None)(self._plan_action)
        self.rolled_back = lru_cache(None)(self._rolled_back)
        self.journal = lru_cache(None)(self._journal)
        self.committable = lru_cache(None)(self._committable)

    # The batch --------------------------------------------------------------------------------------------------------

    def _advance(self, work: WorkCode, event: Event) -> WorkCode:
        return self._seen_state(self.step(batch_of(work), event))

    def action(self, work: WorkCode) -> Action:
        return self.actions[State[work[0]]]

    def fresh(self, attempt: int) -> WorkCode:
        return self._seen_state(Batch(attempt))

    def _seen_state(self, batch: Batch) -> WorkCode:
        self.seen.add(("state", batch.state.name))
        self.seen.update(("outcome", outcome.name) for outcome in batch.answers.values())
        return code_of_batch(batch)

    # Recovery ---------------------------------------------------------------------------------------------------------

    def _resolve(
        self, journal: JournalCode, batch: int, incarnation: int, newest_claim: int
    ) -> tuple[str, WorkCode | tuple[()]]:
        """The name of the resolution, and the work that follows from it, if any."""
        facts = Facts(self.journal(journal, batch), incarnation, newest_claim)
        resolution = self.resolve_batch(facts)
        name = type(resolution).__name__
        self.seen.add(("resolution", name))
        if isinstance(resolution, Run):
            return name, self.fresh(resolution.attempt)
        if isinstance(resolution, CommitForward):
            return name, self._seen_state(self.decided(resolution.attempt, resolution.committables))
        return name, ()

    def _fate(self, branch: int, sink: int, journal: JournalCode, next_batch: int, incarnation: int) -> Fate:
        found = branch_of(branch, sink)
        records = self.journal(journal, found.attempt.batch)
        fate = self.resolve_leftover(found, records, next_batch=next_batch, incarnation=incarnation)
        self.seen.add(("fate", fate.name))
        return fate

    def _effective(self, journal: JournalCode, batch: int) -> tuple[CommittableCode, ...] | None:
        found = self.effective_committables(self.journal(journal, batch))
        return None if found is None else tuple(code_of_committable(c) for c in found)

    # Plans and refusals -----------------------------------------------------------------------------------------------

    def _plan_of(self, journal: JournalCode, batch: int) -> int:
        """The number of the plan that the batch was decided for; 0 when it is not decided."""
        plan = self.decided_plan(self.journal(journal, batch))
        return 0 if plan is None else int(plan.files[0].content or 0)

    def _plan_action(
        self, decided: int, found: int, in_hand: int, *, is_over: bool, is_before_there: bool, gone_on_from: str
    ) -> PlanAction:
        """What follows when the checkpoint says `found` of a decided batch and Spark, if it runs, has `in_hand`."""
        plan = plan_of_code(decided)
        before = plan.before[0]
        digests = {OFFSETS: plan_of_code(found).files[0].digest if found else None}
        digests[before.path] = before.digest if is_before_there else None
        missing, different = compare(what_is_read(plan, is_over=is_over), digests)
        used = gone_on_from if different else ""
        other = in_hand not in (0, decided)
        action = self.resolve_plan(PlanFacts(plan, missing, different, used, bool(in_hand), other))
        self.seen.add(("plan", action.name))
        return action

    def _rolled_back(self, marked: int, staged: int, next_batch: int, is_decided: bool) -> bool:
        facts = SinkFacts(marked, staged)
        return self.refuse_rolled_back(facts, next_batch=next_batch, is_decided=is_decided) is not None

    # Decisions and mends ----------------------------------------------------------------------------------------------

    def _faults_of_a_decision(
        self, record: RecordCode, slot: int, journal: JournalCode, batch: int, sinks: int
    ) -> list[str]:
        decision = self._record(record, slot, batch)
        if not isinstance(decision, Decided):
            raise TypeError("only decisions are checked")
        covers = [] if decision.mends else invariants.decision_covers_every_sink(decision, map(sink_name, range(sinks)))
        return [
            *invariants.decision_takes_the_next_slot(decision, self.journal(journal, batch)),
            *invariants.decision_names_one_attempt(decision),
            *([] if decision.mends else invariants.decision_carries_its_plan(decision)),
            *covers,
        ]

    def _mend(
        self,
        known: tuple[CommittableCode, ...],
        gone: tuple[str, ...],
        sink: int,
        parts: tuple[int, ...],
        prepared: tuple[CommittableCode, ...],
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[CommittableCode, ...]]:
        """Of one sink: the branches that are wanted, the spare ones, and what was prepared under its new keys.

        Asked twice: with nothing prepared it only chooses.
        """
        of_sink = [self.committable(c) for c in known if c[0] == sink]
        chosen = self.choose_parts(of_sink, frozenset(gone), [self._part(b, sink) for b in parts])
        wanted = tuple(code_of_branch(str(p.branch)) for p in chosen.wanted)
        spare = tuple(code_of_branch(str(p.branch)) for p in chosen.spare)
        if not prepared:
            return wanted, spare, ()
        mended = self.replace_gone(chosen, of_sink, [self.committable(c) for c in prepared])
        return wanted, spare, tuple(code_of_committable(c) for c in mended)

    def _part(self, branch: int, sink: int) -> StagedPart:
        return StagedPart(branch_of(branch, sink), 1, fingerprint=f"rows {content(branch, self.tasks)}")

    # From codes -------------------------------------------------------------------------------------------------------

    def _journal(self, journal: JournalCode, batch: int) -> tuple[Record, ...]:
        return tuple(self._record(record, slot, batch) for slot, record in enumerate(journal))

    def _record(self, record: RecordCode, slot: int, batch: int) -> Record:
        kind, incarnation, committables, number = record
        attempt = Attempt(PIPELINE, batch, slot, Incarnation(incarnation))
        if kind == ABORTED:
            return Aborted(attempt)
        if kind == STARTED:
            return Started(attempt)
        prepared = tuple(self.committable(c) for c in committables)
        if kind == MENDS:
            return Decided(attempt, prepared, mends=True)
        plan = plan_of_code(number)
        return Decided(attempt, tuple(replace(c, plan=plan.digest) for c in prepared), plan=plan)

    def _committable(self, code: CommittableCode) -> Committable:
        sink, key, batch, attempt, incarnation, branches, mends = code
        return Committable(
            sink_name(sink),
            key,
            Attempt(PIPELINE, batch, attempt, Incarnation(incarnation)),
            rows=len(branches),
            branches=tuple(str(branch_of(b, sink)) for b in branches),
            fingerprint=f"rows {content(branches[0], self.tasks)}" if len(branches) == 1 else "",
            mends=bool(mends),
        )


# Codes --------------------------------------------------------------------------------------------------------------


OFFSETS, COMMITS_BEFORE = "offsets", "commits before"


def plan_of_code(number: int) -> Plan:
    content = str(number)
    file = PlannedFile(OFFSETS, digest_of(content.encode()), content)
    return Plan((file,), (PlannedFile(COMMITS_BEFORE, digest_of(b""), ""),))


def sink_name(sink: int) -> str:
    return f"s{sink}"


def branch_of(code: int, sink: int) -> Branch:
    batch, attempt, incarnation, task, retry = unpack(code)
    return Branch(Attempt(PIPELINE, batch, attempt, Incarnation(incarnation)), sink_name(sink), task, retry)


def code_of_branch(name: str) -> int:
    branch = parse_branch(name)
    if branch is None:
        raise ValueError(f"not the name of a branch: {name}")
    a = branch.attempt
    return pack(a.batch, a.attempt, a.incarnation, branch.task, branch.retry)


def code_of_committable(c: Committable) -> CommittableCode:
    a = c.attempt
    branches = tuple(code_of_branch(name) for name in c.branches)
    return int(c.sink[1:]), c.key, a.batch, a.attempt, a.incarnation, branches, int(c.mends)


def code_of_batch(batch: Batch) -> WorkCode:
    answers = tuple(sorted((key, outcome.name) for key, outcome in batch.answers.items()))
    return batch.state.name, batch.attempt, tuple(sorted(batch.prepared)), tuple(sorted(batch.pending)), answers


def batch_of(code: WorkCode) -> Batch:
    state, attempt, prepared, pending, answers = code
    named = {key: Outcome[name] for key, name in answers}
    return Batch(attempt, State[state], frozenset(prepared), frozenset(pending), named)
