"""How soon a pipeline shows rows again after kill -9, from Kafka to Kafka and PostgreSQL.

Each round is a life of its own: a process runs the pipeline over rows that keep coming, is killed with SIGKILL at the
moment when a batch is decided and committed nowhere, and the next process goes on. Timed is what the next one does from
`start()` to its first commit, which completes the decided batch, and to the first commit of a batch of its own. The
start of Python, the JVM and the Spark session comes before that and is not counted.

    python benchmarks/recovery.py [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.overhead import session  # noqa: E402
from confluent_kafka import Producer  # noqa: E402
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # noqa: E402

import semel  # noqa: E402
from semel.dev.jars import connector_jars  # noqa: E402
from semel.dev.kafka import kafka  # noqa: E402
from semel.dev.postgres import postgres  # noqa: E402
from semel.failpoints import VARIABLE  # noqa: E402
from semel.runtime.phases import Report  # noqa: E402

PARTITIONS = 4
ROWS_PER_S = 2_000
LIFE_SECONDS_MAX = 120.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# One life -----------------------------------------------------------------------------------------------------------


def live(setup: dict[str, str]) -> None:
    """Run the pipeline until killed, and tell of the start and of every batch."""
    spark = session(("spark.jars", setup["jars"]))
    spark.sparkContext.parallelize([0], 1).map(lambda x: x).collect()
    stream = semel.read_kafka(spark, setup["input"], servers=setup["servers"]).selectExpr("key", "value")
    columns = ("CAST(CAST(key AS STRING) AS BIGINT) AS id", "CAST(value AS STRING) AS text")
    table = semel.Postgres(setup["postgres"], setup["table"], select=columns, create=True)
    writer = semel.write(stream).to(semel.Kafka(setup["servers"], setup["output"]), table)
    began = time.perf_counter()

    def heard(report: Report) -> None:
        print(json.dumps({"how": report.how, "s": time.perf_counter() - began}), flush=True)

    running = writer.option("checkpointLocation", setup["checkpoint"]).queryName("recovery").launch(heard)
    print(json.dumps({"how": "started", "s": time.perf_counter() - began}), flush=True)
    running.query.awaitTermination()


def run_life(setup: dict[str, str], *, kill_at: str) -> list[dict[str, Any]]:
    """The first life ends at its own failpoint; later ones are killed there at their second decision."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--life", json.dumps(setup)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, VARIABLE: kill_at},
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=LIFE_SECONDS_MAX)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


# The servers and the rows -------------------------------------------------------------------------------------------


def feed(servers: str, topic: str, stopping: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    number = 0
    while not stopping.wait(0.05):
        for _ in range(ROWS_PER_S // 20):
            producer.produce(topic, b"x" * 100, key=str(number).encode())
            number += 1
        producer.poll(0)
    producer.flush(30)


def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with kafka(folder / "kafka", say=say) as cluster, postgres(folder / "postgres", say=say) as server:
            topics = [f"recovery-{end}-{uuid.uuid4().hex[:8]}" for end in ("in", "out")]
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
            for future in admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in topics]).values():
                future.result()
            setup = {
                "servers": cluster.bootstrap,
                "input": topics[0],
                "output": topics[1],
                "postgres": server.url,
                "table": "recovered",
                "checkpoint": str(folder / "checkpoint"),
                "jars": ",".join(map(str, connector_jars(say=say))),
            }
            stopping = threading.Event()
            feeder = threading.Thread(target=feed, args=(cluster.bootstrap, topics[0], stopping))
            feeder.start()
            try:
                return _rounds(setup, rounds)
            finally:
                stopping.set()
                feeder.join()


def _rounds(setup: dict[str, str], rounds: int) -> dict[str, Any]:
    run_life(setup, kill_at="batch.decided@3")
    started: list[float] = []
    forwarded: list[float] = []
    committed: list[float] = []
    for number in range(1, rounds + 1):
        events = run_life(setup, kill_at="batch.decided@3")
        first: dict[str, float] = {}
        for event in events:
            first.setdefault(event["how"], event["s"])
        if not first.keys() >= set(HOWS):
            raise RuntimeError(f"round {number} did not get that far: {events}")
        started.append(first["started"])
        forwarded.append(first["forwarded"])
        committed.append(first["committed"])
        say(f"round {number} of {rounds}: {first}")
    return {
        "rounds": rounds,
        "recovery_s_median": round(statistics.median(committed), 3),
        "recovery_s_max": round(max(committed), 3),
        "forwarded_s_median": round(statistics.median(forwarded), 3),
        "started_s_median": round(statistics.median(started), 3),
    }


HOWS = ("started", "forwarded", "committed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--life", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.life:
        live(json.loads(arguments.life))
        return
    result = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:22} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
