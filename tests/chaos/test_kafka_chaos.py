"""The chaos run, short enough for every build; `make chaos-kafka` is the long one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.kafka import run
from tests.chaos.plan import WEIGHTS, plan_faults
from tests.chaos.run import Wanted
from tests.e2e.archive import use_class_archive
from tests.e2e.kafka_points import POINTS

#: Its four faults: dies at batch.began, a zombie, dies at a moment of its own, the broker dies between two steps.
SEED = 11


def test_a_pipeline_under_chaos_is_exactly_once(tmp_path: Path) -> None:
    use_class_archive()
    result = run(tmp_path, Wanted(SEED, rows=5_000, kills=4, rows_per_batch=200), print)
    assert result.verdict is True, result
    assert result.rows >= 5_000
    assert result.kills == 4


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan_faults(7, 30) == plan_faults(7, 30)
    assert plan_faults(7, 30) != plan_faults(8, 30)
    assert [fault.kind for fault in plan_faults(SEED, 4)] == ["point", "zombie", "moment", "server between"]


def test_a_long_plan_has_faults_of_every_kind_and_reaches_every_failpoint() -> None:
    plan = plan_faults(1, 3 * len(POINTS))
    assert set(Counter(fault.kind for fault in plan)) == set(WEIGHTS)
    assert {fault.point for fault in plan if fault.kind == "point"} == set(POINTS)
    assert sum(fault.kills for fault in plan) >= 3 * len(POINTS)
