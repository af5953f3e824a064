"""Every transition of the tables, and every pair that is not in them."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import (
    CommitAnswered,
    Committable,
    DecisionRecorded,
    DecisionRefused,
    DecisionUnanswered,
    Event,
    Outcome,
    Prepared,
    PrepareFailed,
    Superseded,
)
from semel.protocol.states import ACTIONS, ANSWERS_TRIGGERED, EVENT_TRIGGERED, FINAL, Action, State
from semel.protocol.step import Batch, ProtocolError, decided, step

EVENTS: dict[type[Event], Event] = {
    Prepared: Prepared(frozenset({"a", "b"})),
    PrepareFailed: PrepareFailed(),
    DecisionRecorded: DecisionRecorded(),
    DecisionRefused: DecisionRefused(),
    DecisionUnanswered: DecisionUnanswered(),
    Superseded: Superseded(),
    CommitAnswered: CommitAnswered("a", Outcome.COMMITTED),
}

# Written out a second time on purpose: whoever changes the tables has to say so here too.
TRANSITIONS: dict[tuple[State, type[Event]], State] = {
    (State.OPEN, Prepared): State.PREPARED,
    (State.OPEN, PrepareFailed): State.ABORTED,
    (State.PREPARED, DecisionRecorded): State.DECIDED,
    (State.PREPARED, DecisionRefused): State.REFUSED,
    (State.PREPARED, DecisionUnanswered): State.UNKNOWN,
    (State.DECIDED, CommitAnswered): State.DECIDED,
    (State.DECIDED, Superseded): State.FENCED,
    (State.BROKEN, Prepared): State.MENDED,
    (State.BROKEN, PrepareFailed): State.STALLED,
    (State.MENDED, DecisionRecorded): State.DECIDED,
    (State.MENDED, DecisionRefused): State.REFUSED,
    (State.MENDED, DecisionUnanswered): State.UNKNOWN,
}
ABSENT = [pair for pair in product(State, EVENTS) if pair not in TRANSITIONS]


def in_state(state: State) -> Batch:
    """A batch in a state, with two committables that were prepared and have yet to answer."""
    both = frozenset({"a", "b"})
    return Batch(attempt=3, state=state, prepared=both, pending=both)


def committable(key: str) -> Committable:
    attempt = Attempt(PipelineId("00000000-0000-0000-0000-000000000001"), 7, 0, Incarnation(1))
    return Committable("orders", key, attempt, rows=1)


def test_every_pair_of_state_and_event_is_covered() -> None:
    assert (len(State), len(EVENTS), len(TRANSITIONS), len(ABSENT)) == (12, 7, 12, 72)
    assert set(EVENTS) == set(get_args(Event))


def test_the_table_holds_these_transitions_and_no_other() -> None:
    table = {(state, event): target for state, moves in EVENT_TRIGGERED.items() for event, target in moves.items()}
    assert table == TRANSITIONS


@pytest.mark.parametrize(("pair", "target"), TRANSITIONS.items())
def test_an_event_moves_a_batch_where_the_table_says(pair: tuple[State, type[Event]], target: State) -> None:
    state, event = pair
    assert step(in_state(state), EVENTS[event]).state is target


@pytest.mark.parametrize(("state", "event"), ABSENT)
def test_an_event_that_is_not_in_the_table_raises(state: State, event: type[Event]) -> None:
    with pytest.raises(ProtocolError) as raised:
        step(in_state(state), EVENTS[event])
    assert str(raised.value) == f"{event.__name__} cannot happen in state {state.name}"


def test_a_recorded_decision_opens_the_next_slot_and_awaits_what_was_prepared() -> None:
    prepared = step(Batch(attempt=3), Prepared(frozenset({"a", "b"})))
    assert step(prepared, DecisionRecorded()) == Batch(4, State.DECIDED, pending=frozenset({"a", "b"}))


def test_a_decision_without_committables_is_committed_at_once() -> None:
    assert step(step(Batch(0), Prepared(frozenset())), DecisionRecorded()).state is State.COMMITTED
    assert decided(1, ()).state is State.COMMITTED


def test_a_batch_found_decided_awaits_all_of_its_committables() -> None:
    found = decided(2, (committable("a"), committable("b")))
    assert found == Batch(2, State.DECIDED, pending=frozenset({"a", "b"}))


def test_a_batch_stays_decided_until_the_last_committable_has_answered() -> None:
    half = step(in_state(State.DECIDED), CommitAnswered("a", Outcome.IN_DOUBT))
    assert (half.state, half.pending) == (State.DECIDED, frozenset({"b"}))


PRECEDENCE = [Outcome.IN_DOUBT, Outcome.RETRY, Outcome.GONE]
TARGETS = {Outcome.IN_DOUBT: State.IN_DOUBT, Outcome.RETRY: State.STALLED, Outcome.GONE: State.BROKEN}


@pytest.mark.parametrize(("first", "second"), list(product(Outcome, Outcome)))
def test_the_worst_answer_decides_what_follows(first: Outcome, second: Outcome) -> None:
    batch = step(in_state(State.DECIDED), CommitAnswered("a", first))
    batch = step(batch, CommitAnswered("b", second))
    worst = next((outcome for outcome in PRECEDENCE if outcome in (first, second)), None)
    assert batch.state is (State.COMMITTED if worst is None else TARGETS[worst])


def test_every_outcome_leads_somewhere() -> None:
    assert sorted(outcome.name for outcome, _ in ANSWERS_TRIGGERED) == sorted(outcome.name for outcome in Outcome)


@pytest.mark.parametrize("key", ["a", "never heard of"])
def test_an_answer_that_nobody_waits_for_raises(key: str) -> None:
    batch = step(in_state(State.DECIDED), CommitAnswered("a", Outcome.COMMITTED))
    with pytest.raises(ProtocolError, match=f"{key} answered a commit that was not pending"):
        step(batch, CommitAnswered(key, Outcome.COMMITTED))


def test_only_what_is_gone_is_mended_and_commits_again() -> None:
    batch = step(in_state(State.DECIDED), CommitAnswered("a", Outcome.COMMITTED))
    batch = step(batch, CommitAnswered("b", Outcome.GONE))
    assert (batch.state, batch.gone) == (State.BROKEN, frozenset({"b"}))
    batch = step(step(batch, Prepared(frozenset({"b"}))), DecisionRecorded())
    assert batch == Batch(4, State.DECIDED, pending=frozenset({"b"}))
    assert step(batch, CommitAnswered("b", Outcome.COMMITTED)).state is State.COMMITTED


def test_a_batch_in_doubt_is_never_mended_although_something_is_gone() -> None:
    batch = step(in_state(State.DECIDED), CommitAnswered("a", Outcome.GONE))
    batch = step(batch, CommitAnswered("b", Outcome.IN_DOUBT))
    assert ACTIONS[batch.state] is Action.ASK


def test_every_state_has_an_action_and_the_last_seven_actions_end_the_work() -> None:
    assert set(ACTIONS) == set(State)
    assert set(list(ACTIONS)[-7:]) == FINAL


def test_every_action_is_taken_in_some_state() -> None:
    assert set(ACTIONS.values()) == set(Action)


def test_nothing_leaves_a_final_state() -> None:
    assert [state for state, moves in EVENT_TRIGGERED.items() if state in FINAL and moves] == []
