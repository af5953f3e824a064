"""Everything of one seed: the stores, the log, the checkpoint, the time, the drivers, and what has been seen."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

from semel.decisions import log as log_module
from semel.decisions.base import StoreUnanswered
from semel.decisions.memory import MemoryStore
from semel.decisions.records import parse_journal_entry
from semel.errors import (
    BatchFailed,
    CheckpointRolledBack,
    CheckpointUnusable,
    CommitStalled,
    DecisionUnknown,
    Fenced,
    PlanChanged,
    PlanRestored,
    SinkUnavailable,
)
from semel.protocol.events import Committable, Decided, Outcome
from semel.protocol.plans import digest_of
from semel.runtime import batch as batch_module
from semel.runtime import phases as phases_module
from semel.runtime import startup as startup_module
from semel.runtime.offsets import commits_of, offsets_of
from semel.runtime.work import Work
from semel.simulation.audit import Anomaly, Witness
from semel.simulation.checkpoint import Checkpoint, ConcurrentQueries
from semel.simulation.faults import draw_plan
from semel.simulation.line import CHECKPOINT, Late, Line, TaskFailed
from semel.simulation.scheduler import DRIVERS_MAX, Driver, DriverDied, Scheduler
from semel.simulation.spark import run_query
from semel.simulation.stores import FilesStore, LedgerStore, PreparedStore, SimulatedStore
from semel.simulation.trace import Event
from semel.sinks.base import Context

T = TypeVar("T")
R = TypeVar("R")
BATCHES_MIN, BATCHES_MAX = 4, 6
DROP_IN_CHANCE = 0.3
CALLS_MAX = 20_000
EXPIRES_AFTER_S = 60.0
#: How a driver may end. Anything else is a bug of the code under test, or of the simulation.
ENDINGS = (
    *(Fenced, CommitStalled, DecisionUnknown, BatchFailed, SinkUnavailable),
    *(CheckpointRolledBack, CheckpointUnusable, PlanChanged, PlanRestored),
    *(StoreUnanswered, OSError, ConcurrentQueries),
)
#: How many drivers may be needed after the last fault: one that puts a plan back, one after a repair, one that works.
LAST_DRIVERS_MAX = 4
#: Why a batch may fail, or a commit stall.
CAUSES = (*ENDINGS, TaskFailed, type(None))


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(f"world {seed}")  # noqa: S311 - a game, not a secret
        self.witness = Witness()
        self.stores = self._draw_stores()
        expires = any(isinstance(store, PreparedStore) for store in self.stores.values())
        self.plan = draw_plan(self.dice, expires=expires)
        self.batches_min = self.dice.randint(BATCHES_MIN, BATCHES_MAX)
        #: In some worlds journals and claims are forgotten as soon as they may be.
        self.forgets_soon = self.dice.random() < 0.5
        #: In some worlds semel is a function in a foreachBatch: it hears of a query in its first batch only.
        self.drops_in = self.dice.random() < DROP_IN_CHANCE
        #: How many tasks write a batch, each several partitions; 0 where each partition has a task of its own. Drawn
        #: by dice of its own, so that it changes nothing else in a world.
        self.hands = random.Random(f"hands of {seed}").choice((0, 0, 1, 2))  # noqa: S311 - a game, not a secret
        #: In some worlds nobody can tell that an older driver is gone: each start looks at the stores before it claims.
        self.looks_before_claims = seed % 5 == 4
        self.records = MemoryStore()
        #: Batches whose journals were forgotten. What lies there now was recorded later; nobody acts on it.
        self.pruned: set[int] = set()
        self.checkpoint = Checkpoint()
        self.scheduler = Scheduler(self.dice)
        self.now = 0.0
        self.calls = 0
        self.late: list[Late] = []
        self.away: dict[str, int] = {}
        self.tasks_are_doomed = False
        #: Drivers that began to start with a batch in hand which another one had ended.
        self.overtaken: set[str] = set()
        self.trace: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()

    def _draw_stores(self) -> dict[str, SimulatedStore]:
        kinds: dict[str, type[SimulatedStore]] = {"files": FilesStore, "ledger": LedgerStore, "prepared": PreparedStore}
        names = self.dice.sample(sorted(kinds), self.dice.choice((1, 2, 2, 3, 3)))
        return {name: kinds[name](name, self.witness.saw) for name in names}

    # What happens -----------------------------------------------------------------------------------------------------

    def run(self) -> list[Anomaly]:
        """All faults, then a last driver that nothing disturbs."""
        try:
            with the_real_code_in(self):
                while self.has_work() or self.scheduler.live:
                    self._let_somebody_run()
                self._heal()
                self._finish()
        finally:
            self.scheduler.end_all()
        return self.witness.anomalies

    def has_work(self) -> bool:
        return not self.is_done(self.checkpoint.at_hand_batch)

    def is_done(self, batch: int) -> bool:
        """Rows keep coming until all faults have happened."""
        return batch >= self.batches_min and self.plan.exhausted

    def _let_somebody_run(self) -> None:
        scheduler = self.scheduler
        if self.has_work() and all(driver.zombie for driver in scheduler.live):
            if scheduler.started >= DRIVERS_MAX or self.calls > CALLS_MAX:
                raise RuntimeError(f"seed {self.seed}: {scheduler.started} drivers and {self.calls} calls do not end")
            scheduler.launch(self._live)
        scheduler.resume(scheduler.choose(self.calls))

    def _heal(self) -> None:
        self.tell(None, "everything is healed")
        self.away.clear()
        self.tasks_are_doomed = False
        self._land(self.late)

    def _finish(self) -> None:
        """The last driver has one batch more than was asked for, so that it must do some work."""
        self.batches_min = max(self.checkpoint.next_batch, *self.witness.spans, 0) + 2
        for _ in range(LAST_DRIVERS_MAX):
            last = self.scheduler.launch(self._live)
            while not last.ended:
                self.scheduler.resume(last)
            if not isinstance(last.error, PlanRestored | PlanChanged | CheckpointRolledBack):
                break
        if self.has_work():
            self.witness.report("stuck", f"the last driver stopped before batch {self.checkpoint.next_batch} was done")

    def _live(self, driver: Driver) -> None:
        """The whole life of one driver, and how it ended."""
        try:
            run_query(self, Line(self, driver))
            ending = "finished"
        except DriverDied:
            ending = "died"
        except Exception as error:  # noqa: BLE001 - what is not expected is an anomaly
            ending, driver.error = type(error).__name__, error
            if isinstance(error, CheckpointRolledBack | PlanChanged):
                self._explain(driver, error)
            if not isinstance(error, ENDINGS) or not isinstance(error.__cause__, CAUSES):
                self.witness.report("bug", f"{driver} ended with {error!r} because of {error.__cause__!r}")
            self.tell(driver, f"{ending}: {str(error).splitlines()[0]}")
        self.endings[ending] += 1
        self.tell(driver, f"ended: {ending}")

    def _explain(self, driver: Driver, error: CheckpointRolledBack | PlanChanged) -> None:
        """A copy may be refused, and then a person restores the newest checkpoint: when it is older than the log, or
        when Spark planned anew what the copy says is done. Or it looked old because somebody else went on meanwhile.
        """
        is_older = isinstance(error, CheckpointRolledBack)
        if self.checkpoint.is_older_than_newest if is_older else self.checkpoint.is_torn:
            self.tell(None, "somebody restores the newest checkpoint")
            self.counts["refused copies"] += 1
            self.checkpoint.put_newest_copy()
            self.kill_all()
        elif not is_older or (driver.alone and not self.late):
            self.witness.report("bug", f"{driver} refused the checkpoint: {error}")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.calls += 1
        if self.calls > CALLS_MAX:
            raise DriverDied
        if self.late:
            self._land([late for late in self.late if late.due_at_call <= self.calls])

    def _land(self, due: Sequence[Late]) -> None:
        for late in list(due):
            self.late.remove(late)
            self.counts["late effects"] += 1
            self.tell(None, "late:", late.call.place, late.call.verb, late.what)
            # A store that refuses says so to nobody.
            with suppress(Exception):
                late.effect()

    def bury(self, driver: Driver) -> None:
        """A server notices at once that a process has died, or not before somebody else takes over."""
        if self.dice.random() < 0.5:
            for store in self.stores.values():
                store.bury(driver.number)

    def lose_power(self) -> None:
        gone = self.checkpoint.forget_unsynced(self.dice)
        self.counts["forgotten files"] += len(gone)
        self.tell(None, "gone:", *gone)

    def put_older_copy(self, age: int) -> None:
        before = set(self.checkpoint.files)
        self.checkpoint.put_older_copy(self.dice, age)
        gone = before - set(self.checkpoint.files)
        self.counts["decided plans in no copy"] += sum(offsets_of(batch) in gone for batch in self.witness.spans)
        self.tell(None, "gone:", *sorted(gone))

    def kill_all(self) -> None:
        """The machine stops, and what it was about to write there comes to nothing."""
        self.late = [late for late in self.late if late.call.place != CHECKPOINT]
        for driver in self.scheduler.live:
            driver.dead, driver.wake_at_call = True, 0
            self.bury(driver)

    def restart(self, place: str) -> None:
        self.stores[place].restart()
        self.late = [late for late in self.late if late.call.place != place]

    def let_transactions_expire(self) -> None:
        self.now += EXPIRES_AFTER_S
        for store in self.stores.values():
            if isinstance(store, PreparedStore):
                self.counts["expired transactions"] += store.expire(self.now, EXPIRES_AFTER_S)

    def something_prepared(self) -> bool:
        return any(isinstance(store, PreparedStore) and store.staged for store in self.stores.values())

    # What is seen -----------------------------------------------------------------------------------------------------

    def recorded(self, path: str, content: bytes) -> None:
        """A record of the log exists from this moment on."""
        if path.startswith("incarnations/") and (who := json.loads(content)["pid"]) in self.overtaken:
            self.witness.report("nobody", f"{who} claims, and the batch that it has in hand is over")
        if b'"decided"' not in content:
            return
        record = parse_journal_entry(content, path)
        if isinstance(record, Decided):
            self.witness.decided(record)
            self.counts["mends"] += record.mends
            # A driver that slept until the journal was forgotten finds its slot empty.
            self.counts["stale decisions"] += commits_of(record.attempt.batch) in self.checkpoint.files

    def is_ended(self, batch: int) -> bool:
        """Whether Spark has planned and done a batch as it was decided, and nothing newer was ever decided."""
        files, decided = self.checkpoint.files, self.witness.offsets.get(batch)
        planned, is_done = files.get(offsets_of(batch)), commits_of(batch) in files
        is_as_decided = planned is not None and decided in (None, digest_of(planned))
        return is_done and is_as_decided and max(self.witness.named, default=-1) <= batch

    def put_back(self, path: str) -> None:
        """A file of a decided plan is there again."""
        self.counts[f"{path.partition('/')[0]} put back"] += 1

    def deleted(self, path: str) -> None:
        """A record of the log is gone from this moment on."""
        folder, _, name = path.partition("/")
        if folder == "decisions":
            self.pruned.add(int(name.partition(".")[0]))

    def tell(self, driver: Driver | None, *words: object) -> None:
        self.trace.append((self.calls, self.now, driver.number if driver else 0, words))


class InSeededOrder:
    """Instead of the coordinator's threads: commits one after the other, in an order of the seed."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def answers(
        self,
        ask: Callable[[T], R],
        items: Iterable[T],
        go_on: Callable[[], bool],  # noqa: ARG002 - nobody has to wait
        store_of: Callable[[T], str],  # noqa: ARG002 - and nobody is held up
    ) -> list[R | None]:
        pending = list(enumerate(items))
        self.dice.shuffle(pending)
        done = {index: ask(item) for index, item in pending}
        return [done[index] for index in sorted(done)]

    def shutdown(self) -> None:
        """No thread was started."""


