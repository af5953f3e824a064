"""Kafka to Kafka and write-only: Spark's own at-least-once sink against semel, exactly-once and at-least-once.

Every sink has the same source, linger, batch size, compression and acks. Kafka to Kafka is measured once more as users
would write it, where semel's pipelines read with `read_kafka`, which is quicker (kafka_to_kafka_with_read_kafka): that
compares more than the sinks. The sinks take turns within one invocation, because a machine is never equally fast
for long; each figure is the median of the rounds. What is timed is what Spark itself calls the time of its triggers,
from asking the source for offsets to the checkpoint. One more run measures what exactly-once adds to a batch of 1,000
rows, batch by batch in turn with at-least-once.

    python benchmarks/kafka.py [--rows 3000000] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# This file's own name would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.overhead import session  # noqa: E402
from benchmarks.processes import processor_seconds  # noqa: E402
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # noqa: E402

import semel  # noqa: E402
from semel.dev.jars import connector_jars  # noqa: E402
from semel.dev.kafka import kafka  # noqa: E402
from semel.runtime.phases import Report  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
VALUE_BYTES = 150
SETTINGS = {"linger.ms": "20", "batch.size": "1000000", "compression.type": "none", "acks": "all"}
#: The JVM compiles for a minute or so, and takes a third of two cores for it. What it has compiled it knows.
WARM_UP_ROUNDS, WARM_UP_ROUNDS_MORE = 3, 1
SMALL_ROWS, SMALL_BATCHES, WARM_UP_BATCHES = 1_000, 140, 40


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    spark: SparkSession
    servers: str
    folder: Path
    rows: int
    rows_per_batch: int
    settings: dict[str, str]

    def __post_init__(self) -> None:
        self._admin: Any = AdminClient({"bootstrap.servers": self.servers})
        self.input = self.topic()

    def topic(self) -> str:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        self._admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result()
        return name

    def drop(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result()

    # Sources ----------------------------------------------------------------------------------------------------------

    def write_input(self) -> None:
        """The same rows as Parquet files and as a topic."""
        rows = self.spark.range(0, self.rows, 1, PARTITIONS).selectExpr(
            "CAST(id AS STRING) AS key", f"rpad(CAST(id * 7919 AS STRING), {VALUE_BYTES}, 'abcdefghij') AS value"
        )
        rows.write.option("maxRecordsPerFile", self.rows_per_batch // PARTITIONS).parquet(f"{self.folder}/rows")
        stored = self.spark.read.parquet(f"{self.folder}/rows")
        options = {f"kafka.{name}": value for name, value in self.settings.items()}
        stored.write.format("kafka").options(**options).option("kafka.bootstrap.servers", self.servers).option(
            "topic", self.input
        ).save()

    def parquet(self, _: str) -> DataFrame:
        stream = self.spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", PARTITIONS)
        return stream.parquet(f"{self.folder}/rows")

    def kafka(self, sink: str, rows_per_batch: int = 0) -> DataFrame:
        return self._kafka(rows_per_batch, by_semel=sink != "spark")

    def plain_kafka(self, _: str) -> DataFrame:
        return self._kafka(0, by_semel=False)

    def _kafka(self, rows_per_batch: int, *, by_semel: bool) -> DataFrame:
        # Spark rounds down for each partition: the few rows that are left over would be a batch of their own.
        limit = {"maxOffsetsPerTrigger": str((rows_per_batch or self.rows_per_batch) + PARTITIONS)}
        if by_semel:
            stream = semel.read_kafka(self.spark, self.input, servers=self.servers, options=limit)
        else:
            options = {"kafka.bootstrap.servers": self.servers, "subscribe": self.input, "startingOffsets": "earliest"}
            committed = {"kafka.isolation.level": "read_committed"}
            stream = self.spark.readStream.format("kafka").options(**options, **committed, **limit).load()
        return stream.select("key", "value")

    # Sinks ------------------------------------------------------------------------------------------------------------

    def by_spark(self, df: DataFrame, topic: str) -> Any:
        options = {f"kafka.{name}": value for name, value in self.settings.items()}
        writer = df.writeStream.format("kafka").options(**options).option("kafka.bootstrap.servers", self.servers)
        return writer.option("topic", topic).option("checkpointLocation", self.checkpoint()).trigger(availableNow=True)

    def by_semel(self, guarantee: str) -> Callable[[DataFrame, str], Any]:
        def made(df: DataFrame, topic: str) -> Any:
            sink = semel.Kafka(self.servers, topic, options=self.settings)
            writer = semel.write(df, guarantee=guarantee).to(sink)
            return writer.option("checkpointLocation", self.checkpoint()).trigger(availableNow=True)

        return made

    def checkpoint(self) -> str:
        return f"{self.folder}/checkpoints/{uuid.uuid4().hex}"

    def sinks(self) -> dict[str, Callable[[DataFrame, str], Any]]:
        return {
            "spark": self.by_spark,
            "exactly_once": self.by_semel("exactly-once"),
            "at_least_once": self.by_semel("at-least-once"),
        }

    # Runs -------------------------------------------------------------------------------------------------------------

    def compare(self, source: Callable[[str], DataFrame], what: str, rounds: int, warm_up: int) -> dict[str, Any]:
        rates: dict[str, list[float]] = {name: [] for name in self.sinks()}
        used: dict[str, list[dict[str, float]]] = {name: [] for name in rates}
        for round_ in range(1 - warm_up, rounds + 1):
            # Each pays for what the one before has left to the disk, so that none follows the same one always.
            names = list(rates)[round_ % len(rates) :] + list(rates)[: round_ % len(rates)]
            for name in names:
                before = processor_seconds()
                rate = self.run(source(name), self.sinks()[name])
                seconds = {k: round(s - before[k], 1) for k, s in processor_seconds().items() if k != "driver"}
                of = f"round {round_} of {rounds}" if round_ > 0 else "warm-up"
                say(f"{what}, {of}: {name} {rate:,.0f} rows/s, processor seconds {seconds}")
                if round_ > 0:
                    rates[name].append(rate)
                    used[name].append(seconds)
        medians = {f"{name}_rows_per_s": round(statistics.median(values)) for name, values in rates.items()}
        by_round = [mine / own for mine, own in zip(rates["exactly_once"], rates["spark"], strict=True)]
        return {
            **medians,
            "ratio": round(medians["exactly_once_rows_per_s"] / medians["spark_rows_per_s"], 3),
            "ratio_by_round": [round(r, 3) for r in by_round],
            "processor_s": {name: _medians(found) for name, found in used.items()},
        }

    def run(self, df: DataFrame, sink: Callable[[DataFrame, str], Any]) -> float:
        topic = self.topic()
        query = sink(df, topic).start()
        query.awaitTermination()
        progress = [p for p in query.recentProgress if p["numInputRows"]]
        rows = sum(p["numInputRows"] for p in progress)
        seconds = sum(p["durationMs"]["triggerExecution"] for p in progress) / 1000
        self.drop(topic)
        if rows != self.rows:
            raise RuntimeError(f"{rows} rows were written, not {self.rows}")
        time.sleep(1)
        return float(rows / seconds)

    def added_ms(self) -> dict[str, float]:
        """What exactly-once adds to a small batch, in one query whose batches go to both guarantees in turn."""
        guarantees = ("exactly-once", "at-least-once")
        reports: list[Report] = []
        topics = [self.topic() for _ in guarantees]
        functions = [
            semel.sink(semel.Kafka(self.servers, topic, options=self.settings | {"linger.ms": "5"}), guarantee=g)
            for g, topic in zip(guarantees, topics, strict=True)
        ]
        functions[0].listener = reports.append
        times: list[list[float]] = [[], []]

        def alternate(df: DataFrame, batch: int) -> None:
            began = time.perf_counter()
            functions[batch % 2](df, batch)
            times[batch % 2].append((time.perf_counter() - began) * 1000)

        source = self.kafka("exactly_once", SMALL_ROWS)
        query = source.writeStream.foreachBatch(alternate).option("checkpointLocation", self.checkpoint()).start()
        while len(times[1]) < SMALL_BATCHES // 2:
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.1)
        query.stop()
        once, least = (series[WARM_UP_BATCHES // 2 : SMALL_BATCHES // 2] for series in times)
        return {
            "added_ms_median": round(statistics.median(a - b for a, b in zip(once, least, strict=True)), 1),
            "exactly_once_ms_median": round(statistics.median(once), 1),
            "at_least_once_ms_median": round(statistics.median(least), 1),
            "decide_ms_median": round(statistics.median(r.ms["decide"] for r in reports), 1),
            "commit_ms_median": round(statistics.median(r.ms["commit"] for r in reports), 1),
        }


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {kind: statistics.median(one.get(kind, 0.0) for one in found) for kind in found[0]}


def prepared(arguments: argparse.Namespace, folder: Path) -> Iterator[Bench]:
    jars = ",".join(map(str, connector_jars(say=say)))
    with kafka(folder / "kafka", heap_mb=1024, say=say) as cluster:
        spark = session(("spark.jars", jars), ("spark.driver.memory", "2g"))
        settings = SETTINGS | {"compression.type": arguments.compression}
        bench = Bench(spark, cluster.bootstrap, folder, arguments.rows, arguments.rows_per_batch, settings)
        say(f"writing {arguments.rows:,} rows of {VALUE_BYTES} B as input")
        bench.write_input()
        yield bench
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rows-per-batch", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compression", default="none")
    parser.add_argument(
        "--only", choices=("write_only", "kafka_to_kafka", "kafka_to_kafka_with_read_kafka", "added_ms")
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for bench in prepared(arguments, Path(folder)):
            sources: dict[str, Callable[[str], DataFrame]] = {
                "write_only": bench.parquet,
                "kafka_to_kafka": bench.plain_kafka,
                "kafka_to_kafka_with_read_kafka": bench.kafka,
            }
            for name, source in sources.items():
                if arguments.only in (None, name):
                    warm_up = WARM_UP_ROUNDS_MORE if "kafka_to_kafka" in result else WARM_UP_ROUNDS
                    result[name] = bench.compare(source, name, arguments.rounds, warm_up)
            if arguments.only in (None, "added_ms"):
                result |= bench.added_ms()
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
