"""One batch, one event, one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from semel.protocol.events import CommitAnswered, Committable, DecisionRecorded, Event, Outcome, Prepared
from semel.protocol.states import ANSWERS_TRIGGERED, EVENT_TRIGGERED, State


class ProtocolError(RuntimeError):
    """The coordinator reported something that cannot happen in this state: a bug of semel, never of the user."""


@dataclass(frozen=True)
class Batch:
    """What a coordinator knows of the batch it is working on.

    `attempt` is the slot in which the next decision may be recorded. `pending` are the keys that have yet to answer,
    `answers` those that have, since the last decision.
    """

    attempt: int
    state: State = State.OPEN
    prepared: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    answers: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def gone(self) -> frozenset[str]:
        return self.having(Outcome.GONE)

    def having(self, outcome: Outcome) -> frozenset[str]:
        return frozenset(key for key, answer in self.answers.items() if answer is outcome)


def decided(attempt: int, committables: tuple[Committable, ...]) -> Batch:
    """A batch found decided in the journal: nothing is staged, everything is committed forward."""
    return _when_all_answered(Batch(attempt, State.DECIDED, pending=frozenset(c.key for c in committables)))


def step(batch: Batch, event: Event) -> Batch:
    """The batch after the event. Raises ProtocolError when the tables have no such transition."""
    target = EVENT_TRIGGERED.get(batch.state, {}).get(type(event))
    if target is None:
        raise ProtocolError(f"{type(event).__name__} cannot happen in state {batch.state.name}")
    batch = replace(batch, state=target)
    if isinstance(event, Prepared):
        return replace(batch, prepared=event.keys)
    if isinstance(event, DecisionRecorded):
        fresh = replace(batch, attempt=batch.attempt + 1, pending=batch.prepared, prepared=frozenset(), answers={})
        return _when_all_answered(fresh)
    if isinstance(event, CommitAnswered):
        if event.key not in batch.pending:
            raise ProtocolError(f"{event.key} answered a commit that was not pending")
        answered = replace(
            batch, pending=batch.pending - {event.key}, answers={**batch.answers, event.key: event.outcome}
        )
        return _when_all_answered(answered)
    return batch


def _when_all_answered(batch: Batch) -> Batch:
    if batch.pending:
        return batch
    given = set(batch.answers.values())
    target = next((state for outcome, state in ANSWERS_TRIGGERED if outcome in given), State.COMMITTED)
    return replace(batch, state=target)
