"""Who writes the rows of a batch. Lives of a chain take turns, so that each recovers from what another way left."""

from __future__ import annotations

from typing import Protocol

#: A task for each partition, the driver (the batches of these games are small), and one task.
WAYS = ("partitions", "auto", "1")
DRIVER = "auto"


class Ended(Protocol):
    """A life, as far as it is asked here."""

    @property
    def killed(self) -> bool: ...
    @property
    def error(self) -> str: ...


def way(turn: int) -> dict[str, str]:
    """What to set for the life of this number."""
    return {"tasks": WAYS[turn % len(WAYS)]}


def died_as_it_should(life: Ended, *, in_a_task: bool, tasks: str) -> bool:
    """A task takes only its Python worker along; Spark then fails the batch, and the driver ends with an error."""
    if in_a_task and tasks != DRIVER:
        return "failed before it was decided" in life.error
    return life.killed
