"""What is special about Files: two kinds of readers, manifests, half-renamed batches, row groups."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.errors import ConfigError, CorruptRecord, NewerRecord, SchemaMismatch, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.base import StagedPart
from semel.sinks.files import sink as files_module
from semel.sinks.files.sink import COMPRESSIONS, Files, committed_files, read_committed
from semel.testing.harness import (
    OURS,
    Killed,
    Promise,
    Rows,
    arrow,
    attempt,
    commit_in_fresh_process,
    context,
    prepare_one,
    rows_of,
)
from tests.sinks.lakes import committed, helper_ids, manifest_path, plain_ids, prepared, started

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Readers ----------------------------------------------------------------------------------------------------------


def test_both_kinds_of_readers_see_committed_rows_and_no_staged_ones(lake: Path) -> None:
    sink = Files(str(lake))
    committed(sink, rows_of(1, 2), rows_of(3))
    prepared(sink, rows_of(4), batch=2)
    assert plain_ids(lake) == [1, 2, 3]
    assert helper_ids(lake) == [1, 2, 3]
    assert sorted(path.name for path in lake.glob("*.parquet")) == [
        f"b{batch:010d}-t00000-a0-files_lake-{OURS}.parquet" for batch in (0, 1)
    ]


def test_committed_files_come_in_batch_order(lake: Path) -> None:
    sink = Files(str(lake))
    participant = started(sink)
    for number in (2, 10, 9):
        participant.commit(prepare_one(participant, sink, attempt(number), rows_of(number), rows_of(number + 100)))
    assert helper_ids(lake) == [2, 102, 9, 109, 10, 110]


def test_a_manifest_that_names_a_missing_file_is_an_error_in_three_lines(lake: Path) -> None:
    committed(Files(str(lake)), rows_of(1), rows_of(2))
    (lost,) = lake.glob("b0000000001-*.parquet")
    lost.unlink()
    with pytest.raises(CorruptRecord) as caught:
        committed_files(lake)
    assert str(caught.value) == (
        f"The manifest {manifest_path(lake, 1)} is damaged: it names {lost.name}, which is missing.\n"
        "  the data now: nothing was read or changed by this call; the batch was committed once\n"
        "  what to do: Restore the file from a backup. If its rows were dropped on purpose, remove the manifest, too, "
        "unless it is the newest of its folder."
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}'])
def test_a_damaged_manifest_is_named(lake: Path, content: str) -> None:
    committed(Files(str(lake)), rows_of(1))
    manifest_path(lake).write_text(content)
    with pytest.raises(CorruptRecord, match=r"0000000000\.json is damaged: it is not a manifest"):
        committed_files(lake)


def test_a_manifest_of_a_newer_semel_is_not_guessed_at(lake: Path) -> None:
    committed(Files(str(lake)), rows_of(1))
    manifest = manifest_path(lake)
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(NewerRecord, match="of sink files_lake has format 2; this semel reads up to 1"):
        committed_files(lake)


def test_read_committed_gives_just_the_committed_rows_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The folder's name holds what Spark takes for a pattern and for a partition; a stray file is not in a manifest."""
    lake = tmp_path / "day=3" / "la[k]e {a,b} *? %41"
    sink = Files(str(lake))
    with pytest.raises(ConfigError, match=r"No rows are committed in .* yet"):
        read_committed(spark, lake)
    committed(sink, rows_of(1, 2), [], rows_of(3))
    shutil.copy(committed_files(lake)[0], lake / "stray.parquet")
    frame = read_committed(spark, lake)
    assert frame.columns == ["id", "text"]
    assert sorted(map(tuple, frame.collect())) == rows_of(1, 2, 3)


# Manifests and fences ---------------------------------------------------------------------------------------------


