"""Faults of Kafka pipelines that one failpoint does not make: dead executors, dead brokers, zombies, timeouts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyspark
import pytest

from semel.dev.kafka import KafkaCluster, kafka
from semel.errors import SourceUnavailable
from semel.ids import parse_branch
from semel.protocol.events import Committable
from semel.sources.kafka_broker import Broker, Offsets, Partition
from tests.e2e.kafka_game import KafkaGame, forwarded
from tests.processes import descends, executors_of, is_stopped, stopped_workers, wait_until

Make = Callable[..., KafkaGame]
#: How soon a reader must go on after the death of a task; the transaction's own timeout is 15 minutes.
ORPHAN_SECONDS_MAX = 30.0
#: Of topics with these names Spark's source numbers the tasks of a replay otherwise: both have the same hash in Java.
TURNED, ALSO_TURNED = "turned", "uVrned"


# Executors ----------------------------------------------------------------------------------------------------------


def test_the_transaction_of_a_killed_executor_is_ended_and_readers_go_on(make_kafka_game: Make) -> None:
    """FLINK-34554: a transaction that nobody ends holds up every reader of the topic until its timeout.

    Both tasks of batch 1 have sent their rows and stop before they prepare. One executor dies, the other task goes on.
    """
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    game = make_kafka_game(batches=3, master="local-cluster[2,1,1024]", shape="hanging")
    child = game.start()
    wait_until(lambda: len(stopped_workers(child.pid)) == 2, 90)
    orphan, other = stopped_workers(child.pid)
    assert len(game.open_transactions()) == 2
    assert game.committed() == game.setup.rows_per_batch
    executor = next(e for e in executors_of(child.pid) if descends(orphan, e))
    os.kill(executor, signal.SIGKILL)
    os.kill(other, signal.SIGCONT)
    wait_until(lambda: len(game.watcher.sights) == game.dealt, ORPHAN_SECONDS_MAX)
    life = game.require_good_end(game.finish(child))
    assert life.batches("committed") == [0, 1, 2]


# Brokers ------------------------------------------------------------------------------------------------------------


def test_a_broker_killed_between_prepare_decision_and_commit(
    make_kafka_game: Make, kafka_cluster: KafkaCluster
) -> None:
    """The open transactions are in the broker's log: they outlive it, and the driver goes on with them."""
    game = make_kafka_game(batches=4)
    child = game.start("batch.prepared@2=stop,batch.decided@3=stop")
    for _ in range(2):
        game.wait_until_stopped(child)
        prepared = game.open_transactions()
        assert len(prepared) == 2
        kafka_cluster.kill()
        kafka_cluster.start()
        # A coordinator lists no transactions before it has read its log.
        wait_until(partial(_lists, game, prepared), 20)
        game.wake(child)
        wait_until(lambda: not is_stopped(child.pid))
    game.require_good_end(game.finish(child))


@pytest.mark.long
def test_a_broker_killed_while_no_driver_lives_still_has_what_was_decided(
    make_kafka_game: Make, kafka_cluster: KafkaCluster
) -> None:
    game = make_kafka_game(batches=3)
    assert game.live("batch.decided@2").killed
    kafka_cluster.kill()
    kafka_cluster.start()
    assert forwarded(game.require_good_end(game.live())) == [(1, False)]


def _lists(game: KafkaGame, transactions: list[str]) -> bool:
    return game.open_transactions() == transactions


@pytest.mark.long
def test_a_pipeline_outlives_a_broker_that_is_away_for_some_batches(
    make_kafka_game: Make, kafka_cluster: KafkaCluster
) -> None:
    game = make_kafka_game(batches=8)
    child = game.start()
    assert next(e for e in game.events(child) if e["event"] == "batch")
    kafka_cluster.stop()
    time.sleep(4)
    assert child.poll() is None
    kafka_cluster.start()
    game.require_good_end(game.finish(child))


def test_a_broker_that_stays_away_ends_the_pipeline_with_a_clear_error(
    make_kafka_game: Make, kafka_cluster: KafkaCluster
) -> None:
    """What was decided is committed by the next start, without being written again."""
    game = make_kafka_game(batches=4, kafka={"timeout_s": 1.0}, limits={"commit_patience_s": 5})
    child = game.start("batch.decided@2=stop")
    game.wait_until_stopped(child)
    kafka_cluster.stop()
    game.wake(child)
    life = game.finish(child)
    assert life.returncode == 1
    what, now, remedy = _three_lines(life.error, "CommitStalled: ")
    assert what.startswith("Batch 1 is decided but could not be committed to ")
    assert now.startswith("  the data now: batch 1 is decided; visible in: no sink yet; still to commit: ")
    assert remedy.startswith(
        "  what to do: Bring the sink back, or give it more time (commit_limits, commit_patience_s), "
    )
    kafka_cluster.start()
    assert forwarded(game.require_good_end(game.live())) == [(1, False)]


