"""semel beside Flink EXACTLY_ONCE, Spark's own sink (at-least-once) and Quix Streams exactly-once, in one run.

Every run of an engine is a fresh process, and engines take turns; each figure is the median of the rounds. Flink and
Quix Streams are installed from PyPI into environments of their own, Flink's connector comes from Maven, once. A run
that loses a row fails the benchmark, and so does one that shows a row twice where exactly-once was promised.

    throughput   rows a second by append time, 3 million rows of 150 B that are there at the start
    latency      until a row is visible, at 2,000 rows a second (--rates 100,2000,20000)
    recovery     kill -9: the last row before to the first row after, the start of the JVM told apart
    sinks        throughput into one to eight topics at once (--sinks 1,2,4,8)
    state        a count per key, with RocksDB (--keys 10000,100000,1000000,10000000)

The most memory that the processes of an engine held is told beside each.

    python benchmarks/peers.py [--only throughput,latency,recovery] [--engines flink,semel] [--json] [--plot FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import latency  # noqa: E402
from benchmarks.engines.counts import require_even  # noqa: E402
from benchmarks.engines.recovery import recoveries  # noqa: E402
from benchmarks.engines.throughput import Bench, copied, counted  # noqa: E402
from benchmarks.processes import end_in_good_order  # noqa: E402
from benchmarks.rows import ROW_BYTES, preload  # noqa: E402
from benchmarks.topics import Topics  # noqa: E402

from semel.dev.kafka import kafka  # noqa: E402

ENGINES = ("flink", "spark", "quix", "semel")
PARTS = ("throughput", "latency", "recovery", "sinks", "state")
DEFAULT_PARTS = ("throughput", "latency", "recovery")
#: Flink and Quix with the shortest interval and the usual one; the others go on as soon as they can.
LATENCY_OF = {"flink": ("flink_200ms", "flink_1s"), "quix": ("quix_200ms",), "spark": ("spark",), "semel": ("semel",)}
Run = Callable[[str], dict[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Peers:
    topics: Topics
    folder: Path
    given: argparse.Namespace

    def throughput(self) -> dict[str, Any]:
        return self._copied(1)

    def sinks(self) -> dict[str, Any]:
        return {str(count): self._copied(count) for count in self.given.sinks}

    def _copied(self, sinks: int) -> dict[str, Any]:
        bench = self._bench(self.given.rows)
        source = self._input(bench.rows, 0)
        found = self._in_turn(f"into {sinks}", lambda engine: copied(engine, bench, source, sinks))
        self.topics.drop(source)
        return found

    def state(self) -> dict[str, Any]:
        found = {}
        for keys in self.given.keys:
            bench = self._bench(max(self.given.rows, keys))
            source = self._input(bench.rows, keys)
            run = self._counting(bench, source, keys)
            found[str(keys)] = self._in_turn(f"{keys:,} keys", run)
            self.topics.drop(source)
        return found

    def _counting(self, bench: Bench, source: str, keys: int) -> Run:
        def run(engine: str) -> dict[str, Any]:
            settings = {"spark.driver.memory": "4g"} if engine in ("spark", "semel") else {}
            return counted(engine, bench, source, keys, settings)

        return run

    def latency(self) -> dict[str, Any]:
        names = [name for engine in self.given.engines for name in LATENCY_OF[engine]]
        found = {}
        for rate in self.given.rates:
            load = latency.Load(rate, self.given.warm_s, self.given.seconds)
            found[str(rate)] = latency.measure(names, load, self.topics, self.folder / str(rate))
        return found

    def recovery(self) -> dict[str, Any]:
        asked = {"rate": 2_000, "rounds": self.given.kills, "commit_ms": self.given.commit_ms, "seed": self.given.seed}
        say(f"seed {self.given.seed}")
        found = {}
        for engine in self.given.engines:
            found[engine] = recoveries(engine, self.topics, self.folder, say, **asked)
            say(f"recovery: {engine} {found[engine]}")
        return _by_figure(found)

    def _bench(self, rows: int) -> Bench:
        return Bench(self.topics, self.folder, rows, self.given.commit_ms, say)

    def _input(self, rows: int, keys: int) -> str:
        source = self.topics.make("peers-in")
        say(f"writing {rows:,} rows of {ROW_BYTES} B as input")
        preload(self.topics.servers, source, rows, keys=keys)
        return source

    def _in_turn(self, what: str, run: Run) -> dict[str, Any]:
        engines: list[str] = self.given.engines
        rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for number in range(self.given.rounds):
            turn = number % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                rounds[engine].append(run(engine))
                say(f"{what}, round {number + 1} of {self.given.rounds}: {engine} {rounds[engine][-1]}")
        medians = {engine: _medians(found) for engine, found in rounds.items()}
        by_round = {engine: [one["rows_per_s"] for one in found] for engine, found in rounds.items()}
        return {**_by_figure(medians), "rows_per_s_by_round": by_round}


def _medians(found: list[dict[str, Any]]) -> dict[str, float]:
    return {figure: round(statistics.median(one[figure] for one in found), 2) for figure in found[0]}


def _by_figure(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By figure, then by engine."""
    figures = dict.fromkeys(figure for one in found.values() for figure in one)
    return {figure: {engine: one[figure] for engine, one in found.items() if figure in one} for figure in figures}


