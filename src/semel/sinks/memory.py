"""Rows in this process: the reference of the contract, for unit tests, docs and the simulation. Not durable."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from semel.ids import Attempt, Branch, PipelineId
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Remains, Sink, StagedPart, Writer, committable_for
from semel.sinks.evidence import NOTHING_KNOWN, UNSAID, Evidence, Mark

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


@dataclass
class MemoryTable:
    """A store with the three things that the contract needs: staged rows, visible rows, markers."""

    staged: dict[Branch, list[Row]] = field(default_factory=dict)
    visible: list[Row] = field(default_factory=list)
    markers: dict[tuple[PipelineId, str, int], str] = field(default_factory=dict)
    fences: dict[PipelineId, int] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


_TABLES: dict[str, MemoryTable] = {}


def memory_table(name: str) -> MemoryTable:
    """The table of this name in this process."""
    return _TABLES.setdefault(name, MemoryTable())


@dataclass(frozen=True)
class Memory(Sink):
    """`Memory("orders")`. Tasks hand their rows to the driver inside the staged part, so keep them few."""

    table: str

    kind: ClassVar[str] = "memory"

    def default_name(self) -> str:
        return f"memory_{self.table}"

    def describe(self) -> str:
        return f"memory table {self.table}"

    def check(self, schema: pa.Schema) -> None:
        """Any row fits."""

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:  # noqa: ARG002 - needs neither
        return _MemoryWriter(branch)

    def participant(self, context: Context) -> Participant:
        return _MemoryParticipant(self.name, memory_table(self.table), context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        table = memory_table(self.table)
        with table.lock:
            mine = sorted(batch for p, sink, batch in table.markers if (p, sink) == (pipeline, self.name))
            branches = tuple(b for b in table.staged if (b.attempt.pipeline, b.sink) == (pipeline, self.name))
            ran_here = pipeline in table.fences
        # Markers of this store know neither attempt nor rows.
        marks = tuple(Mark(batch, "", UNSAID, UNSAID, UNSAID) for batch in mine if batch >= batches.start)
        known_from = (mine[0] if mine else 0) if ran_here else NOTHING_KNOWN
        return Evidence(marks, known_from, "memory ends with its process", branches=branches)

    def rows(self) -> list[Row]:
        """What is visible."""
        return list(memory_table(self.table).visible)


class _MemoryWriter(Writer):
    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self.batches.append(batch)

    def prepare(self) -> StagedPart:
        return StagedPart(self.branch, sum(b.num_rows for b in self.batches), {"arrow": _to_text(self.batches)})

    def abort(self) -> None:
        self.batches.clear()


def _to_text(batches: Sequence[pa.RecordBatch]) -> str:
    """Rows as an Arrow stream in base64: a staged part is plain JSON, which has no dates, decimals or bytes."""
    import pyarrow as pa

    if not batches:
        return ""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return base64.b64encode(stream.getvalue().to_pybytes()).decode()


def _to_rows(text: str) -> list[Row]:
    import pyarrow as pa

    if not text:
        return []
    with pa.ipc.open_stream(base64.b64decode(text)) as reader:
        rows: list[Row] = reader.read_all().to_pylist()
    return rows


class _MemoryParticipant(Participant):
    def __init__(self, sink: str, table: MemoryTable, context: Context) -> None:
        self.sink = sink
        self.table = table
        self.context = context

    def fence(self) -> None:
        with self.table.lock:
            self._refuse_if_older()
            self.table.fences[self.context.pipeline] = self.context.incarnation

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        with self.table.lock:
            self._refuse_if_older()
            for part in parts:
                self.table.staged[part.branch] = _to_rows(part.payload["arrow"])
        return (committable_for(self.sink, attempt, parts, {}),)

    def commit(self, committable: Committable) -> Outcome:
        marker = (self.context.pipeline, self.sink, committable.attempt.batch)
        with self.table.lock:
            staged = [b for b in self.table.staged if str(b) in committable.branches]
            if self.context.marked and marker in self.table.markers:
                self.abort(staged)
                return Outcome.ALREADY_COMMITTED
            if len(staged) < len(committable.branches):
                return Outcome.GONE
            for branch in sorted(staged):
                self.table.visible += self.table.staged.pop(branch)
            if self.context.marked:
                self.table.markers[marker] = self.context.name
        return Outcome.COMMITTED

    def abort(self, branches: Iterable[Branch]) -> None:
        with self.table.lock:
            for branch in branches:
                self.table.staged.pop(branch, None)

    def recover(self) -> Remains:
        pipeline = self.context.pipeline
        with self.table.lock:
            ours = tuple(b for b in self.table.staged if (b.attempt.pipeline, b.sink) == (pipeline, self.sink))
            batches = [batch for p, sink, batch in self.table.markers if (p, sink) == (pipeline, self.sink)]
            writers = {(name, p) for (p, _, _), name in self.table.markers.items()}
        return Remains.of(ours, max(batches, default=None), writers, self.context)

    def close(self) -> None:
        """Nothing is open."""

    def _refuse_if_older(self) -> None:
        self.context.refuse_if_older(self.table.fences.get(self.context.pipeline, 0), self.sink)