def test_the_lag_is_measured_again_when_the_broker_has_been_restarted(
    make_kafka_game: Make, kafka_cluster: KafkaCluster
) -> None:
    """librdkafka's admin client goes on asking with the leader epoch that it knew before the restart."""
    game = make_kafka_game(batches=1)
    broker = Broker({"kafka.bootstrap.servers": kafka_cluster.bootstrap}, 10.0)
    partitions = [(game.setup.topics[0], number) for number in (0, 1)]
    before = broker.end_offsets(partitions)
    assert sum(before.values()) == game.dealt
    kafka_cluster.kill()
    kafka_cluster.start()
    wait_until(lambda: _end_offsets(broker, partitions) == before, 10)


def _end_offsets(broker: Broker, partitions: list[Partition]) -> Offsets:
    """A broker that has just come back may know no leader yet."""
    try:
        return broker.end_offsets(partitions)
    except SourceUnavailable:
        return {}


def _three_lines(error: str, kind: str) -> list[str]:
    """What semel said, out of what Spark makes of it."""
    assert kind in error, error[:3000]
    return error.partition(kind)[2].splitlines()[:3]


def test_the_transaction_coordinator_fails_over_between_prepare_and_commit(
    make_kafka_game: Make, tmp_path: Path
) -> None:
    """Another broker takes over the open transactions, and the driver finds it."""
    with kafka(tmp_path / "kafka", brokers=3, quick=True, heap_mb=256) as cluster:
        game = make_kafka_game(batches=4, servers=cluster.bootstrap)
        child = game.start("batch.decided@2=stop")
        game.wait_until_stopped(child)
        prepared = game.open_transactions()
        assert len(prepared) == 2
        coordinator = game.coordinator(prepared[0])
        cluster.kill(coordinator)
        game.wake(child)
        life = game.finish(child)
        assert life.returncode == 0, life
        assert not cluster.is_alive(coordinator)
        cluster.start_all()
        game.require_exactly_once()
        game.end()


# Zombies ------------------------------------------------------------------------------------------------------------


def test_zombie_drivers_are_fenced_and_change_nothing(make_kafka_game: Make) -> None:
    """Two drivers are stopped, one before its decision and one after it; a third finishes; then both wake up."""
    game = make_kafka_game(batches=6)
    zombies = []
    for point in ("batch.prepared@2=stop", "batch.decided@2=stop"):
        zombies.append(game.start(point))
        game.wait_until_stopped(zombies[-1])
    last = game.live()
    assert last.returncode == 0, last
    assert len(last.batches("forwarded")) == 1
    seen = game.require_exactly_once()
    for incarnation, zombie in enumerate(zombies, start=1):
        game.wake(zombie)
        woken = game.finish(zombie)
        assert woken.returncode == 1
        what, now, remedy = _three_lines(woken.error, "Fenced: ")
        assert what.startswith(f"Incarnation {incarnation} "), what
        assert now.startswith("  the data now: this driver made nothing of its last batch visible")
        assert remedy.startswith("  what to do: Leave this one stopped.")
    assert game.require_exactly_once() == seen


# Timeouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.spark35
def test_a_decided_batch_outlives_the_timeout_of_its_transactions(make_kafka_game: Make) -> None:
    """Flink logs that the data is lost, and goes on. Here what the broker aborted is written again."""
    game = make_kafka_game(batches=4, kafka={"transaction_timeout_ms": 5_000})
    assert game.live("batch.decided@2").killed
    wait_until(lambda: not game.open_transactions(), 20)
    assert game.committed() == game.setup.rows_per_batch
    assert forwarded(game.require_good_end(game.live())) == [(1, True)]
    tasks = [f"{game.sink}/0", f"{game.sink}/1"]
    assert [(d.mends, sorted(c.key for c in d.committables)) for d in game.decisions(1)] == [
        (False, tasks),
        (True, tasks),
    ]
    assert [len(game.decisions(batch)) for batch in range(game.batches)] == [1, 2, 1, 1]


def die_between_two_commits(game: KafkaGame) -> tuple[Committable, Committable]:
    """The driver has committed one task of batch 1 and dies; the broker aborts the other. Returns both."""
    assert game.live("batch.decided@2").killed
    (decision,) = game.decisions(1)
    kept, gone = sorted(decision.committables, key=lambda c: c.key)
    marker = game.marker_log().markers[kept.branches[0]]
    assert marker.transaction is not None
    assert game.world.wire.end(marker.transaction, commit=True) == "NO_ERROR"
    game.world.end_by_branch(gone.branches[0])
    assert game.committed() == game.setup.rows_per_batch + kept.rows
    return kept, gone


