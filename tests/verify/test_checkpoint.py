"""Checkpoint folders as Spark and semel write them, some of them damaged, and two that they wrote."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Aborted, Decided
from semel.verify.checkpoint import CheckpointWatcher
from semel.verify.feeders import FilePlace, KafkaPlace
from semel.verify.history import NO_BATCH, BatchSeen
from tests.kafka_world import KafkaWorld
from tests.processes import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from semel.dev.kafka import KafkaCluster

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
WAIT_S_MAX = 60
#: Each batch is two jobs of Spark.
QUERY_S_MAX = 240


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def plan(folder: Path, *batches: object) -> None:
    """offsets/N for each, of one source."""
    for number, position in enumerate(batches):
        write(folder / "offsets" / str(number), "v1", {"batchWatermarkMs": 0}, position)


def start_kafka_at(folder: Path, offsets: Mapping[str, Mapping[str, int]], source: int = 0) -> None:
    path = folder / "sources" / str(source) / "0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0v1\n" + json.dumps(offsets).encode())


def take_files(folder: Path, name: str, files: Mapping[str, int]) -> None:
    lines = [{"path": path, "timestamp": 1, "batchId": offset} for path, offset in files.items()]
    write(folder / "sources" / "0" / name, "v1", *lines)


def decide(folder: Path, batch: int, slot: int = 0, at_s: float | None = None, *, aborted: bool = False) -> None:
    attempt = Attempt(PIPELINE, batch, slot, Incarnation(1))
    log = DecisionLog(FileStore(folder / "semel"))
    assert log.append(Aborted(attempt) if aborted else Decided(attempt, ()))
    if at_s is not None:
        os.utime(folder / "semel" / "decisions" / f"{batch:010d}.{slot}.json", (at_s, at_s))


def looked(folder: Path, sources: int = 1) -> CheckpointWatcher:
    watcher = CheckpointWatcher(folder, sources)
    watcher.look()
    return watcher


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_yet_has_no_batches(tmp_path: Path) -> None:
    watcher = looked(tmp_path / "later")
    assert (watcher.batches(), watcher.error, watcher.pipeline) == ({}, "", "")
    assert watcher.batch_of([KafkaPlace("t", 0, 0), FilePlace("/a")]) == [NO_BATCH, NO_BATCH]


def test_batches_are_planned_then_decided_then_checkpointed(tmp_path: Path) -> None:
    plan(tmp_path, {"t": {"0": 1}}, {"t": {"0": 2}}, {"t": {"0": 3}})
    decide(tmp_path, 0, at_s=100.5)
    decide(tmp_path, 1, at_s=101.5)
    write(tmp_path / "commits" / "0", "v1", {})
    watcher = looked(tmp_path)
    assert watcher.batches() == {
        0: BatchSeen(0, 100.5, True),
        1: BatchSeen(1, 101.5, False),
        2: BatchSeen(2, 0.0, False),
    }


def test_the_time_of_a_batch_is_that_of_its_first_decision(tmp_path: Path) -> None:
    decide(tmp_path, 0, 0, 100.0, aborted=True)
    watcher = looked(tmp_path)
    assert watcher.batches() == {}
    decide(tmp_path, 0, 1, 101.0)
    decide(tmp_path, 0, 2, 102.0)
    watcher.look()
    assert watcher.batches()[0].decided_s == 101.0


def test_what_was_read_is_kept_when_the_pipeline_prunes_it(tmp_path: Path) -> None:
    decide(tmp_path, 0, at_s=100.0)
    watcher = looked(tmp_path)
    DecisionLog(FileStore(tmp_path / "semel")).prune(before_batch=1)
    watcher.look()
    assert watcher.batches() == {0: BatchSeen(0, 100.0)}


def test_the_thread_sees_decisions_that_are_pruned_soon(tmp_path: Path) -> None:
    watcher = CheckpointWatcher(tmp_path, 1)
    watcher.start()
    log = DecisionLog(FileStore(tmp_path / "semel"))
    for batch in range(4):
        decide(tmp_path, batch)
        wait_until(lambda: len(watcher.batches()) > batch, WAIT_S_MAX)  # noqa: B023 - called before the next one
        log.prune(before_batch=batch + 1)
    watcher.stop()
    assert not watcher.is_alive()
    assert [b.number for b in watcher.batches().values() if b.decided_s] == [0, 1, 2, 3]


def test_stop_looks_once_more(tmp_path: Path) -> None:
    watcher = CheckpointWatcher(tmp_path, 1)
    decide(tmp_path, 0, at_s=100.0)
    watcher.stop()
    assert watcher.batches() == {0: BatchSeen(0, 100.0)}


def test_the_pipeline_is_known_by_spark_s_metadata(tmp_path: Path) -> None:
    write(tmp_path / "metadata", {"id": PIPELINE})
    assert looked(tmp_path).pipeline == PIPELINE


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_decision_is_an_error_and_the_others_are_read(tmp_path: Path) -> None:
    decide(tmp_path, 0)
    decide(tmp_path, 1, at_s=101.0)
    (tmp_path / "semel" / "decisions" / "0000000000.0.json").write_text('{"kind": "deci')
    watcher = looked(tmp_path)
    assert "damaged or half-written" in watcher.error
    assert watcher.batches() == {1: BatchSeen(1, 101.0)}


@pytest.mark.parametrize("damage", [b'{"t": {"0": ', b"\xff\xfe", b"{]"])
def test_damaged_offsets_are_an_error_until_they_can_be_read(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_bytes(b"v1\n{}\n" + damage)
    watcher = looked(tmp_path)
    assert watcher.error == "offsets/0 of the checkpoint is damaged"
    plan(tmp_path, {"t": {"0": 5}})
    watcher.look()
    assert watcher.error == ""
    assert watcher.batch_of([KafkaPlace("t", 0, 4)]) == [0]


def test_another_number_of_sources_is_an_error(tmp_path: Path) -> None:
    plan(tmp_path, {"t": {"0": 5}})
    assert looked(tmp_path, 2).error == "offsets/0 has 1 sources, and the pipeline 2"


def test_a_folder_that_cannot_be_read_does_not_end_the_thread(tmp_path: Path) -> None:
    (tmp_path / "offsets").write_text("not a folder")
    watcher = CheckpointWatcher(tmp_path, 1)
    watcher.start()
    wait_until(lambda: "cannot be read" in watcher.error, WAIT_S_MAX)
    (tmp_path / "offsets").unlink()
    plan(tmp_path, {"t": {"0": 5}})
    wait_until(lambda: watcher.error == "" and 0 in watcher.batches(), WAIT_S_MAX)
    watcher.stop()


def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "offsets" / ".0.6f8e.tmp", "v1")
    write(tmp_path / "commits" / ".0.6f8e.tmp", "v1")
    write(tmp_path / "semel" / "decisions" / ".0000000000.0.json.tmp", "{")
    watcher = looked(tmp_path)
    assert (watcher.batches(), watcher.error) == ({}, "")


# Rows of Kafka --------------------------------------------------------------------------------------------------------


def test_a_batch_reads_a_topic_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    start_kafka_at(tmp_path, {"t": {"0": 0, "1": 0}})
    plan(tmp_path, {"t": {"0": 3, "1": 0}}, {"t": {"0": 3, "1": 2}}, {"t": {"0": 5, "1": 2}})
    places = [
        KafkaPlace("t", p, offset) for p, offset in [(0, 0), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0), (1, 1), (1, 2)]
    ]
    assert looked(tmp_path).batch_of(places) == [0, 0, 2, 2, NO_BATCH, 1, 1, NO_BATCH]


def test_rows_below_the_start_belong_to_no_batch(tmp_path: Path) -> None:
    start_kafka_at(tmp_path, {"t": {"0": 7}})
    plan(tmp_path, {"t": {"0": 9}})
    assert looked(tmp_path).batch_of([KafkaPlace("t", 0, n) for n in (6, 7, 8, 9)]) == [NO_BATCH, 0, 0, NO_BATCH]


def test_a_partition_that_came_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    start_kafka_at(tmp_path, {"t": {"0": 0}})
    plan(tmp_path, {"t": {"0": 3}}, {"t": {"0": 3, "1": 2}})
    assert looked(tmp_path).batch_of([KafkaPlace("t", 1, 0), KafkaPlace("t", 1, 1)]) == [1, 1]


def test_topics_of_other_names_and_rows_that_nobody_reads_have_no_batch(tmp_path: Path) -> None:
    plan(tmp_path, {"t": {"0": 3}})
    assert looked(tmp_path).batch_of([KafkaPlace("u", 0, 0), KafkaPlace("t", 5, 0)]) == [NO_BATCH, NO_BATCH]


def test_each_source_has_its_own_line(tmp_path: Path) -> None:
    write(tmp_path / "offsets" / "0", "v1", {}, "-", {"t": {"0": 3}})
    write(tmp_path / "offsets" / "1", "v1", {}, "17", {"t": {"0": 5}})
    start_kafka_at(tmp_path, {"t": {"0": 1}}, source=1)
    watcher = looked(tmp_path, 2)
    assert watcher.error == ""
    assert watcher.batch_of([KafkaPlace("t", 0, n) for n in range(5)]) == [NO_BATCH, 0, 0, 1, 1]


def test_a_row_that_two_sources_read_in_different_batches_has_none(tmp_path: Path) -> None:
    write(tmp_path / "offsets" / "0", "v1", {}, {"t": {"0": 3}}, {"t": {"0": 2}})
    write(tmp_path / "offsets" / "1", "v1", {}, {"t": {"0": 4}}, {"t": {"0": 4}})
    assert looked(tmp_path, 2).batch_of([KafkaPlace("t", 0, n) for n in range(4)]) == [0, 0, NO_BATCH, 1]


def test_rows_of_batches_that_spark_forgot_have_none(tmp_path: Path) -> None:
    plan(tmp_path, *({"t": {"0": 2 * n}} for n in range(1, 7)))
    for number in (0, 1, 4):
        (tmp_path / "offsets" / str(number)).unlink()
    batches = looked(tmp_path).batch_of([KafkaPlace("t", 0, n) for n in range(0, 12, 2)])
    assert batches == [NO_BATCH, NO_BATCH, NO_BATCH, 3, NO_BATCH, NO_BATCH]


# Rows of files --------------------------------------------------------------------------------------------------------


def test_a_batch_reads_the_files_of_its_log_offsets(tmp_path: Path) -> None:
    take_files(tmp_path, "0", {"file:///in/a.json": 0, "file:///in/b.json": 0})
    take_files(tmp_path, "1", {"file:///in/c.json": 1})
    take_files(tmp_path, "2", {"file:///in/d.json": 2})
    take_files(tmp_path, "3", {"file:///in/e.json": 3})
    plan(tmp_path, {"logOffset": 0}, {"logOffset": 2})
    places = [FilePlace(f"/in/{name}.json") for name in "aabcdef"]
    assert looked(tmp_path).batch_of(places) == [0, 0, 0, 1, 1, NO_BATCH, NO_BATCH]


def test_a_compacted_log_names_the_files_of_all_before(tmp_path: Path) -> None:
    take_files(tmp_path, "9.compact", {f"file:///in/{n}.json": n for n in range(10)})
    take_files(tmp_path, "10", {"file:///in/10.json": 10})
    plan(tmp_path, *({"logOffset": n} for n in range(11)))
    assert looked(tmp_path).batch_of([FilePlace(f"/in/{n}.json") for n in range(11)]) == list(range(11))


def test_paths_are_compared_as_the_file_system_sees_them(tmp_path: Path) -> None:
    """Spark writes a URI, and names a folder as the option did, links and all."""
    (tmp_path / "real folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real folder")
    take_files(tmp_path, "0", {f"file://{tmp_path}/link/a%20b.json": 0})
    plan(tmp_path, {"logOffset": 0})
    assert looked(tmp_path).batch_of([FilePlace(str(tmp_path / "real folder" / "a b.json"))]) == [0]


def test_a_damaged_log_of_files_leaves_rows_without_a_batch(tmp_path: Path) -> None:
    write(tmp_path / "sources" / "0" / "0", "v1", '{"path": "file:///in/a')
    plan(tmp_path, {"logOffset": 0})
    assert looked(tmp_path).batch_of([FilePlace("/in/a")]) == [NO_BATCH]


# By Spark itself ------------------------------------------------------------------------------------------------------


class Truth:
    """Runs a query under semel and writes down, in foreachBatch, which rows each batch had and when."""

    def __init__(self, target: semel.Sink) -> None:
        self.write: Callable[[DataFrame, int], None] = semel.sink(target)
        self.rows: dict[int, list[Any]] = {}
        self.times: dict[int, tuple[float, float]] = {}

    def __call__(self, df: DataFrame, batch: int) -> None:
        self.rows[batch] = [row[0] for row in df.select("place").collect()]
        began_s = time.time()
        self.write(df, batch)
        self.times[batch] = began_s, time.time()

    def require_decisions_between(self, batches: Mapping[int, BatchSeen]) -> None:
        assert {n for n, b in batches.items() if b.checkpointed} == set(self.rows)
        for number, (began_s, ended_s) in self.times.items():
            assert began_s - 0.01 <= batches[number].decided_s <= ended_s


def test_files_that_spark_has_read(spark: SparkSession, tmp_path: Path) -> None:
    """Eleven batches, so that Spark compacts its log on the way."""
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    folder.mkdir()
    for number in range(22):
        path = folder / f"part {number:02d}.json"
        path.write_text(json.dumps({"id": number}) + "\n")
        os.utime(path, (1_700_000_000 + number,) * 2)
    watcher = CheckpointWatcher(checkpoint, 1)
    watcher.start()
    truth = Truth(semel.Sqlite(str(tmp_path / "out.db"), "rows"))
    df = spark.readStream.schema("id long").option("maxFilesPerTrigger", 2).json(str(folder))
    query = (
        df.selectExpr("id", "_metadata.file_path AS place")
        .writeStream.foreachBatch(truth)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(QUERY_S_MAX)
    watcher.stop()
    assert watcher.error == ""
    assert watcher.pipeline == query.id
    batch_of = watcher.batch_of([FilePlace(str(folder / f"part {n:02d}.json")) for n in range(22)])
    assert len(truth.rows) == 11
    assert (checkpoint / "sources" / "0" / "9.compact").exists()
    for batch, paths in truth.rows.items():
        mine = [f"part%20{n:02d}.json" for n in range(22) if batch_of[n] == batch]
        assert sorted(path.rsplit("/", 1)[1] for path in paths) == mine
    truth.require_decisions_between(watcher.batches())


def test_offsets_that_spark_has_read(spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """The topic holds rows that the query begins behind."""
    from confluent_kafka import Producer

    topic, checkpoint = f"in-{uuid.uuid4().hex[:8]}", tmp_path / "checkpoint"
    world = KafkaWorld(kafka_cluster.address)
    world.create_topics(topic, partitions=2)
    world.close()
    producer = Producer(kafka_cluster.client_options())
    for number in range(40):
        producer.produce(topic, str(number).encode(), partition=number % 2)
    assert producer.flush(WAIT_S_MAX) == 0
    watcher = CheckpointWatcher(checkpoint, 1)
    watcher.start()
    truth = Truth(semel.Sqlite(str(tmp_path / "out.db"), "rows"))
    start, options = {topic: {0: 3, 1: 0}}, {"maxOffsetsPerTrigger": "10"}
    df = semel.read_kafka(spark, topic, servers=kafka_cluster.address, start=start, options=options)
    query = (
        df.selectExpr("CAST(value AS STRING) AS id", "concat_ws(' ', partition, offset) AS place")
        .writeStream.foreachBatch(truth)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(QUERY_S_MAX)
    watcher.stop()
    assert watcher.error == ""
    places = [KafkaPlace(topic, p, offset) for p in range(2) for offset in range(20)]
    batch_of = dict(zip(places, watcher.batch_of(places), strict=True))
    assert [offset for (_, p, offset), batch in batch_of.items() if batch == NO_BATCH] == [0, 1, 2]
    for batch, rows in truth.rows.items():
        mine = [f"{p} {offset}" for (_, p, offset), found in batch_of.items() if found == batch]
        assert sorted(rows) == sorted(mine)
    truth.require_decisions_between(watcher.batches())
