"""Batches without Spark: sinks that answer from a script, tasks that stage the same rows, pauses that take no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import (
    SinkUnavailable,
)
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.hands import Written
from semel.runtime.phases import Limits, Only, Parts
from semel.sinks.base import Context, Participant, Remains, StagedPart, committable_for
from tests.planned import plans

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")


@dataclass
class Scripted(Participant):
    """A participant that answers commits from a script, then with COMMITTED."""

    name: str
    answers: list[Outcome | Exception] = field(default_factory=list)
    refuses: Exception | None = None
    #: So often its store is away when it is to prepare.
    away: int = 0
    #: And so often when it is to roll back.
    cannot_abort: int = 0
    calls: list[str] = field(default_factory=list)
    left: tuple[Branch, ...] = ()

    def fence(self) -> None:
        self.calls.append("fence")

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        self.calls.append(f"prepare {attempt.attempt}")
        if self.refuses:
            raise self.refuses
        if self.away:
            self.away -= 1
            raise SinkUnavailable("The store is away.")
        return (committable_for(self.name, attempt, parts, {}),)

    def commit(self, committable: Committable) -> Outcome:
        self.calls.append(f"commit {committable.attempt.attempt}")
        answer = self.answers.pop(0) if self.answers else Outcome.COMMITTED
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self, branches: Iterable[Branch]) -> None:
        if self.cannot_abort:
            self.cannot_abort -= 1
            self.calls.append("abort away")
            raise SinkUnavailable("The store is away.")
        self.calls.append(f"abort {[b.task for b in branches]}")

    def recover(self) -> Remains:
        return Remains(self.left)

    def close(self) -> None:
        self.calls.append("close")


def coordinator(*sinks: Scripted, store: MemoryStore | None = None, incarnation: int = 1) -> Coordinator:
    log = DecisionLog(store or MemoryStore())
    while log.newest_claim() < incarnation:
        log.claim()
    context = Context(PIPELINE, "orders", Incarnation(incarnation))
    limits = Limits(stage_patience_s=1.0, stage_pause_s=0.1, commit_patience_s=0.35, commit_pause_s=0.1, mends=2)
    participants = {s.name: s for s in sinks}
    return Coordinator(context, participants, log, plans(), limits, sleep=PAUSES.append, clock=lambda: sum(PAUSES))


PAUSES: list[float] = []


def stage(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
    names = ("a", "b") if only is None else only
    return {name: [StagedPart(Branch(attempt, name, t, 0), 5) for t in (0, 1)] for name in names}
