"""The simulation itself: it holds, it does what it says, and a seed is the same each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from semel.decisions.records import journal_entry
from semel.ids import Attempt, Incarnation
from semel.protocol.events import Decided
from semel.simulation import run
from semel.simulation.audit import audit
from semel.simulation.faults import FAULTS_MIN, KINDS, WEIGHTS
from semel.simulation.participants import PreparedParticipant
from semel.simulation.run import Summary, main, simulate, simulate_many
from semel.simulation.source import rows_of_tasks
from semel.simulation.spark import PIPELINE
from semel.simulation.world import World
from tests.simulation.mutants import (
    an_error_is_taken_for_committed,
    copies_without_plans,
    drop_ins_that_are_overtaken,
    nothing_is_synced,
)

SEEDS_IN_CI = 2_000
#: How batches and drivers may end; each of them must really have happened.
ENDINGS = {
    *("committed", "forwarded"),
    *("Fenced", "CommitStalled", "DecisionUnknown", "BatchFailed", "SinkUnavailable", "PlanRestored"),
    *("StoreUnanswered", "OSError", "ConcurrentQueries", "died", "finished"),
}
#: Some of two thousand seeds end so, and not always one.
SELDOM = {"PlanChanged", "CheckpointUnusable", "CheckpointRolledBack"}


def test_2000_seeds_hold_and_everything_that_can_go_wrong_did() -> None:
    summary = simulate_many(0, SEEDS_IN_CI)
    assert summary.verdict is True, "\n".join(failed.explain() for failed in summary.failed)
    assert summary.counts["seeds"] == SEEDS_IN_CI
    assert summary.faults_min is not None
    assert summary.faults_min >= FAULTS_MIN
    assert {kind for kind in KINDS if summary.faults[kind] < 200} == set()
    assert {ending for ending in ENDINGS if summary.endings[ending] < 5} == set()
    assert set(summary.endings) - SELDOM == ENDINGS
    counts = summary.counts
    assert counts["recoveries"] >= SEEDS_IN_CI
    assert counts["mends"] >= 200
    assert counts["zombies woken"] >= 1_000
    assert counts["late effects"] >= 500
    assert counts["expired transactions"] >= 500
    assert counts["stale decisions"] >= 1
    assert counts["forgotten files"] >= 200
    assert counts["decided plans in no copy"] >= 400
    for folder in ("offsets", "commits", "sources"):
        assert counts[f"{folder} put back"] >= 50
    # A copy that is older than what the log still knows is refused, and a person restores the newest one.
    assert 1 <= counts["refused copies"] <= 50
    assert counts["worlds with a drop-in"] >= SEEDS_IN_CI // 5
    assert counts["worlds that look before they claim"] == SEEDS_IN_CI // 5
    for kind in ("with files", "with ledger", "with prepared", "that forget soon"):
        assert counts[f"worlds {kind}"] >= SEEDS_IN_CI // 3
    assert counts["batches"] >= 4 * SEEDS_IN_CI
    assert counts["rows"] >= 20 * SEEDS_IN_CI
    # Each of these was a moment at which something became visible, and was compared with the decisions.
    assert counts["looks"] >= 10 * SEEDS_IN_CI


def test_a_checkpointed_batch_whose_journal_is_gone_and_was_not_forgotten_is_a_contradiction() -> None:
    """Any batch, not only the newest one."""
    world = World(next(seed for seed in range(100) if not World(seed).forgets_soon))
    assert world.run() == []
    for name in world.records.list("decisions"):
        if name.startswith("0000000001."):
            world.records.delete(f"decisions/{name}")
    assert 1 not in world.pruned
    audit(world)
    assert [str(anomaly) for anomaly in world.witness.anomalies] == [
        "journal: batch 1: it is committed and not decided"
    ]


def test_two_decisions_in_a_journal_that_was_forgotten_contradict_nothing() -> None:
    """Both were on their way when their drivers died, and came when the batch was long checkpointed (seed 57004 of the
    release before). In a journal that nobody has forgotten they contradict each other.
    """
    world = World(next(seed for seed in range(100) if World(seed).forgets_soon))
    assert world.run() == []
    assert 0 in world.pruned
    for slot in (0, 1):
        late = journal_entry(Decided(Attempt(PIPELINE, 0, slot, Incarnation(1)), ()), "late")
        assert world.records.create(f"decisions/0000000000.{slot}.json", late)
    audit(world)
    assert world.witness.anomalies == []
    world.pruned.remove(0)
    audit(world)
    assert {anomaly.name for anomaly in world.witness.anomalies} == {"journal"}
    assert "slot 1 decides a batch that was decided before" in world.witness.anomalies[0].evidence


@pytest.mark.parametrize("seed", [0, 7, 13, 101])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    assert simulate(seed).trace == simulate(seed).trace


def test_another_seed_gives_another_trace() -> None:
    assert simulate(1).trace != simulate(2).trace


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    command = [sys.executable, "-m", "semel.simulation", "--first-seed", "40", "--seeds", "5", "--trace"]
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        traces.append([line for line in found.stdout.splitlines() if not line.startswith("verdict")])
    assert traces[0] == traces[1]
    assert len(traces[0]) > 500


def test_a_failing_seed_says_how_to_replay_it_and_fails_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    an_error_is_taken_for_committed(monkeypatch)
    assert main(["--seeds", "60"]) == 1
    printed = capsys.readouterr().out
    seed = next(found.seed for found in map(simulate, range(60)) if found.anomalies)
    assert f"replay: python -m semel.simulation --seeds 1 --first-seed {seed} --trace" in printed
    assert "verdict false" in printed
    first, second = simulate(seed), simulate(seed)
    assert first.anomalies == second.anomalies != ()
    assert first.trace == second.trace


def test_a_run_stops_when_it_has_failures_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("a bug of the sink")

    monkeypatch.setattr(PreparedParticipant, "_promise", broken)
    monkeypatch.setattr(run, "FAILURES_MAX", 2)
    summary = simulate_many(0, 200)
    assert len(summary.failed) == 2
    assert {"bug"} <= {anomaly.name for failed in summary.failed for anomaly in failed.anomalies}


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--first-seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["seeds"], found["first_seed"], found["failed"]) == ("true", 3, 5, [])
    assert found["faults_min"] >= FAULTS_MIN


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--seeds", "many"], ["--first-seed", "-1"], ["--what"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_run_that_compared_nothing_is_unknown() -> None:
    assert Summary(0).verdict is None


def test_a_plan_has_the_same_rows_whenever_it_runs() -> None:
    content = rows_of_tasks(3, 5, 9)
    rows_of_tasks.cache_clear()
    assert rows_of_tasks(3, 5, 9) == content
    assert sorted(row for rows in content for row in rows) == [5, 6, 7, 8]


def test_without_syncing_plans_are_put_back_and_no_row_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where journals are kept. A drop-in hears too late that Spark cannot start."""
    nothing_is_synced(monkeypatch)
    monkeypatch.setitem(WEIGHTS, "old copy", 0)
    seeds = [s for s in range(200) if not (World(s).forgets_soon or World(s).drops_in)]
    runs = [simulate(seed) for seed in seeds]
    assert [run.explain() for run in runs if run.anomalies] == []
    assert sum(run.counts["offsets put back"] for run in runs) >= 15


