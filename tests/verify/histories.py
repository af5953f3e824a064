"""Histories made by hand: a good one, changes that spoil it, and an eventful one for the report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from semel.verify.history import BatchSeen, Event, History, Look, Sights

#: 16 November 2026, 12:00 UTC.
BEGAN_S = 1_794_830_400.0
PARTITIONS = 2
KEYS = 4
#: Within the second of a batch: decided, then looked at.
DECIDED, LOOKED = 0.5, 0.6
SINKS = {"pg": "postgres", "topic": "kafka"}


def at(seconds: float) -> float:
    """A time of day, given in seconds since the run began."""
    return BEGAN_S + seconds


def look(seconds: float, added: Sequence[int] = (), gone: Sequence[int] = ()) -> Look:
    """A look that took a hundredth of a second."""
    return Look(at(seconds) - 0.01, at(seconds), added, gone)


def key_of(number: int) -> str:
    return f"k{number % KEYS}"


def good(rows: int = 40, per_batch: int = 10, sinks: Mapping[str, str] = SINKS, **fields: Any) -> History:
    """Every row once in every sink. Batch b is decided at b + 0.5 s, and a look at each sink shows it soon after.

    When all is over, a last look finds nothing new.
    """
    batches = -(-rows // per_batch)
    parts = [range(b * per_batch, min((b + 1) * per_batch, rows)) for b in range(batches)]
    history = History(
        seed=7,
        pipeline="orders",
        guarantee="exactly-once",
        rows=rows,
        sights=[_sights(name, kind, place, parts) for place, (name, kind) in enumerate(sinks.items())],
        key_of=key_of,
        batch_of=[number // per_batch for number in range(rows)],
        batches={b: BatchSeen(b, at(b + DECIDED), checkpointed=True) for b in range(batches)},
        rows_wanted=rows,
        began_s=BEGAN_S,
        ended_s=at(batches + 1),
        replay="semel verify orders.py --seed 7",
    )
    return replace(history, **fields)


def _sights(name: str, kind: str, place: int, parts: Sequence[range]) -> Sights:
    rows = range(parts[-1].stop if parts else 0)
    kafka = kind == "kafka"
    return Sights(
        sink=name,
        kind=kind,
        snapshots=not kafka,
        looks=[
            *(look(b + LOOKED + place * 0.02, part) for b, part in enumerate(parts)),
            look(len(parts) + 0.9),
        ],
        rows=Counter(rows),
        in_order={p: rows[p::PARTITIONS] for p in range(PARTITIONS)} if kafka else {},
    )


def sights_of(history: History, sink: str) -> Sights:
    return next(s for s in history.sights if s.sink == sink)


def with_sink(history: History, name: str, /, **changes: Any) -> History:
    """The same history, but this was seen of one sink."""
    return replace(history, sights=[replace(s, **changes) if s.sink == name else s for s in history.sights])


def without_rows(history: History, sink: str, *numbers: int) -> History:
    """These rows are not there at the end, and no look has shown them."""
    sights, without = sights_of(history, sink), frozenset(numbers)
    return with_sink(
        history,
        sink,
        rows=sights.rows - Counter(numbers),
        looks=[replace(one, added=[n for n in one.added if n not in without]) for one in sights.looks],
        in_order={p: [n for n in rows if n not in without] for p, rows in sights.in_order.items()},
    )


def with_looks(history: History, sink: str, *looks: Look) -> History:
    """More looks, each in its place in time."""
    return with_sink(history, sink, looks=sorted([*sights_of(history, sink).looks, *looks], key=lambda x: x.ended_s))


# For the report -----------------------------------------------------------------------------------------------------


#: As the plan spells them.
FAULTS = (
    "point at batch.decided@2",
    "point at batch.prepared@3",
    "point at kafka.marked@2",
    "point at startup.closed@1",
    "driver 0.8 s after its first batch",
    "jvm 1.1 s after its first batch",
    "worker 0.3 s after its first batch",
    "pause 0.5 s after its first batch, for 2.1 s",
    "zombie at batch.decided@2",
    "disk-full 0.2 s after its first batch",
    "clock by -1280 s 1.2 s after its first batch",
)
NO_KILLS = ("zombie", "disk-full", "cut", "delay")


@dataclass
class Eventful:
    """A run as it may go: lives that end by kills, servers that are away, recoveries, and three sinks all the while."""

    lives: int = 40
    batches_per_life: int = 6
    per_batch: int = 100
    seed: int = 20261116
    sinks: Mapping[str, str] = field(
        default_factory=lambda: {"kafka_billed": "kafka", "postgres_billed": "postgres", "files_lake": "files"}
    )
    now_s: float = 4.0
    batch: int = 0
    events: list[Event] = field(default_factory=list)
    batches: dict[int, BatchSeen] = field(default_factory=dict)
    looks: dict[str, list[Look]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    def history(self) -> History:
        rng = random.Random(self.seed)  # noqa: S311 - a picture, not a secret
        self.looks = {sink: [look(2.0)] for sink in self.sinks}
        for number in range(self.lives):
            self._life(number, rng)
        self._tell("note", "left alone until every row has arrived")
        rows = self.batch * self.per_batch
        parts = [range(b * self.per_batch, (b + 1) * self.per_batch) for b in range(self.batch)]
        sights = [_sights(name, kind, place, parts) for place, (name, kind) in enumerate(self.sinks.items())]
        return good(
            rows,
            self.per_batch,
            seed=self.seed,
            pipeline="billing",
            sights=[
                replace(s, looks=[*self.looks[s.sink], look(self.now_s + 2)], misses=self.faults["outage"])
                for s in sights
            ],
            batches=self.batches,
            events=sorted(self.events, key=lambda e: e.at_s),
            faults=dict(self.faults),
            kills=sum(n for kind, n in self.faults.items() if kind not in NO_KILLS),
            ended_s=at(self.now_s + 3),
            logs=[f"life-{n + 1}.log" for n in range(self.lives)],
            replay=f"semel verify billing.py --with kafka,postgres --seed {self.seed} --rows {rows}",
        )

    def _life(self, number: int, rng: random.Random) -> None:
        began_s = self.now_s
        self.now_s += rng.uniform(1.5, 2.5)
        if number and rng.random() < 0.6:
            self._tell("recovery", f"batch {self.batch} forwarded, {self.per_batch} rows")
        for _ in range(rng.randint(1, 2 * self.batches_per_life - 1)):
            self._batch(rng)
        if number % 5 == 2:
            self._outage(rng)
        what = "left alone"
        if number < self.lives - 1:
            what = rng.choice(FAULTS)
            self.faults[what.split(" ", maxsplit=1)[0]] += 1
            self._tell("fault", what)
        # The driver of a zombie lives on for a while beside the next life.
        until_s = self.now_s + (3.0 if what.startswith("zombie") else 0.0)
        self.events.append(Event(at(began_s), "life", "pipeline", f"life {number + 1}: {what}", at(until_s)))
        self.now_s += rng.uniform(0.2, 0.6)

    def _tell(self, kind: str, what: str, lane: str = "pipeline", lasts_s: float = 0.0) -> None:
        until_s = at(self.now_s + lasts_s) if lasts_s else 0.0
        self.events.append(Event(at(self.now_s), kind, lane, what, until_s))

    def _batch(self, rng: random.Random) -> None:
        lasts_s = rng.uniform(0.3, 0.9)
        self._tell("batch", f"batch {self.batch} committed, {self.per_batch} rows", lasts_s=lasts_s)
        self.now_s += lasts_s
        self.batches[self.batch] = BatchSeen(self.batch, at(self.now_s - 0.1), checkpointed=True)
        added = range(self.batch * self.per_batch, (self.batch + 1) * self.per_batch)
        for place, sink in enumerate(self.sinks):
            self.looks[sink].append(look(self.now_s + 0.02 * place, added))
        self.batch += 1

    def _outage(self, rng: random.Random) -> None:
        server, kind = rng.choice(["kafka", "postgres"]), rng.choice(["outage", "cut", "delay"])
        what = f"{kind} {server} 0.7 s after its first batch, for 3.0 s"
        self.faults[kind] += 1
        self._tell("fault", what, server)
        self._tell("outage", what, server, lasts_s=3.0)
        self.now_s += 3.5


def eventful(**changes: Any) -> History:
    return Eventful(**changes).history()


def eventful_and_wrong() -> History:
    """The same with a duplicated row, a batch that is lost in one sink, and something left behind."""
    history = eventful()
    lost = range(60 * 100, 61 * 100)
    history = without_rows(history, "files_lake", *lost)
    topic = sights_of(history, "kafka_billed")
    history = with_sink(history, "kafka_billed", rows=topic.rows + Counter([11, 12, 13]))
    history = with_looks(history, "postgres_billed", look(50.0, [77]), look(50.5, (), [77]))
    return with_sink(history, "postgres_billed", left=["prepared transaction 'semel-1-<task 3>' of batch 12"])
