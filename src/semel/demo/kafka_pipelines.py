"""Two pipelines from one topic of orders into two other topics. Run them with `semel run kafka_pipelines.py`.

Nothing in here knows that it will be killed.
"""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel

SERVERS = os.environ["SEMEL_DEMO_SERVERS"]
MADE = os.environ["SEMEL_DEMO_MADE"]
ARRIVING = os.environ["SEMEL_DEMO_ARRIVING"]
TOTALS = os.environ["SEMEL_DEMO_TOTALS"]
CHECKPOINTS = os.environ["SEMEL_DEMO_CHECKPOINTS"]
ROWS_PER_BATCH = os.environ.get("SEMEL_DEMO_ROWS_PER_BATCH", "200")

ORDER = "id string, customer string, cents long, item string, at string"


def read_orders(spark: SparkSession) -> DataFrame:
    records = semel.read_kafka(spark, MADE, servers=SERVERS, options={"maxOffsetsPerTrigger": ROWS_PER_BATCH})
    return records.select(F.from_json(F.col("value").cast("string"), ORDER).alias("order")).select("order.*")


@semel.pipeline
def orders(spark: SparkSession) -> semel.StreamWriter:
    """Every order, once."""
    records = read_orders(spark).select(F.col("id").alias("key"), F.to_json(F.struct("*")).alias("value"))
    return (
        semel.write(records)
        .to(semel.Kafka(SERVERS, ARRIVING))
        .option("checkpointLocation", f"{CHECKPOINTS}/orders")
        .trigger(processingTime="200 milliseconds")
    )


@semel.pipeline(conf={"spark.sql.shuffle.partitions": "2"})
def totals(spark: SparkSession) -> semel.StreamWriter:
    """How many orders each customer made, and for how much: Spark's state and the topic move together."""
    per_customer = (
        read_orders(spark).groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
    )
    records = per_customer.select(F.col("customer").alias("key"), F.to_json(F.struct("*")).alias("value"))
    return (
        semel.write(records)
        .to(semel.Kafka(SERVERS, TOTALS))
        .option("checkpointLocation", f"{CHECKPOINTS}/totals")
        .outputMode("update")
        .trigger(processingTime="200 milliseconds")
    )
