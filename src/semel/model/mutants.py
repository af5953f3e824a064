"""Seeded bugs. Each replaces one rule, one answer of a store, or one step of the driver; the checker must find each.

A change after which every property still holds is no bug, and is not in here. Three examples: a start that sweeps what
a decision names *after* it has committed it forward; stores that do not fence, because the log does; a prepare that
does not check whether the staged rows are there, because they are proven gone and mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from semel.model import bugs
from semel.model.adversary import Model
from semel.model.checker import Result, check
from semel.model.rules import Rules
from semel.model.stores import Stores
from semel.model.world import Bounds
from semel.protocol.events import DecisionRefused, DecisionUnanswered, Outcome, Superseded
from semel.protocol.states import State

#: Far more than any of them needs.
STATES_MAX = 150_000


@dataclass(frozen=True)
class Mutant:
    """A bug, and the bounds within which it is looked for."""

    name: str
    what: str
    bounds: Bounds
    make: Callable[[Bounds], Model]


@dataclass(frozen=True)
class Hunt:
    """How the search for a mutant ended. It is caught by the property that it violates."""

    mutant: Mutant
    result: Result

    @property
    def caught_by(self) -> str:
        return self.result.violations[0].name if self.result.violations else ""


def hunt(mutants: tuple[Mutant, ...] | None = None) -> Iterator[Hunt]:
    """Look for one after the other."""
    for mutant in MUTANTS if mutants is None else mutants:
        yield Hunt(mutant, check(mutant.make(mutant.bounds), states_max=STATES_MAX))


# How a mutant is made -------------------------------------------------------------------------------------------------


def rules(**changed: Any) -> Callable[[Bounds], Model]:
    return lambda bounds: Model(bounds, rules=Rules(bounds.tasks, **changed))


def stores(changed: type[Stores]) -> Callable[[Bounds], Model]:
    return lambda bounds: Model(bounds, stores=changed(bounds.tasks))


def small(*sinks: str, batches: int = 1, tasks: int = 1, **faults: Any) -> Bounds:
    """One batch and no faults but those named."""
    none = Bounds(sinks or ("prepared",), batches, tasks, crashes=0, zombies=0, lost=0, expiries=0, restarts=0)
    return replace(none, **faults)


STRAYED = small("idempotent", batches=2, crashes=2, forgets=1, drop_in=True, strays=1)

MUTANTS = (
    # Deciding
    Mutant(
        "decide_before_all_prepared",
        "the batch is decided when the first sink has prepared",
        small("prepared", "ledger"),
        bugs.DecidesBeforeAllHavePrepared,
    ),
    Mutant(
        "commit_before_decision",
        "sinks commit before the decision is durable",
        small("ledger"),
        bugs.CommitsBeforeTheDecision,
    ),
    Mutant(
        "unanswered_is_recorded",
        "a decision that was not answered is taken for recorded",
        small(lost=1),
        rules(step=bugs.recording(DecisionUnanswered)),
    ),
    Mutant(
        "unanswered_is_refused",
        "a decision that was not answered is rolled back",
        small(lost=1),
        rules(step=bugs.moving(State.PREPARED, DecisionUnanswered, State.REFUSED)),
    ),
    Mutant(
        "refused_is_recorded",
        "a slot that is taken is taken for ours",
        small("idempotent", zombies=2),
        rules(step=bugs.recording(DecisionRefused)),
    ),
    Mutant("slot_is_overwritten", "the log replaces what is in a slot", small(zombies=1), bugs.OverwritesSlots),
    Mutant(
        "slot_is_passed_over",
        "who finds its slot taken decides in the next",
        small(zombies=1),
        bugs.GoesOnInTheNextSlot,
    ),
    Mutant(
        "checkpoint_when_decided",
        "Spark is told that the batch is done when it is decided",
        small(),
        bugs.CheckpointsWhenDecided,
    ),
    # Committing
    Mutant(
        "fenced_is_done",
        "a driver that is fenced reports the batch as committed",
        small(batches=2, zombies=1),
        rules(step=bugs.moving(State.DECIDED, Superseded, State.COMMITTED)),
    ),
    Mutant(
        "retry_is_done",
        "unknown is taken for committed",
        small(batches=2, lost=1),
        rules(step=bugs.believing(Outcome.RETRY)),
    ),
    Mutant("silence_is_done", "a lost answer is taken for success", small(batches=2, lost=1), bugs.TakesSilenceForDone),
    Mutant("silence_is_gone", "a lost answer is taken for proof", small(lost=1), bugs.TakesSilenceForGone),
    Mutant(
        "doubt_is_done",
        "in doubt is taken for committed",
        small(batches=2, doubts=1),
        rules(step=bugs.believing(Outcome.IN_DOUBT)),
    ),
    Mutant("gone_is_done", "gone is taken for committed", small(expiries=1), rules(step=bugs.believing(Outcome.GONE))),
    Mutant(
        "missing_is_already_committed",
        "a store takes what it does not know for committed",
        small(expiries=1),
        stores(bugs.TakesGoneForDone),
    ),
    Mutant(
        "gone_without_proof", "a store says gone and did not ask the marker", small(lost=1), stores(bugs.AsksNoMarker)
    ),
    Mutant(
        "first_answer_is_enough",
        "the batch is done when one sink has answered",
        small("prepared", "ledger", batches=2),
        rules(step=bugs.first_answer_is_enough),
    ),
    Mutant(
        "commit_unnamed",
        "branches of lost tasks are committed too",
        small("ledger", retries=1),
        bugs.CommitsWhatWasNotNamed,
    ),
    Mutant(
        "second_look_skipped",
        "no look for a newer claim between decision and commit",
        small(batches=2, zombies=1),
        bugs.DoesNotLookAgain,
    ),
    Mutant(
        "roll_back_after_decision",
        "a driver that is fenced rolls back what it decided",
        small(zombies=1),
        bugs.RollsBackWhatItDecided,
    ),
    Mutant(
        "roll_back_the_whole_batch",
        "a driver that withdraws drops the other driver's branches too",
        small("idempotent", zombies=1),
        bugs.RollsBackTheWholeBatch,
    ),
    Mutant(
        "tidy_before_commit",
        "staging is cleaned once the batch is decided",
        small("idempotent"),
        bugs.TidiesBeforeItCommits,
    ),
    # Starting
    Mutant(
        "fence_forgotten",
        "a driver never asks whether a newer one has claimed",
        small("idempotent", zombies=1),
        rules(resolve_batch=bugs.ignores_claims),
    ),
    Mutant(
        "claim_before_journal",
        "a driver looks for a newer claim first and reads the journal second",
        small("idempotent", zombies=1),
        bugs.LooksBeforeItReads,
    ),
    Mutant("slot_not_closed", "a start does not close the open slot", small(crashes=1), bugs.DoesNotClose),
    Mutant(
        "sweep_before_close", "a start sweeps and closes the slot then", small(zombies=1), bugs.SweepsBeforeItCloses
    ),
    Mutant(
        "staging_cleaned", "a start drops whatever is staged, then looks", small(crashes=1), bugs.CleansStagingAtStart
    ),
    Mutant("sweep_nothing", "a start drops nothing", small(crashes=1), rules(resolve_leftover=bugs.aborts_nothing)),
    Mutant("withdraw_nothing", "a driver that withdraws leaves its branches", small(zombies=1), bugs.WithdrawsNothing),
    Mutant(
        "attempt_reused",
        "every attempt has the number 0",
        small(crashes=1),
        rules(resolve_batch=bugs.always_attempt_0),
    ),
    Mutant(
        "decided_batch_run_again",
        "a batch that is found decided is run again",
        small(crashes=1),
        rules(resolve_batch=bugs.runs_what_is_decided),
    ),
    Mutant("pruned_too_early", "the journal is forgotten before the checkpoint", small(crashes=1), bugs.PrunesTooEarly),
    # Plans
    Mutant(
        "plan_not_compared",
        "nobody asks whether the checkpoint still says what was decided",
        small("ledger", crashes=1, forgets=1),
        rules(resolve_plan=bugs.compares_no_plans),
    ),
    Mutant(
        "plan_not_restored",
        "a plan that is missing is refused, although the decision carries it",
        small("ledger", crashes=1, forgets=1),
        rules(resolve_plan=bugs.restores_nothing),
    ),
    Mutant(
        "files_only",
        "a driver compares files and does not ask what Spark has in its hands",
        small("idempotent", crashes=1, zombies=1, forgets=1),
        rules(resolve_plan=bugs.looks_at_files_only),
    ),
    Mutant(
        "checkpoint_believed",
        "a start takes the batch of an old checkpoint for the next one, although newer ones are decided",
        small("ledger", batches=2, crashes=1, forgets=1),
        bugs.BelievesTheCheckpoint,
    ),
    Mutant(
        "staged_behind_refused",
        "a start refuses what is staged of the batch behind the one that it finds decided",
        small("ledger", batches=2, crashes=1, forgets=1),
        rules(refuse_rolled_back=bugs.refuses_what_is_staged_behind),
    ),
    Mutant(
        "closes_one_batch_only",
        "a start sweeps the batch behind and does not close its slot",
        small("idempotent", batches=2, zombies=1),
        bugs.ClosesOneBatchOnly,
    ),
    Mutant(
        "gone_on_ignored",
        "the decided plan is put back though somebody has written rows behind the one that is there",
        STRAYED,
        rules(gone_on_from=bugs.nobody_has_gone_on),
    ),
    Mutant(
        "decided_behind_ignored",
        "the decided plan is put back though the next batch may have been decided behind the one that is there",
        STRAYED,
        rules(gone_on_from=bugs.what_is_decided_is_explained),
    ),
    Mutant(
        "gone_on_everywhere",
        "the end of a batch and the plan of the next one prove that rows were written from another plan",
        small("idempotent", batches=2, crashes=1, forgets=1, drop_in=True),
        rules(gone_on_from=bugs.any_file_is_proof),
    ),
    Mutant(
        "plan_behind_kept",
        "the decided plan is put back, and that of the next batch stays, which was made behind another one",
        small("idempotent", batches=2, crashes=2, forgets=1, drop_in=True),
        rules(plan_to_drop=lambda *_: None),
    ),
    Mutant(
        "beginning_believed",
        "a query is not asked behind which plan it began",
        small("idempotent", batches=2, crashes=1, zombies=1, forgets=1),
        rules(begins_elsewhere=lambda *_: False),
    ),
    # Mending
    Mutant(
        "mend_under_a_new_key",
        "a mend does not replace what was gone",
        small(crashes=1, expiries=1),
        rules(replace_gone=bugs.mends_under_a_new_key),
    ),
    Mutant(
        "mend_forgotten",
        "recovery reads the first decision and not its mends",
        small(crashes=1, expiries=1),
        rules(effective_committables=bugs.ignores_mends),
    ),
    Mutant(
        "mend_with_everything",
        "tasks that are visible are written again",
        small(tasks=2, expiries=1),
        rules(choose_parts=bugs.mends_with_everything, replace_gone=bugs.keeps_any_key),
    ),
    Mutant(
        "mend_by_task_number",
        "a replay's tasks are told by their numbers",
        small(tasks=2, expiries=1),
        rules(choose_parts=bugs.mends_by_task_number),
    ),
    # Stores
    Mutant(
        "epoch_reused",
        "a late commit ends the next transaction of the same name",
        small(batches=2, lost=1),
        stores(bugs.LateCommitsHitTheNext),
    ),
    Mutant(
        "marker_beside_the_rows",
        "the marker is not in the rows' transaction",
        small(lost=1),
        stores(bugs.MarksNothing),
    ),
    Mutant(
        "ledger_row_forgotten",
        "rows are moved and no ledger row is written",
        small("ledger", lost=1),
        stores(bugs.MarksNothing),
    ),
    Mutant("flush_skipped", "a task reports before its rows are written", small(retries=1), stores(bugs.SkipsTheFlush)),
    Mutant("prepared_is_visible", "readers see what is prepared", small(), stores(bugs.ShowsWhatIsStaged)),
)
