"""One seed, many seeds, and the command that runs them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.simulation.audit import Anomaly, audit
from semel.simulation.faults import FAULTS_MIN
from semel.simulation.trace import Event, as_text
from semel.simulation.world import World

#: So many failing seeds are enough to work with.
FAILURES_MAX = 20
PROGRESS_S = 10.0


@dataclass(frozen=True)
class SeedRun:
    """What became of one seed."""

    seed: int
    anomalies: tuple[Anomaly, ...]
    events: tuple[Event, ...]
    faults: Counter[str]
    endings: Counter[str]
    counts: Counter[str]

    @property
    def trace(self) -> list[str]:
        return [as_text(event) for event in self.events]

    def explain(self) -> str:
        """What went wrong, and how to see it again."""
        lines = [f"seed {self.seed}:", *(f"  {anomaly}" for anomaly in self.anomalies[:5])]
        return "\n".join([*lines, f"  replay: {replay_command(self.seed)}"])


def replay_command(seed: int) -> str:
    return f"python -m semel.simulation --seeds 1 --first-seed {seed} --trace"


def simulate(seed: int) -> SeedRun:
    """Run one seed and audit what is left."""
    world = World(seed)
    try:
        world.run()
    except RuntimeError as error:
        world.witness.report("stuck", str(error))
    compared = audit(world)
    world.counts.update(
        rows=compared.rows, batches=compared.batches, looks=world.witness.looks, calls=world.calls, seeds=1
    )
    world.counts["drivers"] = world.scheduler.started
    world.counts.update({f"worlds with {name}": 1 for name in world.stores})
    world.counts["worlds that forget soon"] += world.forgets_soon
    world.counts["worlds with a drop-in"] += world.drops_in
    return SeedRun(
        seed, tuple(world.witness.anomalies), tuple(world.trace), world.plan.happened, world.endings, world.counts
    )


@dataclass
class Summary:
    """What became of many seeds."""

    first_seed: int
    failed: list[SeedRun] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    #: The fewest faults that one seed had.
    faults_min: int | None = None
    seconds: float = 0.0

    def add(self, run: SeedRun) -> None:
        if run.anomalies:
            self.failed.append(run)
        self.faults += run.faults
        self.endings += run.endings
        self.counts += run.counts
        happened = run.faults.total()
        self.faults_min = happened if self.faults_min is None else min(self.faults_min, happened)

    @property
    def verdict(self) -> bool | None:
        """None means unknown: it compared too little to say anything."""
        if self.failed:
            return False
        enough = self.counts["rows"] and (self.faults_min or 0) >= FAULTS_MIN
        return True if enough else None

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": {True: "true", False: "false", None: "unknown"}[self.verdict],
            "first_seed": self.first_seed,
            "seeds": self.counts["seeds"],
            "faults": dict(sorted(self.faults.items())),
            "faults_min": self.faults_min or 0,
            "endings": dict(sorted(self.endings.items())),
            "counts": {name: n for name, n in sorted(self.counts.items()) if name != "seeds"},
            "failed": [
                {
                    "seed": run.seed,
                    "anomalies": [str(anomaly) for anomaly in run.anomalies],
                    "replay": replay_command(run.seed),
                }
                for run in self.failed
            ],
            "seconds": round(self.seconds, 1),
            "seeds_per_second": round(self.counts["seeds"] / self.seconds, 1) if self.seconds else 0.0,
        }


def simulate_many(first_seed: int, seeds: int, hear: Callable[[SeedRun], None] = lambda _: None) -> Summary:
    """Run seeds one after the other; stop when FAILURES_MAX of them have failed. `hear` is told of each."""
    summary = Summary(first_seed)
    began = time.perf_counter()
    for seed in range(first_seed, first_seed + seeds):
        run = simulate(seed)
        summary.add(run)
        hear(run)
        if len(summary.failed) >= FAILURES_MAX:
            break
    summary.seconds = time.perf_counter() - began
    return summary


# The command ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every seed held, 1 when one did not, 3 when too little was compared to say so."""
    parser = argparse.ArgumentParser(
        prog="python -m semel.simulation", description="Run the real coordinator in simulated worlds."
    )
    parser.add_argument("--seeds", type=_at_least(1), default=2_000, help="how many (2000)")
    parser.add_argument("--first-seed", type=_at_least(0), default=0, help="the first of them (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", action="store_true", help="print every event of every seed")
    options = parser.parse_args(arguments)

    began = said = time.monotonic()

    def hear(run: SeedRun) -> None:
        nonlocal said
        if time.monotonic() > said + PROGRESS_S:
            said = time.monotonic()
            done = run.seed - options.first_seed + 1
            sys.stderr.write(f"{done:,} of {options.seeds:,} seeds, {done / (said - began):.0f} a second\n")
        if options.trace:
            _say("\n".join([f"seed {run.seed}", *run.trace]))
        if run.anomalies and not options.json:
            _say(run.explain())

    if not options.json:
        _say(f"seeds {options.first_seed} to {options.first_seed + options.seeds - 1}")
    summary = simulate_many(options.first_seed, options.seeds, hear)
    _say(json.dumps(summary.to_json(), indent=2) if options.json else _in_words(summary))
    return {True: 0, False: 1, None: 3}[summary.verdict]


def _in_words(summary: Summary) -> str:
    found = summary.to_json()
    lines = [
        f"verdict {found['verdict']}: {found['seeds']} seeds, {len(summary.failed)} failed, "
        f"{found['seconds']} s, {found['seeds_per_second']} seeds a second",
        *(f"  {title}: {_listed(found[title])}" for title in ("faults", "endings", "counts")),
    ]
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
