"""The user's side: plain DataFrames in, a real StreamingQuery out."""

from __future__ import annotations

import json
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.errors import BatchFailed, ConfigError
from semel.runtime.foreach_batch import BatchFunction
from semel.runtime.phases import Report
from semel.runtime.pipeline import Pipeline, StreamWriter
from semel.sinks.files import read_committed
from semel.sinks.memory import memory_table
from tests.processes import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.spark35


def finish(writer: StreamWriter) -> list[Report]:
    reports: list[Report] = []
    running = writer.trigger(availableNow=True).launch(reports.append)
    running.query.awaitTermination()
    running.function.end()
    return reports


def select(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as connection:
        return connection.execute(sql).fetchall()


def test_start_returns_sparks_own_streaming_query(stream: DataFrame, tmp_path: Path) -> None:
    from pyspark.sql.streaming.query import StreamingQuery

    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    query = semel.write(stream).to(target).option("checkpointLocation", str(tmp_path / "c")).queryName("real").start()
    assert type(query) is StreamingQuery
    query.processAllAvailable()
    progress: Any = query.lastProgress
    assert (query.name, query.isActive, progress["name"]) == ("real", True, "real")
    query.stop()
    assert select(tmp_path / "out.db", "SELECT count(*), count(DISTINCT id) FROM out") == [(20, 20)]


def test_a_fresh_checkpoint_is_claimed_before_spark_starts(
    stream: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the id that Spark will take the query for."""
    claimed: list[list[str]] = []
    start = StreamWriter._spark_writer

    def watched(self: StreamWriter, function: BatchFunction) -> Any:
        claimed.append(sorted(path.name for path in (tmp_path / "c" / "semel" / "incarnations").iterdir()))
        return start(self, function)

    monkeypatch.setattr(StreamWriter, "_spark_writer", watched)
    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    query = semel.write(stream).to(target).option("checkpointLocation", str(tmp_path / "c")).start()
    query.processAllAvailable()
    query.stop()
    assert claimed == [["0000000001.json"]]
    assert json.loads((tmp_path / "c" / "metadata").read_text()) == {"id": query.id}
    assert select(tmp_path / "out.db", "SELECT count(*) FROM out") == [(20,)]


def test_a_query_that_is_stopped_within_a_batch_has_not_failed(stream: DataFrame, tmp_path: Path) -> None:
    """Spark tells a stop from an error by its text, and chokes on a long one."""
    begun, said = tmp_path / "begun", []
    sink = semel.Sqlite(str(tmp_path / "out.db"), "out")
    function = semel.sink(sink)

    def hold(batches: Iterable[Any]) -> Iterator[Any]:
        begun.touch()
        for batch in batches:
            time.sleep(60)
            yield batch

    def listen(df: DataFrame, batch: int) -> None:
        try:
            function(df, batch)
        except BaseException:
            said.append(traceback.format_exc())
            raise

    slow = stream.mapInArrow(hold, stream.schema).writeStream.foreachBatch(listen)
    query = slow.option("checkpointLocation", str(tmp_path / "c")).start()
    wait_until(begun.exists)
    query.stop()
    assert (query.isActive, query.exception()) == (False, None)
    (text,) = said
    assert text.endswith(": java.lang.InterruptedException\n")
    assert len(text) < 2_000
    finish(semel.write(stream).to(sink).option("checkpointLocation", str(tmp_path / "c")))
    assert select(tmp_path / "out.db", "SELECT count(*), count(DISTINCT id) FROM out") == [(20, 20)]


def test_all_sinks_are_written_in_one_spark_job_a_batch(spark: SparkSession, stream: DataFrame, tmp_path: Path) -> None:
    odd = ["id * 2 AS twice", "upper(name) AS name"]
    sinks = (
        semel.Sqlite(str(tmp_path / "out.db"), "everything"),
        semel.Sqlite(str(tmp_path / "out.db"), "odd", select=odd, where="id % 2 = 1"),
        semel.Files(str(tmp_path / "files"), select=["id"]),
    )
    running = semel.write(stream).to(*sinks).option("checkpointLocation", str(tmp_path / "c")).launch()
    running.query.processAllAvailable()
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup(str(running.query.runId))
    running.stop()
    assert len(jobs) == 2
    assert select(tmp_path / "out.db", "SELECT count(*) FROM everything") == [(20,)]
    assert select(tmp_path / "out.db", "SELECT twice, name FROM odd ORDER BY 1") == [
        (2 * i, f"N{i % 10}") for i in range(1, 20, 2)
    ]
    assert sorted(row["id"] for row in read_committed(spark, tmp_path / "files").collect()) == list(range(20))


def test_the_drop_in_claims_anew_when_its_query_is_started_again(
    stream: DataFrame, tmp_path: Path, put: Callable[[int], None]
) -> None:
    function = semel.sink(semel.Sqlite(str(tmp_path / "out.db"), "out"))
    for _ in range(2):
        writer = stream.writeStream.foreachBatch(function).option("checkpointLocation", str(tmp_path / "c"))
        writer.trigger(availableNow=True).start().awaitTermination()
        put(2)
    assert select(tmp_path / "out.db", "SELECT count(*), count(DISTINCT id) FROM out") == [(30, 30)]
    assert select(tmp_path / "out.db", "SELECT max(incarnation) FROM semel_ledger") == [(2,)]
    function.end()


def test_an_empty_batch_commits(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate").option("rowsPerSecond", 5).load().where("value < 0")
    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    reports: list[Report] = []
    running = semel.write(stream).to(target).option("checkpointLocation", str(tmp_path / "c")).launch(reports.append)
    wait_until(lambda: len(reports) >= 2)
    running.stop()
    assert {report.rows for report in reports} == {0}
    assert select(tmp_path / "out.db", "SELECT count(*) >= 2, sum(rows) FROM semel_ledger") == [(1, 0)]


def test_a_complete_aggregation_replaces_the_table(stream: DataFrame, tmp_path: Path) -> None:
    target = semel.Sqlite(str(tmp_path / "out.db"), "counts", mode="replace")
    counts = stream.groupBy("name").count()
    writer = semel.write(counts).to(target).outputMode("complete").option("checkpointLocation", str(tmp_path / "c"))
    assert [r.rows for r in finish(writer)] == [10, 10]
    assert select(tmp_path / "out.db", "SELECT DISTINCT count FROM counts") == [(2,)]
    assert select(tmp_path / "out.db", "SELECT count(*) FROM counts") == [(10,)]


def test_an_update_aggregation_upserts(stream: DataFrame, tmp_path: Path) -> None:
    target = semel.Sqlite(str(tmp_path / "out.db"), "counts", mode="upsert", key=("name",))
    counts = stream.groupBy("name").count()
    finish(semel.write(counts).to(target).outputMode("update").option("checkpointLocation", str(tmp_path / "c")))
    assert select(tmp_path / "out.db", "SELECT count(*), min(count), max(count) FROM counts") == [(10, 2, 2)]


def test_a_row_that_the_table_refuses_fails_the_batch_before_the_decision(stream: DataFrame, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "out.db") as connection:
        connection.execute("CREATE TABLE out (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("INSERT INTO out VALUES (13, 'here already')")
    writer = semel.write(stream).to(semel.Sqlite(str(tmp_path / "out.db"), "out"))
    with pytest.raises(Exception, match=r"UNIQUE constraint failed: out\.id") as caught:
        finish(writer.option("checkpointLocation", str(tmp_path / "c")))
    assert BatchFailed.data_now in str(caught.value)
    assert select(tmp_path / "out.db", "SELECT count(*) FROM out WHERE id < 10") == [(10,)]
    assert select(tmp_path / "out.db", "SELECT count(*) FROM out WHERE id >= 10") == [(1,)]
    assert not (tmp_path / "c" / "semel" / "decisions" / "0000000001.0.json").exists()
    with sqlite3.connect(tmp_path / "out.db") as connection:
        connection.execute("DELETE FROM out WHERE name = 'here already'")
    finish(writer.option("checkpointLocation", str(tmp_path / "c")))
    assert select(tmp_path / "out.db", "SELECT count(*), count(DISTINCT id) FROM out") == [(20, 20)]


def test_stop_ends_between_two_batches(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    reports: list[Report] = []
    running = semel.write(stream).to(target).option("checkpointLocation", str(tmp_path / "c")).launch(reports.append)
    wait_until(lambda: len(reports) >= 2)
    assert running.stop() is True
    assert running.query.isActive is False
    assert select(tmp_path / "out.db", "SELECT sum(rows) FROM semel_ledger") == [(sum(r.rows for r in reports),)]


def test_the_default_checkpoint_of_the_session_counts(spark: SparkSession, stream: DataFrame, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "all"))
    try:
        writer = semel.write(stream).to(semel.Memory("by_default"))
        with pytest.raises(ConfigError, match="no checkpointLocation"):
            _ = writer.checkpoint
        finish(writer.queryName("named"))
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert (tmp_path / "all" / "named" / "semel" / "pipeline.json").exists()
    assert len(memory_table("by_default").visible) == 20


def test_a_decorated_function_is_a_pipeline() -> None:
    @semel.pipeline
    def orders(spark: SparkSession) -> StreamWriter:
        raise AssertionError(spark)

    @semel.pipeline(name="nightly-orders", packages=("org:artifact:1",), conf={"spark.x": "y"})
    def other(spark: SparkSession) -> StreamWriter:
        raise AssertionError(spark)

    assert isinstance(orders, Pipeline)
    assert (orders.name, other.name, other.packages, other.conf) == (
        "orders",
        "nightly-orders",
        ("org:artifact:1",),
        {"spark.x": "y"},
    )
    with pytest.raises(ConfigError, match="A pipeline cannot be named 'no good'"):
        semel.pipeline(name="no good")(lambda _: None)  # type: ignore[arg-type,return-value]  # the name fails first


def test_a_pipeline_that_returns_something_else_says_what_to_return(spark: SparkSession) -> None:
    wrong: Any = lambda session: session.range(3)  # noqa: E731 - what a user might return
    with pytest.raises(ConfigError, match="Pipeline wrong returned DataFrame"):
        Pipeline(wrong, "wrong")(spark)
