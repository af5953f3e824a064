"""A count per key with Spark's default of 200 state partitions: how long a batch takes with each sink.

Rows come from Kafka at a steady rate, in update mode, no trigger, each engine in a fresh process, one after the other.
Every key is there before the rate begins: the state has its full size. What is told is the median of what Spark calls
the time of its triggers; at the end every key must have been counted right, or the benchmark fails.

    python benchmarks/stateful.py [--keys 10000] [--state rocksdb|hdfs] [--only semel_kafka,spark_kafka] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.engines.counts import Counts, PostgresCounts, SqliteCounts, TopicCounts, require_even  # noqa: E402
from benchmarks.engines.launch import running  # noqa: E402
from benchmarks.engines.talk import MARK, Job  # noqa: E402
from benchmarks.processes import end_in_good_order  # noqa: E402
from benchmarks.rows import fed, preload  # noqa: E402
from benchmarks.topics import Topics  # noqa: E402

from semel.dev.kafka import kafka  # noqa: E402
from semel.dev.postgres import postgres  # noqa: E402

WRITERS = ("spark_kafka", "semel_kafka", "semel_sqlite", "semel_postgres")
#: The first batch, with every key once, and the last.
DRAIN_S_MAX = 180.0
BATCHES_MIN = 3
#: For both engines: a million keys do not fit the gigabyte that Spark takes by itself.
DRIVER_MEMORY = "4g"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    topics: Topics
    folder: Path
    given: argparse.Namespace
    postgres: str = ""

    def measure_one(self, name: str) -> dict[str, Any]:
        """One engine with one sink, from its start to its end, every count compared."""
        keys = self.given.keys
        source = self.topics.make("stateful-in")
        preload(self.topics.servers, source, keys, keys=keys)
        with self.job(name, source) as (job, counts), running(job, say=say) as process:
            counts.wait_for(keys, DRAIN_S_MAX)
            say(f"{name}: {keys:,} keys are counted")
            with fed(self.topics.servers, source, self.given.rate, first=keys, keys=keys) as feeder:
                time.sleep(self.given.warm_s)
                process.tell(MARK)
                time.sleep(self.given.seconds)
                rows = feeder.stop()
            counts.wait_for(rows, DRAIN_S_MAX)
            told = process.stop()
            counts.require(name, rows)
            told["peak_mb"] = round(process.peak_mb)
        if told["batches"] < BATCHES_MIN:
            raise RuntimeError(f"{name}: only {told['batches']} batches ran; measure for longer (--seconds)")
        return told

    @contextmanager
    def job(self, name: str, source: str) -> Iterator[tuple[Job, Counts]]:
        """What the engine is to do, and who looks at its sink."""
        engine, sink = name.split("_")
        folder = self.folder / name
        folder.mkdir()
        with self._sink(sink, folder) as (place, table, counts):
            settings = {
                "spark.sql.shuffle.partitions": str(self.given.state_partitions),
                "spark.driver.memory": DRIVER_MEMORY,
            }
            common = {"sink": sink, "place": place, "state": self.given.state, "settings": settings}
            yield Job(engine, self.topics.servers, source, [table], str(folder), count=True, **common), counts

    @contextmanager
    def _sink(self, sink: str, folder: Path) -> Iterator[tuple[str, str, Counts]]:
        keys, table = self.given.keys, f"counts_{uuid.uuid4().hex[:8]}"
        if sink == "kafka":
            topic = self.topics.make("stateful-out")
            counts = TopicCounts(keys, self.topics.servers, topic)
            yield "", topic, counts
            counts.end()
        elif sink == "sqlite":
            yield str(folder / "counts.db"), table, SqliteCounts(keys, str(folder / "counts.db"), table)
        else:
            yield self.postgres, table, PostgresCounts(keys, self.postgres, table)


def result_of(found: dict[str, dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    by_name = {"trigger_ms": {n: told["duration_ms"]["triggerExecution"] for n, told in found.items()}}
    figures = ("trigger_ms_max", "batches", "rows_per_batch", "duration_ms", "peak_mb")
    by_name |= {figure: {name: told[figure] for name, told in found.items()} for figure in figures}
    asked = {"rate": given.rate, "keys": given.keys, "state": given.state, "state_partitions": given.state_partitions}
    return {**asked, **by_name}


def main() -> None:
    end_in_good_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=2_000, help="rows a second")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--state", choices=("rocksdb", "hdfs"), default="hdfs")
    parser.add_argument("--state-partitions", type=int, default=200)
    parser.add_argument("--only", default=",".join(WRITERS), help="engines and sinks, by comma")
    parser.add_argument("--warm-s", type=float, default=15)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    require_even(given.keys)
    names = given.only.split(",")
    if unknown := [name for name in names if name not in WRITERS]:
        parser.error(f"no such writer: {', '.join(unknown)}; there are {', '.join(WRITERS)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(kafka(folder / "kafka", heap_mb=1024, say=say))
        bench = Bench(Topics(cluster.bootstrap), folder, given)
        if "semel_postgres" in names:
            bench.postgres = stack.enter_context(postgres(folder / "postgres", say=say)).url
        found = {}
        for name in names:
            found[name] = bench.measure_one(name)
            say(f"{name}: {found[name]}")
    result = result_of(found, given)
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
