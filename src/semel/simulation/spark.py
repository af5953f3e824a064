"""What Spark does around the coordinator: it plans batches, runs tasks, and writes commits/N when a batch is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from semel.decisions.log import DecisionLog, Identity
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch, PipelineId
from semel.protocol.plans import digest_of
from semel.runtime.batch import Coordinator
from semel.runtime.fingerprint import SEPARATOR
from semel.runtime.hands import Written, hands_again
from semel.runtime.offsets import commits_of, offsets_of
from semel.runtime.phases import Limits, Only, Parts
from semel.runtime.startup import start_exactly_once
from semel.simulation.checkpoint import BEGINNING, Planned, plans_of
from semel.simulation.line import CHECKPOINT, Line, TaskFailed
from semel.simulation.participants import SimulatedSink
from semel.simulation.records import SimulatedRecords
from semel.simulation.source import BEGINS_AT_MAX, draw_rows, in_few, rows_of_tasks
from semel.simulation.stores import Rows
from semel.sinks.base import StagedPart

if TYPE_CHECKING:
    from semel.simulation.world import World

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
#: As often as Spark tries a task (spark.task.maxFailures, which is 4 there).
TASK_TRIES = 2
#: Short, so that a store that is away for some calls is too long away for some batches.
LIMITS = Limits(stage_patience_s=2.0, stage_pause_s=0.5, stage_pause_s_max=1.0, commit_patience_s=2.5, mends=2)


class Query:
    """What Spark has in memory of one query: the batch at hand. A replay has the rows that its plan says."""

    def __init__(self, world: World, line: Line) -> None:
        self.world = world
        self.line = line
        self.at_hand = Planned(0, 0, None, 0)
        self.began = b""
        self.behind: Mapping[str, bytes] = {}
        self._tries = count()

    def open(self) -> None:
        """Spark starts: it reads where to go on. A source that knows of no beginning looks for one."""
        checkpoint, dice = self.world.checkpoint, self.world.dice
        if BEGINNING not in checkpoint.files:
            self._create("begin", BEGINNING, f'v1\n{{"rows":{dice.randint(0, BEGINS_AT_MAX)}}}'.encode())

        def read() -> tuple[Planned, bytes, Mapping[str, bytes]]:
            at_hand = checkpoint.at_hand()
            return at_hand, checkpoint.files[BEGINNING], checkpoint.behind(at_hand.batch)

        self.at_hand, self.began, self.behind = self.line.ask(CHECKPOINT, "read plans", read, changes=False)

    def in_hand(self) -> Mapping[str, str]:
        """The files of the plan as this query read or wrote them."""
        contents = {BEGINNING: self.began, offsets_of(self.at_hand.batch): self.at_hand.content}
        return {path: digest_of(content) for path, content in contents.items()}

    def begins_behind(self) -> Mapping[str, str]:
        """The plan of the batch before the first one, as this query read it."""
        return {path: digest_of(content) for path, content in self.behind.items()}

    def plan(self) -> int:
        """Plan the batch at hand, unless it is planned already. Returns its number."""
        if self.at_hand.end is None:
            end, at_ms = self.at_hand.start + draw_rows(self.world.dice), int(self.world.now * 1000)
            self.at_hand = replace(self.at_hand, end=end, at_ms=at_ms)
            self._create("plan", offsets_of(self.at_hand.batch), self.at_hand.content)
        return self.at_hand.batch

    def finish(self, *, staged: bool) -> None:
        """The batch is done. Only who has seen its rows knows how far the watermark goes."""
        done = self.at_hand
        end = done.start if done.end is None else done.end
        watermark = end if staged else done.watermark
        content = f'v1\n{{"nextBatchWatermarkMs":{watermark}}}'.encode()
        self._create("checkpoint", commits_of(done.batch), content)
        self.at_hand = Planned(done.batch + 1, end, None, watermark)

    def _create(self, verb: str, path: str, content: bytes) -> None:
        self.line.ask(CHECKPOINT, verb, lambda: self.world.checkpoint.create(path, content), path)

    def stage(
        self,
        attempt: Attempt,
        only: Only = None,
        plan: str = "",  # noqa: ARG002 - simulated markers do not name it
        again: Written | None = None,
    ) -> Parts:
        """Run the tasks. Like Spark's task attempt ids, the numbers of their tries never come again."""
        world, span = self.world, (self.at_hand.start, self.at_hand.end or 0)
        world.witness.ran[attempt] = span
        partitions = list(rows_of_tasks(world.seed, *span))
        # Spark may number the tasks otherwise when it runs a batch again (SPARK-28650).
        world.dice.shuffle(partitions)
        content = in_few(partitions, hands_again(again).tasks if again else world.hands)
        names = [name for name in world.stores if only is None or name in only]
        parts: dict[str, list[StagedPart]] = {name: [] for name in names}
        for task, joined in enumerate(content):
            for part in _run_task(world, self.line, attempt, task, joined, names, self._tries):
                parts[part.branch.sink].append(part)
        return parts


