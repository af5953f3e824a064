"""A folder of JSON Lines, one file for each batch.

    <path>/b0000000007-<sink>-<pipeline>.jsonl   a batch: the first line is its marker, each other line is a row
    <path>/_staged/<branch>.jsonl                what a task has staged
    <path>/_fences/<pipeline>/3                  the incarnations that have started

Rows and marker are one file that gets its name by one atomic link: a reader sees the whole batch or nothing of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from semel.durable import create_file, make_folders, sync_file, sync_folder
from semel.errors import BatchFailed, SchemaMismatch, SinkUnavailable
from semel.failpoints import Failpoint, failpoint
from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Remains, Sink, StagedPart, Writer, committable_for
from semel.sinks.evidence import NOTHING_KNOWN, Evidence, Mark
from semel.sinks.kinds import SinkKind

MARKER = "semel"


@dataclass(frozen=True)
class JsonLines(Sink):
    """`JsonLines("out/orders")`: the folder is created if absent, and every executor must see it under this path."""

    path: str
    kind: ClassVar[str] = "jsonl"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(self.path))  # tasks may run in another folder
        super().__post_init__()

    def default_name(self) -> str:
        return f"jsonl_{Path(self.path).name}"

    def describe(self) -> str:
        return f"JSON Lines in {self.path}"

    def check(self, schema: pa.Schema) -> None:
        """A value that JSON does not know is written as text, so any row fits that cannot be taken for a marker."""
        if MARKER in schema.names:
            raise SchemaMismatch(f"{self.describe()}: no column can be called {MARKER}.")

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:  # noqa: ARG002 - the driver marks
        return _Writer(self.staged(str(branch)), branch, durable)

    def participant(self, context: Context) -> Participant:
        return _Participant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        participant = _Participant(self, Context(pipeline, "", Incarnation(0), marked=False))
        left = participant.recover().branches  # before the markers: a batch may be committed meanwhile
        with _reachable():
            said = {int(file.name[1:11]): _marker(file) for file in self.batches(pipeline)}
        found = (Mark(n, "", m["attempt"], m["incarnation"], m["rows"], plan=m["plan"]) for n, m in said.items())
        marks = tuple(mark for mark in found if mark.batch >= batches.start)
        known_from = min(said, default=0) if said or participant.newest_fence() else NOTHING_KNOWN
        return Evidence(marks, known_from, "older files were removed", branches=left)

    def staged(self, name: str) -> Path:
        return Path(self.path, "_staged", f"{name}.jsonl")

    def batches(self, pipeline: str = "*", sink: str = "") -> list[Path]:
        return sorted(Path(self.path).glob(f"b*-{sink or self.name}-{pipeline}.jsonl"))

    def rows(self) -> Iterator[dict[str, Any]]:
        """What a user reads: all lines but the markers. Below exactly-once files have none, and other names."""
        for file in sorted(Path(self.path).glob(f"*-{self.name}-*.jsonl")):
            yield from (row for row in map(json.loads, file.read_text().splitlines()) if MARKER not in row)


class _Writer(Writer):
    def __init__(self, path: Path, branch: Branch, durable: bool) -> None:
        make_folders(path.parent)
        self.path, self.branch, self.durable, self.rows = path, branch, durable, 0
        self.file = path.open("w")

    def write(self, batch: pa.RecordBatch) -> None:
        self.file.writelines(json.dumps(row, default=str, allow_nan=False) + "\n" for row in batch.to_pylist())
        self.rows += batch.num_rows

    def prepare(self) -> StagedPart:
        self.file.close()
        if self.durable:
            sync_file(self.path)
            sync_folder(self.path.parent)
        return StagedPart(self.branch, self.rows)

    def abort(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkUnavailable(f"The folder of JSON Lines did not let us in: {error}.") from error


class _Participant(Participant):
    def __init__(self, sink: JsonLines, context: Context) -> None:
        self.sink, self.context, self.fences = sink, context, Path(sink.path, "_fences", context.pipeline)

    @_reachable()
    def fence(self) -> None:
        if self.context.marked:
            self.refuse_if_older()
            create_file(self.fences / str(self.context.incarnation), b"")
            self.refuse_if_older()  # of two that come at once, one sees the other

    @_reachable()
    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        if self.context.marked:
            self.refuse_if_older()
        if missing := [str(part.branch) for part in parts if not self.sink.staged(str(part.branch)).exists()]:
            raise BatchFailed(f"{self.sink.describe()}: rows vanished before the decision: {', '.join(missing)}.")
        return (committable_for(self.sink.name, attempt, parts, {}),)

    @_reachable()
    def commit(self, committable: Committable) -> Outcome:
        staged = [self.sink.staged(name) for name in committable.branches]
        batch, outcome = self.place(committable), Outcome.ALREADY_COMMITTED
        if not batch.exists():
            if not all(file.exists() for file in staged):
                os.listdir(staged[0].parent)  # a folder that is not there proves nothing
                return Outcome.GONE
            if create_file(batch, b"".join([self.marker(committable), *(file.read_bytes() for file in staged)])):
                outcome = Outcome.COMMITTED
        failpoint("jsonl.committed")
        sync_folder(batch.parent)  # whoever linked it may have died before the name was on the disk
        for file in staged:
            file.unlink(missing_ok=True)
        return outcome

    def place(self, committable: Committable) -> Path:
        """The file of a batch. Below exactly-once nobody looks for it again, and a replay comes to lie beside it."""
        name = f"b{committable.attempt.batch:010d}-{self.sink.name}-{self.context.pipeline}"
        if not self.context.marked:
            name = f"u-{self.sink.name}-{os.urandom(8).hex()}"
        return Path(self.sink.path, f"{name}.jsonl")

    def marker(self, committable: Committable) -> bytes:
        said = {"name": self.context.name, "incarnation": committable.attempt.incarnation, "rows": committable.rows}
        line = {MARKER: {**said, "attempt": committable.attempt.attempt, "plan": committable.plan}}
        return json.dumps(line).encode() + b"\n" if self.context.marked else b""

    @_reachable()
    def abort(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self.sink.staged(str(branch)).unlink(missing_ok=True)

    @_reachable()
    def recover(self) -> Remains:
        found = (parse_branch(file.stem) for file in sorted(self.sink.staged("").parent.glob("*.jsonl")))
        ours = (self.context.pipeline, self.sink.name)
        left = tuple(branch for branch in found if branch and (branch.attempt.pipeline, branch.sink) == ours)
        if not self.context.marked:
            return Remains(left)
        mine = [int(file.name[1:11]) for file in self.sink.batches(self.context.pipeline)]
        newest = {PipelineId(f.stem[-36:]): f for f in self.sink.batches(sink="*")}  # whatever they call their sink
        writers = [(str(_marker(file)["name"]), pipeline) for pipeline, file in newest.items()]
        return Remains.of(left, max(mine, default=None), writers, self.context)

    def close(self) -> None: ...

    def newest_fence(self) -> int:
        return max((int(file.name) for file in self.fences.glob("[0-9]*")), default=0)

    def refuse_if_older(self) -> None:
        self.context.refuse_if_older(self.newest_fence(), self.sink.describe())


def _marker(batch: Path) -> dict[str, Any]:
    with batch.open() as lines:
        return dict(json.loads(lines.readline())[MARKER])


KIND = SinkKind(
    JsonLines,
    page="docs/how-to/a-sink-of-your-own.md",
    failpoints=(Failpoint("jsonl.committed", "the batch has its name, the coordinator does not know yet"),),
    reader="semel_jsonl_reader:JsonLinesReader",
    example=lambda at: JsonLines(f"{at.folder}/{at.target}"),
)
