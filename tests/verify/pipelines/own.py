"""Pipelines as users write them: what comes out is not what went in, and servers of their own."""

import os

from pyspark.sql import SparkSession

import semel

FOLDER = os.environ["SEMEL_VERIFY_FOLDER"]
SCHEMA = "id long, key string"
KEYS = 97

print("loaded")  # noqa: T201 - as users do; it must not get into the JSON


@semel.pipeline
def firsts(spark: SparkSession) -> semel.StreamWriter:
    """The first row of each key, which keeps state; into a PostgreSQL that `semel verify` knows nothing of."""
    # One file makes one batch: of two rows of a key in one batch, Spark would take either.
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1").json(f"{FOLDER}/in")
    return (
        semel.write(rows.dropDuplicates(["key"]))
        .to(semel.Postgres(os.environ["OWN_POSTGRES_URL"], os.environ["OWN_TABLE"], create=True))
        .option("checkpointLocation", FOLDER)
    )


@semel.workload(firsts, expect=lambda n, sink: int(n < KEYS))  # noqa: ARG005 - there is one sink
def keyed(n: int) -> dict[str, object]:
    return {"id": n, "key": f"k{n % KEYS}"}


@semel.pipeline
def halved(spark: SparkSession) -> semel.StreamWriter:
    """Drops half of the rows, as its workload says."""
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "2").json(f"{FOLDER}/in")
    sink = semel.Sqlite(f"{FOLDER}/out.db", "orders")
    return semel.write(rows.where("id % 2 = 0")).to(sink).option("checkpointLocation", FOLDER)


@semel.workload(halved, expect=lambda n, sink: int(n % 2 == 0))  # noqa: ARG005 - there is one sink
def even(n: int) -> dict[str, object]:
    return {"id": n, "key": "k"}


@semel.pipeline
def elsewhere(spark: SparkSession) -> semel.StreamWriter:
    """Reads another folder each time it starts, so it never gets what was fed."""
    place = f"{FOLDER}/in-{os.getpid()}"
    os.makedirs(place, exist_ok=True)
    rows = spark.readStream.schema(SCHEMA).json(place)
    return semel.write(rows).to(semel.Sqlite(f"{FOLDER}/out.db", "orders")).option("checkpointLocation", FOLDER)
