"""The rows that go in: a growing sequence of row numbers. Which rows a batch has, its plan says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from semel.simulation.stores import Rows

#: At so many rows, or fewer, the source begins: rows before it are not asked for.
BEGINS_AT_MAX = 3
ROWS_MAX = 5
EMPTY_CHANCE = 0.08


def draw_rows(dice: random.Random) -> int:
    """How many rows have come since the last batch; sometimes none."""
    return 0 if dice.random() < EMPTY_CHANCE else dice.randint(1, ROWS_MAX)


@lru_cache(maxsize=256)
def rows_of_tasks(seed: int, start: int, end: int) -> tuple[Rows, ...]:
    """What each task of a batch over these rows brings: always the same. Some tasks have no rows at all."""
    dice = random.Random(f"rows {start} to {end} of {seed}")  # noqa: S311 - a game, not a secret
    tasks = dice.randint(1, 3)
    owners = [dice.randrange(tasks) for _ in range(start, end)]
    return tuple(tuple(start + k for k, owner in enumerate(owners) if owner == task) for task in range(tasks))


def in_few(partitions: Sequence[Rows], tasks: int) -> list[tuple[Rows, ...]]:
    """Which partitions each task writes, one after the other, if there are so few tasks; each its own if it is 0."""
    if not tasks:
        return [(rows,) for rows in partitions]
    return [tuple(partitions[task::tasks]) for task in range(min(tasks, len(partitions)))]
