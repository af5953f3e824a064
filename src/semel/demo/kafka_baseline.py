"""The same two streams in plain Spark: its own Kafka source, and its own Kafka sink, which is at-least-once.

Nothing is sabotaged: the source reads committed records only, and Spark's checkpoint is as durable as for semel. The
only harm done to it is kill -9. A batch that was cut off is run again by Spark, and what its first run had sent already
is then there twice.
"""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

from semel.demo.baseline_events import open_session, tell

SERVERS = os.environ["SEMEL_DEMO_SERVERS"]
MADE = os.environ["SEMEL_DEMO_MADE"]
ARRIVING = os.environ["SEMEL_DEMO_ARRIVING"]
TOTALS = os.environ["SEMEL_DEMO_TOTALS"]
CHECKPOINTS = os.environ["SEMEL_DEMO_CHECKPOINTS"]
ROWS_PER_BATCH = os.environ.get("SEMEL_DEMO_ROWS_PER_BATCH", "200")

ORDER = "id string, customer string, cents long, item string, at string"


def read_orders(spark: SparkSession) -> DataFrame:
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", SERVERS)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", MADE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", ROWS_PER_BATCH)
        .load()
    )
    return records.select(F.from_json(F.col("value").cast("string"), ORDER).alias("order")).select("order.*")


def start(df: DataFrame, name: str, topic: str, mode: str) -> None:
    records = df.select(F.col(df.columns[0]).alias("key"), F.to_json(F.struct("*")).alias("value"))

    def write(batch: DataFrame, number: int) -> None:
        tell("began", name, number)
        writer: Any = batch.write.format("kafka").option("kafka.bootstrap.servers", SERVERS)
        writer.option("topic", topic).save()
        tell("batch", name, number)

    (
        records.writeStream.foreachBatch(write)
        .queryName(name)
        .outputMode(mode)
        .option("checkpointLocation", f"{CHECKPOINTS}/{name}")
        .trigger(processingTime="200 milliseconds")
        .start()
    )
    tell("started", name)


def main() -> None:
    spark = open_session()
    per_customer = (
        read_orders(spark).groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
    )
    start(read_orders(spark), "orders", ARRIVING, "append")
    start(per_customer, "totals", TOTALS, "update")
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()
