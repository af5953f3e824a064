"""What a start takes to ask a worker which Python it is, and how much of it the first batch would take anyway.

Each round is two JVMs of their own, one with the question and one without. They have run a job, and no Python yet:

    cold     the first question: Spark starts the daemon of the workers and the first worker
    warm     the question again, as if nothing were known: one job of one task
    known    the question of every later start of the application
    added    the cold question and a first task of Python behind it, less that first task where nobody has asked

    python benchmarks/interpreter.py [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# A file beside this one would hide the package `kafka`.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.overhead import session  # noqa: E402

import semel  # noqa: E402
from semel.runtime import interpreter  # noqa: E402

WARM = 20


def round_of(*, asked: bool) -> dict[str, float]:
    """In a process of its own."""
    spark = session()
    # What the first query of any application starts, whether or not anybody asks.
    spark.range(1).collect()
    sink = semel.Sqlite(str(Path(tempfile.gettempdir()) / "never.db"), "never")

    interpreter.choose_python(spark.sparkContext)

    def ask() -> None:
        interpreter.require_python(spark, [sink])

    def first_task() -> None:
        spark.sparkContext.parallelize([0], 1).map(lambda row: row).collect()

    found: dict[str, float] = {}
    if asked:
        found["cold"] = timed(ask)
        found["known"] = min(timed(ask) for _ in range(WARM))
    found["first_task"] = timed(first_task)
    if asked:
        found["warm"] = statistics.median(timed(anew(ask)) for _ in range(WARM))
    return found


def anew(ask: Callable[[], None]) -> Callable[[], None]:
    def forgetful() -> None:
        interpreter._KNOWN.clear()
        ask()

    return forgetful


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def measure(rounds: int) -> dict[str, float]:
    asked: list[dict[str, float]] = []
    unasked: list[dict[str, float]] = []
    for _ in range(rounds):
        asked.append(in_a_process("asked"))
        unasked.append(in_a_process("unasked"))
    result = {f"{name}_ms": median(found[name] for found in asked) for name in ("cold", "warm", "known")}
    result["cold_ms_max"] = round(max(found["cold"] for found in asked), 1)
    result["first_task_ms"] = median(found["first_task"] for found in unasked)
    result["first_task_behind_it_ms"] = median(found["first_task"] for found in asked)
    result["added_ms"] = round(result["cold_ms"] + result["first_task_behind_it_ms"] - result["first_task_ms"], 1)
    return {**result, "rounds": rounds}


def in_a_process(which: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--round", which]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--round", choices=["asked", "unasked"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.round:
        print(json.dumps(round_of(asked=arguments.round == "asked")))
        return
    result = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:26} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
