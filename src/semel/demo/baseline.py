"""The same two streams in plain Spark: `foreachBatch` with a database driver, as people write it.

Nothing is sabotaged: the rows of a batch go to SQLite in chunks, each committed, and Spark's checkpoint is as durable
as for semel. The only harm done to it is kill -9. A batch that was cut off is run again by Spark, and what its first
run had committed already is then there twice. The totals come out right all the same where a replay overwrites a row
with the same numbers: an upsert of absolute values forgives what an append does not.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from semel.demo.baseline_events import run

INPUT = os.environ["SEMEL_DEMO_INPUT"]
DATABASE = os.environ["SEMEL_DEMO_DATABASE"]
FILES_PER_BATCH = os.environ.get("SEMEL_DEMO_FILES_PER_BATCH", "2")
ROWS_PER_COMMIT = int(os.environ.get("SEMEL_DEMO_ROWS_PER_COMMIT", "25"))

CREATE = """
CREATE TABLE IF NOT EXISTS orders (id TEXT, customer TEXT, cents INTEGER, item TEXT, at TEXT);
CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, orders INTEGER, cents INTEGER);
"""
INSERT = "INSERT INTO orders VALUES (?, ?, ?, ?, ?)"
UPSERT = """
INSERT INTO totals VALUES (?, ?, ?)
ON CONFLICT (customer) DO UPDATE SET orders = excluded.orders, cents = excluded.cents
"""


def write_rows(df: DataFrame, statement: str) -> None:
    rows: Iterator[Any] = df.toLocalIterator()
    with closing(sqlite3.connect(DATABASE, timeout=60)) as connection:
        while chunk := [tuple(row) for row in islice(rows, ROWS_PER_COMMIT)]:
            with connection:
                connection.executemany(statement, chunk)


def read_orders(spark: SparkSession) -> DataFrame:
    schema = "id string, customer string, cents long, item string, at string"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_BATCH).json(INPUT)


def main() -> None:
    with closing(sqlite3.connect(DATABASE, timeout=60)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(CREATE)
    run(read_orders, partial(write_rows, statement=INSERT), partial(write_rows, statement=UPSERT))


if __name__ == "__main__":
    main()