def test_a_manifest_can_be_read_by_a_person(lake: Path) -> None:
    sink = Files(str(lake), name="orders")
    participant = started(sink, 3)
    participant.commit(prepare_one(participant, sink, attempt(7, 2, 3), rows_of(1, 2), [], rows_of(3)))
    text = manifest_path(lake, 7, "orders").read_text()
    manifest = json.loads(text)
    assert text.startswith('{\n  "version": 1,\n  "name": "shop",\n')
    assert datetime.fromisoformat(manifest.pop("committed_at")).utcoffset() == timedelta(0)
    names = [f"b0000000007-t{task:05d}-a2-orders-{OURS}.parquet" for task in (0, 2)]
    assert manifest == {
        "version": 1,
        "name": "shop",
        "pipeline": OURS,
        "sink": "orders",
        "batch": 7,
        "attempt": 2,
        "incarnation": 3,
        "rows": 3,
        "plan": "",
        "files": [
            {"name": names[0], "rows": 2, "bytes": (lake / names[0]).stat().st_size},
            {"name": names[1], "rows": 1, "bytes": (lake / names[1]).stat().st_size},
        ],
        "schema": {"id": "int64", "text": "string"},
    }


def test_an_empty_batch_hands_on_the_schema(lake: Path) -> None:
    sink = Files(str(lake))
    committed(sink, [], rows_of(1), [], [])
    schemas = [json.loads(manifest_path(lake, batch).read_text())["schema"] for batch in range(4)]
    assert schemas == [None, *[{"id": "int64", "text": "string"}] * 3]
    with pytest.raises(SchemaMismatch):
        sink.check(pa.schema([("id", pa.string())]))


def test_only_the_newest_fence_is_kept(lake: Path) -> None:
    for incarnation in (1, 2, 2, 3):
        started(Files(str(lake)), incarnation)
    assert [path.name for path in (lake / "_semel" / "fences" / OURS).iterdir()] == ["0000000003"]


# Half-done commits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "point", "plainly_visible"),
    [
        ([rows_of(1), rows_of(2), rows_of(3)], "files.half_renamed", [1]),
        ([rows_of(1)], "files.half_renamed", []),
        ([rows_of(1), rows_of(2), rows_of(3)], "files.renamed", [1, 2, 3]),
    ],
    ids=["half-renamed", "one file", "renamed without manifest"],
)
def test_a_half_renamed_batch_is_finished_by_a_fresh_process(
    lake: Path, tasks: list[Rows], point: str, plainly_visible: list[int]
) -> None:
    sink = Files(str(lake))
    committable = prepared(sink, *tasks)
    assert commit_in_fresh_process(sink, context(2), Promise((committable,)), failpoint=point) == Killed()
    assert plain_ids(lake) == plainly_visible
    assert committed_files(lake) == []
    assert commit_in_fresh_process(sink, context(3), Promise((committable,))) is Outcome.COMMITTED
    everything = [i for rows in tasks for i, _ in rows]
    assert plain_ids(lake) == everything
    assert helper_ids(lake) == everything


def test_what_was_renamed_of_a_gone_batch_is_withdrawn(lake: Path) -> None:
    """Otherwise a plain reader would see these rows twice once the batch is mended."""
    sink = Files(str(lake))
    gone = prepared(sink, rows_of(1), rows_of(2))
    assert commit_in_fresh_process(sink, context(2), Promise((gone,)), failpoint="files.half_renamed") == Killed()
    assert plain_ids(lake) == [1]
    (lake / "_semel" / "staging" / f"{gone.branches[1]}.parquet").unlink()
    participant = started(sink, 3)
    assert participant.commit(gone) is Outcome.GONE
    assert plain_ids(lake) == []
    mended = prepare_one(participant, sink, attempt(0, 1, 3), rows_of(1), rows_of(2))
    assert participant.commit(mended) is Outcome.COMMITTED
    assert plain_ids(lake) == helper_ids(lake) == [1, 2]