class SimulatedCoordinator(batch_module.Coordinator):
    """The real one, without its threads."""

    dice: random.Random

    @cached_property
    def _committers(self) -> Any:
        return InSeededOrder(self.dice)

    def _commit_one(self, committable: Committable, work: Work) -> Outcome:
        """Here one sink is asked after the other; those who are asked at the same time have the same seconds."""
        work.give_up_at = self.clock() + self.limits.commit_patience_s
        return super()._commit_one(committable, work)

    @contextmanager
    def _telling(self, work: Work) -> Iterator[None]:  # noqa: ARG002 - nobody listens
        yield

    def close(self) -> None:
        self._close_participants()


@contextmanager
def the_real_code_in(world: World) -> Iterator[None]:
    """The runtime as it is, but for the clock, the threads, the name of the process, the warnings, and how soon it
    forgets.
    """

    def coordinator(context: Context, *values: Any, **named: Any) -> SimulatedCoordinator:
        driver = world.scheduler.current
        if driver is None:
            raise RuntimeError("a coordinator is made only by a driver that runs")
        made = SimulatedCoordinator(context, *values, **named)
        made.sleep, made.clock, made.dice = Line(world, driver).pause, lambda: world.now, world.dice
        return made

    replaced: list[tuple[Any, str, Any]] = [
        (startup_module, "Coordinator", coordinator),
        # A record names the process that made it, and so do errors.
        (log_module, "this_process", lambda: {"host": f"seed {world.seed}", "pid": str(world.scheduler.current)}),
        (log_module, "_token", lambda: f"{world.now:.9f}"),
        (log_module, "_now", lambda: f"{world.now:.3f} s"),
        (logging.getLogger("semel"), "disabled", True),
    ]
    if world.looks_before_claims:
        world.counts["worlds that look before they claim"] += 1
    if world.forgets_soon:
        replaced += [(phases_module, "TIDY_EVERY_BATCHES", 2), (phases_module, "BATCHES_KEPT", 1)]
        replaced += [(log_module, "INCARNATIONS_KEPT", 3)]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
