"""Two pipelines from one folder of orders into one SQLite database. Run them with `semel run pipelines.py`.

Nothing in here knows that it will be killed.
"""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel

INPUT = os.environ["SEMEL_DEMO_INPUT"]
DATABASE = os.environ["SEMEL_DEMO_DATABASE"]
CHECKPOINTS = os.environ["SEMEL_DEMO_CHECKPOINTS"]
FILES_PER_BATCH = os.environ.get("SEMEL_DEMO_FILES_PER_BATCH", "2")


def read_orders(spark: SparkSession) -> DataFrame:
    schema = "id string, customer string, cents long, item string, at string"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_BATCH).json(INPUT)


@semel.pipeline
def orders(spark: SparkSession) -> semel.StreamWriter:
    """Every order, once."""
    return (
        semel.write(read_orders(spark))
        .to(semel.Sqlite(DATABASE, "orders"))
        .option("checkpointLocation", f"{CHECKPOINTS}/orders")
        .trigger(processingTime="200 milliseconds")
    )


@semel.pipeline(conf={"spark.sql.shuffle.partitions": "2"})
def totals(spark: SparkSession) -> semel.StreamWriter:
    """How many orders each customer made, and for how much: Spark's state and our table move together."""
    per_customer = (
        read_orders(spark).groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
    )
    return (
        semel.write(per_customer)
        .to(semel.Sqlite(DATABASE, "totals", mode="upsert", key=("customer",)))
        .option("checkpointLocation", f"{CHECKPOINTS}/totals")
        .outputMode("update")
        .trigger(processingTime="200 milliseconds")
    )
