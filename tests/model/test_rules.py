"""The model has no rules of its own: it calls the production functions."""

from __future__ import annotations

from semel.ids import parse_branch
from semel.model.observer import words
from semel.model.rules import Rules, batch_of, branch_of, code_of_batch, code_of_branch, code_of_committable
from semel.model.world import (
    ABORTED,
    DECIDED,
    CommittableCode,
    JournalCode,
    content,
    create_slot,
    pack,
    read_journal,
    unpack,
)
from semel.protocol import plans, recovery, refusals, states
from semel.protocol import step as step_module
from semel.protocol.events import CommitAnswered, Outcome
from semel.runtime import mend

BRANCH = pack(1, 2, 3, 1, 0)
CODE: CommittableCode = (0, "s0/1", 1, 2, 3, (BRANCH,), 0)


def test_every_rule_is_the_production_function() -> None:
    rules = Rules(tasks=1)
    assert rules.step is step_module.step
    assert rules.decided is step_module.decided
    assert rules.resolve_batch is recovery.resolve_batch
    assert rules.resolve_leftover is recovery.resolve_leftover
    assert rules.effective_committables is recovery.effective_committables
    assert rules.resolve_plan is plans.resolve_plan
    assert rules.must_start_again is plans.must_start_again
    assert rules.decided_plan is recovery.decided_plan
    assert rules.refuse_rolled_back is refusals.refuse_rolled_back
    assert rules.choose_parts is mend.choose_parts
    assert rules.replace_gone is mend.replace_gone
    assert rules.actions is states.ACTIONS


def test_a_branch_survives_its_code() -> None:
    name = str(branch_of(BRANCH, sink=2))
    assert parse_branch(name) == branch_of(BRANCH, sink=2)
    assert code_of_branch(name) == BRANCH
    assert unpack(BRANCH) == (1, 2, 3, 1, 0)
    assert words(BRANCH) == "batch 1 attempt 2 task 1 retry 0 of incarnation 3"


def test_a_committable_survives_its_code() -> None:
    assert code_of_committable(Rules(tasks=2).committable(CODE)) == CODE


def test_a_batch_survives_its_code() -> None:
    rules = Rules(tasks=1)
    journal: JournalCode = ((ABORTED, 1, (), 0), (ABORTED, 2, (), 0), (DECIDED, 3, (CODE,), 0))
    name, work = rules.resolve(journal, 1, 3, 3)
    assert (name, work) == ("CommitForward", ("DECIDED", 3, (), ("s0/1",), ()))
    assert work
    after = rules.advance(work, CommitAnswered("s0/1", Outcome.GONE))
    assert after == ("BROKEN", 3, (), (), (("s0/1", "GONE"),))
    assert code_of_batch(batch_of(after)) == after


def test_what_the_functions_answered_is_remembered_as_reached() -> None:
    rules = Rules(tasks=1)
    rules.resolve((), 0, 1, 2)
    rules.fate(BRANCH, 0, (), 0, 1)
    assert rules.seen == {("resolution", "StandDown"), ("fate", "KEEP")}


def test_a_replay_numbers_its_tasks_otherwise() -> None:
    assert [content(pack(0, attempt, 1, task, 0), 2) for attempt in (0, 1) for task in (0, 1)] == [0, 1, 1, 0]


def test_a_journal_is_read_up_to_its_first_hole() -> None:
    first, second = (ABORTED, 1, (), 0), (ABORTED, 2, (), 0)
    behind_a_hole = create_slot((), 1, second)
    assert behind_a_hole == ((), second)
    assert read_journal(behind_a_hole) == ()
    filled = create_slot(behind_a_hole, 0, first)
    assert filled is not None
    assert read_journal(filled) == (first, second)
    assert create_slot(filled, 1, first) is None
