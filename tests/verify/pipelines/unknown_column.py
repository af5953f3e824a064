"""A pipeline that cannot be built."""

import os

from pyspark.sql import SparkSession

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]


@semel.pipeline
def wrong(spark: SparkSession) -> semel.StreamWriter:
    rows = spark.readStream.schema("id long").json(f"{FOLDER}/in")
    return semel.write(rows).to(semel.Sqlite(f"{FOLDER}/out.db", "orders", select=("price",)))
