"""`make chaos`: `semel verify` over the combinations of sinks, one after the other, and the sum of it in JSON.

The exit code is 0 only when every verdict is true. Each run prints its own seed, which follows from `--seed`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from semel.verify.run import verify
from semel.verify.settings import MASTER, Settings

ANOMALIES = ("lost", "duplicated", "torn", "split", "early", "reordered", "orphans")


class Combination(NamedTuple):
    sinks: tuple[str, ...]
    kills: int
    rows: int
    rows_per_batch: int
    master: str = MASTER


#: At least 200 kills, and a million rows into three stores at once.
COMBINATIONS = (
    Combination(("sqlite", "files"), kills=45, rows=150_000, rows_per_batch=1_000),
    Combination(("kafka",), kills=50, rows=350_000, rows_per_batch=4_000),
    Combination(("postgres",), kills=30, rows=150_000, rows_per_batch=2_000),
    Combination(("mariadb",), kills=30, rows=150_000, rows_per_batch=2_000),
    Combination(("kafka", "postgres", "mariadb"), kills=50, rows=1_000_000, rows_per_batch=8_000),
    Combination(("postgres:prepared", "mariadb:xa"), kills=12, rows=20_000, rows_per_batch=1_000),
    Combination(("postgres:upsert", "mariadb:upsert"), kills=12, rows=20_000, rows_per_batch=1_000),
    Combination(("postgres:dedup", "mariadb:versions"), kills=12, rows=20_000, rows_per_batch=1_000),
    Combination(("postgres:versions", "mariadb:dedup"), kills=12, rows=20_000, rows_per_batch=1_000),
    # The only one in which executors can be killed: they are processes of their own there.
    Combination(("files", "sqlite"), kills=12, rows=20_000, rows_per_batch=1_000, master="local-cluster[2,1,1024]"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--output", type=Path, default=Path("verify-output"))
    parser.add_argument("--only", default="*", help="sinks of a combination, with commas between them; * and ? match")
    parser.add_argument("--scale", type=float, default=1.0, help="this many times as many kills and rows")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:5.0f} s] {text}\n")
        sys.stdout.flush()

    say(f"seed {arguments.seed}")
    chosen = [(n, c) for n, c in enumerate(COMBINATIONS) if fnmatch(",".join(c.sinks), arguments.only)]
    runs = []
    for number, combination in chosen:
        settings = Settings(
            seed=arguments.seed + number,
            sinks=combination.sinks,
            kills=max(1, round(combination.kills * arguments.scale)),
            rows=max(1, round(combination.rows * arguments.scale)),
            rows_per_batch=combination.rows_per_batch,
            master=combination.master,
            output=arguments.output / "-".join(combination.sinks).replace(":", "-"),
        )
        say(settings.replay)
        runs.append(verify(settings, say).as_json())
        say(json.dumps(_short(runs[-1])))
    sys.stdout.write(json.dumps(_sum(arguments.seed, runs, time.monotonic() - began)) + "\n")
    return 0 if runs and all(run["verdict"] is True for run in runs) else 1


def _short(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in ("verdict", "seed", "rows", "batches", "kills", *ANOMALIES, "seconds", "report")}


def _sum(seed: int, runs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Unknown is not a pass, and one wrong verdict is enough."""
    verdicts = [run["verdict"] for run in runs]
    verdict = False if False in verdicts else "unknown" if "unknown" in verdicts or not runs else True
    faults: Counter[str] = Counter()
    for run in runs:
        faults.update(run["faults"])
    sums = {key: sum(run[key] for run in runs) for key in ("rows", "batches", "kills", *ANOMALIES)}
    return {"verdict": verdict, "seed": seed, **sums, "faults": dict(sorted(faults.items())), "seconds": round(seconds)}


if __name__ == "__main__":
    sys.exit(main())
