"""Spark's own sink, and semel, as their users run them. One process is one engine with one job.

python -m benchmarks.engines.spark_job '<job>'
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engines.talk import ENDED, FAILED, MARK, SESSION, STARTED, STOP, Job, tell, words

import semel
from semel.run.session import DEFAULTS, LOOPBACK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STEPS = ("triggerExecution", "latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
PROVIDERS = {
    "hdfs": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
#: Spark remembers the progress of 100 batches, which is less than a minute of small ones.
PROGRESS_KEPT = 100_000


def settings_of(job: Job) -> dict[str, str]:
    """What both engines have: a quiet Spark on this machine, the connector, and what the benchmark asks for."""
    settings = {**DEFAULTS, **LOOPBACK, "spark.sql.streaming.numRecentProgressUpdates": str(PROGRESS_KEPT)}
    if job.jars:
        settings["spark.jars"] = ",".join(job.jars)
    if job.count:
        settings["spark.sql.streaming.stateStore.providerClass"] = PROVIDERS[job.state]
    return settings | job.settings


def session(job: Job) -> SparkSession:
    """semel's users take the session that `semel.configure` makes, where this semel has it; Spark's as it comes."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.master("local[*]").appName(job.engine)
    for name, value in settings_of(job).items():
        builder = builder.config(name, value)
    configure = getattr(semel, "configure", None)
    if job.engine == "semel" and configure is not None:
        builder = configure(builder)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def source(spark: SparkSession, job: Job) -> DataFrame:
    if job.engine == "semel":
        return semel.read_kafka(spark, job.input, servers=job.servers)
    stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", job.servers)
    return stream.option("subscribe", job.input).option("startingOffsets", "earliest").load()


def rows_of(job: Job, stream: DataFrame) -> DataFrame:
    if not job.count:
        return stream.select("key", "value")
    counted = stream.selectExpr("CAST(key AS STRING) AS key").groupBy("key").count()
    return counted.selectExpr("key", "CAST(count AS STRING) AS value") if job.sink == "kafka" else counted


def start(spark: SparkSession, job: Job) -> StreamingQuery:
    df = rows_of(job, source(spark, job))
    writer: Any = by_semel(df, job) if job.engine == "semel" else by_spark(df, job)
    if job.count:
        writer = writer.outputMode("update")
    query: StreamingQuery = writer.option("checkpointLocation", f"{job.folder}/checkpoint").start()
    return query


def by_semel(df: DataFrame, job: Job) -> Any:
    # A sink is called after its topic: the words for several into one Kafka are those of docs/how-to/several-sinks.md.
    if job.sink == "sqlite":
        return semel.write(df).to(semel.Sqlite(job.place, job.outputs[0], mode="upsert", key="key"))
    if job.sink == "postgres":
        return semel.write(df).to(semel.Postgres(job.place, job.outputs[0], mode="upsert", key=["key"], create=True))
    return semel.write(df).to(*(semel.Kafka(job.servers, topic) for topic in job.outputs))


def by_spark(df: DataFrame, job: Job) -> Any:
    options = {"kafka.bootstrap.servers": job.servers}
    if len(job.outputs) == 1:
        return df.writeStream.format("kafka").options(**options).option("topic", job.outputs[0])

    def batch(rows: DataFrame, _: int) -> None:
        # Spark has no other way to several sinks in one query: kept, so that the input is read once.
        rows.persist()
        for topic in job.outputs:
            rows.write.format("kafka").options(**options).option("topic", topic).save()
        rows.unpersist()

    return df.writeStream.foreachBatch(batch)


# What it tells --------------------------------------------------------------------------------------------------------


def medians(progress: list[Any]) -> dict[str, float]:
    """Of the batches that had rows, in milliseconds."""
    found = [batch["durationMs"] for batch in progress if batch["numInputRows"]]
    if not found:
        return {}
    spent = {step: [batch[step] for batch in found if step in batch] for step in STEPS}
    return {step: statistics.median(times) for step, times in spent.items() if times}


def summary(progress: list[Any]) -> dict[str, Any]:
    rows = [batch["numInputRows"] for batch in progress if batch["numInputRows"]]
    triggers = [batch["durationMs"]["triggerExecution"] for batch in progress if batch["numInputRows"]]
    return {
        "batches": len(rows),
        "rows_per_batch": statistics.median(rows) if rows else 0,
        "trigger_ms_max": max(triggers, default=0),
        "duration_ms": medians(progress),
    }


def _watch(query: StreamingQuery) -> None:
    """A query that breaks by itself is told of at once."""
    try:
        query.awaitTermination()
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark has to fail by it
        tell(FAILED, error=str(error)[:2_000])


def main() -> None:
    job = Job.from_json(sys.argv[1])
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    spark = session(job)
    tell(SESSION)
    query = start(spark, job)
    tell(STARTED)
    threading.Thread(target=_watch, args=(query,), daemon=True).start()
    from_batch = 0
    for word in words():
        if word == MARK:
            from_batch = len(query.recentProgress)
        elif word == STOP:
            progress: list[Any] = list(query.recentProgress)[from_batch:]
            tell(ENDED, **summary(progress))
            query.stop()
            break
    spark.stop()


if __name__ == "__main__":
    main()
