"""What Spark's checkpoint costs a small batch on a local disk: by Hadoop's own code, and by ours (`semel.configure`).

Batches of 400 rows from files, no trigger interval; medians of what Spark itself reports (`durationMs`), behind a
warming up. The ways come in turns, each in a process of its own. A pipeline is `plain` (Spark's foreachBatch that
collects its rows), `semel` (rows into SQLite), or `state` (a count per key over as many partitions, into SQLite).

    python benchmarks/checkpoint_files.py [--rounds 3] [--batches 40] [--state-partitions 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

import semel  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAYS = ("hadoop", "ours")
PIPELINES = ("plain", "semel", "state")
PARTS = ("walCommit", "commitOffsets", "addBatch", "triggerExecution")
WARM = 8
ROWS = 400
KEYS = 50


def session(way: str, partitions: int) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", str(partitions))
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
    )
    spark: SparkSession = semel.configure(builder, kafka=False, local_files=way == "ours").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def rows_in(spark: SparkSession, folder: Path, batches: int) -> DataFrame:
    (folder / "in").mkdir()
    for batch in range(batches):
        lines = (json.dumps({"id": n, "key": n % KEYS}) for n in range(batch * ROWS, (batch + 1) * ROWS))
        path = folder / "in" / f"{batch:05d}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))
    source = spark.readStream.schema("id LONG, key LONG").option("maxFilesPerTrigger", 1)
    return source.json(str(folder / "in"))


def collected(batch: DataFrame, _: int) -> None:
    batch.collect()


def started(pipeline: str, df: DataFrame, folder: Path) -> StreamingQuery:
    if pipeline == "plain":
        plain = df.writeStream.foreachBatch(collected)
        return plain.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    mode = "append"
    if pipeline == "state":
        df, mode = df.groupBy("key").count(), "update"
    table = semel.Sqlite(str(folder / "out.db"), "out")
    writer = semel.write(df).to(table).outputMode(mode).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(availableNow=True).start()


def medians_of(pipeline: str, way: str, batches: int, partitions: int) -> dict[str, float]:
    """In a process of its own."""
    spark = session(way, partitions)
    with tempfile.TemporaryDirectory() as text:
        query = started(pipeline, rows_in(spark, Path(text), WARM + batches), Path(text))
        query.awaitTermination()
        progress: list[dict[str, Any]] = [json.loads(told.json) for told in query.recentProgress]
    measured = [told["durationMs"] for told in progress if told["numInputRows"] == ROWS][WARM:]
    if len(measured) < batches:
        raise RuntimeError(f"{len(measured)} batches were told of, and {batches} should be")
    return {part: statistics.median(told[part] for told in measured) for part in PARTS}


def measure(rounds: int, batches: int, partitions: int) -> dict[str, Any]:
    found: dict[tuple[str, str], list[dict[str, float]]] = {(p, way): [] for p in PIPELINES for way in WAYS}
    for _ in range(rounds):
        for (pipeline, way), told in found.items():
            words = ["--one", pipeline, way, "--batches", str(batches), "--state-partitions", str(partitions)]
            done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True)
            told.append(json.loads(done.stdout))
    return {
        "rounds": rounds,
        "batches": batches,
        "state_partitions": partitions,
        "ms": {
            f"{pipeline}, {way}": {part: statistics.median(one[part] for one in told) for part in PARTS}
            for (pipeline, way), told in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--state-partitions", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("PIPELINE", "WAY"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        pipeline, way = chosen.one
        print(json.dumps(medians_of(pipeline, way, chosen.batches, chosen.state_partitions)))
        return
    result = measure(chosen.rounds, chosen.batches, chosen.state_partitions)
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    for name, parts in result["ms"].items():
        print(f"{name:16}", *(f"{part} {ms:6.0f} ms" for part, ms in parts.items()), sep="  ")


if __name__ == "__main__":
    main()
