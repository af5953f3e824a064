"""What a run is to report: pipelines that lose rows, whose rows have no identity, or that fail."""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


def read_rows(spark: SparkSession) -> DataFrame:
    return spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")


def written(rows: DataFrame) -> semel.StreamWriter:
    return semel.write(rows).to(semel.Sqlite(f"{FOLDER}/out.db", "orders")).option("checkpointLocation", FOLDER)


@semel.pipeline
def losing(spark: SparkSession) -> semel.StreamWriter:
    """Drops every tenth row, which nobody expects."""
    return written(read_rows(spark).where("id % 10 != 3"))


@semel.pipeline
def failing(spark: SparkSession) -> semel.StreamWriter:
    bad = F.when(F.col("id") == 300, F.raise_error(F.lit("row 300 is bad"))).otherwise(F.col("id"))
    return written(read_rows(spark).withColumn("id", bad))


@semel.pipeline
def renumbered(spark: SparkSession) -> semel.StreamWriter:
    return written(read_rows(spark).withColumn("id", F.col("id") + 1_000_000))


@semel.pipeline
def nameless(spark: SparkSession) -> semel.StreamWriter:
    return written(read_rows(spark).select("key"))
