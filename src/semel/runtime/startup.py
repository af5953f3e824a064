"""What happens at start: claim the pipeline, settle what the last run left, sweep the rest. No Spark in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semel.decisions.log import DecisionLog, Identity
from semel.errors import AnotherPipeline, CheckpointRolledBack
from semel.failpoints import failpoint
from semel.ids import Attempt, Incarnation
from semel.protocol.events import Aborted, Journal
from semel.protocol.recovery import Fate, effective_committables, resolve_leftover
from semel.runtime.batch import Coordinator, Limits
from semel.sinks.base import Context, Participant, Remains, Sink

CLOSE_TRIES_MAX = 100


def start_exactly_once(
    log: DecisionLog,
    sinks: Sequence[Sink],
    identity: Identity,
    *,
    default_name: str,
    next_batch: int,
    limits: Limits = Limits(),
) -> Coordinator:
    """Claim, fence, settle, sweep; then the pipeline may run. `next_batch` is the first that Spark will hand us."""
    coordinator = _claim(log, sinks, identity, default_name, marked=True, limits=limits)
    try:
        _recover(coordinator, log, next_batch)
    except BaseException:
        coordinator.close()
        raise
    return coordinator


def _recover(coordinator: Coordinator, log: DecisionLog, next_batch: int) -> None:
    remains = {name: p.recover() for name, p in coordinator.participants.items()}
    _refuse_a_replaced_checkpoint(remains, coordinator.context)
    for participant in coordinator.participants.values():
        participant.fence()
    journal = close_open_slot(log, coordinator.attempt(next_batch, 0))
    failpoint("startup.closed")
    _refuse_a_rolled_back_checkpoint(remains, next_batch, journal)
    _commit_forward(coordinator, next_batch, journal)
    failpoint("startup.committed")
    sweep(coordinator, remains, next_batch, journal)
    failpoint("startup.swept")


def start_weaker(log: DecisionLog | None, sinks: Sequence[Sink], identity: Identity, default_name: str) -> Coordinator:
    """At-least-once and at-most-once: no marker, no recovery; only what an earlier run staged is dropped."""
    if log is not None:
        coordinator = _claim(log, sinks, identity, default_name, marked=False, limits=Limits())
    else:
        context = Context(identity.pipeline, identity.name or default_name, Incarnation(0), marked=False)
        coordinator = Coordinator(context, _participants(sinks, context))
    for participant in coordinator.participants.values():
        participant.abort(participant.recover().branches)
    return coordinator


def _claim(
    log: DecisionLog, sinks: Sequence[Sink], identity: Identity, default_name: str, *, marked: bool, limits: Limits
) -> Coordinator:
    found = log.identity()
    if found is None:
        log.create_identity(identity)
    else:
        _refuse_anothers_checkpoint(found, identity, log.store.describe())
    incarnation = log.claim(sinks={s.name: s.describe() for s in sinks})
    failpoint("startup.claimed")
    context = Context(identity.pipeline, identity.name or default_name, incarnation, marked)
    return Coordinator(context, _participants(sinks, context), log, limits)


def _participants(sinks: Sequence[Sink], context: Context) -> dict[str, Participant]:
    """In the order in which they prepare: what can expire has the least to wait for."""
    made: dict[str, Participant] = {}
    try:
        for sink in sorted(sinks, key=lambda s: s.capabilities.expires):
            made[sink.name] = sink.participant(context)
    except BaseException:
        for participant in made.values():
            participant.close()
        raise
    return made


# Settling -----------------------------------------------------------------------------------------------------------


def close_open_slot(log: DecisionLog, ours: Attempt) -> Journal:
    """Close the slot in which an older incarnation might still decide this batch, and return the journal.

    The first incarnation has nobody before it and closes nothing.
    """
    journal = log.journal(ours.batch)
    if ours.incarnation == 1:
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


def sweep(coordinator: Coordinator, remains: Mapping[str, Remains], next_batch: int, journal: Journal) -> int:
    """Abort every leftover that no decision names and none ever will. Returns how many."""
    swept = 0
    for name, remain in remains.items():
        fates = {
            branch: resolve_leftover(
                branch,
                journal if branch.attempt.batch == next_batch else (),
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
    if found.pipeline != ours.pipeline:
        raise AnotherPipeline(
            f"The log {where} belongs to query {found.pipeline}, but the checkpoint's metadata says {ours.pipeline}: "
            "files of two checkpoints are mixed."
        )
    if found.name and ours.name and found.name != ours.name:
        raise AnotherPipeline(f"The checkpoint {where} belongs to pipeline {found.name!r}, not to {ours.name!r}.")


def _refuse_a_replaced_checkpoint(remains: Mapping[str, Remains], context: Context) -> None:
    for sink, remain in remains.items():
        if remain.namesakes and remain.newest_batch is None:
            raise AnotherPipeline(
                f"Sink {sink} holds batches that pipeline {context.name!r} wrote under another checkpoint "
                f"(query {remain.namesakes[-1]}).",
                data_now="what that checkpoint committed is visible; starting anew would write it a second time",
                remedy="Use the old checkpoint again. To write everything anew on purpose, give the pipeline "
                "another name with queryName() and empty the target yourself.",
            )


def _refuse_a_rolled_back_checkpoint(remains: Mapping[str, Remains], next_batch: int, journal: Journal) -> None:
    newest_known = next_batch if effective_committables(journal) is not None else next_batch - 1
    for sink, remain in remains.items():
        staged = max((b.attempt.batch for b in remain.branches), default=-1)
        marked = -1 if remain.newest_batch is None else remain.newest_batch
        if marked > newest_known or staged > next_batch:
            raise CheckpointRolledBack(
                f"Sink {sink} has seen batch {max(marked, staged)}, but the checkpoint knows batches only up to "
                f"{newest_known}: it is older than the sink.",
                data_now="every batch that the sink has seen is visible once; this start wrote nothing",
            )
