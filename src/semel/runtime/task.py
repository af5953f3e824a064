"""One task on an executor: Arrow batches in, one staged part per sink out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel import errors, failpoints
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, parse_branch
from semel.runtime import worker
from semel.sinks.base import Sink, StagedPart, Writer

if TYPE_CHECKING:
    import pyarrow as pa

#: The column in which a task returns what it staged to the driver.
PARTS = "parts"


@dataclass(frozen=True)
class TaskWriter:
    """What `mapInArrow` runs. It is pickled with the sinks' configuration; clients are made on the executor.

    `views` says, sink by sink, which struct column holds the sink's rows; None means that it takes every column as it
    is. `only` restricts the tasks that write, sink by sink, when rows that vanished are written again.
    """

    sinks: tuple[Sink, ...]
    views: tuple[str | None, ...]
    attempt: Attempt
    durable: bool
    only: Mapping[str, frozenset[int]] | None
    failpoints: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        if self.failpoints:
            os.environ[failpoints.VARIABLE] = self.failpoints
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a semel task runs only inside a Spark task")
        worker.acknowledge_at_once()
        parts = self.run(batches, context.partitionId(), context.taskAttemptId())
        worker.lighten()
        yield pa.RecordBatch.from_pydict({PARTS: [encode_parts(parts)]})

    def run(self, batches: Iterable[pa.RecordBatch], task: int, retry: int) -> list[StagedPart]:
        """Write each batch to each sink as it comes, then prepare; on any error leave nothing behind."""
        writers = [
            (view, sink.writer(Branch(self.attempt, sink.name, task, retry), durable=self.durable))
            for sink, view in zip(self.sinks, self.views, strict=True)
            if self.only is None or task in self.only.get(sink.name, ())
        ]
        try:
            for batch in batches:
                for view, writer in writers:
                    writer.write(batch if view is None else rows_of_view(batch, view))
                failpoint("task.wrote")
            parts = [writer.prepare() for _, writer in writers]
        except BaseException:
            _abort_all(writer for _, writer in writers)
            raise
        failpoint("task.prepared")
        return parts


def rows_of_view(batch: pa.RecordBatch, view: str) -> pa.RecordBatch:
    """The rows of one sink out of its struct column. A null struct is a row that the sink's `where` left out."""
    import pyarrow as pa

    column = batch.column(batch.schema.get_field_index(view))
    if column.null_count:
        column = column.drop_null()
    return pa.RecordBatch.from_struct_array(column)


def _abort_all(writers: Iterable[Writer]) -> None:
    for writer in writers:
        with suppress(Exception):  # the first error is on its way up; what stays behind is swept
            writer.abort()


_TASK_ERROR = re.compile(r"semel\.errors\.(\w+): (.+)\n  the data now: (.+)\n  what to do: (.+)")


def error_of_task(text: str) -> errors.SemelError | None:
    """The error of semel that a task raised, out of the stack trace in which Spark wraps it."""
    found = _TASK_ERROR.search(text)
    kind = getattr(errors, found[1], None) if found else None
    if found is None or not (isinstance(kind, type) and issubclass(kind, errors.SemelError)):
        return None
    return kind(found[2], data_now=found[3].rstrip(), remedy=found[4].rstrip())


def encode_parts(parts: Sequence[StagedPart]) -> str:
    return json.dumps([[str(p.branch), p.rows, dict(p.payload)] for p in parts])


def decode_parts(text: str) -> list[StagedPart]:
    return [_part(*entry) for entry in json.loads(text)]


def _part(name: str, rows: int, payload: dict[str, Any]) -> StagedPart:
    branch = parse_branch(name)
    if branch is None:
        raise ValueError(f"a task returned a part with an unknown name: {name!r}")
    return StagedPart(branch, rows, payload)
