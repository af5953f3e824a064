"""The audit of the Kafka fault tests must notice what it is there for."""

from __future__ import annotations

import pytest

from tests.e2e.kafka_audit import PARTITIONS, BatchPlan, Findings, Sight, audit

#: Two batches of four rows, two from each input partition.
PLAN = BatchPlan.of([{0: 2, 1: 2}, {0: 4, 1: 4}])
DECIDED_AT = {(0, 0): 10.0, (0, 1): 10.0, (1, 0): 20.0, (1, 1): 20.0}
ROWS = 8


def sight(number: int, *, offset: int = -1, at: float = 30.0, partition: int = 0) -> Sight:
    """As the sink writes it: a task for each input partition; here all into one output partition, in order."""
    source, where = number % PARTITIONS, number // PARTITIONS
    return Sight(number, source, where, source, partition, offset if offset >= 0 else number, at)


ALL = [sight(number) for number in range(ROWS)]


def found(sights: list[Sight], **changes: object) -> dict[str, int]:
    """The kinds of trouble that the audit finds, and how often."""
    findings = audit(sights, PLAN, DECIDED_AT, **{"rows": ROWS, **changes})  # type: ignore[arg-type]
    return {kind: count for kind, count in findings.counts.items() if count}


def test_a_clean_output_is_clean_and_every_row_was_compared() -> None:
    findings = audit(ALL, PLAN, DECIDED_AT, rows=ROWS)
    assert findings == Findings(compared=ROWS)
    findings.require_clean(ROWS)


def test_a_lost_row_is_noticed_and_so_is_the_batch_that_it_tears() -> None:
    assert found(ALL[:3] + ALL[4:]) == {"lost": 1, "torn": 1}


def test_a_row_that_is_there_twice_is_noticed() -> None:
    assert found([*ALL, sight(7, offset=9)]) == {"duplicated": 1}


def test_a_damaged_row_is_lost_once_and_there_once_too_often() -> None:
    damaged = ALL[5]._replace(id=4)
    assert found([*ALL[:5], damaged, *ALL[6:]]) == {"lost": 1, "duplicated": 1}


def test_a_batch_in_part_is_noticed_once_a_later_one_is_visible() -> None:
    """While the run goes on nobody knows what is still to come, but batches come one after the other."""
    assert found(ALL[:2], rows=None) == {}
    assert found([*ALL[:2], *ALL[4:]], rows=None) == {"torn": 1}


def test_open_transactions_may_hide_the_rest_of_a_batch_but_not_its_order() -> None:
    assert found([*ALL[:2], *ALL[4:]], rows=None, settled=False) == {}
    late = sight(3, offset=9)
    assert found([*ALL[:3], *ALL[4:], late], rows=None, settled=False) == {"torn": 1}


def test_a_row_seen_before_its_decision_is_noticed() -> None:
    early = ALL[6]._replace(at=19.9)
    assert found([*ALL[:6], early, ALL[7]]) == {"early": 1}


def test_a_row_that_no_decision_names_is_noticed() -> None:
    without_task_1 = {key: at for key, at in DECIDED_AT.items() if key != (1, 1)}
    assert audit(ALL, PLAN, without_task_1, rows=ROWS).counts["early"] == 2
    only_batch_0 = {key: at for key, at in DECIDED_AT.items() if key[0] == 0}
    assert "batch 1 is visible and was not decided" in audit(ALL, PLAN, only_batch_0, rows=ROWS).early


def test_an_audit_that_compared_nothing_fails() -> None:
    """Kafka's own group_mode_transactions_test once compared nothing, and passed."""
    nothing = audit([], PLAN, DECIDED_AT)
    assert nothing == Findings(compared=0)
    with pytest.raises(AssertionError, match="an audit of no rows says nothing"):
        nothing.require_clean(0)
    with pytest.raises(AssertionError, match="0 rows were compared, 8 should have been"):
        nothing.require_clean(ROWS)
    assert found([]) == {"lost": ROWS}


def test_the_batch_of_a_row_is_the_one_that_spark_planned_it_for() -> None:
    assert [PLAN.batch_of(0, offset) for offset in range(5)] == [0, 0, 1, 1, -1]
    assert [PLAN.rows(batch) for batch in range(PLAN.batches)] == [4, 4]
