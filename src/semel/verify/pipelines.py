"""The pipeline that `semel verify --sinks ...` runs: rows from a topic or a folder into every sink that was asked for.

It is an ordinary pipeline file: all addresses come from the environment, and nothing in here knows that it will be
killed. How an example of each kind of sink is made is in the kind's record.
"""

import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

import semel
from semel.dev.servers import KINDS as SERVERS
from semel.sinks.kinds import Venue, kinds

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]
SINKS = os.environ["SEMEL_VERIFY_SINKS"].split(",")
ROWS_PER_BATCH = os.environ.get("SEMEL_VERIFY_ROWS_PER_BATCH", "500")
GUARANTEE = os.environ.get("SEMEL_VERIFY_GUARANTEE", "exactly-once")

#: Who writes the batches: it changes from life to life.
TASKS = os.environ.get("SEMEL_VERIFY_TASKS", "auto")
NOT_THE_DRIVER = {"semel.driverRows": "0"} if TASKS.isdigit() else {}

INPUT = "verify_in"
SCHEMA = "id long, key string, amount long, at string"


def read_rows(spark: SparkSession) -> DataFrame:
    """From Kafka where there is one, else from JSON files."""
    servers = os.environ.get("SEMEL_KAFKA_SERVERS")
    if not servers:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "2").json(f"{FOLDER}/in")
    records = semel.read_kafka(spark, INPUT, servers=servers, options={"maxOffsetsPerTrigger": ROWS_PER_BATCH})
    return records.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")


def make_sink(wanted: str) -> semel.Sink:
    """`wanted` is what `semel verify --sinks` calls a kind of sink, with its mode if it has some: `postgres:upsert`."""
    name, _, mode = wanted.partition(":")
    kind = next(kind for kind in kinds().values() if name == (kind.called or kind.name))
    address = os.environ[SERVERS[kind.server].variable] if kind.server else ""
    if kind.example is None:
        raise ValueError(f"{name} has no example")
    return kind.example(Venue(FOLDER, address, mode=mode))


@semel.pipeline
def verified(spark: SparkSession) -> semel.StreamWriter:
    """Every row, once, in every sink."""
    sinks = [make_sink(name) for name in SINKS]
    return (
        semel.write(read_rows(spark), guarantee=GUARANTEE)
        .to(*sinks)
        .options(checkpointLocation=f"{FOLDER}/checkpoint", **{"semel.tasks": TASKS, **NOT_THE_DRIVER})
        .trigger(processingTime="100 milliseconds")
    )
