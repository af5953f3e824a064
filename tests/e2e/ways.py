"""Who writes the rows of a batch. Lives of a chain take turns, so that each recovers from what another way left."""

from __future__ import annotations

from typing import Any, Protocol

#: A task for each partition, the driver (the batches of these games are small), and one task: what to set for a life.
WAYS: tuple[dict[str, Any], ...] = ({"tasks": "partitions"}, {"tasks": "auto"}, {"tasks": "1", "driver_rows": 0})
PARTITIONS, DRIVER, ONE_TASK = range(len(WAYS))


class Ended(Protocol):
    """A life, as far as it is asked here."""

    @property
    def killed(self) -> bool: ...
    @property
    def error(self) -> str: ...


def way(turn: int) -> dict[str, Any]:
    """What to set for the life of this number."""
    return WAYS[turn % len(WAYS)]


def died_as_it_should(life: Ended, turn: int, *, in_a_task: bool) -> bool:
    """A task takes only its Python worker along; Spark then fails the batch, and the driver ends with an error."""
    if in_a_task and turn % len(WAYS) != DRIVER:
        return "failed before it was decided" in life.error
    return life.killed
