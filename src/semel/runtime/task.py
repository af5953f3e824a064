"""One task on an executor: Arrow batches in, one staged part per sink out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semel import errors, failpoints, formats
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, parse_branch
from semel.runtime import worker
from semel.runtime.fingerprint import IN_ORDER, Checksum, Fingerprint, Hashed, without_hashes
from semel.runtime.versions import own_versions
from semel.sinks.base import Sink, StagedPart, Writer

if TYPE_CHECKING:
    import pyarrow as pa

#: The columns that a task returns to the driver: what it staged, how large its rows are, and which versions it runs.
PARTS, ROW_BYTES, VERSIONS = "parts", "row_bytes", "versions"


@dataclass(frozen=True)
class TaskWriter:
    """What `mapInArrow` runs. It is pickled with the sinks' configuration; clients are made on the executor.

    `views` says, sink by sink, which struct column holds the sink's rows; None means that it takes every column as it
    is. `hashed` says which column holds the hashes of the sink's rows; `IN_ORDER` means that none are needed for their
    fingerprint, "" that nobody asks for one. `plan` is the digest of what Spark planned for the batch.
    """

    sinks: tuple[Sink, ...]
    views: tuple[str | None, ...]
    hashed: Hashed
    attempt: Attempt
    durable: bool
    failpoints: str
    plan: str = ""
    #: Whether the worker is spared what `worker` spares it.
    tuned: bool = True

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        if self.failpoints:
            os.environ[failpoints.VARIABLE] = self.failpoints
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a semel task runs only inside a Spark task")
        if self.tuned:
            worker.acknowledge_at_once()
            worker.keep_memory()
        measured = Measured(batches)
        parts = self.run(measured, context.partitionId(), context.taskAttemptId())
        if self.tuned:
            worker.lighten()
        told = {PARTS: encode_parts(parts), ROW_BYTES: measured.row_bytes, VERSIONS: json.dumps(own_versions())}
        yield pa.RecordBatch.from_pydict({name: [value] for name, value in told.items()})

    def run(self, batches: Iterable[pa.RecordBatch], task: int, retry: int) -> list[StagedPart]:
        """Write each batch to each sink as it comes, then prepare; on any error leave nothing behind."""
        writers = [
            s.writer(Branch(self.attempt, s.name, task, retry), durable=self.durable, plan=self.plan)
            for s in self.sinks
        ]
        hashes, origins = self.hashed.hashes, self.hashed.origins
        sums = {column: Fingerprint() for column in hashes if column not in ("", IN_ORDER)}
        checks = {view: Checksum() for view, column in zip(self.views, hashes, strict=True) if column == IN_ORDER}
        try:
            for batch in batches:
                from_where = batch.column(batch.schema.get_field_index(origins)) if origins else None
                for column, fingerprint in sums.items():
                    fingerprint.add(batch.column(batch.schema.get_field_index(column)), from_where)
                hidden = self.hashed.added
                rows = {v: rows_of_view(batch, v) if v else without_hashes(batch, hidden) for v in set(self.views)}
                for view, check in checks.items():
                    check.add(rows[view])
                for view, writer in zip(self.views, writers, strict=True):
                    writer.write(rows[view])
                failpoint("task.wrote")
            parts = self._prepared(writers)
        except BaseException:
            _abort_all(writers)
            raise
        failpoint("task.prepared")
        prints = [
            str(checks[view] if column == IN_ORDER else sums.get(column, ""))
            for view, column in zip(self.views, hashes, strict=True)
        ]
        return [replace(part, fingerprint=text, plan=self.plan) for part, text in zip(parts, prints, strict=True)]

    def _prepared(self, writers: Sequence[Writer]) -> list[StagedPart]:
        """What can expire is prepared last."""
        last = sorted(range(len(writers)), key=lambda index: self.sinks[index].capabilities.expires)
        parts = {index: writers[index].prepare() for index in last}
        return [parts[index] for index in range(len(writers))]


@dataclass
class Measured:
    """Batches, and the mean size of a row in that batch of them where it was largest."""

    batches: Iterable[pa.RecordBatch]
    row_bytes: int = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self.batches:
            self.row_bytes = max(self.row_bytes, batch.nbytes // max(batch.num_rows, 1))
            yield batch


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
    entries = [[str(p.branch), p.rows, dict(p.payload), p.fingerprint, p.plan] for p in parts]
    return json.dumps({"format": formats.TASK, "parts": entries})


def decode_parts(text: str) -> list[StagedPart]:
    said = json.loads(text)
    formats.refuse_newer("What a task returned", said["format"], formats.TASK)
    return [_part(*entry) for entry in said["parts"]]


def _part(name: str, rows: int, payload: dict[str, Any], fingerprint: str, plan: str) -> StagedPart:
    branch = parse_branch(name)
    if branch is None:
        raise ValueError(f"a task returned a part with an unknown name: {name!r}")
    return StagedPart(branch, rows, payload, fingerprint, plan)
