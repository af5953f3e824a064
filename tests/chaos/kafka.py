"""Kafka to Kafka under kill -9 of everything, for as long as it takes: `make chaos-kafka`.

Prints its seed first; `--seed` gives the same plan of faults again. The last line is the result, in JSON. The exit code
is 0 only when as many rows and kills as asked for were reached and nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from semel.dev.kafka import kafka
from tests.chaos.lives import Chaos
from tests.chaos.plan import plan_faults
from tests.e2e.archive import use_class_archive
from tests.e2e.child import Setup
from tests.e2e.kafka_game import KafkaGame

ROWS, KILLS = 300_000, 30
#: A life gets through some three batches before it dies, so most rows come under fire.
ROWS_PER_BATCH = 4_000


@dataclass(frozen=True)
class Result:
    """`verdict` is true, false or "unknown"; unknown is not a pass."""

    rows: int
    kills: int
    lost: int
    duplicated: int
    torn: int
    early: int
    open_transactions: int
    seconds: float
    seed: int
    verdict: bool | str


def run(folder: Path, *, seed: int, rows: int, kills: int, rows_per_batch: int, say: Callable[[str], None]) -> Result:
    """One game by the plan of the seed."""
    began = time.monotonic()
    with kafka(folder / "kafka", quick=True, say=say) as cluster:
        setup = Setup(str(folder / "game"), servers=cluster.bootstrap, rows_per_batch=rows_per_batch)
        chaos = Chaos(KafkaGame(setup), cluster, say)
        try:
            findings = chaos.play(plan_faults(seed, kills), rows, kills)
            story, left = chaos.story, chaos.game.open_transactions()
            wrong = {
                "lost": len(findings.lost),
                "duplicated": len(story.duplicated),
                "torn": len(story.torn),
                "early": len(story.early),
                "open_transactions": len(left),
            }
            reached = findings.compared >= rows and story.kills >= kills
            verdict = False if any(wrong.values()) else True if reached else "unknown"
            for evidence in (findings.lost, sorted(story.duplicated), sorted(story.torn), sorted(story.early), left):
                for words in evidence[:5]:
                    say(f"  {words}")
            seconds = round(time.monotonic() - began, 1)
            return Result(findings.compared, story.kills, **wrong, seconds=seconds, seed=seed, verdict=verdict)
        finally:
            chaos.end()
            chaos.game.end()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kafka", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--rows-per-batch", type=int, default=ROWS_PER_BATCH)
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:4.0f} s] {text}\n")
        sys.stdout.flush()

    say(f"seed {given.seed}: {given.rows} rows, {given.kills} kills")
    use_class_archive()
    with tempfile.TemporaryDirectory(prefix="semel-chaos-") as folder:
        try:
            result = run(
                Path(folder),
                seed=given.seed,
                rows=given.rows,
                kills=given.kills,
                rows_per_batch=given.rows_per_batch,
                say=say,
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing is known of the data
            say(f"broken off: {type(error).__name__}: {error}")
            unknown = dict.fromkeys(field.name for field in fields(Result))
            sys.stdout.write(json.dumps({**unknown, "seed": given.seed, "verdict": "unknown"}) + "\n")
            return 2
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 0 if result.verdict is True else 1


if __name__ == "__main__":
    sys.exit(main())
