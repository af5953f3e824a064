"""What is done to a pipeline, life by life: drawn from a seed, so that the same seed gives the same plan. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from semel.errors import ConfigError
from semel.failpoints import PROTOCOL, VARIABLE, all_failpoints
from semel.sinks.base import Sink
from semel.sinks.kinds import kind_of
from semel.verify.power.forgetful import MODES

#: What can be done -> what it is.
KINDS: Mapping[str, str] = {
    "point": "the driver or a task dies by SIGKILL at a named step of the protocol",
    "driver": "every process of the pipeline is killed at a moment",
    "supervisor": "only the Python driver is killed; its JVM notices, and may overlap with the next life",
    "jvm": "only Spark's JVM is killed",
    "worker": "a Python worker is killed in the middle of its work",
    "executor": "an executor is killed (--master local-cluster[...])",
    "pause": "every process is stopped for seconds and goes on (SIGSTOP, SIGCONT)",
    "zombie": "the driver is stopped between two steps, the next one takes over, then it wakes and must be fenced",
    "server": "a server is killed and comes back at once, or after some seconds",
    "between": "a server is killed and started while the driver is stopped between two steps",
    "outage": "a server is away for 10 to 30 seconds",
    "cut": "the network to a server is cut, or goes silent, for some seconds",
    "delay": "the network to a server is slow for some seconds: each piece of data takes 0.2 to 1 second",
    "disk-full": "the disk of the checkpoint is full, until the pipeline has given up",
    "power": "every process is killed, and the disk of the checkpoint loses what was not synced (only if it is named)",
}
#: Only if it is named: the checkpoint then lies on a slow disk of our own, which needs FUSE.
ON_REQUEST = frozenset({"power"})
#: How often each kind comes, beside one time each of the others.
WEIGHTS = {"point": 6, "driver": 3, "server": 2}
#: What a fault of a kind ends by SIGKILL; the others end one process or group of processes.
KILLS = {"zombie": 0, "disk-full": 0, "server": 2, "between": 2, "outage": 2}

NTH_MAX = 4
DELAY_S_MAX = 2.0
#: How long it lasts, from and to. Half of the servers that are killed come back at once.
LASTS_S = {"pause": (0.5, 3.0), "server": (-3.0, 3.0), "outage": (10.0, 30.0), "cut": (1.0, 8.0), "delay": (2.0, 8.0)}
CHUNK_S = (0.2, 1.0)
SEEDS = 1_000_000

#: Where a driver is stopped so that it becomes a zombie, or so that a server dies between two steps.
BETWEEN = ("batch.staged", "batch.prepared", "batch.decided", "batch.committed")
#: Where a driver may hold a lock that nobody but itself can end: a zombie is not made there then.
LOCKED = ("batch.prepared", "batch.decided")


@dataclass(frozen=True)
class Fault:
    """What happens to one life, `delay_s` after its first batch or at the `nth` hit of a failpoint.

    `pause_s` is how long it lasts, `chunk_s` how long each piece of data takes.
    """

    kind: str
    point: str = ""
    nth: int = 1
    delay_s: float = 0.0
    pause_s: float = 0.0
    server: str = ""
    silent: bool = False
    chunk_s: float = 0.0
    #: What the disk loses, of which `seed` draws a part.
    mode: str = ""
    seed: int = 0

    @property
    def kills(self) -> int:
        """How many processes or servers it is to end by SIGKILL."""
        return KILLS.get(self.kind, 1)

    @property
    def variables(self) -> dict[str, str]:
        """The environment that the life needs in order to suffer it."""
        stops = "=stop" if self.kind in ("zombie", "between") else ""
        return {VARIABLE: f"{self.point}@{self.nth}{stops}"} if self.point else {}

    def __str__(self) -> str:
        where = f" at {self.point}@{self.nth}" if self.point else f" {self.delay_s:.1f} s after its first batch"
        what = f"{self.kind} {self.server}".rstrip()
        more = " (silent)" if self.silent else ""
        more += f" (loses {self.mode}, seed {self.seed})" if self.mode else ""
        lasts = f", for {self.pause_s:.1f} s" if self.pause_s else ""
        return f"{what}{more}{where}{lasts}"


# What is possible -----------------------------------------------------------------------------------------------------


def kinds_possible(
    guarantee: str,
    master: str,
    servers: Collection[str] = (),
    proxied: Collection[str] = (),
    wanted: Collection[str] = (),
) -> tuple[str, ...]:
    """The kinds of faults that a pipeline can suffer here, or those that are wanted, all of which must be possible.

    Of the servers, those `proxied` have a network of ours.
    """
    impossible = _impossible(guarantee, master, servers, proxied)
    in_vain = [f"{kind} ({impossible[kind]})" for kind in wanted if kind in impossible]
    if in_vain:
        raise ConfigError(
            f"Some of these faults are not possible here: {', '.join(in_vain)}.",
            remedy="Leave them out of --faults, or provide what they need.",
        )
    return tuple(
        kind for kind in KINDS if kind not in impossible and (kind in wanted or not (wanted or kind in ON_REQUEST))
    )


def _impossible(guarantee: str, master: str, servers: Collection[str], proxied: Collection[str]) -> dict[str, str]:
    """What cannot be done here, and why."""
    found: dict[str, str] = {}
    if not servers:
        found |= dict.fromkeys(("server", "between", "outage"), "no server may be broken: --with or --break")
    if not proxied:
        found |= dict.fromkeys(("cut", "delay"), "no server is started here: --with")
    if not master.startswith("local-cluster"):
        found["executor"] = "executors are killed where we start them: --master local-cluster[2,1,1024]"
    if guarantee != "exactly-once":
        found["zombie"] = f"{guarantee} does not promise that a zombie is fenced"
        found["power"] = f"{guarantee} promises nothing of a power cut"
    return found


def refuse_kinds_that_kill_nobody(kinds: Sequence[str], kills: int) -> None:
    """A plan goes on until there are enough kills, so one of its kinds must bring some."""
    if kills and kinds and not any(Fault(kind).kills for kind in kinds):
        raise ConfigError(
            f"Faults of the kind {' and '.join(kinds)} kill nobody, and {kills} kills are asked for.",
            remedy=f"Add a kind that kills: --faults {','.join(kinds)},driver.",
        )


def points_for(sinks: Sequence[Sink], guarantee: str) -> tuple[str, ...]:
    """The failpoints that each batch, or each start, of such a pipeline passes."""
    passed = {"batch.began", "task.wrote", "task.prepared", "batch.staged", "batch.prepared", "batch.committed"}
    if guarantee == "exactly-once":
        passed |= {p.name for p in PROTOCOL if p.name.startswith("startup.") and not p.seldom}
        passed |= {"log.written", "batch.decided"}
    elif guarantee == "at-most-once":
        passed |= {"startup.claimed", "log.written"}
    for sink in sinks:
        passed |= _points_of(sink, guarantee)
    return tuple(point for point in all_failpoints() if point in passed)


def _points_of(sink: Sink, guarantee: str) -> set[str]:
    own = [p for p in kind_of(sink).failpoints if not p.seldom]
    if guarantee != "exactly-once":
        own = [p for p in own if not p.exactly_once]
    if sink.capabilities.native_prepare:
        # Each task prepares its own transaction, so the driver has none to move rows in.
        own = [p for p in own if not p.moves]
    return {p.name for p in own}


# The plan -------------------------------------------------------------------------------------------------------------


def plan_faults(
    seed: int,
    kills: int,
    kinds: Sequence[str],
    points: Sequence[str],
    servers: Sequence[str] = (),
    proxied: Sequence[str] = (),
) -> tuple[Fault, ...]:
    """Faults until there are enough kills: each kind and each failpoint once, before any comes again."""
    refuse_kinds_that_kill_nobody(kinds, kills)
    dice = random.Random(f"faults of {seed}")  # noqa: S311 - a game, not a secret
    between = [point for point in BETWEEN if point in points]
    known = all_failpoints()
    locks = any(known[point].locks for point in points)
    zombie = [point for point in between if not (locks and point in LOCKED)]
    decks = {"point": points, "between": between, "zombie": zombie, "server": servers, "proxied": proxied}
    drawn = _Draw(dice, decks)
    plan: list[Fault] = []
    left: list[str] = []
    planned = 0
    while planned < kills:
        left = left or _round_of_kinds(dice, kinds)
        plan.append(drawn.fault(left.pop()))
        planned += plan[-1].kills
    return tuple(plan)


def _round_of_kinds(dice: random.Random, kinds: Sequence[str]) -> list[str]:
    """Each kind as often as its weight says, to be taken from the end: first each of them once."""
    more = [kind for kind in kinds for _ in range(WEIGHTS.get(kind, 1) - 1)]
    return dice.sample(more, len(more)) + dice.sample(list(kinds), len(kinds))


class _Draw:
    """Draws the particulars of one fault after the other."""

    def __init__(self, dice: random.Random, decks: Mapping[str, Sequence[str]]) -> None:
        self.dice = dice
        self.decks = decks
        self._left: dict[str, list[str]] = {}

    def fault(self, kind: str) -> Fault:
        fault = Fault(kind, delay_s=self._seconds(0.0, DELAY_S_MAX))
        if kind == "point":
            point = self._next("point")
            # A start is gone through once; later points are hit by each batch, so some batches come before.
            return Fault(kind, point, 1 if point.startswith("startup.") else self._nth())
        if kind in ("zombie", "between"):
            fault = Fault(kind, self._next(kind), self._nth())
        if kind in ("server", "between", "outage"):
            fault = replace(fault, server=self._next("server"))
        if kind == "power":
            return replace(fault, mode=self.dice.choice(MODES), seed=self.dice.randrange(SEEDS))
        if kind in ("cut", "delay"):
            fault = replace(fault, server=self._next("proxied"))
        return replace(
            fault,
            pause_s=max(0.0, self._seconds(*LASTS_S[kind])) if kind in LASTS_S else 0.0,
            silent=kind == "cut" and self.dice.random() < 0.5,
            chunk_s=self._seconds(*CHUNK_S) if kind == "delay" else 0.0,
        )

    def _next(self, deck: str) -> str:
        """The next of a shuffled deck: each comes once before any comes again."""
        if not self._left.get(deck):
            self._left[deck] = self.dice.sample(list(self.decks[deck]), len(self.decks[deck]))
        return self._left[deck].pop()

    def _nth(self) -> int:
        return self.dice.randint(2, NTH_MAX)

    def _seconds(self, least: float, most: float) -> float:
        return round(self.dice.uniform(least, most), 2)
