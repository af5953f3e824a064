"""What follows when the checkpoint says something else of a decided batch than the decision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Aborted, Committable, Decided
from semel.protocol.invariants import decision_carries_its_plan
from semel.protocol.plans import (
    Behind,
    Plan,
    PlanAction,
    PlanFacts,
    PlannedFile,
    begins_elsewhere,
    compare,
    digest_of,
    first_batch,
    first_to_put_back,
    gone_on_from,
    is_of_another_plan,
    is_read_at_start,
    is_strange,
    lists_to_put_back,
    must_start_again,
    newest_state,
    next_batch_of,
    plan_to_drop,
    resolve_plan,
    undecided_gap,
    what_is_read,
)
from semel.protocol.recovery import decided_plan


def planned(path: str, content: str, *, carried: bool = True) -> PlannedFile:
    return PlannedFile(path, digest_of(content.encode()), content if carried else None)


PLAN = Plan((planned("sources/0/7", "files"), planned("offsets/7", "to 70")), (planned("commits/6", "done"),))
LARGE = Plan((planned("sources/0/7", "many files", carried=False), planned("offsets/7", "to 70")))
AS_DECIDED = {file.path: file.digest for file in (*PLAN.files, *PLAN.before)}


# What is compared -----------------------------------------------------------------------------------------------------


def test_what_says_the_same_is_neither_missing_nor_different() -> None:
    assert compare(PLAN, AS_DECIDED) == ([], [])
    assert compare(PLAN, {**AS_DECIDED, "offsets/8": "sha256:somebody else's"}) == ([], [])


@pytest.mark.parametrize("found", [{}, dict.fromkeys(AS_DECIDED)])
def test_what_is_not_there_is_missing(found: dict[str, None]) -> None:
    assert compare(PLAN, found) == (["sources/0/7", "offsets/7", "commits/6"], [])


def test_what_says_something_else_is_different() -> None:
    found = {**AS_DECIDED, "offsets/7": digest_of(b"to 90"), "commits/6": None}
    assert compare(PLAN, found) == (["commits/6"], ["offsets/7"])


def test_the_digest_of_a_plan_is_that_of_its_rows() -> None:
    assert Plan(PLAN.files).digest == PLAN.digest  # what was done before changes no row
    assert LARGE.digest == Plan((planned("sources/0/7", "many files"), planned("offsets/7", "to 70"))).digest
    others = [Plan((planned("offsets/7", "to 70"),)), Plan((PLAN.files[0], planned("offsets/7", "to 90")))]
    others.append(Plan((planned("sources/1/7", "files"), PLAN.files[1])))
    assert len({plan.digest for plan in (PLAN, *others)}) == 4
    assert digest_of(b"to 70").startswith("sha256:")


# What follows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PLAN, LARGE, None])
@pytest.mark.parametrize("under_way", [True, False])
def test_a_plan_that_is_as_decided_is_gone_on_with(plan: Plan | None, under_way: bool) -> None:
    assert resolve_plan(PlanFacts(plan, written_from_it="offsets/8 is there", under_way=under_way)) is PlanAction.GO_ON


def test_what_is_missing_is_restored_before_spark_plans() -> None:
    assert resolve_plan(PlanFacts(PLAN, missing=["offsets/7", "commits/6"])) is PlanAction.RESTORE


@pytest.mark.parametrize("missing", [[], ["commits/6"]])
def test_another_plan_that_nobody_has_used_is_put_back(missing: list[str]) -> None:
    assert resolve_plan(PlanFacts(PLAN, missing, different=["offsets/7"])) is PlanAction.PUT_BACK


@pytest.mark.parametrize("facts", [PlanFacts(PLAN, ["offsets/7"]), PlanFacts(PLAN, [], ["offsets/7"])])
def test_when_spark_has_handed_over_the_rows_it_must_start_again(facts: PlanFacts) -> None:
    assert resolve_plan(replace(facts, under_way=True)) is PlanAction.RESTART


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.parametrize(
    "facts",
    [
        pytest.param((None, ["offsets/7"], []), id="the decision recorded no plan"),
        pytest.param((LARGE, ["sources/0/7"], []), id="what is missing was not carried"),
        pytest.param((LARGE, ["offsets/7"], ["sources/0/7"]), id="what is different was not carried"),
    ],
)
def test_what_cannot_be_restored_is_refused(facts: tuple[Plan | None, list[str], list[str]], under_way: bool) -> None:
    assert resolve_plan(PlanFacts(*facts, under_way=under_way)) is PlanAction.REFUSE


@pytest.mark.parametrize("under_way", [True, False])
def test_another_plan_that_somebody_has_gone_on_from_is_refused(under_way: bool) -> None:
    facts = PlanFacts(PLAN, different=["offsets/7"], written_from_it="commits/7 is there", under_way=under_way)
    assert resolve_plan(facts) is PlanAction.REFUSE


def test_what_was_not_carried_does_not_matter_while_it_is_there() -> None:
    assert resolve_plan(PlanFacts(LARGE, missing=["offsets/7"])) is PlanAction.RESTORE


# Lists of files -------------------------------------------------------------------------------------------------------


def lists_of(*names: str) -> Plan:
    return Plan((*(planned(f"sources/0/{name}", f"files of {name}") for name in names), planned("offsets/1", "x")))


#: Newest first: the plan of batch 3 has two lists, that of batch 1 is compacted.
LISTS = (lists_of("11", "12"), lists_of("10"), lists_of("9.compact"), lists_of("8"))


@pytest.mark.parametrize(
    ("missing", "wanted", "left"),
    [
        ((), [], set()),
        (("10",), ["10"], set()),
        (("11", "12", "8"), ["12", "11", "8"], set()),
        (("7", "8", "9"), ["9.compact"], set()),
        (("7", "10"), ["10"], {"7"}),
        (("13",), [], {"13"}),
    ],
)
def test_a_missing_list_is_in_the_decision_of_its_batch_or_in_a_newer_one_that_holds_all_before_it(
    missing: tuple[str, ...], wanted: list[str], left: set[str]
) -> None:
    found, unknown = lists_to_put_back([f"sources/0/{name}" for name in missing], LISTS)
    assert [file.path for file in found] == [f"sources/0/{name}" for name in wanted]
    assert unknown == {f"sources/0/{name}" for name in left}


def test_a_list_that_was_too_large_and_one_of_another_source_stand_for_nothing() -> None:
    large = Plan((planned("sources/0/9.compact", "many files", carried=False),))
    assert lists_to_put_back(["sources/0/9"], [large]) == ([], {"sources/0/9"})
    assert lists_to_put_back(["sources/1/8"], LISTS) == ([], {"sources/1/8"})
    found, left = lists_to_put_back(["sources/0/9", "sources/1/8"], LISTS)
    assert ([file.path for file in found], left) == (["sources/0/9.compact"], {"sources/1/8"})


# Which batch comes next ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest_done", "newest_planned", "following"),
    [(-1, -1, 0), (-1, 0, 0), (4, 4, 5), (4, 5, 5), (2, 5, 5), (7, 5, 8)],
)
def test_what_is_planned_implies_that_what_came_before_is_done(
    newest_done: int, newest_planned: int, following: int
) -> None:
    assert next_batch_of(newest_done, newest_planned) == following


@pytest.mark.parametrize(
    ("next_batch", "decided", "first"), [(5, [], 5), (5, [3, 4], 5), (5, [5], 5), (5, [5, 6, 7], 7)]
)
def test_spark_goes_on_with_the_newest_that_is_decided(next_batch: int, decided: list[int], first: int) -> None:
    assert first_batch(next_batch, decided) == first


def test_spark_reads_the_newest_plan_and_the_one_before() -> None:
    assert [b for b in range(9) if is_read_at_start(b, 7, is_planned=True)] == [6, 7, 8]
    assert [b for b in range(9) if is_read_at_start(b, 7, is_planned=False)] == [5, 6, 7, 8]


def test_of_a_batch_that_is_over_the_offsets_are_read() -> None:
    assert what_is_read(PLAN, is_over=True) == Plan((PLAN.files[1],))
    assert what_is_read(PLAN, is_over=False) == PLAN


def test_of_a_batch_that_is_over_and_was_planned_anew_the_lists_of_its_sources_are_another_plans_too() -> None:
    assert what_is_read(PLAN, is_over=True, is_replanned=True) == PLAN


@pytest.mark.parametrize(
    ("newest_planned", "decided", "first"),
    [(7, [4, 5, 6, 7], 5), (6, [4, 5, 6, 7], 5), (4, [5, 6, 7], 5), (3, [4, 5, 6, 7], 4), (-1, range(8), 0)],
)
def test_nothing_is_left_out_behind_the_plans_that_are_there(
    newest_planned: int, decided: Collection[int], first: int
) -> None:
    assert first_to_put_back(7, newest_planned, decided) == first


def test_where_the_log_has_forgotten_some_of_them_the_last_two_are_put_back() -> None:
    assert first_to_put_back(7, 2, [4, 5, 6, 7]) == first_to_put_back(7, 2, [3, 5, 6, 7]) == 5


BATCHES = st.sets(st.integers(0, 12))


# Who has gone on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(Behind(), id="nothing is behind"),
        pytest.param(Behind(7, 6, [7]), id="it is planned"),
        pytest.param(Behind(7, 7, [7]), id="its end is that of its decision"),
        pytest.param(Behind(8, 7, [7]), id="a plan is no row"),
        pytest.param(Behind(8, 6, [7]), id="nor is it one where that end is lost"),
        pytest.param(Behind(8, 7, [6, 7, 8]), id="the next batch is decided for another plan"),
        pytest.param(Behind(9, 8, [7, 8]), id="and it has ended, too"),
        pytest.param(Behind(8, 7, [7], begun=[6, 7]), id="what was begun before does not matter"),
    ],
)
def test_nobody_has_gone_on_while_decisions_explain_all_that_spark_has_ended(behind: Behind) -> None:
    assert gone_on_from(7, behind) == ""


@pytest.mark.parametrize(
    ("behind", "proof"),
    [
        (Behind(8, 8, [7]), "commits/8 is there"),
        (Behind(8, 8, [6, 7]), "commits/8 is there"),
        # A batch in between was written under a weaker guarantee.
        (Behind(9, 8, [7, 9]), "commits/8 is there"),
        # Spark plans a batch when the one before is done: its end is lost, and no decision explains it.
        (Behind(9, 7, [7]), "offsets/9 is there"),
        (Behind(8, 7, [7], begun=[8]), "batch 8 was begun at-most-once"),
        # It may have been decided behind the other plan.
        (Behind(8, 7, [7, 8], as_decided=[8]), "offsets/8 is there"),
        (Behind(9, 8, [7, 8, 9], as_decided=[9]), "offsets/9 is there"),
    ],
)
def test_what_no_decision_explains_proves_that_somebody_has_gone_on(behind: Behind, proof: str) -> None:
    assert gone_on_from(7, behind) == proof


@given(
    st.integers(0, 9),
    st.integers(-1, 12),
    st.integers(-1, 12),
    st.sets(st.integers(0, 12)),
    st.sets(st.integers(0, 12)),
)
def test_an_end_without_a_decision_is_never_overlooked(
    batch: int, planned: int, done: int, decided: set[int], begun: set[int]
) -> None:
    behind = Behind(planned, done, decided | {batch}, begun=begun)
    unexplained = set(range(batch, done + 1)) - behind.decided  # type: ignore[operator]
    if unexplained:
        assert gone_on_from(batch, behind) != ""
    if (dropped := plan_to_drop(batch, behind)) is not None and gone_on_from(batch, behind) == "":
        assert dropped > done
        assert dropped not in decided | begun


@pytest.mark.parametrize(
    ("behind", "dropped"),
    [
        (Behind(8, 7, [7]), 8),
        (Behind(8, 6, [7]), 8),
        (Behind(7, 7, [7]), None),
        (Behind(8, 7, [7, 8]), None),
        (Behind(8, 8, [7]), None),
        (Behind(9, 7, [7]), None),
        (Behind(8, 7, [7], begun=[8]), None),
    ],
)
def test_the_plan_behind_another_one_goes_where_nobody_has_decided_it(behind: Behind, dropped: int | None) -> None:
    assert plan_to_drop(7, behind) == dropped


@pytest.mark.parametrize(
    ("found", "in_hand", "elsewhere"),
    [("a", "a", False), (None, None, False), ("b", "b", True), ("a", "b", True), ("b", "a", True), (None, "b", True)],
)
def test_a_query_begins_where_the_decided_batch_before_ends(
    found: str | None, in_hand: str | None, elsewhere: bool
) -> None:
    assert begins_elsewhere("a", found, in_hand) is elsewhere


# Gaps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("next_batch", "decided", "gap"),
    [
        (5, [], None),
        (5, [4], None),
        (5, [5], None),
        (5, [5, 6, 7], None),
        (0, [0], None),
        (5, [6], 5),
        (5, [5, 7], 6),
        (0, [9], 0),
        (5, [3, 4], None),
    ],
)
def test_a_batch_that_is_neither_done_nor_decided_before_the_newest_decision_is_a_gap(
    next_batch: int, decided: list[int], gap: int | None
) -> None:
    assert undecided_gap(next_batch, decided) == gap


@given(st.integers(0, 20), st.sets(st.integers(0, 20)))
def test_a_gap_is_found_exactly_when_something_between_is_in_neither(next_batch: int, decided: set[int]) -> None:
    between = set(range(next_batch, max(decided, default=-1)))
    assert undecided_gap(next_batch, decided) == min(between - decided, default=None)


@pytest.mark.parametrize(("marker", "strange"), [((1, 4), False), ((2, 5), False), ((2, 4), True), ((1, 5), True)])
def test_a_marker_is_strange_when_no_record_of_the_batch_names_its_attempt(
    marker: tuple[int, int], strange: bool
) -> None:
    """A batch that was mended was decided by two."""
    assert is_strange(marker, {(1, 4), (2, 5)}) is strange


@pytest.mark.parametrize("marker", [(1, 4), (7, 7), None])
def test_where_marker_and_decision_say_the_plan_it_alone_tells(marker: tuple[int, int] | None) -> None:
    assert not is_strange(marker, {(1, 4)}, "ours", {"ours"})
    assert is_strange(marker, {(1, 4)}, "theirs", {"ours"})
    # One of them does not say it.
    assert is_strange(marker, {(1, 4)}, "", {"ours"}) is is_strange(marker, {(1, 4)}, "theirs") is (marker == (7, 7))


@pytest.mark.parametrize(
    ("newest_decided", "was_amiss", "again"),
    [(-1, False, False), (6, False, False), (7, False, False), (7, True, True), (6, True, True), (8, False, True)],
)
def test_a_query_that_runs_must_start_again_when_it_has_read_what_was_not_decided(
    newest_decided: int, was_amiss: bool, again: bool
) -> None:
    assert must_start_again(7, newest_decided, was_amiss=was_amiss) is again


def test_state_rests_on_a_decision_up_to_the_version_that_the_newest_decided_batch_made() -> None:
    assert newest_state(0, is_decided=False) == 0
    assert newest_state(7, is_decided=False) == 7
    assert newest_state(7, is_decided=True) == 8


# In a journal ---------------------------------------------------------------------------------------------------------


def attempt(slot: int) -> Attempt:
    return Attempt(PipelineId("00000000-0000-0000-0000-000000000001"), 7, slot, Incarnation(1))


def test_the_plan_of_a_batch_is_that_of_its_decision_and_not_of_a_mend() -> None:
    journal = (Aborted(attempt(0)), Decided(attempt(1), (), plan=PLAN), Decided(attempt(2), (), mends=True))
    assert decided_plan(journal) == PLAN
    assert decided_plan(journal[:1]) is None
    assert decided_plan((Decided(attempt(0), ()),)) is None


def test_a_decision_carries_the_plan_that_its_sinks_prepared_for() -> None:
    ours, anothers = (
        Committable(name, name, attempt(0), 1, plan=digest)
        for name, digest in (("a", PLAN.digest), ("b", LARGE.digest))
    )
    assert decision_carries_its_plan(Decided(attempt(0), (ours,), plan=PLAN)) == []
    assert decision_carries_its_plan(Decided(attempt(0), (ours, anothers), plan=PLAN)) == [
        "b was prepared for another plan"
    ]
    assert decision_carries_its_plan(Decided(attempt(0), (ours,))) != []


@pytest.mark.parametrize(("marker", "plan"), [("a", "a"), ("", "a"), ("a", ""), ("", "")])
def test_a_marker_is_of_another_plan_only_where_both_say_theirs(marker: str, plan: str) -> None:
    assert not is_of_another_plan(marker, plan)
    assert is_of_another_plan(f"{marker}x", f"{plan}y")
