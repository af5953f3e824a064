"""How soon a row is visible: Flink EXACTLY_ONCE, Spark's own sink (at-least-once) and semel, from Kafka to Kafka.

Each engine runs in a fresh process, one after the other on one broker, as its users would run it: no trigger, its own
defaults. Rows come at a steady rate, each with the time of the machine's clock when it was sent; a read_committed
reader, in a process of its own, looks at the same clock when it gets it. Only rows that were sent after the warm-up
count. A row that is lost or comes twice fails the benchmark.

For the two engines on Spark, `duration_ms` is where their batches spent the time, medians by StreamingQueryProgress.

    python benchmarks/latency.py [--rate 2000] [--only spark,semel] [--warm-s 25] [--seconds 40] [--json] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.engines.launch import Running, running  # noqa: E402
from benchmarks.engines.talk import MARK, Job  # noqa: E402
from benchmarks.processes import end_in_good_order  # noqa: E402
from benchmarks.reader import Seen, reading  # noqa: E402
from benchmarks.rows import ROW_BYTES, fed  # noqa: E402
from benchmarks.topics import Topics  # noqa: E402

from semel.dev.kafka import kafka  # noqa: E402

PERCENTILES = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
#: How long the last rows may take to come out.
DRAIN_S_MAX = 60.0
#: name -> the engine, and how often it makes a checkpoint where that is its user's choice.
ENGINES: dict[str, tuple[str, int]] = {
    "flink_200ms": ("flink", 200),
    "flink_1s": ("flink", 1_000),
    "spark": ("spark", 0),
    "semel": ("semel", 0),
}
#: For benchmarks/peers.py.
MORE_ENGINES: dict[str, tuple[str, int]] = {"quix_200ms": ("quix", 200), "quix_1s": ("quix", 1_000)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Load:
    rate: int
    warm_s: float
    seconds: float


def measure_one(name: str, load: Load, topics: Topics, folder: Path) -> dict[str, Any]:
    """One engine from its start to its end, every row accounted for."""
    engine, commit_ms = (ENGINES | MORE_ENGINES)[name]
    source, target = topics.make("latency-in"), topics.make("latency-out")
    job = Job(engine, topics.servers, source, [target], str(folder / name), commit_ms=commit_ms)
    with reading(topics.servers, [target]) as reader, running(job, say=say) as process:
        with fed(topics.servers, source, load.rate) as feeder:
            time.sleep(load.warm_s)
            process.tell(MARK)
            from_ns = time.monotonic_ns()
            time.sleep(load.seconds)
            to_ns = time.monotonic_ns()
            rows = feeder.stop()
        reader.wait_for(rows, DRAIN_S_MAX)
        told = process.stop()
        seen = reader.finish()[target]
    topics.drop(source, target)
    seen.require_each_once(name, rows)
    return _figures(seen, from_ns, to_ns) | _told(told, process)


def _figures(seen: Seen, from_ns: int, to_ns: int) -> dict[str, Any]:
    import numpy as np

    counted = (seen.sent_ns >= from_ns) & (seen.sent_ns < to_ns)
    ms = (seen.seen_ns[counted] - seen.sent_ns[counted]) / 1e6
    found = {name: round(float(np.percentile(ms, at)), 1) for name, at in PERCENTILES.items()}
    return {**found, "max_ms": round(float(ms.max()), 1), "rows": int(counted.sum())}


def _told(told: dict[str, Any], process: Running) -> dict[str, Any]:
    more: dict[str, Any] = {name: told[name] for name in ("duration_ms", "batches", "rows_per_batch") if name in told}
    return {**more, "peak_mb": round(process.peak_mb)}


def measure(names: list[str], load: Load, topics: Topics, folder: Path) -> dict[str, Any]:
    """By figure, then by engine."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = measure_one(name, load, topics, folder)
        say(f"{name}: {found[name]}")
    figures = dict.fromkeys(figure for one in found.values() for figure in one)
    by_figure = {f: {name: one[f] for name, one in found.items() if f in one} for f in figures}
    return {"rate": load.rate, "row_bytes": ROW_BYTES, "warm_s": load.warm_s, "seconds": load.seconds, **by_figure}


def plot(result: dict[str, Any]) -> str:
    from benchmarks.plots import Bars, bars

    engines = list(result["p50_ms"])
    groups = {name: [result[figure][name] for figure in PERCENTILES] for name in engines}
    title = f"Until a row is visible, ms ({result['rate']:,} rows/s of {result['row_bytes']} B)"
    return bars(Bars(title, [figure.removesuffix("_ms") for figure in PERCENTILES], groups))


def main() -> None:
    end_in_good_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=2_000, help="rows a second")
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, by comma")
    parser.add_argument("--warm-s", type=float, default=25)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in ENGINES | MORE_ENGINES]:
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES | MORE_ENGINES)}")
    with tempfile.TemporaryDirectory() as text, kafka(Path(text) / "kafka", heap_mb=1024, say=say) as cluster:
        load = Load(given.rate, given.warm_s, given.seconds)
        result = measure(names, load, Topics(cluster.bootstrap), Path(text))
    if given.plot:
        given.plot.write_text(plot(result))
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
