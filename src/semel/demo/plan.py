"""When and where each life is killed. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from semel.failpoints import all_failpoints

NTH_MAX = 3
DELAY_S_MAX = 2.0


@dataclass(frozen=True)
class Kill:
    """`point` is a failpoint and its `nth` hit, or empty: then `delay_s` after the life's first batch.

    Plain Spark has no failpoints. It is killed after this `fraction` of the time that its last batch of orders took,
    counted from the beginning of the next one: inside a batch, as most failpoints are.
    """

    point: str = ""
    nth: int = 1
    delay_s: float = 0.0
    fraction: float = 0.5

    @property
    def variable(self) -> str:
        return f"{self.point}@{self.nth}" if self.point else ""


def points_of(store: str) -> tuple[str, ...]:
    """What a pipeline with a sink of this kind reaches in its driver.

    A point in a task kills a Python worker, which ends in an error of the query; here the whole process group is to die
    without a word.
    """
    of_ours = ("startup.", "batch.", "log.", f"{store}.")
    return tuple(name for name, p in all_failpoints().items() if name.startswith(of_ours) and not p.in_a_task)


def plan_kills(seed: int, count: int, store: str = "sqlite") -> tuple[Kill, ...]:
    """Half at failpoints, half at random moments, in turns. The first is a random one: it always makes progress."""
    dice = random.Random(f"kills of {seed}")  # noqa: S311 - a game, not a secret
    points = _shuffled_rounds(dice, (count + 1) // 2, points_of(store))
    kills = [_at_point(dice, points[number // 2]) if number % 2 else _any_time(dice) for number in range(count)]
    return tuple(replace(kill, fraction=round(dice.uniform(0.2, 1.0), 3)) for kill in kills)


def _any_time(dice: random.Random) -> Kill:
    return Kill(delay_s=round(dice.uniform(0.0, DELAY_S_MAX), 3))


def _shuffled_rounds(dice: random.Random, count: int, reached: Sequence[str]) -> list[str]:
    """Every point once before any comes again."""
    points: list[str] = []
    while len(points) < count:
        points += dice.sample(reached, len(reached))
    return points


def _at_point(dice: random.Random, point: str) -> Kill:
    """A start is gone through once per pipeline; later points are hit by each batch, so some batches come before."""
    low, high = (1, 2) if point.startswith("startup.") else (2, NTH_MAX)
    return Kill(point, dice.randint(low, high))