def test_a_manifest_of_somebody_else_is_synced_before_it_is_taken_for_proof(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may have died between the link and the sync: then a power cut would take the proof back."""
    sink = Files(str(lake))
    committable = prepared(sink, rows_of(1))
    assert started(sink).commit(committable) is Outcome.COMMITTED
    synced: list[Path] = []
    monkeypatch.setattr(files_module, "sync_folder", synced.append)
    assert started(sink, 2).commit(committable) is Outcome.ALREADY_COMMITTED
    assert [folder.parts[-3] for folder in synced] == ["manifests"]


def test_a_late_rename_of_a_replaced_attempt_is_cleaned_up(lake: Path) -> None:
    """A paused driver wakes after the mend and renames what it still has; its next look finds the manifest."""
    sink = Files(str(lake))
    zombie = started(sink)
    late = prepare_one(zombie, sink, attempt(0, 0), rows_of(1))
    staged = lake / "_semel" / "staging" / f"{late.branches[0]}.parquet"
    mended = prepare_one(zombie, sink, attempt(0, 1), rows_of(1))
    assert zombie.commit(mended) is Outcome.COMMITTED
    staged.rename(lake / late.payload["files"][0]["name"])
    assert plain_ids(lake) == [1, 1]
    assert zombie.commit(late) is Outcome.ALREADY_COMMITTED
    assert plain_ids(lake) == helper_ids(lake) == [1]


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_staged_file_that_was_cut_short_is_gone(lake: Path, kept: float) -> None:
    sink = Files(str(lake))
    committable = prepared(sink, rows_of(*range(100)), rows_of(200))
    path = lake / "_semel" / "staging" / f"{committable.branches[0]}.parquet"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    assert started(sink, 2).commit(committable) is Outcome.GONE
    assert plain_ids(lake) == []


def test_an_error_of_the_file_system_is_tried_again(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Files(str(lake))
    committable = prepared(sink, rows_of(1), rows_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _fails_at(2, os.rename))
        with pytest.raises(SinkUnavailable, match=r"did not let us commit: .*No space left on device"):
            started(sink, 2).commit(committable)
    assert plain_ids(lake) == [1]
    assert started(sink, 2).commit(committable) is Outcome.COMMITTED
    assert plain_ids(lake) == helper_ids(lake) == [1, 2]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_an_error_that_lasts_until_somebody_mends_it_is_told_as_such(
    lake: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Files(str(lake))
    committable = prepared(sink, rows_of(1), rows_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _fails_at(2, os.rename, number))
        with pytest.raises(ConfigError, match=rf"did not let us commit: .*{os.strerror(number)}"):
            started(sink, 2).commit(committable)
    assert helper_ids(lake) == []
    assert started(sink, 2).commit(committable) is Outcome.COMMITTED
    assert plain_ids(lake) == helper_ids(lake) == [1, 2]


def _fails_at(nth: int, function: Callable[..., None], number: int = errno.ENOSPC) -> Callable[..., None]:
    calls = []

    def call(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(number, os.strerror(number))
        function(*arguments)

    return call


def test_a_folder_that_is_not_mounted_is_not_taken_for_a_gone_batch(lake: Path, tmp_path: Path) -> None:
    """Without our folder nothing proves that the batch is not committed."""
    sink = Files(str(lake))
    committable = prepared(sink, rows_of(1))
    lake.rename(tmp_path / "elsewhere")
    lake.mkdir()
    participant = sink.participant(context(1))
    with pytest.raises(SinkUnavailable, match=r"did not let us commit: no folder .*_semel"):
        participant.commit(committable)
    lake.rmdir()
    (tmp_path / "elsewhere").rename(lake)
    assert participant.commit(committable) is Outcome.COMMITTED
    assert helper_ids(lake) == [1]


def test_without_marks_a_replayed_batch_loses_nothing(lake: Path) -> None:
    """At-least-once: the replay may have another task layout; rows may be doubled, never lost."""
    sink = Files(str(lake))
    participant = sink.participant(context(0, marked=False))
    participant.commit(prepare_one(participant, sink, attempt(0, 0, 0), rows_of(1), rows_of(2), rows_of(3)))
    participant.commit(prepare_one(participant, sink, attempt(0, 0, 0), rows_of(1, 2), rows_of(3)))
    assert set(plain_ids(lake)) == {1, 2, 3}
    assert not (lake / "_semel" / "manifests").exists()
    assert not (lake / "_semel" / "fences").exists()


# Row groups -------------------------------------------------------------------------------------------------------


def staged_file(lake: Path, batches: Iterator[pa.RecordBatch], compression: str = "zstd") -> tuple[StagedPart, Path]:
    branch = Branch(attempt(), "files_lake", 0, 0)
    writer = Files(str(lake), compression=compression).writer(branch)
    for batch in batches:
        writer.write(batch)
    return writer.prepare(), lake / "_semel" / "staging" / f"{branch}.parquet"


def row_groups(path: Path) -> list[int]:
    metadata = pq.read_metadata(path)
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def test_row_groups_are_bounded_by_rows(lake: Path) -> None:
    sizes = [10_000] * 20 + [0, 1] + [300_000]
    part, path = staged_file(lake, (pa.RecordBatch.from_pydict({"id": range(size)}) for size in sizes))
    assert part.rows == sum(row_groups(path)) == 500_001
    assert max(row_groups(path)) <= 131_072
    assert len(row_groups(path)) <= 7
    expected = [i for size in sizes for i in range(size)]
    assert pq.read_table(path)["id"].to_pylist() == expected


def test_row_groups_are_bounded_by_bytes(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rows beside small ones, and one row that is larger than a row group: it gets one of its own."""
    monkeypatch.setattr(files_module, "ROW_GROUP_BYTES_MAX", 10_000)
    sizes = [10] * 50 + [3_000] * 10 + [50_000] + [10] * 50
    texts = [chr(97 + i % 26) * size for i, size in enumerate(sizes)]
    part, path = staged_file(lake, iter([pa.RecordBatch.from_pydict({"text": texts})] * 2))
    read = pq.ParquetFile(path)
    groups = [read.read_row_group(i)["text"].to_pylist() for i in range(read.num_row_groups)]
    assert [text for group in groups for text in group] == texts * 2
    assert all(sum(map(len, group)) <= 10_000 for group in groups if len(group) > 1)
    assert part.rows == len(texts) * 2


def test_rows_reach_the_disk_before_the_task_ends(lake: Path) -> None:
    """Memory is bounded by one row group: full ones are written while the task goes on."""
    writer = Files(str(lake)).writer(Branch(attempt(), "files_lake", 0, 0))
    for _ in range(3):
        writer.write(pa.RecordBatch.from_pydict({"id": range(100_000)}))
    (file,) = (lake / "_semel" / "staging").iterdir()
    assert file.stat().st_size > 100_000
    writer.abort()
    assert not file.exists()


def test_no_rows_make_no_file(lake: Path) -> None:
    part, _ = staged_file(lake, iter([arrow([]), arrow([])]))
    assert part.rows == 0
    assert not lake.exists()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_works(lake: Path, compression: str) -> None:
    _, path = staged_file(lake, iter([arrow(rows_of(*range(100)))]), compression)
    used = pq.read_metadata(path).row_group(0).column(0).compression
    assert used == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())
    assert pq.read_table(path)["id"].to_pylist() == list(range(100))


def test_nested_and_hostile_columns_come_back_as_they_were(lake: Path) -> None:
    schema = pa.schema(
        [
            ('a"b; drop', pa.list_(pa.struct([("x", pa.int64()), ("y", pa.decimal128(38, 18))]))),
            ("größe duration null", pa.map_(pa.string(), pa.float64())),
            ("wann", pa.date32()),
        ]
    )
    values = [
        {'a"b; drop': [{"x": 1, "y": None}], "größe duration null": [("k", 0.5)], "wann": None},
        {'a"b; drop': None, "größe duration null": [], "wann": datetime(2024, 7, 1).date()},
    ]
    sink = Files(str(lake))
    sink.check(schema)
    _, path = staged_file(lake, iter([pa.RecordBatch.from_pylist(values, schema=schema)]))
    assert pq.read_table(path).to_pylist() == values
