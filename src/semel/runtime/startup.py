"""What happens at start: claim the pipeline, settle what the last run left, sweep the rest. No Spark in here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from semel.decisions.log import DecisionLog, Identity
from semel.errors import AnotherPipeline, CheckpointRolledBack
from semel.failpoints import failpoint
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Aborted, Journal
from semel.protocol.order import order_to_prepare
from semel.protocol.plans import is_strange, newest_state
from semel.protocol.recovery import Fate, closes_behind, closes_slots, effective_committables, resolve_leftover
from semel.protocol.refusals import (
    AGAIN,
    Holder,
    Refusal,
    SinkFacts,
    refuse_holder,
    refuse_replaced,
    refuse_rolled_back,
)
from semel.runtime.batch import Coordinator
from semel.runtime.beginning import check_beginnings, check_nothing_owed, check_overtaken
from semel.runtime.commits import Waiting
from semel.runtime.handover import may_be_running
from semel.runtime.phases import Limits
from semel.runtime.plans import Plans
from semel.runtime.restore import first_to_run, keep_what_spark_planned, restore_plans
from semel.runtime.weaker import Weaker
from semel.sinks.base import Context, Participant, Remains, Sink
from semel.sinks.evidence import UNSAID

CLOSE_TRIES_MAX = 100
#: So many other pipelines that write to the same target are told by name.
OTHERS_TOLD_MAX = 5

#: Waits until an older driver writes nothing any more; see `handover.wait_for_older`.
Wait = Callable[[DecisionLog, int], object]

_LOG = logging.getLogger("semel")


def nobody_to_wait_for(log: DecisionLog, ours: int) -> None:
    """For a start that is known to be alone."""


def start_exactly_once(  # noqa: PLR0913 - the first four are what it starts, the others are keywords
    log: DecisionLog,
    plans: Plans,
    sinks: Sequence[Sink],
    identity: Identity,
    *,
    limits: Limits = Limits(),
    under_way: int | None = None,
    wait: Wait = nobody_to_wait_for,
    tell: Callable[[Waiting], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
    is_somebody_there: Callable[[DecisionLog], bool] = may_be_running,
) -> Coordinator:
    """Claim, fence, settle, sweep; then the pipeline may run. `under_way` is a batch that Spark runs already.

    `wait` returns when the driver that ran the pipeline before writes nothing any more, or must not be waited for. When
    `is_somebody_there`, the stores are looked at before the claim.
    """
    if under_way is not None:
        keep_what_spark_planned(plans, under_way)

    def look() -> None:
        if is_somebody_there(log):
            refuse_beside_who_runs(log, plans, sinks, identity)

    context = _claim(log, sinks, identity, marked=True, plans=plans, under_way=under_way, look=look)
    coordinator = Coordinator(context, _participants(sinks, context), log, plans, limits)
    coordinator.tell, coordinator.is_stopped = tell, is_stopped
    coordinator.strange_marks = partial(strange_marks, sinks, identity.pipeline)
    try:
        _recover(coordinator, log, plans, under_way, wait, {sink.name: sink.starts for sink in sinks})
    except BaseException:
        coordinator.close()
        raise
    return coordinator


def _recover(
    coordinator: Coordinator,
    log: DecisionLog,
    plans: Plans,
    under_way: int | None,
    wait: Wait,
    starts: Mapping[str, str],
) -> None:
    remains = {name: p.recover() for name, p in coordinator.participants.items()}
    _refuse_a_replaced_checkpoint(remains, coordinator.context, starts)
    _tell_of_others(remains, coordinator.context)
    for participant in coordinator.participants.values():
        participant.fence()
    wait(log, coordinator.context.incarnation)
    # Only now: until here an older driver may have finished a batch. What Spark has read and runs was not torn.
    plans.clean(lambda batch: effective_committables(log.journal(batch)) is not None, under_way)
    next_batch = plans.next_batch()
    batch = coordinator.first = first_to_run(log, next_batch)
    journal = close_open_slot(log, coordinator.attempt(batch, 0))
    failpoint("startup.closed")
    _refuse_a_rolled_back_checkpoint(remains, batch, journal)
    staged = {branch.attempt.batch for remain in remains.values() for branch in remain.branches}
    following = close_open_slot(log, coordinator.attempt(batch + 1, 0)) if closes_behind(batch, staged) else ()
    restore_plans(log, plans, next_batch, coordinator.strange_marks, under_way)
    # Only now: a start that is refused leaves the state as it was.
    newest = newest_state(batch, is_decided=effective_committables(journal) is not None)
    plans.drop_state(newest, may_be_in_use=newest == under_way)
    _commit_forward(coordinator, batch, journal)
    failpoint("startup.committed")
    sweep(coordinator, remains, batch, {batch: journal, batch + 1: following})
    failpoint("startup.swept")


def start_weaker(
    log: DecisionLog | None,
    sinks: Sequence[Sink],
    identity: Identity,
    plans: Plans | None = None,
    wait: Wait = nobody_to_wait_for,
    under_way: int | None = None,
    decisions: DecisionLog | None = None,
) -> Weaker:
    """At-least-once and at-most-once: no marker, no recovery; only what an earlier run staged is dropped.

    `decisions` is the log of the checkpoint also where the guarantee keeps none: exactly-once may have left one.
    """
    decisions = decisions or log
    if decisions is not None and plans is not None:
        check_nothing_owed(decisions, plans)
    if log is not None:
        context = _claim(log, sinks, identity, marked=False, plans=plans, under_way=under_way)
        wait(log, context.incarnation)
        if plans is not None:
            # The older driver may have decided one more while it left.
            check_nothing_owed(log, plans)
    else:
        context = Context(identity.pipeline, identity.name or identity.known_by, Incarnation(0), marked=False)
    weaker = Weaker(context, _participants(sinks, context), log)
    for participant in weaker.participants.values():
        participant.abort(participant.recover().branches)
    return weaker


def _claim(
    log: DecisionLog,
    sinks: Sequence[Sink],
    identity: Identity,
    *,
    marked: bool,
    plans: Plans | None,
    under_way: int | None = None,
    look: Callable[[], None] = lambda: None,
) -> Context:
    found = log.identity()
    if found is not None:
        _refuse_anothers_checkpoint(found, identity, log.store.describe())
    if plans is not None:
        check_beginnings(log, plans, sinks, identity.pipeline, under_way)
    # A newer semel that has claimed, and decided nothing yet, must not be fenced by a start that is refused later.
    log.claimed(log.newest_claim())
    for sink in sinks if marked else ():
        sink.check_store(identity.pipeline)
    look()
    if found is None:
        log.create_identity(identity)
    if plans is not None:
        # The checks took their time. Another driver may have ended the batch meanwhile, or a newer semel have claimed.
        check_overtaken(log, plans, under_way)
        log.claimed(log.newest_claim())
    incarnation = log.claim(sinks={s.name: s.describe() for s in sinks})
    failpoint("startup.claimed")
    return Context(identity.pipeline, _name(identity, found), incarnation, marked)


def refuse_beside_who_runs(log: DecisionLog, plans: Plans, sinks: Sequence[Sink], identity: Identity) -> None:
    """What the stores show that a start is refused for, looked for while it fences nobody, and once more after that.

    The stores come first: what they show of a driver that goes on meanwhile is in the log by the time that it is read.
    """
    # As nobody's incarnation: the driver that runs may end our sessions, and takes none of them for its own.
    onlooker = Context(identity.pipeline, _name(identity, log.identity()), Incarnation(0))
    participants = _participants(sinks, onlooker)
    try:
        remains = {name: participant.recover() for name, participant in participants.items()}
    finally:
        for participant in participants.values():
            participant.close()
    _refuse_a_replaced_checkpoint(remains, onlooker, {sink.name: sink.starts for sink in sinks})
    batch = first_to_run(log, plans.next_batch())
    _refuse_a_rolled_back_checkpoint(remains, batch, log.journal(batch))


def _name(identity: Identity, found: Identity | None) -> str:
    """What markers call the pipeline: a name that it once had stays, whoever leaves it out later."""
    return identity.name or (found.name if found is not None else "") or identity.known_by


def _participants(sinks: Sequence[Sink], context: Context) -> dict[str, Participant]:
    """In the order in which they prepare: what can expire has the least to wait for."""
    made: dict[str, Participant] = {}
    try:
        named = {sink.name: sink for sink in sinks}
        for name in order_to_prepare((sink.name, sink.capabilities.expires) for sink in sinks):
            made[name] = named[name].participant(context)
    except BaseException:
        for participant in made.values():
            participant.close()
        raise
    return made


# Settling -----------------------------------------------------------------------------------------------------------


def close_open_slot(log: DecisionLog, ours: Attempt) -> Journal:
    """Close the slot in which an older incarnation might still decide this batch, and return the journal."""
    journal = log.journal(ours.batch)
    if not closes_slots(ours.incarnation):
        return journal
    for _ in range(CLOSE_TRIES_MAX):
        closing = Aborted(Attempt(ours.pipeline, ours.batch, len(journal), ours.incarnation))
        if log.append(closing):
            return (*journal, closing)
        # Somebody was faster: either it is decided now, or a third driver closed it. Read again.
        journal = log.journal(ours.batch)
    raise CheckpointRolledBack(
        f"The journal of batch {ours.batch} keeps growing: other drivers run this pipeline.",
        remedy="Run the pipeline in one place only, then start it again.",
    )


def _commit_forward(coordinator: Coordinator, batch: int, journal: Journal) -> None:
    """Commit a decided batch now, without waiting for Spark. What is gone needs the rows: Spark brings them."""
    if effective_committables(journal) is None:
        return
    coordinator.drive(coordinator.open_work(batch), stage=None)


def sweep(
    coordinator: Coordinator, remains: Mapping[str, Remains], next_batch: int, journals: Mapping[int, Journal]
) -> int:
    """Abort every leftover that no decision names and none ever will. Returns how many."""
    swept = 0
    for name, remain in remains.items():
        fates = {
            branch: resolve_leftover(
                branch,
                journals.get(branch.attempt.batch, ()),
                next_batch=next_batch,
                incarnation=coordinator.context.incarnation,
            )
            for branch in remain.branches
        }
        doomed = [branch for branch, fate in fates.items() if fate is Fate.ABORT]
        coordinator.participants[name].abort(doomed)
        swept += len(doomed)
    return swept


# Refusing -----------------------------------------------------------------------------------------------------------


def _refuse_anothers_checkpoint(found: Identity, ours: Identity, where: str) -> None:
    refusal = refuse_holder(Holder(found.pipeline, found.name), Holder(ours.pipeline, ours.name))
    if refusal is Refusal.ANOTHERS_CHECKPOINT:
        raise AnotherPipeline(
            f"The log {where} belongs to query {found.pipeline}, but the checkpoint's metadata says {ours.pipeline}: "
            "files of two checkpoints are mixed."
        )
    if refusal is Refusal.ANOTHER_NAME:
        raise AnotherPipeline(f"The checkpoint {where} belongs to pipeline {found.name!r}, not to {ours.name!r}.")


def _refuse_a_replaced_checkpoint(remains: Mapping[str, Remains], context: Context, starts: Mapping[str, str]) -> None:
    for sink, remain in remains.items():
        if refuse_replaced(replace(_facts_of(remain), starts=starts.get(sink, ""))):
            raise AnotherPipeline(
                f"Sink {sink} holds batches that pipeline {context.name!r} wrote under another checkpoint "
                f"(query {remain.namesakes[-1]}).",
                data_now="what that checkpoint committed is visible; starting anew would write it a second time",
                remedy="Use the old checkpoint again. If this is another pipeline that reads the same, give it a name "
                f"with queryName(). To write all rows a second time on purpose, say starts={AGAIN!r} on the sink.",
            )


def _tell_of_others(remains: Mapping[str, Remains], context: Context) -> None:
    """Two pipelines may well write to one target; but whoever did not mean it learns it from here only."""
    for sink, remain in remains.items():
        if remain.others:
            told = ", ".join(f"{name!r} (query {query})" for name, query in remain.others[:OTHERS_TOLD_MAX])
            more = len(remain.others) - OTHERS_TOLD_MAX
            _LOG.warning(
                "Sink %s of pipeline %r also holds batches of %s%s: rows of all of them mix in its target.",
                sink,
                context.name,
                told,
                f" and {more} more" if more > 0 else "",
            )


def _refuse_a_rolled_back_checkpoint(remains: Mapping[str, Remains], next_batch: int, journal: Journal) -> None:
    is_decided = effective_committables(journal) is not None
    for sink, remain in remains.items():
        facts = _facts_of(remain)
        if refuse_rolled_back(facts, next_batch=next_batch, is_decided=is_decided):
            raise CheckpointRolledBack(
                f"Sink {sink} has seen batch {max(facts.marked, facts.staged)}, but the checkpoint knows batches only "
                f"up to {next_batch if is_decided else next_batch - 1}: it is older than the sink.",
                data_now="every batch that the sink has seen is visible once; this start wrote nothing",
            )


def _facts_of(remain: Remains) -> SinkFacts:
    return SinkFacts(
        marked=-1 if remain.newest_batch is None else remain.newest_batch,
        staged=max((branch.attempt.batch for branch in remain.branches), default=-1),
        namesakes=remain.namesakes,
    )


def strange_marks(sinks: Sequence[Sink], pipeline: PipelineId, batch: int, journal: Journal) -> str:
    """What the sinks show of a batch that its decision does not name: somebody has decided it for other rows."""
    named = effective_committables(journal) or ()
    decided = {(c.attempt.attempt, c.attempt.incarnation) for c in named}
    plans = {c.plan for c in named if c.plan}
    for sink in sinks:
        for mark in sink.evidence(pipeline, range(batch, batch + 1)).marks:
            by = (mark.attempt, mark.incarnation)
            if mark.batch == batch and is_strange(None if UNSAID in by else by, decided, mark.plan, plans):
                whose = "another plan" if UNSAID in by else f"attempt {by[0]} of incarnation {by[1]}"
                return f"sink {sink.name} shows {whose}"
    return ""
