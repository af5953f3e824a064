"""Rows from JSON files into an SQLite table: the work horse of the tests of `semel verify`."""

import os

from pyspark.sql import DataFrame, SparkSession

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


def read_rows(spark: SparkSession) -> DataFrame:
    return spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")


@semel.pipeline
def orders(spark: SparkSession) -> semel.StreamWriter:
    """Ends by itself, which `semel verify` does not let it."""
    return (
        semel.write(read_rows(spark))
        .to(semel.Sqlite(f"{FOLDER}/out.db", "orders", select=("id", "key AS name")))
        .option("checkpointLocation", f"{FOLDER}/not-used")
        .trigger(availableNow=True)
    )
