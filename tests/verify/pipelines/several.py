"""Two pipelines: one keeps state, one fails at its third row."""

import os

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


@semel.pipeline
def totals(spark: SparkSession) -> semel.StreamWriter:
    rows = spark.readStream.schema("id long, key string").json(f"{FOLDER}/in")
    return (
        semel.write(rows.groupBy("key").agg(F.count("*").alias("orders")))
        .to(semel.Sqlite(f"{FOLDER}/totals.db", "totals", mode="upsert", key=("key",)))
        .option("checkpointLocation", f"{FOLDER}/not-used")
        .outputMode("update")
    )


@semel.pipeline
def failing(spark: SparkSession) -> semel.StreamWriter:
    rows = spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")
    checked = rows.withColumn(
        "id", F.when(F.col("id") == 3, F.raise_error(F.lit("row 3 is bad"))).otherwise(F.col("id"))
    )
    return semel.write(checked).to(semel.Sqlite(f"{FOLDER}/out.db", "orders")).option("checkpointLocation", FOLDER)
