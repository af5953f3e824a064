"""The life of a batch as tables: the single truth. The diagram in docs/protocol.md is generated from them."""

from __future__ import annotations

from enum import Enum

from semel.protocol.events import (
    CommitAnswered,
    DecisionRecorded,
    DecisionRefused,
    DecisionUnanswered,
    Event,
    Outcome,
    Prepared,
    PrepareFailed,
    Superseded,
)


class State(Enum):
    OPEN = "OPEN"
    PREPARED = "PREPARED"
    DECIDED = "DECIDED"
    BROKEN = "BROKEN"
    MENDED = "MENDED"
    COMMITTED = "COMMITTED"
    # Ends of this driver's work on the batch. The batch itself goes on at the next start, except IN_DOUBT.
    ABORTED = "ABORTED"
    REFUSED = "REFUSED"
    FENCED = "FENCED"
    UNKNOWN = "UNKNOWN"
    STALLED = "STALLED"
    IN_DOUBT = "IN_DOUBT"


class Action(Enum):
    STAGE = "stage rows and prepare every sink"
    DECIDE = "record the decision in this attempt's slot"
    COMMIT = "commit every pending committable"
    RESTAGE = "stage again the rows of what is gone"
    RETURN = "return to Spark, which writes commits/N"
    ROLL_BACK = "abort every branch of this attempt"
    WITHDRAW = "abort every branch of this attempt, then stop: a newer incarnation runs this pipeline"
    STAND_DOWN = "stop: a newer incarnation runs this pipeline"
    STOP = "stop and touch nothing: the next start goes on"
    ASK = "stop and ask a person"


# Which event moves which state where. What is not here cannot happen, and raises.
EVENT_TRIGGERED: dict[State, dict[type[Event], State]] = {
    State.OPEN: {Prepared: State.PREPARED, PrepareFailed: State.ABORTED},
    State.PREPARED: {
        DecisionRecorded: State.DECIDED,
        DecisionRefused: State.REFUSED,
        DecisionUnanswered: State.UNKNOWN,
    },
    State.DECIDED: {CommitAnswered: State.DECIDED, Superseded: State.FENCED},
    State.BROKEN: {Prepared: State.MENDED, PrepareFailed: State.STALLED},
    State.MENDED: {
        DecisionRecorded: State.DECIDED,
        DecisionRefused: State.REFUSED,
        DecisionUnanswered: State.UNKNOWN,
    },
}

# Where DECIDED goes once every committable has answered: the first row whose outcome was given by any of them.
ANSWERS_TRIGGERED: tuple[tuple[Outcome, State], ...] = (
    (Outcome.IN_DOUBT, State.IN_DOUBT),
    (Outcome.RETRY, State.STALLED),
    (Outcome.GONE, State.BROKEN),
    (Outcome.COMMITTED, State.COMMITTED),
    (Outcome.ALREADY_COMMITTED, State.COMMITTED),
)

# What the coordinator does in each state. The last seven end its work on the batch.
ACTIONS: dict[State, Action] = {
    State.OPEN: Action.STAGE,
    State.PREPARED: Action.DECIDE,
    State.DECIDED: Action.COMMIT,
    State.BROKEN: Action.RESTAGE,
    State.MENDED: Action.DECIDE,
    State.COMMITTED: Action.RETURN,
    State.ABORTED: Action.ROLL_BACK,
    State.REFUSED: Action.WITHDRAW,
    State.FENCED: Action.STAND_DOWN,
    State.UNKNOWN: Action.STOP,
    State.STALLED: Action.STOP,
    State.IN_DOUBT: Action.ASK,
}

#: The states that end this driver's work on the batch.
FINAL = frozenset(
    {
        State.COMMITTED,
        State.ABORTED,
        State.REFUSED,
        State.FENCED,
        State.UNKNOWN,
        State.STALLED,
        State.IN_DOUBT,
    }
)
