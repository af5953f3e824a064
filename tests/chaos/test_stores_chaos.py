"""Chaos on several stores at once, short enough for every build; `make chaos-stores` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.plan import plan_faults
from tests.chaos.run import Wanted
from tests.chaos.stores import run
from tests.e2e.archive import use_class_archive
from tests.e2e.stores_game import POINTS

SERVERS = ("Kafka", "Postgres", "MySql")
#: Dies with rows in an open transaction of PostgreSQL; MariaDB dies between prepare and decision; dies prepared.
SEED = 50


def test_several_stores_under_chaos_have_one_outcome(tmp_path: Path) -> None:
    use_class_archive()
    result = run(tmp_path, Wanted(SEED, rows=3_000, kills=4, rows_per_batch=200), print)
    assert result.verdict is True, result
    assert (result.rows >= 3_000, result.kills >= 4) == (True, True)


def test_a_long_plan_kills_every_server() -> None:
    plan = plan_faults(1, 120, POINTS, SERVERS)
    assert {fault.server for fault in plan} == {"", *SERVERS}
    assert {fault.point for fault in plan if fault.kind == "point"} == set(POINTS)
