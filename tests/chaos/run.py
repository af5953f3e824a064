"""What chaos runs share: the result, and a command that prints its seed first and the result last, in JSON.

The exit code is 0 only when as many rows and kills as asked for were reached and nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from tests.chaos.lives import Chaos
from tests.chaos.plan import Fault
from tests.e2e.archive import use_class_archive

Say = Callable[[str], None]
EVIDENCE_SHOWN = 5


@dataclass(frozen=True)
class Result:
    """`verdict` is true, false or "unknown"; unknown is not a pass. `left` is what is open, prepared or staged."""

    rows: int
    kills: int
    lost: int
    duplicated: int
    torn: int
    early: int
    left: int
    seconds: float
    seed: int
    verdict: bool | str


@dataclass(frozen=True)
class Wanted:
    """What a run is to reach."""

    seed: int
    rows: int
    kills: int
    rows_per_batch: int


class Run(Protocol):
    def __call__(self, folder: Path, wanted: Wanted, say: Say) -> Result: ...


def play(chaos: Chaos, plan: Sequence[Fault], wanted: Wanted, say: Say) -> Result:
    """One game by a plan; everything of it is ended."""
    began = time.monotonic()
    try:
        findings = chaos.play(plan, wanted.rows, wanted.kills)
        story = chaos.story
        wrong = {
            "lost": [*findings.lost],
            "duplicated": sorted(story.duplicated),
            "torn": sorted(story.torn),
            "early": sorted(story.early),
            "left": chaos.game.left_behind(),
        }
        for kind, more in chaos.game.wrong_elsewhere().items():
            wrong[kind] += more
        for kind, words in wrong.items():
            for evidence in words[:EVIDENCE_SHOWN]:
                say(f"  {kind}: {evidence}")
        counts = {kind: len(words) for kind, words in wrong.items()}
        reached = findings.compared >= wanted.rows and story.kills >= wanted.kills
        verdict = False if any(counts.values()) else True if reached else "unknown"
        seconds = round(time.monotonic() - began, 1)
        return Result(findings.compared, story.kills, **counts, seconds=seconds, seed=wanted.seed, verdict=verdict)
    finally:
        chaos.end()
        chaos.game.end()


def main(name: str, description: str, run: Run, default: Wanted, arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--rows", type=int, default=default.rows)
    parser.add_argument("--kills", type=int, default=default.kills)
    parser.add_argument("--rows-per-batch", type=int, default=default.rows_per_batch)
    wanted = Wanted(**vars(parser.parse_args(arguments)))
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:4.0f} s] {text}\n")
        sys.stdout.flush()

    say(f"seed {wanted.seed}: {wanted.rows} rows, {wanted.kills} kills")
    use_class_archive()
    with tempfile.TemporaryDirectory(prefix="semel-chaos-") as folder:
        try:
            result = run(Path(folder), wanted, say)
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing is known of the data
            say(f"broken off: {type(error).__name__}: {error}")
            unknown = dict.fromkeys(field.name for field in fields(Result))
            sys.stdout.write(json.dumps({**unknown, "seed": wanted.seed, "verdict": "unknown"}) + "\n")
            return 2
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 0 if result.verdict is True else 1
