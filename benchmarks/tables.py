"""What the benchmarks of databases share: the rows, the runs that take turns, and the ratios.

Every writer gets the same DataFrame in one micro-batch of a stream and is timed by what Spark calls the time of its
trigger. Each has a table of its own, as its mode needs it: where that has a primary key, Spark's JDBC writer is
measured with one, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.overhead import session

import semel
from semel.dev.jars import fetch
from semel.sinks.sql.sink import DEDUP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
PLAIN, KEY, VERSIONS = "plain", "key", "versions"
ROWS_PER_INSERT = "10000"
#: The JVM compiles for a minute or so.
WARM_UP_ROUNDS = 2
PROCESSES = 2
#: bigint, bigint, double, a text of 64 characters, timestamp
COLUMNS = (
    "id",
    "id * 7919 AS customer",
    "id / 7.0D AS amount",
    "rpad(CAST(id AS STRING), 64, 'abcdefghij') AS text",
    "timestamp_micros(1700000000000000 + id * 1000) AS at",
)

Write = Callable[["DataFrame", str], Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench(ABC):
    """One database under measurement. `modes` are semel's, each with the shape of table that it needs."""

    rows: int
    folder: Path
    url: str
    rates: dict[str, list[float]] = field(default_factory=dict)

    modes: dict[str, str] = field(default_factory=dict)
    jar: str = ""

    # What differs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def create(self, table: str, shape: str) -> None:
        """A fresh table of the five columns: plain, with a key, or with a key and versions."""

    @abstractmethod
    def count(self, table: str) -> int: ...

    @abstractmethod
    def drop(self, table: str) -> None: ...

    @abstractmethod
    def jdbc(self, *, tuned: bool) -> dict[str, str]:
        """Options of Spark's JDBC writer."""

    @abstractmethod
    def sink(self, table: str, mode: str) -> semel.Sink: ...

    @abstractmethod
    def limits(self) -> dict[str, tuple[Callable[[Path, Path], None], Callable[[str, str, str], None]]]:
        """name -> how the rows of a file of Spark's become one that the server reads, and how that gets there.

        The latter is called in one process per core, with the file, the server and the table.
        """

    # Runs -------------------------------------------------------------------------------------------------------------

    def write_input(self, spark: SparkSession) -> None:
        rows = spark.range(0, self.rows, 1, PARTITIONS).selectExpr(*COLUMNS)
        rows.write.parquet(f"{self.folder}/rows")

    def stream(self, spark: SparkSession) -> DataFrame:
        schema = spark.read.parquet(f"{self.folder}/rows").schema
        return spark.readStream.schema(schema).parquet(f"{self.folder}/rows")

    def writers(self) -> dict[str, tuple[str, Write]]:
        """name -> the shape of its table, and what writes."""
        theirs: dict[str, tuple[str, Write]] = {
            "jdbc": (PLAIN, self._by_jdbc(tuned=False)),
            "jdbc_tuned": (PLAIN, self._by_jdbc(tuned=True)),
        }
        if self._keyed():
            theirs["jdbc_tuned_with_key"] = (KEY, self._by_jdbc(tuned=True))
        return theirs | {mode: (shape, self._by_semel(mode)) for mode, shape in self.modes.items()}

    def _by_jdbc(self, *, tuned: bool) -> Write:
        options = self.jdbc(tuned=tuned)

        def write(df: DataFrame, table: str) -> Any:
            def batch(rows: DataFrame, _: int) -> None:
                rows.write.format("jdbc").options(**options).option("dbtable", table).mode("append").save()

            return df.writeStream.foreachBatch(batch).option("checkpointLocation", self._checkpoint())

        return write

    def _by_semel(self, mode: str) -> Write:
        def write(df: DataFrame, table: str) -> Any:
            return semel.write(df).to(self.sink(table, mode)).option("checkpointLocation", self._checkpoint())

        return write

    def _checkpoint(self) -> str:
        return f"{self.folder}/checkpoints/{uuid.uuid4().hex}"

    def run(self, spark: SparkSession, shape: str, write: Write) -> float:
        table = f"bench_{uuid.uuid4().hex[:8]}"
        self.create(table, shape)
        query = write(self.stream(spark), table).trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = sum(p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]) / 1000
        self._require_all(table)
        return float(self.rows / seconds)

    def run_raw(self, limit: str) -> float:
        """The rows as the server reads them, without Spark: what it can take at most."""
        write, load = self.limits()[limit]
        folder = self.folder / limit
        if not folder.is_dir():
            folder.mkdir()
            for number, file in enumerate(sorted(self.folder.glob("rows/*.parquet"))):
                write(file, folder / str(number))
        table = f"bench_{uuid.uuid4().hex[:8]}"
        self.create(table, PLAIN)
        files = sorted(map(str, folder.iterdir()))
        began = time.perf_counter()
        with ProcessPoolExecutor(PROCESSES) as pool:
            list(pool.map(load, files, [self.url] * len(files), [table] * len(files)))
        seconds = time.perf_counter() - began
        self._require_all(table)
        return self.rows / seconds

    def _require_all(self, table: str) -> None:
        found = self.count(table)
        self.drop(table)
        if found != self.rows:
            raise RuntimeError(f"{found} rows were written, not {self.rows}")
        time.sleep(1)

    def compare(self, spark: SparkSession, rounds: int) -> dict[str, Any]:
        for round_ in range(1 - WARM_UP_ROUNDS, rounds + 1):
            for name, (shape, write) in self.writers().items():
                self._note(name, round_, rounds, self.run(spark, shape, write))
            for name in self.limits():
                self._note(name, round_, rounds, self.run_raw(name))
        return self.result()

    def _note(self, name: str, round_: int, rounds: int, rate: float) -> None:
        say(f"{f'round {round_} of {rounds}' if round_ > 0 else 'warm-up'}: {name} {rate:,.0f} rows/s")
        if round_ > 0:
            self.rates.setdefault(name, []).append(rate)

    def result(self) -> dict[str, Any]:
        """Ratios are those of the medians that stand beside them.

        A mode that keeps a key, in its table or beside it, is compared with JDBC into a table with one, too.
        """
        return {
            "rows_per_s": {name: round(statistics.median(found)) for name, found in self.rates.items()},
            "ratio_to_tuned_jdbc": {mode: self._ratio(mode, "jdbc_tuned") for mode in self.modes},
            "ratio_to_tuned_jdbc_with_key": {mode: self._ratio(mode, "jdbc_tuned_with_key") for mode in self._keyed()},
            **{f"ratio_to_{limit}": {mode: self._ratio(mode, limit) for mode in self.modes} for limit in self.limits()},
        }

    def _keyed(self) -> list[str]:
        return [mode for mode, shape in self.modes.items() if shape != PLAIN or mode == DEDUP]

    def _ratio(self, ours: str, theirs: str) -> float:
        return round(statistics.median(self.rates[ours]) / statistics.median(self.rates[theirs]), 3)


def write_text(source: Path, target: Path) -> None:
    """A line for each row, its fields between tabs: as COPY and LOAD DATA read and write by default."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import csv

    table = pq.read_table(source)
    at = table["at"].cast(pa.timestamp("us")).cast(pa.string())
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(table.set_column(4, "at", at), target, options)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="", help="only these, by comma")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def measure(bench: Bench, given: argparse.Namespace) -> None:
    """Prepare, compare, print."""
    if given.modes:
        bench.modes = {mode: bench.modes[mode] for mode in given.modes.split(",")}
    jars = ",".join(map(str, fetch(bench.jar, say=say)))
    spark = session(("spark.jars", jars), ("spark.driver.memory", "2g"))
    say(f"writing {given.rows:,} rows as input")
    bench.write_input(spark)
    found = bench.compare(spark, given.rounds)
    spark.stop()
    print(json.dumps(found) if given.json else json.dumps(found, indent=2))
