"""Which parts of a replay take the place of what is gone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import BatchFailed
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable
from semel.protocol.step import ProtocolError
from semel.runtime.mend import choose_parts, replace_gone
from semel.sinks.base import StagedPart, committable_for

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
TOLD_APART = "Of batch 4 the rows of k/1 are gone from k, and they cannot be told apart in a replay."
NOT_AGAIN = "Of batch 4 the rows of k/1 are gone from k, and a replay did not bring them again."


def parts(*contents: str, attempt: int = 1) -> list[StagedPart]:
    """A part for each task. A content is a fingerprint; "-" has no rows, and "?" has rows without a fingerprint."""
    which = Attempt(PIPELINE, 4, attempt, Incarnation(1))
    prints = {"-": "0:0", "?": ""}
    return [
        StagedPart(Branch(which, "k", task, 0), int(content != "-"), {}, prints.get(content, content))
        for task, content in enumerate(contents)
    ]


def committables(staged: Sequence[StagedPart]) -> list[Committable]:
    return [committable_for("k", p.branch.attempt, [p], {}, key=f"k/{p.branch.task}") for p in staged]


def decided(*contents: str) -> list[Committable]:
    return committables(parts(*contents, attempt=0))


def chosen(before: Sequence[Committable], gone: set[int], after: Sequence[StagedPart]) -> dict[int, str]:
    """Task of the replay -> the key that it replaces."""
    mend = choose_parts(before, {f"k/{task}" for task in gone}, after)
    mended = replace_gone(mend, before, list(reversed(committables(mend.wanted))))
    assert all(c.mends for c in mended)
    key_of = {branch: c.key for c in mended for branch in c.branches}
    assert {*key_of, *(str(p.branch) for p in mend.spare)} >= {str(p.branch) for p in after if p.rows}
    return {p.branch.task: key_of[str(p.branch)] for p in mend.wanted}


def test_when_all_is_gone_every_task_replaces_its_own() -> None:
    assert chosen(decided("a", "b"), {0, 1}, parts("a", "b")) == {0: "k/0", 1: "k/1"}


def test_when_all_is_gone_the_rows_may_differ_or_have_no_fingerprint() -> None:
    """Nothing of the batch is visible, so nothing can be doubled."""
    assert chosen(decided("a", "?"), {0, 1}, parts("?", "c")) == {0: "k/0", 1: "k/1"}


def test_a_task_without_rows_is_neither_visible_nor_missing() -> None:
    """It never answers "gone"."""
    assert chosen(decided("a", "-", "b"), {0, 2}, parts("b", "c", "-")) == {0: "k/0", 1: "k/1", 2: "k/2"}
    assert chosen(decided("a", "-", "b"), {0}, parts("b", "a", "-")) == {1: "k/0"}


def test_what_is_gone_in_part_is_found_whatever_the_number_of_its_task() -> None:
    assert chosen(decided("a", "b", "c"), {1}, parts("b", "c", "a")) == {0: "k/1"}
    assert chosen(decided("a", "b", "c"), {0, 2}, parts("c", "a", "b")) == {0: "k/2", 1: "k/0"}


def test_two_tasks_with_the_same_rows_stand_in_for_each_other() -> None:
    assert chosen(decided("a", "a", "b"), {1}, parts("b", "a", "a")) == {1: "k/1"}
    assert chosen(decided("a", "a", "b"), {0, 1}, parts("a", "b", "a")) == {0: "k/0", 2: "k/1"}


def test_a_mend_of_a_mend_is_matched_like_any_other() -> None:
    before = decided("a", "b")
    mend = choose_parts(before, {"k/1"}, parts("b", "a"))
    (mended,) = replace_gone(mend, before, committables(mend.wanted))
    again = choose_parts([before[0], mended], {"k/1"}, parts("a", "b", attempt=2))
    assert [(p.branch.task, again.keys[str(p.branch)]) for p in again.wanted] == [(1, "k/1")]
    # With two committables of task 0 the layout is still one of two tasks.
    assert len(choose_parts([before[0], mended], {"k/0", "k/1"}, parts("a", "b", attempt=2)).wanted) == 2


@pytest.mark.parametrize(
    ("before", "after", "what"),
    {
        "the decision has no fingerprint": (("a", "?"), ("a", "b"), TOLD_APART),
        "what is visible has none": (("?", "b"), ("a", "b"), TOLD_APART),
        "the replay has none": (("a", "b"), ("?", "b"), TOLD_APART),
        "what is gone does not come again": (("a", "b"), ("a", "c"), NOT_AGAIN),
        "what is visible does not come again": (("a", "b"), ("c", "b"), NOT_AGAIN),
        "rows moved from task to task": (("a", "b"), ("c", "d"), NOT_AGAIN),
        "fewer tasks": (("a", "b"), ("b",), NOT_AGAIN),
        "more tasks": (("a", "b"), ("a", "b", "b"), NOT_AGAIN),
        "no rows": (("a", "b"), ("-", "-"), NOT_AGAIN),
    }.values(),
)
def test_what_does_not_match_up_is_not_mended(before: tuple[str, ...], after: tuple[str, ...], what: str) -> None:
    with pytest.raises(BatchFailed) as caught:
        choose_parts(decided(*before), {"k/1"}, parts(*after))
    assert str(caught.value).splitlines() == [
        what,
        "  the data now: the batch is decided; what is named here is not visible, the rest is",
        "  what to do: Write the missing rows by hand from the offsets of the batch.",
    ]


def test_when_all_is_gone_there_must_be_a_task_for_every_key() -> None:
    with pytest.raises(BatchFailed, match=r"has another task layout .*: 1 tasks for k, not 2"):
        choose_parts(decided("a", "b"), {"k/0", "k/1"}, parts("a"))
    # Where some wrote several partitions each, there are more of them in a replay.
    assert chosen(decided("a+b", "c"), {0, 1}, parts("a", "b", "c")) == {0: "k/0", 1: "k/1", 2: "k/2"}


def test_what_one_task_wrote_of_several_partitions_is_found_partition_by_partition() -> None:
    before = decided("a+b", "c+d", "e")
    assert chosen(before, {1}, parts("d", "a", "e", "c", "b")) == {0: "k/1", 3: "k/1+1"}
    # Two that are alike stand in for each other, and each is there once.
    assert chosen(decided("a+a", "a+b"), {0}, parts("a", "b", "a", "a")) == {0: "k/0", 2: "k/0+1"}
    again = parts("a+b", "e", "c", "d")
    assert chosen(before, {0, 1}, again) == {0: "k/0", 2: "k/1", 3: "k/1+1"}


@pytest.mark.parametrize("after", [("a", "c", "d"), ("a", "b", "c"), ("a", "b", "c", "d", "d"), ("a+c", "b", "d")])
def test_partitions_that_do_not_match_up_are_not_mended(after: tuple[str, ...]) -> None:
    with pytest.raises(BatchFailed, match="a replay did not bring them again"):
        choose_parts(decided("a+b", "c+d"), {"k/1"}, parts(*after))


def test_a_sink_that_prepares_something_else_is_not_believed() -> None:
    before = decided("a", "b")
    some, every = choose_parts(before, {"k/1"}, parts("b", "a")), choose_parts(before, {"k/0", "k/1"}, parts("b", "a"))
    for mend, prepared in ((some, []), (some, committables(parts("b", "a"))), (every, committables(parts("b")))):
        with pytest.raises(ProtocolError, match="what was prepared are"):
            replace_gone(mend, before, prepared)


@given(st.lists(st.sampled_from("abc-"), min_size=1, max_size=6), st.data())
def test_in_whatever_order_the_tasks_come_again_every_row_is_visible_once(
    contents: list[str], data: st.DataObject
) -> None:
    with_rows = [task for task, content in enumerate(contents) if content != "-"]
    gone = set(data.draw(st.lists(st.sampled_from(with_rows), unique=True))) if with_rows else set()
    if not gone:
        return
    before = decided(*contents)
    after = parts(*data.draw(st.permutations(contents)))
    mend = choose_parts(before, {f"k/{task}" for task in gone}, after)
    mended = replace_gone(mend, before, committables(mend.wanted))
    now = {c.key: c for c in (*before, *mended)}
    assert sorted(c.fingerprint for c in now.values()) == sorted(c.fingerprint for c in before)
    kept = [c for c in before if c.rows and c.key not in {f"k/{task}" for task in gone}]
    assert all(now[c.key] == c for c in kept)
