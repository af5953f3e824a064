"""How many rows a second engines take from Kafka to Kafka, by the time at which the broker appended what they wrote.

All rows are there before an engine starts, which is a fresh process with its own defaults: no trigger, no limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.counts import TopicCounts
from benchmarks.engines.launch import Running, Say, running
from benchmarks.engines.talk import STARTED, Job
from benchmarks.reader import Seen, reading
from benchmarks.topics import Topics

POLL_S = 0.25
RUN_S_MAX = 400.0
#: The last transaction is committed after the last row is written.
VISIBLE_S_MAX = 120.0


@dataclass(frozen=True)
class Bench:
    topics: Topics
    folder: Path
    rows: int
    commit_ms: int
    say: Say


def copied(engine: str, bench: Bench, source: str, sinks: int) -> dict[str, Any]:
    """All rows into so many topics. Each topic must have each row once."""
    targets = [bench.topics.make("throughput-out") for _ in range(sinks)]
    job = Job(engine, bench.topics.servers, source, targets, _folder(bench), commit_ms=bench.commit_ms)
    with running(job, say=bench.say) as process:
        _wait_until_written(bench, process, targets, bench.rows)
        # It stays until the reader has seen all: only then is the last transaction known to be committed.
        seen = _read(bench.topics.servers, targets, bench.rows)
        started_ns = int(process.events[STARTED]["wall_ns"])
        process.stop()
    bench.topics.drop(*targets)
    for topic in targets:
        seen[topic].require_each_once(engine, bench.rows)
    first = min(int(one.appended_ms.min()) for one in seen.values())
    last = max(int(one.appended_ms.max()) for one in seen.values())
    return {
        "rows_per_s": round(bench.rows * 1000 / max(last - first, 1)),
        "s_from_start": round(last / 1000 - started_ns / 1e9, 2),
        "peak_mb": round(process.peak_mb),
    }


def counted(engine: str, bench: Bench, source: str, keys: int, settings: dict[str, str]) -> dict[str, Any]:
    """A count per key, from the start of the job to the last count: what shows up before says nothing of the rate."""
    target = bench.topics.make("state-out")
    job = Job(
        engine,
        bench.topics.servers,
        source,
        [target],
        _folder(bench),
        count=True,
        state="rocksdb",
        commit_ms=bench.commit_ms,
        settings=settings,
    )
    counts = TopicCounts(keys, bench.topics.servers, target)
    with running(job, say=bench.say) as process:
        counts.wait_for(bench.rows, RUN_S_MAX)
        process.stop()
    counts.require(engine, bench.rows)
    counts.end()
    bench.topics.drop(target)
    seconds = counts.last_append_ms / 1000 - int(process.events[STARTED]["wall_ns"]) / 1e9
    return {"rows_per_s": round(bench.rows / seconds), "peak_mb": round(process.peak_mb)}


def _folder(bench: Bench) -> str:
    return str(bench.folder / f"run-{time.monotonic_ns()}")


def _wait_until_written(bench: Bench, process: Running, topics: list[str], rows: int) -> None:
    """By asking the broker for the ends of the topics: a reader would take the engine's processor."""
    deadline = time.monotonic() + RUN_S_MAX
    while any(bench.topics.appended(topic) < rows for topic in topics):
        process.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.name} did not write {rows:,} rows within {RUN_S_MAX:.0f} s")
        time.sleep(POLL_S)


def _read(servers: str, topics: list[str], rows: int) -> dict[str, Seen]:
    with reading(servers, topics) as reader:
        reader.wait_for(rows, VISIBLE_S_MAX)
        return reader.finish()