def test_copies_that_know_the_end_of_a_batch_and_not_its_plan_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, every start of twelve in 92,273 seeds was refused, and here that of more than every tenth."""
    copies_without_plans(monkeypatch)
    runs = [simulate(seed) for seed in range(200)]
    assert [run.explain() for run in runs if run.anomalies] == []
    assert sum(run.endings["PlanChanged"] for run in runs) == 0
    assert sum(run.counts["plans dropped"] for run in runs) >= 5
    assert sum(run.counts["offsets put back"] for run in runs) >= 100


@pytest.mark.parametrize("seed", [12701, 19108, 23348, 24199, 27980, 43563, 55410, 71207, 80302, 83335, 86400, 87803])
def test_seeds_that_no_start_got_past_a_refusal_in(seed: int) -> None:
    """On 2026-11-19. The runtime has changed since, and with it what happens in them; see the test before."""
    assert simulate(seed).anomalies == ()


def test_a_query_that_another_driver_has_overtaken_fences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_ins_that_are_overtaken(monkeypatch)
    runs = [simulate(seed) for seed in range(150)]
    assert [run.explain() for run in runs if run.anomalies] == []
    assert sum(run.counts["overtaken queries"] for run in runs) >= 1


@pytest.mark.parametrize("seed", [1990, 2530, 2782])
def test_a_query_that_read_another_plan_before_it_was_put_back_stops(seed: int) -> None:
    """The file says what was decided when it looks, and Spark has other rows in its hands."""
    run = simulate(seed)
    assert run.anomalies == ()
    assert run.endings["PlanRestored"] >= 1


def test_what_is_done_and_in_no_decision_is_lost() -> None:
    world = World(0)
    assert world.run() == []
    span = world.witness.spans[2]
    world.witness.spans[2] = (span[0], span[1] - 1)
    audit(world)
    found = [str(anomaly) for anomaly in world.witness.anomalies if anomaly.name == "lost"]
    assert found == [f"lost: rows [{span[1] - 1}] are done as the checkpoint says, and no batch was decided with them"]


def test_every_kind_of_fault_is_drawn() -> None:
    assert set(WEIGHTS) == set(KINDS)


def test_no_driver_is_left_behind() -> None:
    simulate(0)
    threads = threading.active_count()
    for seed in range(5):
        world = World(seed)
        assert world.run() == []
        assert world.scheduler.live == []
    # Threads are kept for the next seed, so their number grows only with the most drivers of one seed.
    assert threading.active_count() <= threads + 20
