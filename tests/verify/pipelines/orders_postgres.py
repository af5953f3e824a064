"""Rows from JSON files into a PostgreSQL table."""

import os

from pyspark.sql import SparkSession

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


@semel.pipeline
def orders(spark: SparkSession) -> semel.StreamWriter:
    rows = spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")
    return (
        semel.write(rows)
        .to(semel.Postgres(os.environ["SEMEL_POSTGRES_URL"], "orders", create=True))
        .option("checkpointLocation", f"{FOLDER}/not-used")
    )
