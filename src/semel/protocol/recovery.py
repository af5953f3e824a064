"""Facts in, resolution out: what a start does about each batch and each branch that it finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from semel.ids import Branch
from semel.protocol.events import Committable, Decided, Journal, Started
from semel.protocol.plans import Plan
from semel.protocol.step import ProtocolError


@dataclass(frozen=True)
class Facts:
    """What is known of a batch that Spark has not checkpointed.

    `journal` must have been read before `newest_claim`: see the theory of operation.
    """

    journal: Journal
    incarnation: int
    newest_claim: int


@dataclass(frozen=True)
class Run:
    """Nothing is decided: run the batch, and decide it in this slot."""

    attempt: int


@dataclass(frozen=True)
class CommitForward:
    """The batch is decided: commit these, do not write the rows again."""

    attempt: int
    committables: tuple[Committable, ...]


@dataclass(frozen=True)
class StandDown:
    """A newer incarnation runs this pipeline."""

    newest_claim: int


@dataclass(frozen=True)
class Unclear:
    """The batch was begun at-most-once: nobody can say whether it was written."""


Resolution: TypeAlias = Run | CommitForward | StandDown | Unclear


def resolve_batch(facts: Facts) -> Resolution:
    """What to do about a batch. The order matters: a driver that has been superseded acts on nothing."""
    if facts.newest_claim > facts.incarnation:
        return StandDown(facts.newest_claim)
    if any(isinstance(record, Started) for record in facts.journal):
        return Unclear()
    committables = effective_committables(facts.journal)
    if committables is None:
        return Run(attempt=len(facts.journal))
    return CommitForward(attempt=len(facts.journal), committables=committables)


def slot_to_begin_in(journal: Journal) -> int | None:
    """At-most-once: the slot in which a batch is begun; None when it was begun before, or is decided.

    A closed slot began nothing: each start of exactly-once closes one.
    """
    return None if any(isinstance(record, Started | Decided) for record in journal) else len(journal)


def effective_committables(journal: Journal) -> tuple[Committable, ...] | None:
    """What the journal decided, mends applied; None when nothing is decided. A closed slot changes nothing."""
    decision: dict[str, Committable] | None = None
    for slot, record in enumerate(journal):
        if record.attempt.attempt != slot:
            raise ProtocolError(f"slot {slot} holds a record of attempt {record.attempt.attempt}")
        if isinstance(record, Decided):
            if (decision is not None) != record.mends:
                raise ProtocolError(f"slot {slot} decides a batch that was decided before, or mends one that was not")
            decision = {**(decision or {}), **{c.key: c for c in record.committables}}
    return None if decision is None else tuple(decision.values())


def closes_slots(incarnation: int) -> bool:
    """Whether somebody may have come before, and might still decide. The first incarnation closes nothing."""
    return incarnation > 1


def closes_behind(batch: int, staged: Iterable[int]) -> bool:
    """Whether the slot of the next batch is closed, too: where something of it is staged.

    Then its driver had seen commits/N of this batch, which the checkpoint has lost, and may still decide.
    """
    return batch + 1 in staged


class Fate(Enum):
    """What becomes of a branch that a sink still holds at start."""

    KEEP = "a decision names it, or one may still do so"
    ABORT = "no decision names it, and none ever will"


def resolve_leftover(branch: Branch, journal: Journal, *, next_batch: int, incarnation: int) -> Fate:
    """The fate of one leftover. `journal` is that of its batch; `next_batch` is the first that Spark will run."""
    if branch.attempt.incarnation > incarnation:
        # It belongs to whoever has come after us.
        return Fate.KEEP
    if branch.attempt.batch < next_batch:
        return Fate.ABORT
    named = {name for c in effective_committables(journal) or () for name in c.branches}
    if str(branch) in named:
        return Fate.KEEP
    # An open slot may still be decided by its owner; only a closed or decided one proves that nobody will.
    return Fate.ABORT if branch.attempt.attempt < len(journal) else Fate.KEEP


def decided_plan(journal: Journal) -> Plan | None:
    """The plan that the batch was decided for; None when nothing is decided, or an old record carries none."""
    return next((r.plan for r in journal if isinstance(r, Decided) and not r.mends), None)
