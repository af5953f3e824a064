"""The same two streams in plain Spark: its own Kafka source, and its own Kafka sink, which is at-least-once.

Nothing is sabotaged: the source reads committed records only, and Spark's checkpoint is as durable as for semel. The
only harm done to it is kill -9. A batch that was cut off is run again by Spark, and what its first run had sent already
is then there twice.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

from semel.demo.baseline_events import run

SERVERS = os.environ["SEMEL_DEMO_SERVERS"]
MADE = os.environ["SEMEL_DEMO_MADE"]
ARRIVING = os.environ["SEMEL_DEMO_ARRIVING"]
TOTALS = os.environ["SEMEL_DEMO_TOTALS"]
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


def write_records(rows: DataFrame, topic: str) -> None:
    records = rows.select(F.col(rows.columns[0]).alias("key"), F.to_json(F.struct("*")).alias("value"))
    writer: Any = records.write.format("kafka").option("kafka.bootstrap.servers", SERVERS)
    writer.option("topic", topic).save()


if __name__ == "__main__":
    run(read_orders, partial(write_records, topic=ARRIVING), partial(write_records, topic=TOTALS))