def run_query(world: World, line: Line) -> None:
    """One life of the query: start, then one batch after the other until there is nothing left to do.

    `semel.write` settles everything before Spark starts. As a drop-in, semel hears of the query in its first batch.
    """
    query = Query(world, line)
    coordinator = None if world.drops_in else _start(world, line, query)
    try:
        query.open()
        while not world.is_done(query.at_hand.batch):
            batch = query.plan()
            if coordinator is None:
                coordinator = _start(world, line, query, under_way=batch)
            report = coordinator.exactly_once(batch, query.stage)
            world.endings[report.how] += 1
            world.tell(line.driver, f"batch {batch} {report.how}")
            coordinator.tidy(batch)
            query.finish(staged=report.staged)
    finally:
        if coordinator is not None:
            coordinator.close()


def _start(world: World, line: Line, query: Query, under_way: int | None = None) -> Coordinator:
    if under_way is not None and world.is_ended(under_way):
        world.counts["overtaken queries"] += 1
        world.overtaken.add(str(line.driver))
    coordinator = start_exactly_once(
        DecisionLog(SimulatedRecords(world.records, line, world.recorded, world.deleted)),
        plans_of(world.checkpoint, line, world.put_back),
        [SimulatedSink(store, line, name=store.name) for store in world.stores.values()],
        Identity(PIPELINE, "simulated"),
        limits=LIMITS,
        under_way=under_way,
        is_somebody_there=lambda _: world.looks_before_claims,
    )
    coordinator.in_hand, coordinator.begins_behind = query.in_hand, query.begins_behind
    world.counts["starts"] += 1
    world.counts["recoveries"] += coordinator.context.incarnation > 1
    return coordinator


def _run_task(
    world: World,
    line: Line,
    attempt: Attempt,
    task: int,
    joined: Sequence[Rows],
    names: Sequence[str],
    retries: count[int],
) -> list[StagedPart]:
    for tries_left in reversed(range(TASK_TRIES)):
        retry = next(retries)
        try:
            if world.tasks_are_doomed:
                raise TaskFailed("the task fails again")
            return [_write(world, line, Branch(attempt, name, task, retry), joined) for name in names]
        except (SinkUnavailable, TaskFailed):
            if not tries_left:
                world.tasks_are_doomed = False
                raise
    raise AssertionError("a task is tried at least once")


def _write(world: World, line: Line, branch: Branch, joined: Sequence[Rows]) -> StagedPart:
    """The rows of some partitions, and a print of each of them that has any."""
    rows = tuple(row for partition in joined for row in partition)
    if not rows:
        return StagedPart(branch, 0)
    store = world.stores[branch.sink]
    line.ask(branch.sink, "stage", lambda: store.stage(branch, rows, world.now), branch)
    prints = (",".join(map(str, partition)) for partition in joined if partition)
    return StagedPart(branch, len(rows), {"task": branch.task}, SEPARATOR.join(prints))
