"""What both plain Spark programs of the demo share: a session, the queries, and events as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

Write = Callable[[DataFrame], None]
CHECKPOINTS = os.environ["SEMEL_DEMO_CHECKPOINTS"]


def tell(event: str, pipeline: str, batch: int | None = None) -> None:
    sys.stdout.write(json.dumps({"event": event, "pipeline": pipeline, "batch": batch}) + "\n")
    sys.stdout.flush()


def open_session() -> SparkSession:
    builder: Any = SparkSession.builder
    for key, value in json.loads(os.environ.get("SEMEL_DEMO_CONF", "{}")).items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(read: Callable[[SparkSession], DataFrame], write_orders: Write, write_totals: Write) -> None:
    spark = open_session()
    per_customer = read(spark).groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
    start(read(spark), "orders", write_orders, "append")
    start(per_customer, "totals", write_totals, "update")
    spark.streams.awaitAnyTermination()


def start(df: DataFrame, name: str, write: Write, mode: str) -> None:
    def write_batch(batch: DataFrame, number: int) -> None:
        tell("began", name, number)
        write(batch)
        tell("batch", name, number)

    (
        df.writeStream.foreachBatch(write_batch)
        .queryName(name)
        .outputMode(mode)
        .option("checkpointLocation", f"{CHECKPOINTS}/{name}")
        .trigger(processingTime="200 milliseconds")
        .start()
    )
    tell("started", name)
