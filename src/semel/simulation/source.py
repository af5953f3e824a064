"""The rows that go in: the same whenever a batch runs, as a source with offsets gives them."""

from __future__ import annotations

import random
from functools import lru_cache

from semel.simulation.stores import Rows


@lru_cache(maxsize=64)
def rows_of_tasks(seed: int, batch: int) -> tuple[Rows, ...]:
    """What each task of a batch brings. It is the same whenever the batch runs; some have no rows at all."""
    dice = random.Random(f"rows of batch {batch} of {seed}")  # noqa: S311 - a game, not a secret
    tasks = dice.randint(1, 3)
    rows = 0 if dice.random() < 0.08 else dice.randint(1, 5)
    owners = [dice.randrange(tasks) for _ in range(rows)]
    return tuple(tuple(batch * 100 + k for k, owner in enumerate(owners) if owner == task) for task in range(tasks))
