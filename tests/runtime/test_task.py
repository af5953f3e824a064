"""One task without Spark: what it writes, what it returns, what it leaves behind when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import semel
from semel.errors import BatchFailed
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.runtime import worker
from semel.runtime.fingerprint import Hashed
from semel.runtime.task import TaskWriter, decode_parts, encode_parts, error_of_task
from semel.sinks.base import Sink

ATTEMPT = Attempt(PipelineId("11111111-2222-3333-4444-555555555555"), 4, 0, Incarnation(2))


def batch(*values: float) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": list(values)})


def task(*sinks: Sink, views: tuple[str | None, ...] = (), hashes: tuple[str, ...] = ()) -> TaskWriter:
    none = tuple(None for _ in sinks)
    return TaskWriter(sinks, views or none, Hashed(hashes or tuple("" for _ in sinks)), ATTEMPT, True, "")


def spooled(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out.db-semel").glob("*"))


def test_each_sink_gets_every_batch_and_returns_one_part(tmp_path: Path) -> None:
    sinks = (semel.Sqlite(str(tmp_path / "out.db"), "a"), semel.Sqlite(str(tmp_path / "out.db"), "b"))
    parts = task(*sinks).run([batch(1, 2), batch(3)], task=7, retry=9)
    assert [(p.branch, p.rows) for p in parts] == [(Branch(ATTEMPT, f"sqlite_{t}", 7, 9), 3) for t in ("a", "b")]
    assert spooled(tmp_path) == [f"{p.branch}.arrow" for p in parts]
    assert decode_parts(encode_parts(parts)) == parts


def test_a_task_without_rows_returns_a_part_and_leaves_no_file(tmp_path: Path) -> None:
    parts = task(semel.Sqlite(str(tmp_path / "out.db"), "a")).run([], task=0, retry=0)
    assert [p.rows for p in parts] == [0]
    assert spooled(tmp_path) == []


def test_a_view_leaves_out_what_its_condition_left_out(tmp_path: Path) -> None:
    rows = pa.array([{"x": 1}, None, {"x": 3}], pa.struct([("x", pa.int64())]))
    whole = pa.RecordBatch.from_arrays([rows], names=["_semel_0"])
    parts = task(semel.Files(str(tmp_path / "lake")), views=("_semel_0",)).run([whole], task=0, retry=0)
    assert [p.rows for p in parts] == [2]


def test_the_fingerprint_counts_the_rows_and_adds_up_their_hashes() -> None:
    """Modulo 2**64, over all batches, and without the rows that a condition left out."""
    first = pa.RecordBatch.from_pydict({"x": [1, 2, 3], "_semel_7": pa.array([2**63 - 1, None, -1], pa.int64())})
    second = pa.RecordBatch.from_pydict({"x": [4], "_semel_7": pa.array([2**63 - 1], pa.int64())})
    (part,) = task(semel.Memory("a"), hashes=("_semel_7",)).run([first, second], task=0, retry=0)
    assert part.fingerprint == f"3:{2**64 - 3:016x}"
    assert decode_parts(encode_parts([part])) == [part]
    (empty,) = task(semel.Memory("a"), hashes=("_semel_7",)).run([], task=0, retry=0)
    assert empty.fingerprint == "0:0000000000000000"


def test_no_sink_gets_to_see_the_hashes(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"x": [1, 2], "_semel_2": pa.array([5, 6], pa.int64())})
    sinks = (semel.Files(str(tmp_path / "a")), semel.Files(str(tmp_path / "b")))
    parts = task(*sinks, hashes=("", "_semel_2")).run([rows], task=0, retry=0)
    assert [p.fingerprint for p in parts] == ["", "2:000000000000000b"]
    files = list(tmp_path.rglob("*.parquet"))
    assert [pq.read_schema(file).names for file in files] == [["x"], ["x"]]


def test_a_task_that_fails_leaves_nothing_of_any_sink(tmp_path: Path) -> None:
    """The first sink takes NaN, the second does not: both drop what they wrote."""
    sinks = (semel.Files(str(tmp_path / "lake")), semel.Sqlite(str(tmp_path / "out.db"), "a"))
    with pytest.raises(BatchFailed, match="Column x holds NaN"):
        task(*sinks).run([batch(1.0), batch(float("nan"))], task=0, retry=0)
    assert spooled(tmp_path) == []
    assert list((tmp_path / "lake").rglob("*.parquet")) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield batch(1.0)
        raise ConnectionResetError("the JVM is gone")

    with pytest.raises(ConnectionResetError):
        task(semel.Sqlite(str(tmp_path / "out.db"), "a")).run(broken(), task=0, retry=0)
    assert spooled(tmp_path) == []


def test_the_error_of_a_task_is_found_in_the_stack_trace() -> None:
    raised = BatchFailed("Topic a did not take a row.", remedy="Make it smaller.")
    trace = f"SparkException: Job aborted\nTraceback:\n  File\nsemel.errors.BatchFailed: {raised}\n\tat org.apache"
    found = error_of_task(trace)
    assert isinstance(found, BatchFailed)
    assert str(found) == str(raised)
    assert error_of_task("ValueError: something else") is None
    assert error_of_task("semel.errors.Nonsense: a\n  the data now: b\n  what to do: c") is None


@pytest.mark.parametrize("tuned", [True, False])
def test_a_worker_is_left_as_it_is_when_tuning_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    """The user's own functions run in the same process."""
    done: list[str] = []
    for name in ("acknowledge_at_once", "keep_memory", "lighten"):
        monkeypatch.setattr(worker, name, partial(done.append, name))
    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: context)
    whole = replace(task(semel.Sqlite(str(tmp_path / "out.db"), "a")), tuned=tuned)
    (told,) = whole([batch(1)])
    assert [part.rows for part in decode_parts(told["parts"][0].as_py())] == [1]
    assert done == (["acknowledge_at_once", "keep_memory", "lighten"] if tuned else [])
