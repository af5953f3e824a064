"""Does anything grow? Memory, descriptors, threads and transactional ids over many exactly-once batches to Kafka.

Samples the driver, its JVM and its Python workers while a query runs 1,000-row batches from Kafka to Kafka, and prints
what each holds after a warm-up and at the end.

    python benchmarks/kafka_growth.py [--batches 500] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.kafka import Bench, prepared, say  # noqa: E402
from benchmarks.processes import processes  # noqa: E402

import semel  # noqa: E402
from semel.sinks.kafka.wire.client import Wire  # noqa: E402

WARM_UP_BATCHES = 100
ROWS_PER_BATCH = 1_000


def held_by(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) // 1024,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def sample() -> dict[str, dict[str, int]]:
    """By kind of process: of several workers the sum."""
    found: dict[str, dict[str, int]] = {}
    for pid, kind in processes():
        try:
            held = held_by(pid)
        except OSError:  # it ended while we looked
            continue
        known = found.setdefault(kind, dict.fromkeys(held, 0))
        found[kind] = {name: known[name] + value for name, value in held.items()}
    return found


def transactional_ids(bench: Bench) -> int:
    wire = Wire(bench.servers, {}, 10)
    try:
        listed = wire._client.list_transactions()
        return sum(len(of_broker) for of_broker in listed.values())
    finally:
        wire.close()


def measure(bench: Bench, batches: int) -> dict[str, Any]:
    done: list[int] = []
    sink = semel.Kafka(bench.servers, bench.topic())
    writer = semel.write(bench.kafka("exactly_once", ROWS_PER_BATCH)).to(sink)
    running = writer.option("checkpointLocation", bench.checkpoint()).launch(lambda report: done.append(report.batch))
    result: dict[str, Any] = {"batches": batches}
    for name, goal in (("early", WARM_UP_BATCHES), ("late", batches)):
        while len(done) < goal:
            if not running.query.isActive:
                raise RuntimeError(str(running.query.exception()))
            time.sleep(0.05)
        result[name] = sample() | {"transactional_ids": transactional_ids(bench)}
        say(f"after {goal} batches: {result[name]}")
    running.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = (arguments.batches + 20) * ROWS_PER_BATCH
    settings = argparse.Namespace(rows=rows, rows_per_batch=100_000, compression="none")
    with tempfile.TemporaryDirectory() as folder:
        for bench in prepared(settings, Path(folder)):
            result = measure(bench, arguments.batches)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
