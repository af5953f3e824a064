"""Seeded bugs: each is caught, and by the bug and not by the bounds."""

from __future__ import annotations

import pytest

from semel.model.adversary import Model
from semel.model.checker import check
from semel.model.mutants import MUTANTS, Mutant, hunt
from semel.model.properties import ALWAYS
from semel.model.trace import numbered

CAUGHT_BY = {
    "decide_before_all_prepared": "no_loss",
    "commit_before_decision": "nothing_early",
    "unanswered_is_recorded": "nothing_early",
    "unanswered_is_refused": "decided_is_kept",
    "refused_is_recorded": "nothing_early",
    "slot_is_overwritten": "decided_is_kept",
    "slot_is_passed_over": "one_decision",
    "checkpoint_when_decided": "no_loss",
    "fenced_is_done": "no_loss",
    "retry_is_done": "no_loss",
    "silence_is_done": "no_loss",
    "silence_is_gone": "no_duplicate",
    "doubt_is_done": "no_loss",
    "gone_is_done": "no_loss",
    "missing_is_already_committed": "no_loss",
    "gone_without_proof": "no_duplicate",
    "first_answer_is_enough": "no_loss",
    "commit_unnamed": "no_duplicate",
    "second_look_skipped": "no_torn",
    "roll_back_after_decision": "decided_is_kept",
    "roll_back_the_whole_batch": "decided_is_kept",
    "tidy_before_commit": "decided_is_kept",
    "fence_forgotten": "one_decision",
    "claim_before_journal": "one_decision",
    "slot_not_closed": "no_orphan",
    "sweep_before_close": "decided_is_kept",
    "staging_cleaned": "decided_is_kept",
    "sweep_nothing": "no_orphan",
    "withdraw_nothing": "no_orphan",
    "attempt_reused": "tables",
    "decided_batch_run_again": "no_torn",
    "pruned_too_early": "finishes",
    "plan_not_compared": "no_loss",
    "plan_not_restored": "plan_kept",
    "files_only": "no_loss",
    "checkpoint_believed": "finishes",
    "staged_behind_refused": "finishes",
    "closes_one_batch_only": "decided_is_kept",
    "gone_on_ignored": "no_loss",
    "decided_behind_ignored": "no_loss",
    "gone_on_everywhere": "plan_kept",
    "plan_behind_kept": "no_loss",
    "beginning_believed": "no_loss",
    "mend_under_a_new_key": "finishes",
    "mend_forgotten": "finishes",
    "mend_with_everything": "no_duplicate",
    "mend_by_task_number": "no_duplicate",
    "epoch_reused": "nothing_early",
    "marker_beside_the_rows": "no_duplicate",
    "ledger_row_forgotten": "no_duplicate",
    "flush_skipped": "no_loss",
    "prepared_is_visible": "nothing_early",
}


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 20
    assert set(CAUGHT_BY) == {m.name for m in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught_by_the_property_that_it_breaks(mutant: Mutant) -> None:
    (found,) = hunt((mutant,))
    assert found.caught_by == CAUGHT_BY[mutant.name]
    assert found.caught_by in ALWAYS
    assert len(numbered(found.result.violations[0].trace)) == found.result.depth


@pytest.mark.parametrize("bounds", sorted({m.bounds for m in MUTANTS}, key=repr), ids=repr)
def test_without_the_bug_nothing_is_violated_within_the_same_bounds(bounds: object) -> None:
    (mutant, *_) = [m for m in MUTANTS if m.bounds == bounds]
    result = check(Model(mutant.bounds))
    assert result.complete
    assert result.violations == ()


def test_every_property_is_broken_by_some_mutant() -> None:
    assert set(CAUGHT_BY.values()) == set(ALWAYS)
