"""What is done to a pipeline, life by life. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.e2e.kafka_points import POINTS

NTH_MAX = 4
DELAY_S_MAX = 2.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 3.0
#: Where a driver is stopped so that it becomes a zombie, or so that a server dies between two steps.
BETWEEN = ("batch.staged", "batch.prepared", "batch.decided", "batch.committed")
#: How often each kind comes among twelve, in the long run.
WEIGHTS = {"point": 5, "moment": 3, "pause": 1, "zombie": 1, "server": 1, "server between": 1}


@dataclass(frozen=True)
class Fault:
    """What happens to one life.

    point            it dies at the `nth` hit of a failpoint
    moment           it is killed `delay_s` after its first batch
    pause            it is stopped `delay_s` after its first batch, for `pause_s`, goes on as long, and is killed
    zombie           it is stopped at a failpoint, the next one takes over, then it wakes up
    server           a server is killed `delay_s` after the first batch and is back after `pause_s`; then it is killed
    server between   it is stopped at a failpoint, a server is killed and started, it goes on; then it is killed
    """

    kind: str
    point: str = ""
    nth: int = 1
    delay_s: float = 0.0
    pause_s: float = 0.0
    server: str = ""

    @property
    def kills(self) -> int:
        return {"zombie": 0, "server": 2, "server between": 2}.get(self.kind, 1)

    @property
    def failpoints(self) -> str:
        """What the environment variable says."""
        stops = "=stop" if self.kind in ("zombie", "server between") else ""
        return f"{self.point}@{self.nth}{stops}" if self.point else ""

    def __str__(self) -> str:
        where = f" at {self.point}@{self.nth}" if self.point else f" {self.delay_s:.1f} s after its first batch"
        return f"{self.server or self.kind}{where}"


def plan_faults(
    seed: int, kills: int, known: Sequence[str] = POINTS, servers: Sequence[str] = ("Kafka",)
) -> tuple[Fault, ...]:
    """Faults of every kind, of failpoints each one before any comes again, until there are enough kills."""
    dice = random.Random(f"faults of {seed}")  # noqa: S311 - a game, not a secret
    plan: list[Fault] = []
    kinds: list[str] = []
    points: list[str] = []
    while sum(fault.kills for fault in plan) < kills:
        kinds = kinds or _shuffled(dice, [kind for kind, weight in WEIGHTS.items() for _ in range(weight)])
        points = points or _shuffled(dice, list(known))
        plan.append(_fault(dice, kinds.pop(), points, servers))
    return tuple(plan)


def _shuffled(dice: random.Random, items: list[str]) -> list[str]:
    return dice.sample(items, len(items))


def _fault(dice: random.Random, kind: str, points: list[str], servers: Sequence[str]) -> Fault:
    delay_s, pause_s = round(dice.uniform(0.0, DELAY_S_MAX), 2), round(dice.uniform(PAUSE_S_MIN, PAUSE_S_MAX), 2)
    if kind == "point":
        point = points.pop()
        # A start is gone through once; later points are hit by each batch, so some batches come before.
        nth = 1 if point.startswith("startup.") else dice.randint(2, NTH_MAX)
        return Fault(kind, point, nth)
    if kind in ("zombie", "server between"):
        fault = Fault(kind, dice.choice(BETWEEN), dice.randint(2, NTH_MAX), delay_s)
    else:
        fault = Fault(kind, delay_s=delay_s, pause_s=pause_s)
    return replace(fault, server=dice.choice(servers)) if kind.startswith("server") else fault
