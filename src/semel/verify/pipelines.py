"""The pipeline that `semel verify --sinks ...` runs: rows from a topic or a folder into every sink that was asked for.

It is an ordinary pipeline file, and a pattern for one: all addresses come from the environment, and nothing in here
knows that it will be killed.
"""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]
SINKS = os.environ["SEMEL_VERIFY_SINKS"].split(",")
ROWS_PER_BATCH = os.environ.get("SEMEL_VERIFY_ROWS_PER_BATCH", "500")
GUARANTEE = os.environ.get("SEMEL_VERIFY_GUARANTEE", "exactly-once")

INPUT, OUTPUT = "verify-in", "verify-out"
SCHEMA = "id long, key string, amount long, at string"
#: Modes of a database that need a key.
KEYED = ("upsert", "dedup", "versions")
#: So few that batches of these sizes have several.
PIECE_ROWS = 100


def read_rows(spark: SparkSession) -> DataFrame:
    """From Kafka where there is one, else from JSON files."""
    servers = os.environ.get("SEMEL_KAFKA_SERVERS")
    if not servers:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "2").json(f"{FOLDER}/in")
    records = semel.read_kafka(spark, INPUT, servers=servers, options={"maxOffsetsPerTrigger": ROWS_PER_BATCH})
    return records.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")


def make_sink(name: str) -> semel.Sink:
    """`name` is a kind of sink, for a database with its mode: `postgres:upsert`."""
    kind, _, mode = name.partition(":")
    if kind == "kafka":
        columns = ("key", "to_json(struct(id, key, amount)) AS value")
        return semel.Kafka(os.environ["SEMEL_KAFKA_SERVERS"], OUTPUT, name="kafka", select=columns)
    key = ["id"] if mode in KEYED else []
    if kind == "postgres":
        url = os.environ["SEMEL_POSTGRES_URL"]
        return semel.Postgres(url, "verify_out", mode=mode or "auto", key=key, create=True, piece_rows=PIECE_ROWS)
    if kind == "mariadb":
        url = os.environ["SEMEL_MARIADB_URL"]
        return semel.MySql(url, "verify_out", mode=mode or "auto", key=key, create=True, piece_rows=PIECE_ROWS)
    if kind == "files":
        return semel.Files(f"{FOLDER}/out")
    return semel.Sqlite(f"{FOLDER}/out.db", "verify_out")


@semel.pipeline
def verified(spark: SparkSession) -> semel.StreamWriter:
    """Every row, once, in every sink."""
    sinks = [make_sink(name) for name in SINKS]
    return (
        semel.write(read_rows(spark), guarantee=GUARANTEE)
        .to(*sinks)
        .option("checkpointLocation", f"{FOLDER}/checkpoint")
        .trigger(processingTime="100 milliseconds")
    )
