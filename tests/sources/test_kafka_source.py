"""`semel.read_kafka` on a real broker and real Spark: what is read, where it starts, what the broker is told."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.dev.kafka import Security, kafka
from semel.dev.ports import free_port
from semel.errors import ConfigError, Refused, SemelError, SourceUnavailable
from semel.run.happenings import Happening
from semel.run.runner import launch
from semel.runtime.phases import Report
from semel.runtime.pipeline import pipeline
from semel.sources.kafka_progress import KafkaProgress
from tests.kafka_world import KafkaWorld
from tests.quick_spark import CLASS_PATH, JVM
from tests.sources.conftest import Topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOTHING = "nothing was started and no row was written"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[int]]:
    """Run a stream to the end of its input, and return what is in the sink then."""

    def run_to_the_end(df: DataFrame, hear: Callable[[Report], None] | None = None, **options: Any) -> list[int]:
        target = semel.Sqlite(str(tmp_path / "out.db"), "out", select=["CAST(CAST(value AS STRING) AS INT) AS id"])
        writer = semel.write(df, **options).to(target).option("checkpointLocation", str(tmp_path / "checkpoint"))
        running = writer.trigger(availableNow=True).launch(hear)
        running.query.awaitTermination()
        running.function.end()
        return rows(tmp_path)

    return run_to_the_end


def rows(tmp_path: Path) -> list[int]:
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        return sorted(row[0] for row in connection.execute("SELECT id FROM out"))


def lines(error: SemelError) -> tuple[str, str, str]:
    what, data, remedy = str(error).split("\n")
    return what, data.removeprefix("  the data now: "), remedy.removeprefix("  what to do: ")


# What is read -------------------------------------------------------------------------------------------------------


@pytest.mark.spark35
def test_aborted_records_are_never_seen_and_the_group_is_where_the_batch_ends(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]]
) -> None:
    topic.put([1, 2])
    topic.put_in_transaction([3, 4], commit=False)
    topic.put_in_transaction([5], commit=True)
    df = semel.read_kafka(spark, topic.name, servers=topic.servers, group="billing-1")
    assert run(df) == [1, 2, 5]
    # Two transactions have left an end marker each.
    assert topic.group_is_at("billing-1") == {0: 7}
    topic.put([6])
    assert run(df) == [1, 2, 5, 6]
    assert topic.group_is_at("billing-1") == {0: 8}


def test_without_a_group_the_broker_is_told_nothing(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]]
) -> None:
    topic.put([1])
    before = topic.groups()
    told: list[Report] = []
    assert run(semel.read_kafka(spark, topic.name, servers=topic.servers), told.append) == [1]
    assert topic.groups() == before
    assert [report.warning for report in told] == [""]


def test_several_topics_and_a_pattern(
    spark: SparkSession, make_topic: Callable[..., Topic], run: Callable[..., list[int]]
) -> None:
    one, two, three = make_topic(prefix="many"), make_topic(prefix="many"), make_topic(prefix="pattern.7")
    for number, topic in enumerate((one, two, three), start=1):
        topic.put([number])
    several = semel.read_kafka(spark, [one.name, two.name], servers=one.servers)
    # As Java writes it: Python cannot read this one.
    by_pattern = semel.read_kafka(spark, pattern=r"\Qpattern.7\E-\p{Alnum}+", servers=one.servers)
    assert run(several.union(by_pattern)) == [1, 2, 3]


# Where it starts ----------------------------------------------------------------------------------------------------


def test_group_offsets_are_where_the_first_start_begins_and_only_there(
    spark: SparkSession, make_topic: Callable[..., Topic], run: Callable[..., list[int]]
) -> None:
    topic = make_topic(partitions=3)
    for partition in range(3):
        topic.put(range(partition * 10, partition * 10 + 3), partition)
    topic.set_group("billing-2", {0: 2, 1: 0})

    def read(fallback: str) -> DataFrame:
        return semel.read_kafka(
            spark, topic.name, servers=topic.servers, start="group-offsets", group="billing-2", fallback=fallback
        )

    assert run(read("earliest")) == [2, 10, 11, 12, 20, 21, 22]
    # Whatever happens to the group, the checkpoint rules from now on.
    topic.set_group("billing-2", {0: 0, 1: 0, 2: 0})
    assert run(read("latest")) == [2, 10, 11, 12, 20, 21, 22]
    topic.put([23], partition=2)
    assert run(read("latest")) == [2, 10, 11, 12, 20, 21, 22, 23]


def test_a_start_of_ones_own(spark: SparkSession, make_topic: Callable[..., Topic], tmp_path: Path) -> None:
    topic = make_topic(partitions=2)
    topic.put([0, 1, 2], partition=0)
    topic.put([10, 11, 12], partition=1)
    now = datetime.now(timezone.utc)
    starts: dict[str, tuple[Any, str]] = {
        "latest": ("latest", "earliest"),
        "offsets of one partition": ({topic.name: {0: 2}}, "earliest"),
        "offsets of one partition, else the end": ({topic.name: {1: 2}}, "latest"),
        "offsets": ({topic.name: {0: 1, 1: 2}}, "latest"),
        "a day ago": (now - timedelta(days=1), "latest"),
        "tomorrow": (now + timedelta(days=1), "earliest"),
    }
    streams = [
        semel.read_kafka(spark, topic.name, servers=topic.servers, start=start, fallback=fallback).selectExpr(
            f"'{name}' AS start", "CAST(CAST(value AS STRING) AS INT) AS id"
        )
        for name, (start, fallback) in starts.items()
    ]
    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    writer = semel.write(reduce(lambda one, other: one.union(other), streams)).to(target)
    running = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).launch()
    running.query.awaitTermination()
    running.function.end()
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        found = sorted(connection.execute("SELECT start, id FROM out"))
    assert {name: [id_ for start, id_ in found if start == name] for name in starts} == {
        "latest": [],
        "offsets of one partition": [2, 10, 11, 12],
        "offsets of one partition, else the end": [12],
        "offsets": [1, 2, 12],
        "a day ago": [0, 1, 2, 10, 11, 12],
        "tomorrow": [],
    }


def test_a_start_that_names_a_partition_that_is_not_there_is_refused(spark: SparkSession, topic: Topic) -> None:
    with pytest.raises(ConfigError, match=f"^The start names partitions that are not read: {topic.name}-7"):
        semel.read_kafka(spark, topic.name, servers=topic.servers, start={topic.name: {0: 1, 7: 1}})


@pytest.mark.spark35
def test_records_that_were_deleted_before_they_were_read_stop_the_query(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]]
) -> None:
    topic.put([1, 2])
    df = semel.read_kafka(spark, topic.name, servers=topic.servers, group="billing-lost")
    assert run(df) == [1, 2]
    topic.put([3, 4, 5])
    topic.delete_before(4)
    with pytest.raises(Exception, match=r"failOnDataLoss|[Dd]ata (loss|may have been lost)"):
        run(df)
    assert topic.group_is_at("billing-lost") == {0: 2}


# Through to a Kafka sink --------------------------------------------------------------------------------------------


def run_into(sink: semel.Kafka, df: DataFrame, tmp_path: Path) -> None:
    writer = semel.write(df).to(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.spark35
def test_every_column_of_a_data_frame_arrives(
    spark: SparkSession, make_topic: Callable[..., Topic], tmp_path: Path
) -> None:
    source, one, two = make_topic(), make_topic(), make_topic(partitions=3)
    source.put([1, 2])
    df = semel.read_kafka(spark, source.name, servers=source.servers).selectExpr(
        "CAST(value AS STRING) AS key",
        "concat('row ', CAST(value AS STRING)) AS value",
        f"IF(CAST(value AS STRING) = '1', '{one.name}', '{two.name}') AS topic",
        "IF(CAST(value AS STRING) = '1', 0, 2) AS partition",
        "array(named_struct('key', 'trace', 'value', value)) AS headers",
        "timestamp_millis(1719837000000 + CAST(CAST(value AS STRING) AS INT)) AS timestamp",
    )
    run_into(semel.Kafka(source.servers), df, tmp_path)
    world = KafkaWorld(source.servers)
    seen = [r for topic in (one, two) for r in world.committed(topic.name)]
    world.close()
    assert [(r.topic, r.partition, r.key, r.value, r.headers, r.timestamp_ms) for r in seen] == [
        (one.name, 0, b"1", b"row 1", (("trace", b"1"),), 1719837000001),
        (two.name, 2, b"2", b"row 2", (("trace", b"2"),), 1719837000002),
    ]


def test_a_batch_with_a_message_too_large_is_not_lost(
    spark: SparkSession, make_topic: Callable[..., Topic], tmp_path: Path
) -> None:
    source, target = make_topic(), make_topic()
    target.set_up(**{"max.message.bytes": "2000"})
    source.put(range(20))
    read = semel.read_kafka(spark, source.name, servers=source.servers)
    df = read.selectExpr("value AS key", "repeat('x', IF(CAST(value AS STRING) = '7', 5000, 10)) AS value")
    sink, world = semel.Kafka(source.servers, target.name), KafkaWorld(source.servers)
    with pytest.raises(Exception, match="Message size too large"):
        run_into(sink, df, tmp_path)
    assert world.committed(target.name) == []
    target.set_up(**{"max.message.bytes": "100000"})
    run_into(sink, df, tmp_path)
    assert sorted(int(r.key) for r in world.committed(target.name)) == list(range(20))
    world.close()


# What the broker is told --------------------------------------------------------------------------------------------


def test_two_sources_report_to_their_own_groups_through_the_drop_in(
    spark: SparkSession, make_topic: Callable[..., Topic], tmp_path: Path
) -> None:
    one, two = make_topic(), make_topic()
    one.put(range(3))
    two.put(range(5))
    left = semel.read_kafka(spark, one.name, servers=one.servers, group="left")
    right = semel.read_kafka(spark, two.name, servers=two.servers, group="right")
    function = semel.sink(semel.Memory("two_groups", select=["topic", "offset"]))
    # The second leg of the union is the first source again: it has a line of its own in Spark's log.
    query = left.union(left).union(right).writeStream.foreachBatch(function)
    query.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    function.end()
    assert (one.group_is_at("left"), two.group_is_at("right")) == ({0: 3}, {0: 5})
    assert (one.group_is_at("right"), two.group_is_at("left")) == ({}, {})


def test_a_forwarded_batch_reports_its_offsets_too(
    spark: SparkSession, topic: Topic, tmp_path: Path, run: Callable[..., list[int]]
) -> None:
    topic.put([1, 2, 3])
    df = semel.read_kafka(spark, topic.name, servers=topic.servers, group="billing-3")
    assert run(df) == [1, 2, 3]
    # As if the driver had died after the commit, before Spark's checkpoint and before the report.
    for name in ("commits/0", "commits/.0.crc"):
        (tmp_path / "checkpoint" / name).unlink(missing_ok=True)
    topic.set_group("billing-3", {0: 0})
    told: list[Report] = []
    assert run(df, told.append) == [1, 2, 3]
    assert [report.how for report in told] == ["forwarded"]
    assert topic.group_is_at("billing-3") == {0: 3}


def test_a_batch_that_failed_is_not_reported(
    spark: SparkSession, topic: Topic, tmp_path: Path, run: Callable[..., list[int]]
) -> None:
    topic.put([1])
    df = semel.read_kafka(spark, topic.name, servers=topic.servers, group="billing-failed")
    assert run(df) == [1]
    topic.put([2, 3])
    with pytest.raises(Exception, match="no such luck"):
        run(df.where("CAST(value AS STRING) != '3' OR raise_error('no such luck') IS NULL"))
    assert (rows(tmp_path), topic.group_is_at("billing-failed")) == ([1], {0: 1})
    assert run(df) == [1, 2, 3]
    assert topic.group_is_at("billing-failed") == {0: 3}


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_the_weaker_guarantees_report_as_well(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]], guarantee: str
) -> None:
    topic.put([1])
    df = semel.read_kafka(spark, topic.name, servers=topic.servers, group=f"billing-{guarantee}")
    assert run(df, guarantee=guarantee) == [1]
    assert topic.group_is_at(f"billing-{guarantee}") == {0: 1}


def test_lag_is_what_waits_behind_each_batch(
    spark: SparkSession, make_topic: Callable[..., Topic], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(partitions=2)
    topic.put(range(8), partition=0)
    topic.put(range(2), partition=1)
    still_open = topic.open_transaction(range(100), partition=1)
    told: list[Happening] = []

    @pipeline(name="orders")
    def orders(session: SparkSession) -> semel.StreamWriter:
        options = {"maxOffsetsPerTrigger": 5}
        df = semel.read_kafka(session, topic.name, servers=topic.servers, group="billing-4", options=options)
        target = semel.Memory("lag", select=["partition", "offset"])
        return semel.write(df).to(target).option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)

    # The lag is measured while a batch runs; on a busy machine that may take longer than the batch.
    at_once = KafkaProgress.lag
    monkeypatch.setattr(KafkaProgress, "lag", lambda self, batch: self.flush(30) and at_once(self, batch))
    run = launch(orders, spark, Path("shop.py"), told.append)
    run.running.query.awaitTermination()
    run.running.stop()
    still_open.abort_transaction()
    batches = [h for h in told if h.event == "batch"]
    # Ten records can be read; what is in the open transaction cannot, so it is not waited for.
    assert [h.lag for h in batches] == [5, 0]
    first, last = batches
    assert first.lag_by_partition is not None
    assert sum(first.lag_by_partition.values()) == 5
    assert last.lag_by_partition == {f"{topic.name}-0": 0, f"{topic.name}-1": 0}
    assert [h.warning for h in batches] == ["", ""]
    assert topic.group_is_at("billing-4") == {0: 8, 1: 2}


# What is refused ----------------------------------------------------------------------------------------------------


def test_a_broker_that_is_away_is_told_within_the_limit(spark: SparkSession) -> None:
    port = free_port()
    with pytest.raises(SourceUnavailable) as caught:
        semel.read_kafka(spark, "orders", servers=f"127.0.0.1:{port}", timeout_s=1.0)
    what, now, remedy = lines(caught.value)
    assert what.startswith(f"Kafka at 127.0.0.1:{port} cannot be reached: ")
    assert what.endswith("Connection refused.")
    assert (now, remedy) == (
        NOTHING,
        "Bring the source back, or correct its address, and start the pipeline again.",
    )
    with pytest.raises(SourceUnavailable):
        semel.read_kafka(spark, pattern="orders.*", servers=f"127.0.0.1:{port}", timeout_s=0.5)


def test_a_missing_topic_is_named_and_not_created(spark: SparkSession, topic: Topic) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            semel.read_kafka(spark, [topic.name, "no.such.topic"], servers=topic.servers)
        assert lines(caught.value) == (
            f"There is no topic no.such.topic on {topic.servers}.",
            NOTHING,
            "Correct the name, or create the topic before the pipeline starts.",
        )


def raw(spark: SparkSession, topic: Topic, **options: str) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", topic.servers)
    return reader.option("subscribe", topic.name).option("startingOffsets", "earliest").options(**options).load()


@pytest.mark.parametrize("level", ["", "read_uncommitted"])
def test_a_source_that_reads_uncommitted_records_is_refused_under_exactly_once(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]], tmp_path: Path, level: str
) -> None:
    topic.put([1])
    df = raw(spark, topic, **({"kafka.isolation.level": level} if level else {}))
    with pytest.raises(Refused) as caught:
        run(df)
    assert lines(caught.value) == (
        f"The Kafka source has kafka.isolation.level={level or 'read_uncommitted, by default'}: "
        "it would read records of aborted transactions, which were never written once.",
        NOTHING,
        'Add .option("kafka.isolation.level", "read_committed") to the source, or use semel.read_kafka(...).',
    )
    assert not (tmp_path / "checkpoint").exists()
    assert run(df, guarantee="at-least-once") == [1]


def test_the_drop_in_refuses_the_same(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    function = semel.sink(semel.Sqlite(str(tmp_path / "out.db"), "out"))
    topic.put([1])
    query = (
        raw(spark, topic).writeStream.foreachBatch(function).option("checkpointLocation", str(tmp_path / "c")).start()
    )
    with pytest.raises(Exception, match=r"The Kafka source has kafka\.isolation\.level=read_uncommitted, by default"):
        query.awaitTermination()
    assert not (tmp_path / "out.db").exists()


def test_a_raw_source_that_reads_committed_records_is_fine(
    spark: SparkSession, topic: Topic, run: Callable[..., list[int]]
) -> None:
    topic.put([1])
    topic.put_in_transaction([2], commit=False)
    told: list[Report] = []
    assert run(raw(spark, topic, **{"Kafka.Isolation.Level": "read_committed"}), told.append) == [1]
    # Nobody asked us to speak to this broker.
    assert [report.lag for report in told] == [None]


NO_CONNECTOR = """
import semel
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    semel.read_kafka(spark, "{topic}", servers="{servers}")
except semel.SemelError as error:
    print(type(error).__name__, error)
