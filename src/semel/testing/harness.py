"""One harness per sink: how to make a target, and how to look at it the way a user would.

The suite in `contract.py` says what a sink must do; nothing in here does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from semel.decisions.records import committable_from_json, committable_to_json
from semel.failpoints import VARIABLE
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Sink, StagedPart
from semel.sinks.kinds import kind_of

OURS = PipelineId("00000000-0000-4000-8000-000000000001")
OTHERS = PipelineId("00000000-0000-4000-8000-000000000002")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
RECORD_SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string())])
FRESH_PROCESS = Path(__file__).with_name("fresh_process.py")
PROCESS_TIMEOUT_S = 30

Row = tuple[int, str]
Rows = list[Row]


def rows_of(*ids: int) -> Rows:
    return [(i, f"row {i}") for i in ids]


def context(incarnation: int = 1, *, pipeline: PipelineId = OURS, name: str = "shop", marked: bool = True) -> Context:
    return Context(pipeline, name, Incarnation(incarnation), marked)


def attempt(batch: int = 0, number: int = 0, incarnation: int = 1, pipeline: PipelineId = OURS) -> Attempt:
    return Attempt(pipeline, batch, number, Incarnation(incarnation))


def stage(sink: Sink, which: Attempt, tasks: Sequence[Rows], *, durable: bool = True) -> list[StagedPart]:
    """Write rows through the sink's own writer, one writer per task, as executors do."""
    parts = []
    for task, rows in enumerate(tasks):
        writer = sink.writer(Branch(which, sink.name, task, 0), durable=durable)
        for start in range(0, len(rows), 2):
            writer.write(arrow_for(sink, rows[start : start + 2]))
        parts.append(writer.prepare())
    return parts


def schema_of(sink: Sink) -> pa.Schema:
    """Most sinks take any columns; some take those of a record."""
    return RECORD_SCHEMA if kind_of(sink).takes_records else SCHEMA


def records(sink: Sink, rows: Rows) -> list[dict[str, Any]]:
    if kind_of(sink).takes_records:
        return [{"key": str(i), "value": text} for i, text in rows]
    return [{"id": i, "text": text} for i, text in rows]


