"""What exactly-once adds to a batch: against at-least-once into SQLite and Kafka, and against Spark's own Kafka sink.

One query for each store; its batches go to one way after the other in turn, so that noise hits all alike. Spark's own
sink is called as any other user of foreachBatch would call it: it is at-least-once, and the same code that its stream
runs for a batch. Spark has no sink of its own for SQLite.

    python benchmarks/overhead.py [--rows 1000] [--batches 120] [--only sqlite|kafka] [--json]

With `--state-partitions N` a count by customer keeps its state in so many partitions, and two queries run one after the
other: with and without the syncs that make a decision safe from power cuts (`semel.powerLossSafe`).

    python benchmarks/overhead.py --state-partitions 200 --batches 12 [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # A file beside this one would hide the package `kafka`.
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.processes import end_in_good_order

import semel
from semel.run.session import DEFAULTS, LOOPBACK
from semel.runtime.phases import Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ONCE, LEAST, OWN = "exactly-once", "at-least-once", "spark-own"
WARM_UP_BATCHES = 20

#: What a batch is given to.
Way = Callable[["DataFrame", int], Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def measure(
    spark: SparkSession, folder: Path, how_much: tuple[int, int], ways: dict[str, Way], reports: list[Report]
) -> dict[str, object]:
    """Medians of each way, and of what exactly-once adds to its neighbours. `reports` are those of exactly-once."""
    rows, batches = how_much
    (folder / "in").mkdir(parents=True)
    write_input(folder / "in", rows, batches)
    times: dict[str, list[float]] = {name: [] for name in ways}

    def alternate(df: DataFrame, batch: int) -> None:
        name = list(ways)[batch % len(ways)]
        began = time.perf_counter()
        ways[name](df, batch)
        times[name].append((time.perf_counter() - began) * 1000)

    stream = spark.readStream.schema("id long, customer long, item string").option("maxFilesPerTrigger", 1)
    writer = stream.json(str(folder / "in")).writeStream.foreachBatch(alternate)
    writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    warm = {name: series[WARM_UP_BATCHES // len(ways) :] for name, series in times.items()}
    once = warm.pop(ONCE)
    added = {name: [a - b for a, b in zip(once, series, strict=False)] for name, series in warm.items()}
    return {
        "rows": rows,
        "batches": len(added[LEAST]),
        "exactly_once_ms_median": round(statistics.median(once), 1),
        **{f"{_key(name)}_ms_median": round(statistics.median(series), 1) for name, series in warm.items()},
        "added_ms_median": round(statistics.median(added.pop(LEAST)), 1),
        **{f"added_to_{_key(name)}_ms_median": round(statistics.median(a), 1) for name, a in added.items()},
        "decide_ms_median": round(statistics.median(r.ms["decide"] for r in reports), 1),
        "commit_ms_median": round(statistics.median(r.ms["commit"] for r in reports), 1),
    }


def _key(name: str) -> str:
    return name.replace("-", "_")


def _by_semel(sink: Callable[[str], semel.Sink]) -> tuple[dict[str, Way], list[Report]]:
    """Both guarantees, each with a target of its own."""
    reports: list[Report] = []
    functions = {g: semel.sink(sink(g), guarantee=g) for g in (ONCE, LEAST)}
    functions[ONCE].listener = reports.append
    return dict(functions), reports


def measure_sqlite(spark: SparkSession, folder: Path, how_much: tuple[int, int]) -> dict[str, object]:
    ways, reports = _by_semel(lambda guarantee: semel.Sqlite(str(folder / f"{guarantee}.db"), "orders"))
    found = measure(spark, folder, how_much, ways, reports)
    counts = [_rows_in(folder / f"{guarantee}.db") for guarantee in ways]
    _require_all(how_much, counts)
    return found


def _rows_in(database: Path) -> tuple[int, int]:
    connection = sqlite3.connect(database)
    try:
        found = connection.execute("SELECT count(*), count(DISTINCT id) FROM orders").fetchone()
        return int(found[0]), int(found[1])
    finally:
        connection.close()


def measure_kafka(spark: SparkSession, folder: Path, how_much: tuple[int, int], servers: str) -> dict[str, object]:
    from benchmarks.reader import consumer_of
    from benchmarks.topics import Topics

    topics = Topics(servers)
    targets = {name: topics.make(f"overhead-{name}") for name in (ONCE, LEAST, OWN)}
    record = ["CAST(id AS STRING) AS key", "to_json(struct(*)) AS value"]
    ways, reports = _by_semel(lambda guarantee: semel.Kafka(servers, targets[guarantee], select=record))
    options = {"kafka.bootstrap.servers": servers, "topic": targets[OWN]}
    ways[OWN] = lambda df, _: df.selectExpr(*record).write.format("kafka").options(**options).save()
    found = measure(spark, folder, how_much, ways, reports)
    consumer = consumer_of(servers, list(targets.values()))
    keys: dict[str, list[bytes]] = {topic: [] for topic in targets.values()}
    while messages := consumer.consume(10_000, 3.0):
        for message in messages:
            keys[message.topic()].append(message.key())
    consumer.close()
    _require_all(how_much, [(len(k), len(set(k))) for k in keys.values()])
    return found


def _require_all(how_much: tuple[int, int], found: list[tuple[int, int]]) -> None:
    """Each way was given every so many batches: all rows arrive, each once."""
    rows, batches = how_much
    expected = [rows * len(range(way, batches, len(found))) for way in range(len(found))]
    if [(rows, rows) for rows in expected] != found:
        raise RuntimeError(f"rows and distinct rows are {found}, and should be {expected}")


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
    end_in_good_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--state-partitions", type=int, default=0)
    parser.add_argument("--only", choices=("sqlite", "kafka"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, how_much = Path(name), (given.rows, given.batches)
        if given.state_partitions:
            result = measure_state(session(), folder, *how_much, given.state_partitions)
        else:
            result = compare(folder, how_much, given.only)
    if given.json:
        print(json.dumps(result))
    else:
        print("\n".join(_lines(result)))


def compare(folder: Path, how_much: tuple[int, int], only: str | None) -> dict[str, object]:
    """SQLite on top, as it always was; Kafka below its name."""
    from semel.dev.jars import connector_jars
    from semel.dev.kafka import kafka

    if only == "sqlite":
        return measure_sqlite(session(), folder / "sqlite", how_much)
    spark = session(("spark.jars", ",".join(map(str, connector_jars(say=say)))))
    result = {} if only else measure_sqlite(spark, folder / "sqlite", how_much)
    with kafka(folder / "server", say=say) as cluster:
        return {**result, "kafka": measure_kafka(spark, folder / "kafka", how_much, cluster.bootstrap)}


def _lines(result: dict[str, object], into: str = "") -> Iterator[str]:
    for name, value in result.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{name}: ")
        else:
            yield f"{into + name:40} {value}"


if __name__ == "__main__":
    main()
