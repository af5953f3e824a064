"""What Spark does around the coordinator: it plans batches, runs tasks, and writes commits/N when a batch is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from semel.decisions.log import DecisionLog, Identity
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch, PipelineId
from semel.protocol.plans import Plan, PlannedFile, digest_of
from semel.runtime.batch import Limits, Only, Stage
from semel.runtime.startup import start_exactly_once
from semel.simulation.line import CHECKPOINT, Line, TaskFailed
from semel.simulation.participants import SimulatedSink
from semel.simulation.records import SimulatedRecords
from semel.simulation.source import rows_of_tasks
from semel.simulation.stores import Rows
from semel.sinks.base import StagedPart

if TYPE_CHECKING:
    from semel.simulation.world import World

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
#: As often as Spark tries a task (spark.task.maxFailures, which is 4 there).
TASK_TRIES = 2
#: Short, so that a store that is away for some calls is too long away for some batches.
LIMITS = Limits(stage_patience_s=2.0, stage_pause_s=0.5, stage_pause_s_max=1.0, commit_tries=4, mends=2)


class ConcurrentQueries(Exception):
    """Spark itself found that another query writes the checkpoint ("Multiple streaming jobs detected")."""


@dataclass
class Checkpoint:
    """`offsets/N` is planned, `commits/N` is done. Neither is ever written twice."""

    planned: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    @property
    def next_batch(self) -> int:
        return max(self.done, default=-1) + 1

    def plan(self, batch: int, *, is_first: bool) -> None:
        if batch in self.planned and not is_first:
            raise ConcurrentQueries(f"offsets/{batch}")
        self.planned.add(batch)

    def finish(self, batch: int) -> None:
        if batch in self.done:
            raise ConcurrentQueries(f"commits/{batch}")
        self.done.add(batch)


class SimulatedPlans:
    """The checkpoint as the coordinator of one driver sees it."""

    def __init__(self, checkpoint: Checkpoint, line: Line) -> None:
        self.checkpoint = checkpoint
        self.line = line

    def next_batch(self) -> int:
        return self.line.ask(CHECKPOINT, "next batch", lambda: self.checkpoint.next_batch, changes=False)

    def has_planned(self, batch: int) -> bool:
        return self.line.ask(CHECKPOINT, "has planned", lambda: batch in self.checkpoint.planned, batch, changes=False)

    def read(self, batch: int) -> Plan:
        content = str(batch)
        return Plan((PlannedFile(f"offsets/{batch}", digest_of(content.encode()), content),))

    def text(self, path: str) -> bytes | None:
        batch = int(path.rpartition("/")[2])
        return str(batch).encode() if batch in self.checkpoint.planned else None

    def put_back(self, file: PlannedFile) -> None:
        self.checkpoint.planned.add(int(file.path.rpartition("/")[2]))

    def make_durable(self, batch: int) -> None:
        """Nothing is forgotten here yet."""


def run_query(world: World, line: Line) -> None:
    """One life of the query: start, then one batch after the other until there is nothing left to do."""
    checkpoint = world.checkpoint
    sinks = [SimulatedSink(store, line, name=store.name) for store in world.stores.values()]
    log = DecisionLog(SimulatedRecords(world.records, line, world.recorded, world.deleted))
    plans = SimulatedPlans(checkpoint, line)
    coordinator = start_exactly_once(
        log, plans, sinks, Identity(PIPELINE, "simulated"), default_name="simulated", limits=LIMITS
    )
    world.counts["starts"] += 1
    world.counts["recoveries"] += coordinator.context.incarnation > 1
    try:
        first = line.ask(CHECKPOINT, "next batch", lambda: checkpoint.next_batch, changes=False)
        stage = _stage(world, line)
        batch = first
        while not world.is_done(batch):
            line.ask(CHECKPOINT, "plan", _planning(checkpoint, batch, is_first=batch == first), batch)
            report = coordinator.exactly_once(batch, stage)
            world.endings[report.how] += 1
            world.tell(line.driver, f"batch {batch} {report.how}")
            coordinator.tidy(batch)
            line.ask(CHECKPOINT, "checkpoint", _finishing(checkpoint, batch), batch)
            batch += 1
    finally:
        coordinator.close()


def _planning(checkpoint: Checkpoint, batch: int, *, is_first: bool) -> Callable[[], None]:
    return lambda: checkpoint.plan(batch, is_first=is_first)


def _finishing(checkpoint: Checkpoint, batch: int) -> Callable[[], None]:
    return lambda: checkpoint.finish(batch)


def _stage(world: World, line: Line) -> Stage:
    """The tasks of one driver. Like Spark's task attempt ids, the numbers of their tries never come again."""
    retries = count()

    def stage(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:  # noqa: ARG001
        content = list(rows_of_tasks(world.seed, attempt.batch))
        # Spark may number the tasks otherwise when it runs a batch again (SPARK-28650).
        world.dice.shuffle(content)
        names = [name for name in world.stores if only is None or name in only]
        parts: dict[str, list[StagedPart]] = {name: [] for name in names}
        for task, rows in enumerate(content):
            for part in _run_task(world, line, attempt, task, rows, names, retries):
                parts[part.branch.sink].append(part)
        return parts

    return stage


def _run_task(
    world: World, line: Line, attempt: Attempt, task: int, rows: Rows, names: Sequence[str], retries: count[int]
) -> list[StagedPart]:
    for tries_left in reversed(range(TASK_TRIES)):
        retry = next(retries)
        try:
            if world.tasks_are_doomed:
                raise TaskFailed("the task fails again")
            return [_write(world, line, Branch(attempt, name, task, retry), rows) for name in names]
        except (SinkUnavailable, TaskFailed):
            if not tries_left:
                world.tasks_are_doomed = False
                raise
    raise AssertionError("a task is tried at least once")


def _write(world: World, line: Line, branch: Branch, rows: Rows) -> StagedPart:
    if not rows:
        return StagedPart(branch, 0)
    store = world.stores[branch.sink]
    line.ask(branch.sink, "stage", lambda: store.stage(branch, rows, world.now), branch)
    return StagedPart(branch, len(rows), {"task": branch.task}, ",".join(map(str, rows)))