# Pictures -------------------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], folder: Path) -> None:
    from benchmarks.plots import Bars, bars

    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Bars] = {}
    if "throughput" in result:
        rates = result["throughput"]["rows_per_s"]
        pictures["throughput"] = Bars("Rows a second, Kafka to Kafka", ["rows/s"], {e: [r] for e, r in rates.items()})
        peaks = result["throughput"]["peak_mb"]
        pictures["memory"] = Bars("Memory at its peak, MB", ["MB"], {engine: [mb] for engine, mb in peaks.items()})
    for part, title in (("sinks", "Rows a second, by number of sinks"), ("state", "Rows a second, by number of keys")):
        if part in result:
            pictures[part] = _by_size(title, result[part])
    if "recovery" in result:
        figures = ("first_row_s", "new_row_s", "jvm_s")
        groups = {engine: [result["recovery"][f][engine] for f in figures] for engine in result["recovery"]["jvm_s"]}
        names = ["first row", "first new row", "of that its JVM or Python"]
        pictures["recovery"] = Bars("From the last row before kill -9, s", names, groups)
    for name, shown in pictures.items():
        (folder / f"{name}.svg").write_text(bars(shown))
    for rate, found in result.get("latency", {}).items():
        (folder / f"latency-{rate}.svg").write_text(latency.plot(found))


def _by_size(title: str, found: dict[str, Any]) -> Any:
    from benchmarks.plots import Bars

    engines = list(next(iter(found.values()))["rows_per_s"])
    groups = {engine: [one["rows_per_s"][engine] for one in found.values()] for engine in engines}
    return Bars(title, [f"{int(size):,}" for size in found], groups)


# The command ----------------------------------------------------------------------------------------------------------


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no such thing: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_names(PARTS), default=list(DEFAULT_PARTS), help="parts, by comma")
    parser.add_argument("--engines", type=_names(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3, help="of throughput, sinks and state")
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--commit-ms", type=int, default=1_000, help="checkpoints of Flink, commits of Quix Streams")
    parser.add_argument("--rates", type=_numbers, default=[2_000], help="of latency, rows a second")
    parser.add_argument("--warm-s", type=float, default=25)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=18, help="of the moments of the kills")
    parser.add_argument("--sinks", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--keys", type=_numbers, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="a folder for SVG files")
    return parser.parse_args()


def main() -> None:
    end_in_good_order()
    given = arguments()
    for keys in given.keys:
        require_even(keys)
    with tempfile.TemporaryDirectory() as text, kafka(Path(text) / "kafka", heap_mb=1024, say=say) as cluster:
        peers = Peers(Topics(cluster.bootstrap), Path(text), given)
        result = {part: getattr(peers, part)() for part in given.only}
    if given.plot:
        plot(result, given.plot)
    print(json.dumps(result) if given.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