@pytest.mark.spark35
def test_of_a_batch_that_is_gone_in_part_exactly_the_gone_rows_are_written_again(make_kafka_game: Make) -> None:
    """Of a topic with this name Spark's source reads partition 1 in task 0, and partition 0 in task 0 when it replays
    the batch (SPARK-28650). Task 1 of the replay has the rows that are visible already; those that are gone are in
    task 0.
    """
    game = make_kafka_game(batches=3, topics=(TURNED, ""), shape="unsigned")
    kept, gone = die_between_two_commits(game)
    assert forwarded(game.require_good_end(game.live())) == [(1, True)]
    decided, mend = game.decisions(1)
    assert (decided.mends, mend.mends) == (False, True)
    (mended,) = mend.committables
    assert (mended.key, mended.rows, mended.fingerprint, mended.mends) == (gone.key, gone.rows, gone.fingerprint, True)
    assert kept.fingerprint != gone.fingerprint
    branch = parse_branch(mended.branches[0])
    assert branch is not None
    assert (gone.key, branch.task) == (f"{game.sink}/1", 0), "Spark has numbered the tasks of the replay as before"


def test_what_is_gone_of_tasks_that_wrote_several_partitions_is_written_partition_by_partition(
    make_kafka_game: Make,
) -> None:
    """Four partitions in two tasks, one of which is visible. The replay has a task for each partition."""
    source = {"minPartitions": "4"}
    game = make_kafka_game(batches=3, rows_per_batch=1200, shape="unsigned", source=source, tasks="2", driver_rows=0)
    kept, gone = die_between_two_commits(game)
    assert [c.fingerprint.count("+") for c in (kept, gone)] == [1, 1]
    assert forwarded(game.require_good_end(game.live())) == [(1, True)]
    _, mend = game.decisions(1)
    assert sorted(c.key for c in mend.committables) == [gone.key, f"{gone.key}+1"]
    assert "+".join(sorted(c.fingerprint for c in mend.committables)) == gone.fingerprint
    assert sum(c.rows for c in mend.committables) == gone.rows


def test_when_a_replay_brings_other_rows_the_pipeline_stops_and_doubles_nothing(make_kafka_game: Make) -> None:
    """The same, but each row says which task wrote it: a plan whose rows are others when it is run again."""
    game = make_kafka_game(batches=3, topics=(ALSO_TURNED, ""))
    die_between_two_commits(game)
    visible = game.committed()
    last = game.live()
    assert last.returncode == 1
    what, now, remedy = _three_lines(last.error, "RowsGone: ")
    gone = f"Of batch 1 the rows of {game.sink}/1 are gone from {game.sink}"
    assert what == f"{gone}, and a replay did not bring them again."
    assert now.startswith("  the data now: the batch is decided; what is named here is not visible, the rest is")
    assert remedy.startswith("  what to do: Write the missing rows by hand")
    assert game.committed() == visible
    assert game.open_transactions() == []


# What it is good for ------------------------------------------------------------------------------------------------


def test_without_the_guarantee_the_same_kill_doubles_rows_and_the_reader_sees_it(make_kafka_game: Make) -> None:
    """The kill after which exactly-once has nothing to write again; it also shows that these tests can fail."""
    game = make_kafka_game(batches=4, guarantee="at-least-once")
    assert game.live("batch.committed@2").killed
    last = game.live()
    assert last.returncode == 0, last
    findings = game.findings()
    assert (len(findings.lost), len(findings.duplicated)) == (0, game.setup.rows_per_batch)
    with pytest.raises(AssertionError, match="'duplicated': 40"):
        findings.require_clean(game.dealt)


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_checkpoint_older_than_the_output_is_refused(make_kafka_game: Make, tmp_path: Path) -> None:
    """iceberg#10892, delta#1813, hudi#12368: the sink skips what it takes for seen; rows are lost without a word."""
    game = make_kafka_game(batches=4)
    assert game.live("batch.began@3").killed
    game.copy_checkpoint(tmp_path / "old")
    assert game.live().returncode == 0
    game.copy_checkpoint(tmp_path / "new")
    seen = game.require_exactly_once()
    game.restore_checkpoint(tmp_path / "old")
    refused = game.live()
    assert refused.returncode == 1
    assert [e["kind"] for e in refused.events if e["event"] == "failed"] == ["CheckpointRolledBack"]
    assert "has seen batch 3, but the checkpoint knows batches only up to 1: it is older" in refused.error
    game.restore_checkpoint(tmp_path / "new")
    assert game.require_exactly_once() == seen