def arrow(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": i, "text": text} for i, text in rows], schema=SCHEMA)


def arrow_for(sink: Sink, rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(records(sink, rows), schema=schema_of(sink))


@dataclass(frozen=True)
class Promise:
    """What a participant prepared for one batch: one committable for all tasks, or one for each."""

    committables: tuple[Committable, ...]

    @property
    def rows(self) -> int:
        return sum(c.rows for c in self.committables)

    @property
    def keys(self) -> list[str]:
        return sorted(c.key for c in self.committables)

    @property
    def branches(self) -> list[str]:
        return sorted(branch for c in self.committables for branch in c.branches)


def prepare(participant: Participant, sink: Sink, which: Attempt, *tasks: Rows) -> Promise:
    return Promise(participant.prepare(which, stage(sink, which, tasks)))


def prepare_one(participant: Participant, sink: Sink, which: Attempt, *tasks: Rows) -> Committable:
    """The same for a sink that gives one committable per batch."""
    (committable,) = prepare(participant, sink, which, *tasks).committables
    return committable


def commit(participant: Participant, promise: Promise) -> Outcome:
    return together([participant.commit(c) for c in promise.committables])


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The answer, among several, that matters most for the batch as a whole."""
    order = (Outcome.IN_DOUBT, Outcome.RETRY, Outcome.GONE, Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)
    return next(outcome for outcome in order if outcome in outcomes)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Other processes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """The process was killed before it could answer."""


def commit_in_fresh_process(sink: Sink, who: Context, promise: Promise, *, failpoint: str = "") -> Outcome | Killed:
    """Commit in a process that has never seen the batch and gets nothing but the committables, as JSON bytes."""
    order = _order(sink, who) | {"committables": [committable_to_json(c) for c in promise.committables]}
    done = subprocess.run(
        [sys.executable, FRESH_PROCESS, "commit"],
        input=json.dumps(order).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, VARIABLE: failpoint},
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return Killed()
    if done.returncode:
        raise RuntimeError(f"the committing process failed with {done.returncode}")
    return together([Outcome[name] for name in json.loads(done.stdout)])


def prepare_in_a_process_that_is_killed(sink: Sink, who: Context, which: Attempt, *tasks: Rows) -> Promise:
    """Stage and prepare in another process, which is killed with SIGKILL while it holds what it prepared."""
    rows = [records(sink, task) for task in tasks]
    order = _order(sink, who) | {"batch": which.batch, "attempt": which.attempt, "tasks": rows}
    with subprocess.Popen(
        [sys.executable, FRESH_PROCESS, "prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process has no pipes")
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            process.kill()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the preparing process ended by itself with {process.returncode}")
    return Promise(tuple(committable_from_json(c) for c in json.loads(answer)))


def _order(sink: Sink, who: Context) -> dict[str, Any]:
    settings = {field.name: getattr(sink, field.name) for field in fields(sink)}
    return {
        "sink": [type(sink).__module__, type(sink).__name__],
        "settings": settings,
        "context": [who.pipeline, who.name, who.incarnation, who.marked],
    }


# Harnesses --------------------------------------------------------------------------------------------------------


class Harness(ABC):
    """A fresh target of one sink."""

    kind: ClassVar[str]
    #: A process that has never seen the batch can commit it. Off only for a store that lives inside one process.
    survives_the_process: ClassVar[bool] = True
    #: The failpoint that the sink passes once its store has committed, before it answers.
    committed_failpoint: ClassVar[str] = ""
    #: The neighbour under our name is our sink: one folder has the rows of both, and tells them apart by their names.
    neighbour_is_the_same: ClassVar[bool] = False
    #: How many batches the search for leaks takes, and by how many descriptors connections come and go meanwhile: ours,
    #: and those that other tests left to this process. What leaks leaks with every batch, or with each of ten starts.
    leak_batches: ClassVar[int] = 200
    descriptor_jitter: ClassVar[int] = 8

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.address = address

    def settled_descriptors(self) -> int:
        """How many descriptors are open while nothing is under way."""
        return open_descriptors()

    def let_go(self) -> None:  # noqa: B027 - most sinks keep nothing
        """Drop what this process keeps between batches."""

    def end(self) -> None:  # noqa: B027
        """The test is over."""

    @abstractmethod
    def sink(self, name: str = "") -> Sink:
        """The sink on its target; with another name on the same target."""

    @abstractmethod
    def neighbour(self) -> Sink:
        """Another sink in the same store: another table of the database, another name in the folder."""

    @abstractmethod
    def visible(self, sink: Sink) -> Rows:
        """What a reader sees, sorted."""

    def visible_without_marks(self, sink: Sink) -> Rows:
        """The same below exactly-once, where no marker can be asked."""
        return self.visible(sink)

    @abstractmethod
    def staged(self) -> list[str]:
        """The names of whatever is staged in the store, of anybody."""

    @abstractmethod
    def lose(self, branch: str) -> None:
        """Make what is staged under this name vanish."""

    @abstractmethod
    def markers(self) -> int:
        """How many markers and fences the store holds."""

    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        """Leave rows staged in the store, as a task does whose driver died."""
        stage(sink, which, [rows])

    @abstractmethod
    def put_foreign_things(self) -> None:
        """Leave things among the staged ones that are not ours."""


@contextmanager
def started(sink: Sink, who: Context | None = None) -> Iterator[Participant]:
    """A participant as a start of the pipeline leaves it: its store asked, fenced, and closed in the end."""
    who = who or context()
    if who.marked:
        sink.check_store(who.pipeline)
    participant = sink.participant(who)
    try:
        if who.marked:
            participant.fence()
        yield participant
    finally:
        participant.close()
