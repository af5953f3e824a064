"""What goes wrong in a run, and when. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

#: kind -> what happens, at a call that it applies to.
KINDS = {
    "crash": "the driver dies, before the effect of the call or between the effect and the answer",
    "lost answer": "the effect happens, the driver is told that nobody answered",
    "late effect": "the driver dies or gives up waiting; the effect happens later, while somebody else runs",
    "away": "a store, or the log, does not answer this call and some that follow",
    "restart": "a store restarts: open transactions are lost, prepared ones are kept",
    "expiry": "time passes until the store drops what is prepared",
    "task retried": "a task fails after it has prepared; Spark runs it again under another number",
    "task failed": "a task fails as often as Spark tries it",
    "zombie": "the driver stops in the middle of the call and goes on when others have taken over",
    "checkpoint lost": "the batch is committed and the driver dies before Spark has written commits/N",
    "power": "the machine stops: every driver dies, and files of the checkpoint that nobody has synced are gone",
    "old copy": "every driver dies, and an older copy of the checkpoint takes its place; the log stays as it is",
}
FAULTS_MIN, FAULTS_MAX = 5, 9
SKIP_CALLS_MAX = 28
AWAY_CALLS_MAX = 9
#: No driver gets anywhere without the log, so it is back sooner.
LOG_AWAY_CALLS_MAX = 3
LATE_CALLS_MAX = 160
ZOMBIE_CALLS_MAX = 240
#: In changes of the checkpoint; a batch makes two.
COPY_AGE_MAX = 12
#: A fault that is meant for one kind of call waits so long for it, then takes what comes.
AIM_CALLS_MAX = 60
#: The calls that are worth aiming at: those that change something.
AIMS = ("", "", "decide", "decide", "commit", "commit", "stage", "move", "abort", "claim", "fence")
#: How often each kind is drawn.
WEIGHTS = {
    "crash": 5,
    "lost answer": 3,
    "late effect": 3,
    "away": 3,
    "restart": 2,
    "expiry": 3,
    "task retried": 2,
    "task failed": 1,
    "zombie": 4,
    "checkpoint lost": 1,
    "power": 2,
    "old copy": 2,
}


@dataclass(frozen=True)
class Fault:
    """`skip` calls after the fault before it, at the next call that it applies to (`at`: only at such a one)."""

    kind: str
    skip: int
    at: str = ""
    #: Whether the effect of the call comes first.
    after: bool = False
    #: How many calls it lasts, where it lasts; how old the copy is.
    span: int = 0


@dataclass(frozen=True)
class Call:
    """What a fault looks at: where a call goes, and what it is."""

    place: str
    verb: str
    changes: bool


@dataclass
class Plan:
    """The faults of one seed, in the order in which they come."""

    waiting: list[Fault]
    happened: Counter[str] = field(default_factory=Counter)
    _passed: int = 0

    @property
    def exhausted(self) -> bool:
        return not self.waiting

    def due(self, call: Call, something_prepared: Callable[[], bool]) -> Fault | None:
        """The fault that happens at this call, if any. Only what is prepared can expire."""
        if not self.waiting:
            return None
        fault = self.waiting[0]
        self._passed += 1
        if self._passed <= fault.skip or not _applies(fault, call, something_prepared):
            return None
        if fault.at and call.verb != fault.at and self._passed <= fault.skip + AIM_CALLS_MAX:
            return None
        self._passed = 0
        self.happened[fault.kind] += 1
        return self.waiting.pop(0)


def _applies(fault: Fault, call: Call, something_prepared: Callable[[], bool]) -> bool:
    if fault.kind == "expiry":
        return something_prepared()
    applies = _APPLIES_TO.get(fault.kind)
    return applies is None or applies(call)


_APPLIES_TO: dict[str, Callable[[Call], bool]] = {
    "lost answer": lambda call: call.changes,
    "late effect": lambda call: call.changes,
    "away": lambda call: call.place != "checkpoint",
    "restart": lambda call: call.place not in ("checkpoint", "log"),
    "task retried": lambda call: call.verb == "stage",
    "task failed": lambda call: call.verb == "stage",
    "checkpoint lost": lambda call: call.verb == "checkpoint",
}


_SPANS_MAX = {
    "away": AWAY_CALLS_MAX,
    "late effect": LATE_CALLS_MAX,
    "zombie": ZOMBIE_CALLS_MAX,
    "old copy": COPY_AGE_MAX,
}


def draw_plan(dice: random.Random, *, expires: bool) -> Plan:
    """Between FAULTS_MIN and FAULTS_MAX faults. Without a sink whose transactions expire none expires."""
    weights = {kind: weight for kind, weight in WEIGHTS.items() if expires or kind != "expiry"}
    kinds = dice.choices(list(weights), list(weights.values()), k=dice.randint(FAULTS_MIN, FAULTS_MAX))
    return Plan([_draw(dice, kind) for kind in kinds])


def _draw(dice: random.Random, kind: str) -> Fault:
    # Troubles that follow each other closely are the ones that nobody thought of.
    skip = dice.choice((dice.randint(0, 4), dice.randint(0, SKIP_CALLS_MAX)))
    at = "" if kind in ("task retried", "task failed", "checkpoint lost") else dice.choice(AIMS)
    span_max = _SPANS_MAX.get(kind, 1)
    # Half of those who sleep or are late meet the next driver while it starts, the others when it has gone on.
    span = dice.randint(1, dice.choice((max(span_max // 4, 1), span_max)))
    return Fault(kind, skip, at, dice.random() < 0.5, span)
