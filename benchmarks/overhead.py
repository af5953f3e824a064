"""What exactly-once adds to a batch, against at-least-once, with the Sqlite sink.

One query; its batches go to the one and the other guarantee in turn, so that noise hits both alike.

    python benchmarks/overhead.py [--rows 1000] [--batches 120] [--json]

With `--state-partitions N` a count by customer keeps its state in so many partitions, and two queries run one after the
other: with and without the syncs that make a decision safe from power cuts (`semel.powerLossSafe`).

    python benchmarks/overhead.py --state-partitions 200 --batches 12 [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import semel
from semel.run.session import DEFAULTS, LOOPBACK
from semel.runtime.phases import Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GUARANTEES = ("exactly-once", "at-least-once")
WARM_UP_BATCHES = 20


def session(*more: tuple[str, str]) -> SparkSession:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = SparkConf().setMaster("local[2]").setAll([*DEFAULTS.items(), *LOOPBACK.items(), *more])
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def write_input(folder: Path, rows: int, batches: int) -> None:
    for batch in range(batches):
        orders = ({"id": batch * rows + k, "customer": k % 97, "item": "a thing to buy"} for k in range(rows))
        (folder / f"{batch:06d}.json").write_text("".join(json.dumps(order) + "\n" for order in orders))


def measure(spark: SparkSession, folder: Path, rows: int, batches: int) -> dict[str, object]:
    (folder / "in").mkdir()
    write_input(folder / "in", rows, batches)
    reports: list[Report] = []
    functions = [semel.sink(semel.Sqlite(str(folder / f"{g}.db"), "orders"), guarantee=g) for g in GUARANTEES]
    functions[0].listener = reports.append
    times: list[list[float]] = [[], []]

    def alternate(df: DataFrame, batch: int) -> None:
        began = time.perf_counter()
        functions[batch % 2](df, batch)
        times[batch % 2].append((time.perf_counter() - began) * 1000)

    stream = spark.readStream.schema("id long, customer long, item string").option("maxFilesPerTrigger", 1)
    writer = stream.json(str(folder / "in")).writeStream.foreachBatch(alternate)
    writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    once, least = (series[WARM_UP_BATCHES // 2 :] for series in times)
    added = [a - b for a, b in zip(once, least, strict=False)]
    return {
        "rows": rows,
        "batches": len(added),
        "exactly_once_ms_median": round(statistics.median(once), 1),
        "at_least_once_ms_median": round(statistics.median(least), 1),
        "added_ms_median": round(statistics.median(added), 1),
        "decide_ms_median": round(statistics.median(r.ms["decide"] for r in reports), 1),
        "commit_ms_median": round(statistics.median(r.ms["commit"] for r in reports), 1),
    }


def measure_state(spark: SparkSession, folder: Path, rows: int, batches: int, partitions: int) -> dict[str, object]:
    """What all the work of a batch takes, from the first task to the last commit."""
    (folder / "in").mkdir()
    write_input(folder / "in", rows, batches)
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    spent: dict[str, float] = {}
    for name, safe in (("safe", True), ("unsafe", False)):
        reports: list[Report] = []
        stream = spark.readStream.schema("id long, customer long, item string").option("maxFilesPerTrigger", 1)
        counted = stream.json(str(folder / "in")).groupBy("customer").count()
        function = semel.sink(semel.Sqlite(str(folder / f"{name}.db"), "counts"), power_loss_safe=safe, name=name)
        function.listener = reports.append
        writer = counted.writeStream.foreachBatch(function).outputMode("update").trigger(availableNow=True)
        writer.option("checkpointLocation", str(folder / name)).start().awaitTermination()
        spent[name] = statistics.median(sum(r.ms.values()) for r in reports[2:])
    return {
        "rows": rows,
        "batches": batches - 2,
        "state_partitions": partitions,
        "safe_ms_median": round(spent["safe"], 1),
        "unsafe_ms_median": round(spent["unsafe"], 1),
        "syncs_ms": round(spent["safe"] - spent["unsafe"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--state-partitions", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, how_much = Path(name), (given.rows, given.batches)
        if given.state_partitions:
            result = measure_state(session(), folder, *how_much, given.state_partitions)
        else:
            result = measure(session(), folder, *how_much)
    if given.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:26} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
