"""What a start does about each batch and each leftover that it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Aborted, Committable, Decided, Journal, Record, Started
from semel.protocol.recovery import (
    CommitForward,
    Facts,
    Fate,
    Run,
    StandDown,
    Unclear,
    closes_behind,
    closes_slots,
    effective_committables,
    resolve_batch,
    resolve_leftover,
    slot_to_begin_in,
)
from semel.protocol.step import ProtocolError

PIPELINE = PipelineId("00000000-0000-0000-0000-000000000001")
BATCH = 42


def attempt(slot: int, *, batch: int = BATCH, incarnation: int = 2) -> Attempt:
    return Attempt(PIPELINE, batch, slot, Incarnation(incarnation))


def branch(slot: int, sink: str = "orders", *, batch: int = BATCH, incarnation: int = 2) -> Branch:
    return Branch(attempt(slot, batch=batch, incarnation=incarnation), sink, 0, 0)


def committable(slot: int, sink: str = "orders") -> Committable:
    return Committable(sink, sink, attempt(slot), rows=1, branches=(str(branch(slot, sink)),))


def decision(slot: int, *sinks: str, mends: bool = False) -> Decided:
    return Decided(attempt(slot), tuple(committable(slot, sink) for sink in sinks), mends)


def facts(*journal: Record, incarnation: int = 2, newest_claim: int = 2) -> Facts:
    return Facts(journal, incarnation, newest_claim)


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_batch_without_a_journal_is_run_and_decided_in_slot_0() -> None:
    assert resolve_batch(facts()) == Run(attempt=0)


def test_a_batch_whose_slots_are_closed_is_run_and_decided_in_the_next() -> None:
    assert resolve_batch(facts(Aborted(attempt(0)), Aborted(attempt(1)))) == Run(attempt=2)


def test_a_decided_batch_is_committed_forward() -> None:
    resolution = resolve_batch(facts(Aborted(attempt(0)), decision(1, "orders", "audit")))
    assert resolution == CommitForward(2, (committable(1, "orders"), committable(1, "audit")))


def test_a_batch_decided_with_nothing_inside_is_committed_forward_and_not_run() -> None:
    assert resolve_batch(facts(decision(0))) == CommitForward(1, ())


@pytest.mark.parametrize(
    ("journal", "slot"),
    [
        ((), 0),
        ((Aborted(attempt(0)),), 1),
        ((Aborted(attempt(0)), Aborted(attempt(1))), 2),
        ((Started(attempt(0)),), None),
        ((Aborted(attempt(0)), Started(attempt(1))), None),
        ((decision(0, "orders"),), None),
        ((decision(0, "orders"), Aborted(attempt(1))), None),
    ],
)
def test_a_batch_is_begun_once_and_a_closed_slot_began_nothing(journal: Journal, slot: int | None) -> None:
    assert slot_to_begin_in(journal) == slot


def test_a_batch_begun_at_most_once_is_unclear() -> None:
    assert resolve_batch(facts(Started(attempt(0)))) == Unclear()
    assert resolve_batch(facts(Aborted(attempt(0)), Started(attempt(1)))) == Unclear()


@pytest.mark.parametrize("journal", [(), (decision(0, "orders"),), (Started(attempt(0)),)])
def test_a_superseded_driver_stands_down_whatever_else_it_finds(journal: Journal) -> None:
    assert resolve_batch(facts(*journal, newest_claim=3)) == StandDown(3)


# Journals -------------------------------------------------------------------------------------------------------------


def test_a_mend_replaces_what_was_gone_and_keeps_the_rest() -> None:
    journal = (decision(0, "orders", "audit"), decision(1, "audit", mends=True))
    assert effective_committables(journal) == (committable(0, "orders"), committable(1, "audit"))


def test_the_last_of_several_mends_counts_and_closed_slots_between_them_do_not() -> None:
    journal = (
        decision(0, "orders", "audit"),
        decision(1, "audit", mends=True),
        Aborted(attempt(2)),
        decision(3, "audit", mends=True),
    )
    assert effective_committables(journal) == (committable(0, "orders"), committable(3, "audit"))


def test_a_second_decision_raises() -> None:
    with pytest.raises(ProtocolError, match="slot 1 decides a batch that was decided before"):
        effective_committables((decision(0, "orders"), decision(1, "orders")))


def test_a_mend_of_what_was_never_decided_raises() -> None:
    with pytest.raises(ProtocolError, match="or mends one that was not"):
        effective_committables((decision(0, "orders", mends=True),))


def test_a_record_in_the_wrong_slot_raises() -> None:
    with pytest.raises(ProtocolError, match="slot 0 holds a record of attempt 1"):
        effective_committables((Aborted(attempt(1)),))


SINKS = ("orders", "audit", "lake")
# What each further slot holds: None closes it, a set of sinks decides or mends them.
slots = st.lists(st.none() | st.frozensets(st.sampled_from(SINKS)), max_size=8)


def journal_of(plan: list[frozenset[str] | None]) -> Journal:
    """A journal as a coordinator writes it: the first decision covers all sinks, later ones mend some."""
    records: list[Record] = []
    for slot, sinks in enumerate(plan):
        mends = any(isinstance(record, Decided) for record in records)
        chosen = [sink for sink in SINKS if not mends or sink in (sinks or ())]
        records.append(Aborted(attempt(slot)) if sinks is None else decision(slot, *chosen, mends=mends))
    return tuple(records)


@given(slots)
def test_any_journal_folds_to_the_newest_committable_of_every_sink(plan: list[frozenset[str] | None]) -> None:
    journal = journal_of(plan)
    folded = effective_committables(journal)
    newest = {c.key: c for record in journal if isinstance(record, Decided) for c in record.committables}
    if not newest:
        assert folded is None
        assert resolve_batch(facts(*journal)) == Run(attempt=len(journal))
    else:
        assert folded is not None
        assert {c.key: c for c in folded} == newest
        assert [c.key for c in folded] == list(SINKS)
        assert resolve_batch(facts(*journal)) == CommitForward(len(journal), folded)


@given(slots)
def test_closing_the_next_slot_of_any_journal_changes_no_decision(plan: list[frozenset[str] | None]) -> None:
    journal = journal_of(plan)
    closed = (*journal, Aborted(attempt(len(journal))))
    assert effective_committables(closed) == effective_committables(journal)


@given(slots)
def test_after_any_journal_exactly_the_named_branches_are_kept(plan: list[frozenset[str] | None]) -> None:
    journal = journal_of(plan)
    named = {name for c in effective_committables(journal) or () for name in c.branches}
    leftovers = [branch(slot, sink) for slot in range(len(journal)) for sink in SINKS]
    fates = {str(b): resolve_leftover(b, journal, next_batch=BATCH, incarnation=3) for b in leftovers}
    assert fates == {str(b): Fate.KEEP if str(b) in named else Fate.ABORT for b in leftovers}


# Leftovers ------------------------------------------------------------------------------------------------------------


def fate(leftover: Branch, *journal: Record, incarnation: int = 3) -> Fate:
    return resolve_leftover(leftover, journal, next_batch=BATCH, incarnation=incarnation)


def test_a_branch_of_a_checkpointed_batch_is_aborted_even_if_its_decision_names_it() -> None:
    old = branch(0, batch=BATCH - 1)
    named = Decided(old.attempt, (replace(committable(0), attempt=old.attempt, branches=(str(old),)),))
    assert fate(old, named) is Fate.ABORT


def test_a_branch_of_a_batch_that_the_checkpoint_does_not_know_is_kept_for_whoever_comes_after_us() -> None:
    assert fate(branch(0, batch=BATCH + 1)) is Fate.KEEP


def test_a_branch_of_a_newer_incarnation_is_kept() -> None:
    assert fate(branch(0, incarnation=4), Aborted(attempt(0))) is Fate.KEEP


def test_a_branch_in_a_closed_slot_is_aborted() -> None:
    assert fate(branch(0), Aborted(attempt(0))) is Fate.ABORT


def test_a_branch_in_an_open_slot_is_kept_because_its_owner_may_still_decide() -> None:
    assert fate(branch(1), Aborted(attempt(0))) is Fate.KEEP


def test_a_branch_that_the_decision_names_is_kept() -> None:
    assert fate(branch(0), decision(0, "orders")) is Fate.KEEP


def test_a_retry_of_a_task_that_the_decision_does_not_name_is_aborted() -> None:
    assert fate(replace(branch(0), retry=1), decision(0, "orders")) is Fate.ABORT


def test_a_branch_that_was_mended_away_is_aborted() -> None:
    journal = (decision(0, "orders"), decision(1, "orders", mends=True))
    assert fate(branch(0), *journal) is Fate.ABORT
    assert fate(branch(1), *journal) is Fate.KEEP


def test_the_first_incarnation_closes_nothing() -> None:
    assert [closes_slots(incarnation) for incarnation in (1, 2, 9)] == [False, True, True]


def test_the_slot_behind_is_closed_when_something_of_its_batch_is_staged() -> None:
    assert closes_behind(7, {6, 7, 8})
    assert not closes_behind(7, {6, 7, 9})
    assert not closes_behind(7, ())
