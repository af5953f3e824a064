"""The options of a writer that are semel's own: `.option("semel.powerLossSafe", "false")`. All others are Spark's.

With `semel.sink` they are keywords: `semel.sink(..., power_loss_safe=False)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from semel.errors import ConfigError

PREFIX = "semel."
POWER_LOSS_SAFE, TUNED_WORKERS = "semel.powerLossSafe", "semel.tunedWorkers"
NAMES = (POWER_LOSS_SAFE, TUNED_WORKERS)


@dataclass(frozen=True)
class Switches:
    """What is on unless it is turned off.

    `power_loss_safe`: what a decision presupposes is on the disk before it (`durability`). `tuned_workers`: Python
    workers are spared what costs a small task more than its rows do (`worker`).
    """

    power_loss_safe: bool = True
    tuned_workers: bool = True

    @classmethod
    def said_by(cls, options: Mapping[str, object]) -> Switches:
        return cls(_is_on(options, POWER_LOSS_SAFE), _is_on(options, TUNED_WORKERS))


def _is_on(options: Mapping[str, object], name: str) -> bool:
    said = str(options.get(name, True)).lower()
    if said not in ("true", "false"):
        raise ConfigError(f"{name} is {said!r}.", remedy=f"Set {name} to true, which is the default, or to false.")
    return said == "true"


def check_names(options: Iterable[str]) -> None:
    """A name that is misspelt would be passed over, and what it asks for not be done."""
    for name in options:
        if name.lower().startswith(PREFIX) and name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
            raise ConfigError(f"semel knows no option {name}.", remedy=f"Did you mean {near[0]}?")
