"""The plan of faults: drawn from a seed, with everything in it that is possible."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import semel
from semel.errors import ConfigError
from semel.failpoints import VARIABLE, all_failpoints, parse
from semel.verify import plan
from semel.verify.plan import KINDS, WEIGHTS, Fault, kinds_possible, plan_faults, points_for

SERVERS = ("kafka", "postgres")
ALL = points_for([semel.Sqlite("x.db", "t"), semel.Kafka("localhost:1", "t")], "exactly-once")


def _plan(seed: int, kills: int, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[Fault, ...]:
    return plan_faults(seed, kills, kinds, ALL, SERVERS, SERVERS)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert _plan(7, 40) == _plan(7, 40)
    assert _plan(7, 40) != _plan(8, 40)


@pytest.mark.parametrize("kills", [0, 1, 5, 37, 200])
def test_a_plan_has_as_many_kills_as_asked_for_and_ends_there(kills: int) -> None:
    made = _plan(3, kills)
    assert sum(fault.kills for fault in made) >= kills
    assert sum(fault.kills for fault in made[:-1]) < max(kills, 1)


@pytest.mark.parametrize("kinds", [("zombie",), ("disk-full",), ("zombie", "disk-full")])
def test_kills_by_faults_that_kill_nobody_are_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{' and '.join(kinds)} kill nobody, and 5 kills are asked for") as refused:
        _plan(3, 5, kinds)
    assert f"--faults {','.join(kinds)},driver" in refused.value.remedy
    assert _plan(3, 0, kinds) == ()
    assert len(_plan(3, 5, (*kinds, "driver"))) <= 5 * (len(kinds) + 1) * max(WEIGHTS.values())


def test_every_kind_comes_before_any_comes_again() -> None:
    for seed in range(20):
        assert {fault.kind for fault in _plan(seed, 60)[: len(KINDS)]} == set(KINDS)


def test_over_a_round_each_kind_comes_as_often_as_its_weight_says() -> None:
    wanted = {kind: WEIGHTS.get(kind, 1) for kind in KINDS}
    assert Counter(fault.kind for fault in _plan(1, 300)[: sum(wanted.values())]) == wanted


def test_every_failpoint_and_every_server_comes_before_any_comes_again() -> None:
    faults = _plan(5, 400)
    died_at = [fault.point for fault in faults if fault.kind == "point"]
    assert set(died_at[: len(ALL)]) == set(ALL)
    assert set(died_at[len(ALL) : 2 * len(ALL)]) == set(ALL)
    killed = [fault.server for fault in faults if fault.kind in ("server", "between", "outage")]
    assert all(set(killed[at : at + 2]) == set(SERVERS) for at in range(0, 40, 2))


def test_a_start_dies_at_its_first_pass_and_batches_later() -> None:
    for fault in _plan(2, 300):
        if fault.point:
            assert (fault.nth == 1) == fault.point.startswith("startup.")


def test_the_environment_of_a_life_says_where_it_dies_or_stops() -> None:
    assert Fault("point", "batch.decided", 2).variables == {VARIABLE: "batch.decided@2"}
    assert Fault("zombie", "batch.decided", 3).variables == {VARIABLE: "batch.decided@3=stop"}
    assert Fault("driver").variables == {}
    for fault in _plan(4, 300):
        if fault.point:
            assert list(parse(fault.variables[VARIABLE])) == [fault.point]


def test_no_zombie_holds_the_lock_of_an_sqlite_database() -> None:
    stopped = {fault.point for fault in _plan(1, 400) if fault.kind == "zombie"}
    assert stopped == {"batch.staged", "batch.committed"}
    elsewhere = plan_faults(1, 400, tuple(KINDS), points_for([semel.Files("out")], "exactly-once"), SERVERS, SERVERS)
    assert {fault.point for fault in elsewhere if fault.kind == "zombie"} == set(plan.BETWEEN)


def test_lengths_are_within_their_limits() -> None:
    for fault in _plan(6, 500):
        least, most = plan.LASTS_S.get(fault.kind, (0.0, 0.0))
        assert max(least, 0.0) <= fault.pause_s <= most
        assert (fault.chunk_s > 0) == (fault.kind == "delay")
        assert bool(fault.server) == (fault.kind in ("server", "between", "outage", "cut", "delay"))
    cuts = {fault.silent for fault in _plan(6, 500) if fault.kind == "cut"}
    assert cuts == {True, False}


def test_a_fault_is_told_in_words() -> None:
    assert str(Fault("point", "batch.decided", 2)) == "point at batch.decided@2"
    told = str(Fault("cut", delay_s=1.0, pause_s=2.0, server="kafka", silent=True))
    assert told == "cut kafka (silent) 1.0 s after its first batch, for 2.0 s"


# What is possible -----------------------------------------------------------------------------------------------------


def test_without_servers_none_is_broken() -> None:
    alone = {"point", "driver", "supervisor", "jvm", "worker", "pause", "zombie", "disk-full"}
    assert set(kinds_possible("exactly-once", "local[2]")) == alone
    of_others = alone | {"server", "between", "outage"}
    assert set(kinds_possible("exactly-once", "local[2]", SERVERS)) == of_others
    assert set(kinds_possible("exactly-once", "local[2]", SERVERS, SERVERS)) == of_others | {"cut", "delay"}


def test_executors_die_only_in_a_cluster_of_ours() -> None:
    assert "executor" not in kinds_possible("exactly-once", "local[*]")
    assert "executor" in kinds_possible("exactly-once", "local-cluster[2,1,1024]")
    # Those of another cluster are not our children.
    assert "executor" not in kinds_possible("exactly-once", "spark://somewhere:7077")


def test_what_is_wanted_is_planned_and_nothing_else() -> None:
    assert kinds_possible("exactly-once", "local[2]", wanted=("zombie", "point")) == ("point", "zombie")
    with pytest.raises(ConfigError, match=r"not possible here: cut \(no server is started here: --with\)\."):
        kinds_possible("exactly-once", "local[2]", wanted=("point", "cut"))


def test_zombies_come_only_where_they_are_fenced() -> None:
    assert "zombie" not in kinds_possible("at-least-once", "local[2]")
    assert "zombie" not in kinds_possible("at-most-once", "local[2]")


def test_the_failpoints_are_those_of_the_sinks(tmp_path: Path) -> None:
    everything = [
        semel.Sqlite(str(tmp_path / "x.db"), "t"),
        semel.Files(str(tmp_path / "out")),
        semel.Kafka("localhost:1", "t"),
        semel.Postgres("postgresql://u@localhost/d", "t"),
        semel.MySql("mysql://u@localhost/d", "t"),
    ]
    known = all_failpoints()
    assert points_for(everything, "exactly-once") == tuple(name for name, point in known.items() if not point.seldom)
    in_a_task = {name for name, point in known.items() if point.in_a_task}
    assert in_a_task == {"task.wrote", "task.prepared", "kafka.marked"}


def test_a_task_that_prepares_for_itself_leaves_the_driver_nothing_to_move() -> None:
    native = points_for([semel.Postgres("postgresql://u@localhost/d", "t", mode="prepared")], "exactly-once")
    assert "postgres.committed" in native
    assert "postgres.moved" not in native


def test_below_exactly_once_nothing_is_decided() -> None:
    sinks = [semel.Kafka("localhost:1", "t")]
    least = ("batch.began", "task.wrote", "task.prepared", "batch.staged", "batch.prepared", "batch.committed")
    assert points_for(sinks, "at-least-once") == least
    assert set(points_for(sinks, "at-most-once")) == {*least, "startup.claimed", "log.written"}


def test_the_power_is_cut_only_if_that_is_named() -> None:
    assert "power" not in kinds_possible("exactly-once", "local[2]")
    assert kinds_possible("exactly-once", "local[2]", wanted=("power", "driver")) == ("driver", "power")
    with pytest.raises(ConfigError, match="at-least-once promises nothing of a power cut"):
        kinds_possible("at-least-once", "local[2]", wanted=("power",))


def test_power_cuts_lose_each_kind_of_thing_and_say_how_to_lose_it_again() -> None:
    plan = _plan(1, 30, ("power",))
    assert {fault.mode for fault in plan} == {"all", "some", "torn"}
    assert len({fault.seed for fault in plan}) > 20
    assert f"(loses {plan[0].mode}, seed {plan[0].seed})" in str(plan[0])
    assert plan == _plan(1, 30, ("power",))
