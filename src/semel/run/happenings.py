"""What a program that runs pipelines tells of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from semel import errors
from semel.errors import SemelError
from semel.runtime.pipeline import Running

#: How long a batch that is worked on may go on when everything is to stop.
GRACE_S = 30.0


@dataclass(frozen=True)
class Happening:
    """What `semel run` tells: a pipeline "started", ended a "batch", "stopped" or "failed", or is "waiting".

    Who waits has a decided batch that is `visible_in` some sinks and not in those that it `waits_for`.
    """

    event: str
    pipeline: str
    batch: int | None = None
    how: str = ""
    rows: int = 0
    attempt: int = 0
    ms: float = 0.0
    lag: int | None = None
    lag_by_partition: Mapping[str, int] | None = None
    warning: str = ""
    error: str = ""
    waits_for: tuple[str, ...] = ()
    visible_in: tuple[str, ...] = ()
    since: str = ""
    seconds: float = 0.0
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))


Hear = Callable[[Happening], None]


@dataclass
class Launched:
    """A pipeline that was started, and whether its end has been told. `begin` starts it once more."""

    name: str
    running: Running
    told: bool = False
    begin: Callable[[], Running] | None = None
    restarts: int = 0

    @property
    def active(self) -> bool:
        return bool(self.running.query.isActive)


def error_in(text: str) -> SemelError | None:
    """The semel error inside what came back from the JVM, where it is only text: the last one is the outermost."""
    found = re.findall(
        r"^(?:.*: )?semel\.errors\.(\w+): ([\s\S]{0,2000}?)\n  the data now: (.*)\n  what to do: (.*)$",
        text,
        re.MULTILINE,
    )
    if not found:
        return None
    kind, what, data_now, remedy = found[-1]
    return errors._rebuild(getattr(errors, kind, SemelError), what, data_now, remedy)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
