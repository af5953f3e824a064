"""The options of a writer that are semel's own: `.option("semel.powerLossSafe", "false")`. All others are Spark's.

With `semel.sink` they are keywords: `semel.sink(..., power_loss_safe=False)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from semel.errors import ConfigError
from semel.runtime import hands

PREFIX = "semel."
POWER_LOSS_SAFE, TUNED_WORKERS = "semel.powerLossSafe", "semel.tunedWorkers"
TASKS, DRIVER_ROWS = "semel.tasks", "semel.driverRows"
#: What can be said of tasks beside a number.
AUTO, PARTITIONS = "auto", "partitions"
NAMES = (POWER_LOSS_SAFE, TUNED_WORKERS, TASKS, DRIVER_ROWS)


@dataclass(frozen=True)
class Switches:
    """What is on unless it is turned off, and limits.

    `power_loss_safe`: what a decision presupposes is on the disk before it (`durability`). `tuned_workers`: Python
    workers are spared what costs a small task more than its rows do (`worker`). `tasks`: how many write a batch:
    "auto", a number that is the limit, or "partitions" for a task for each partition of Spark's. `driver_rows`: up to
    so many rows the driver writes itself; with 0 it never does (`hands`).
    """

    power_loss_safe: bool = True
    tuned_workers: bool = True
    tasks: str | int = AUTO
    driver_rows: int = hands.DRIVER_ROWS

    @classmethod
    def said_by(cls, options: Mapping[str, object]) -> Switches:
        return cls(
            _is_on(options, POWER_LOSS_SAFE),
            _is_on(options, TUNED_WORKERS),
            tasks=str(options.get(TASKS, AUTO)),
            driver_rows=_number(DRIVER_ROWS, options.get(DRIVER_ROWS, hands.DRIVER_ROWS)),
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _tasks(self.tasks))
        _number(DRIVER_ROWS, self.driver_rows)

    @property
    def tasks_max(self) -> int:
        return self.tasks if isinstance(self.tasks, int) else 0


def _is_on(options: Mapping[str, object], name: str) -> bool:
    said = str(options.get(name, True)).lower()
    if said not in ("true", "false"):
        raise ConfigError(f"{name} is {said!r}.", remedy=f"Set {name} to true, which is the default, or to false.")
    return said == "true"


def _tasks(said: object) -> str | int:
    text = str(said).lower()
    if text in (AUTO, PARTITIONS):
        return text
    if not _is_number(text) or int(text) < 1:
        raise ConfigError(
            f"{TASKS} is {said!r}.",
            remedy=f"Set {TASKS} to {AUTO}, {PARTITIONS}, or the most tasks that write a batch.",
        )
    return int(text)


def _number(name: str, said: object) -> int:
    if not _is_number(str(said)):
        raise ConfigError(f"{name} is {said!r}.", remedy=f"Set {name} to a whole number that is not negative.")
    return int(str(said))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def check_names(options: Iterable[str]) -> None:
    """A name that is misspelt would be passed over, and what it asks for not be done."""
    for name in options:
        if name.lower().startswith(PREFIX) and name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
            raise ConfigError(f"semel knows no option {name}.", remedy=f"Did you mean {near[0]}?")
