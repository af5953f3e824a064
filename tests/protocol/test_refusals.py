"""Why a start is refused: every rule by its facts."""

from __future__ import annotations

import pytest

from semel.ids import PipelineId
from semel.protocol.refusals import (
    AGAIN,
    NOW,
    Beginning,
    Refusal,
    SinkFacts,
    begins_late,
    refuse_beginning,
    refuse_executors,
    refuse_replaced,
    refuse_temporary,
)

OTHER = PipelineId("11111111-2222-3333-4444-555555555555")


@pytest.mark.parametrize(
    ("marked", "namesakes", "starts", "refusal"),
    [
        (-1, (OTHER,), "", Refusal.REPLACED),
        (-1, (OTHER,), NOW, Refusal.REPLACED),
        (-1, (OTHER,), AGAIN, None),
        (0, (OTHER,), "", None),
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


def test_executors_elsewhere_must_reach_the_store() -> None:
    assert refuse_executors(are_remote=True, reaches_remote=False) is Refusal.REMOTE_EXECUTORS
    assert refuse_executors(are_remote=True, reaches_remote=True) is None
    assert refuse_executors(are_remote=False, reaches_remote=False) is None
