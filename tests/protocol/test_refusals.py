"""Why a start is refused, and when it is not."""

from __future__ import annotations

import pytest

from semel.ids import PipelineId
from semel.protocol.refusals import (
    AGAIN,
    NOW,
    Beginning,
    Holder,
    Refusal,
    SinkFacts,
    UnderWay,
    begins_late,
    refuse_beginning,
    refuse_executors,
    refuse_holder,
    refuse_overtaken,
    refuse_replaced,
    refuse_rolled_back,
    refuse_temporary,
    refuse_weaker,
)

OURS = PipelineId("00000000-0000-0000-0000-000000000001")
ANOTHER = PipelineId("00000000-0000-0000-0000-000000000002")


@pytest.mark.parametrize(
    ("found", "ours", "refusal"),
    [
        (Holder(OURS, "orders"), Holder(OURS, "orders"), None),
        (Holder(OURS), Holder(OURS, "orders"), None),
        (Holder(OURS, "orders"), Holder(OURS), None),
        (Holder(OURS, "orders"), Holder(OURS, "bills"), Refusal.ANOTHER_NAME),
        (Holder(ANOTHER), Holder(OURS), Refusal.ANOTHERS_CHECKPOINT),
        (Holder(ANOTHER, "orders"), Holder(OURS, "orders"), Refusal.ANOTHERS_CHECKPOINT),
        (Holder(ANOTHER, "orders"), Holder(OURS, "bills"), Refusal.ANOTHERS_CHECKPOINT),
    ],
)
def test_a_checkpoint_is_used_by_the_query_and_under_the_name_that_it_belongs_to(
    found: Holder, ours: Holder, refusal: Refusal | None
) -> None:
    assert refuse_holder(found, ours) is refusal


@pytest.mark.parametrize(
    ("sink", "refusal"),
    [
        (SinkFacts(), None),
        (SinkFacts(marked=3), None),
        (SinkFacts(namesakes=(ANOTHER,)), Refusal.REPLACED),
        (SinkFacts(staged=2, namesakes=(ANOTHER,)), Refusal.REPLACED),
        # It wrote there after the other one, which somebody has allowed: that is not a fresh checkpoint.
        (SinkFacts(marked=0, namesakes=(ANOTHER,)), None),
    ],
)
def test_a_fresh_checkpoint_is_refused_where_a_namesake_has_written(sink: SinkFacts, refusal: Refusal | None) -> None:
    assert refuse_replaced(sink) is refusal


@pytest.mark.parametrize(
    ("marked", "staged", "is_decided", "refusal"),
    [
        (-1, -1, False, None),
        (4, 4, False, None),
        (4, 5, False, None),
        (5, -1, False, Refusal.ROLLED_BACK),
        (4, 6, False, Refusal.ROLLED_BACK),
        (5, 5, True, None),
        (6, -1, True, Refusal.ROLLED_BACK),
        # Spark had begun batch 6, and commits/5 was lost with the power.
        (5, 6, True, None),
        (5, 7, True, Refusal.ROLLED_BACK),
    ],
)
def test_a_checkpoint_at_batch_5_is_refused_when_a_sink_has_seen_more(
    marked: int, staged: int, is_decided: bool, refusal: Refusal | None
) -> None:
    assert refuse_rolled_back(SinkFacts(marked, staged), next_batch=5, is_decided=is_decided) is refusal


@pytest.mark.parametrize(
    ("marked", "namesakes", "starts", "refusal"),
    [
        (-1, (ANOTHER,), "", Refusal.REPLACED),
        (-1, (ANOTHER,), NOW, Refusal.REPLACED),
        (-1, (ANOTHER,), AGAIN, None),
        (-1, (ANOTHER,), f"{NOW}, {AGAIN}", None),
        (0, (ANOTHER,), "", None),
        (-1, (), "", None),
    ],
)
def test_what_would_be_doubled_is_refused_unless_it_is_meant(
    marked: int, namesakes: tuple[PipelineId, ...], starts: str, refusal: Refusal | None
) -> None:
    assert refuse_replaced(SinkFacts(marked, namesakes=namesakes, starts=starts)) is refusal


@pytest.mark.parametrize(
    ("batch", "followed_on", "starts", "refusal"),
    [
        (0, False, "", None),
        (7, True, "", None),
        (7, False, "", Refusal.STARTS_LATE),
        (7, False, AGAIN, Refusal.STARTS_LATE),
        (7, False, NOW, None),
        (7, False, f"{NOW},{AGAIN}", None),
    ],
)
def test_a_sink_that_lacks_earlier_rows_is_refused_unless_it_is_meant(
    batch: int, followed_on: bool, starts: str, refusal: Refusal | None
) -> None:
    beginning = Beginning(batch, followed_on, starts)
    assert refuse_beginning(beginning) is refusal
    assert begins_late(beginning) is (batch > 0 and not followed_on)


def test_only_a_guarantee_that_remembers_nothing_may_have_a_checkpoint_that_ends_with_the_query() -> None:
    assert refuse_temporary(is_temporary=True, remembers=True) is Refusal.TEMPORARY_CHECKPOINT
    assert refuse_temporary(is_temporary=True, remembers=False) is None
    assert refuse_temporary(is_temporary=False, remembers=True) is None


@pytest.mark.parametrize(
    ("query", "refusal"),
    [
        (UnderWay(5), None),
        (UnderWay(5, newest_decided=5), None),
        (UnderWay(5, is_next_planned=True), Refusal.OVERTAKEN),
        (UnderWay(5, is_next_planned=True, newest_decided=7), Refusal.OVERTAKEN),
        # The other driver waits for its trigger, or for rows.
        (UnderWay(5, is_over=True, newest_decided=5), Refusal.OVERTAKEN),
        (UnderWay(5, is_over=True), Refusal.OVERTAKEN),
        # A copy of a checkpoint that knows less than the log.
        (UnderWay(5, is_over=True, newest_decided=6), None),
        # The copy knew the end, and Spark has planned the batch anew.
        (UnderWay(5, is_over=True, newest_decided=5, is_replanned=True), None),
        (UnderWay(5, is_next_planned=True, is_over=True, newest_decided=5, is_replanned=True), Refusal.OVERTAKEN),
    ],
)
def test_a_query_that_another_driver_has_overtaken_fences_nobody(query: UnderWay, refusal: Refusal | None) -> None:
    assert refuse_overtaken(query) is refusal


def test_executors_elsewhere_must_reach_the_store() -> None:
    assert refuse_executors(are_remote=True, reaches_remote=False) is Refusal.REMOTE_EXECUTORS
    assert refuse_executors(are_remote=True, reaches_remote=True) is None
    assert refuse_executors(are_remote=False, reaches_remote=False) is None


@pytest.mark.parametrize(
    ("newest_decided", "next_batch", "refusal"),
    [(-1, 0, None), (4, 5, None), (5, 5, Refusal.OWED), (6, 5, Refusal.OWED), (0, 0, Refusal.OWED)],
)
def test_a_weaker_guarantee_does_not_begin_before_what_was_decided_is_over(
    newest_decided: int, next_batch: int, refusal: Refusal | None
) -> None:
    assert refuse_weaker(newest_decided=newest_decided, next_batch=next_batch) is refusal
