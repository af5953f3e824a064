"""Batches through a sink as the runtime takes them, without Spark: what the tests of several sinks share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch
from semel.protocol.events import Committable
from semel.sinks.base import Context, Participant, Sink, StagedPart
from semel.testing.harness import context


@contextmanager
def started(sink: Sink, who: Context | None = None) -> Iterator[Participant]:
    who = who or context()
    sink.check_store(who.pipeline)
    participant = sink.participant(who)
    try:
        participant.fence()
        yield participant
    finally:
        participant.close()


def prepare(participant: Participant, sink: Sink, which: Attempt, *batches: pa.RecordBatch) -> tuple[Committable, ...]:
    """One task per batch. A task that fails is told to abort, as the runtime does."""
    parts = []
    for task, batch in enumerate(batches):
        writer = sink.writer(Branch(which, sink.name, task, 0))
        try:
            writer.write(batch)
            parts.append(writer.prepare())
        except BaseException:
            writer.abort()
            participant.abort(participant.recover().branches)
            raise
    return participant.prepare(which, parts)


def stage_at_once(sink: Sink, which: Attempt, *batches: pa.RecordBatch) -> list[StagedPart]:
    """One task per batch, all of which begin at the same moment."""
    start = threading.Barrier(len(batches))

    def staged(task: int) -> StagedPart:
        writer = sink.writer(Branch(which, sink.name, task, 0))
        start.wait()
        writer.write(batches[task])
        return writer.prepare()

    with ThreadPoolExecutor(len(batches)) as tasks:
        return list(tasks.map(staged, range(len(batches))))


def rows(*pairs: tuple[Any, ...], names: Sequence[str] = ("id", "text")) -> pa.RecordBatch:
    """Rows of an int64 and texts."""
    schema = pa.schema([(name, pa.string() if place else pa.int64()) for place, name in enumerate(names)])
    return pa.RecordBatch.from_pylist([dict(zip(names, pair, strict=True)) for pair in pairs], schema=schema)


def column(values: Sequence[Any], kind: pa.DataType, name: str = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], [name])


def error_of(call: Callable[[], Any], meanwhile: Callable[[], None]) -> str:
    """What the server said when the call failed as one that is to be tried again."""
    with ThreadPoolExecutor(1) as calls:
        called = calls.submit(call)
        meanwhile()
        with pytest.raises(SinkUnavailable) as caught:
            called.result(20)
    return caught.value.what.partition("batch 1: ")[2].partition(";")[0].rstrip(".")