"""


def test_without_the_connector_the_error_names_the_one_that_fits(topic: Topic) -> None:
    code = NO_CONNECTOR.format(topic=topic.name, servers=topic.servers)
    # The child lives for seconds: the quick compiler starts it in less time.
    quick = {**os.environ, "JDK_JAVA_OPTIONS": JVM, CLASS_PATH: ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=quick, capture_output=True, text=True, timeout=120, check=True)
    what, now, remedy = done.stdout.splitlines()
    assert what.startswith("ConfigError This Spark 4.0")
    assert what.endswith("cannot read Kafka: its connector is not on the class path.")
    assert now == f"  the data now: {NOTHING}"
    wanted = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
    assert remedy == (
        f'  what to do: In a pipeline file write @semel.pipeline(packages=("{wanted}",)); '
        "make a session of your own with semel.configure(SparkSession.builder).getOrCreate()."
    )


# Who may read -------------------------------------------------------------------------------------------------------


def test_a_login_serves_spark_and_the_reports_alike(
    spark: SparkSession, tmp_path: Path, run: Callable[..., list[int]]
) -> None:
    security = Security({"admin": "s3cr3t", "nobody": "n0b0dy"})
    with kafka(tmp_path / "kafka", security=security, quick=True) as cluster:
        login: Any = cluster.client_options("admin")
        topic = Topic("orders", cluster.bootstrap, login)
        topic.create()
        topic.put([1])

        def read(user: str, password: str) -> DataFrame:
            options = {
                "kafka.security.protocol": "SASL_PLAINTEXT",
                "kafka.sasl.mechanism": "PLAIN",
                "kafka.sasl.username": user,
                "kafka.sasl.password": password,
            }
            return semel.read_kafka(spark, "orders", servers=cluster.bootstrap, group="billing", options=options)

        told: list[Report] = []
        assert run(read("admin", "s3cr3t"), told.append) == [1]
        assert [(report.lag.records, report.warning) for report in told if report.lag] == [(0, "")]
        for user, password in (("admin", "wr0ng"), ("nobody", "n0b0dy")):
            with pytest.raises(ConfigError, match=f"^Kafka at {cluster.bootstrap} did not let us in: ") as caught:
                read(user, password)
            assert password not in str(caught.value)
