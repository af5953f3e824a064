"""Which settings and rows Files refuses, and that the others come back as they were."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest

from semel.errors import ConfigError, SchemaMismatch
from semel.ids import Branch
from semel.sinks.files.sink import Files
from semel.testing.harness import (
    OTHERS,
    SCHEMA,
    attempt,
    context,
    prepare_one,
    rows_of,
)
from tests.sinks.lakes import committed, started


def test_settings_are_validated_when_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Files has no compression 'zip'; use one of zstd, snappy, gzip, lz4, none"):
        Files(str(tmp_path), compression="zip")
    for url in ("s3a://bucket/orders", "hdfs://host/orders", "file:///orders", ""):
        with pytest.raises(ConfigError, match="a folder of a mounted file system, not to"):
            Files(url)


def test_check_writes_nothing(lake: Path, tmp_path: Path) -> None:
    Files(str(lake)).check(SCHEMA)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file")
    for path in (tmp_path / "notes", tmp_path / "notes" / "lake"):
        with pytest.raises(ConfigError, match="notes is not a folder"):
            Files(str(path)).check(SCHEMA)


def test_a_folder_that_cannot_be_written_is_refused(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} cannot be written"):
        Files(str(lake)).check(SCHEMA)


def test_a_schema_mismatch_lists_every_problem(lake: Path) -> None:
    sink = Files(str(lake))
    committed(sink, rows_of(1))
    with pytest.raises(SchemaMismatch) as caught:
        sink.check(pa.schema([("id", pa.string()), ("note", pa.string())]))
    assert str(caught.value) == (
        f"Parquet files in {lake} do not match the rows: the files have no column note; the rows have no column text; "
        "column id is int64 in the files and string in the rows.\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Select or cast the columns so that they match the sink, or name another table or folder."
    )


def test_the_schema_of_another_pipeline_in_the_folder_counts(lake: Path) -> None:
    sink = Files(str(lake))
    other = sink.participant(context(pipeline=OTHERS))
    other.commit(prepare_one(other, sink, attempt(pipeline=OTHERS), rows_of(1)))
    with pytest.raises(SchemaMismatch, match="column id is int64 in the files and int32 in the rows"):
        sink.check(pa.schema([("id", pa.int32()), ("text", pa.string())]))


def test_what_parquet_does_not_keep_is_no_mismatch(lake: Path) -> None:
    """Nullability, order, the session's time zone and 64-bit offsets may change from start to start."""
    sink = Files(str(lake))
    berlin = pa.timestamp("us", "Europe/Berlin")
    first = pa.schema([("at", berlin), ("tags", pa.list_(pa.string())), ("b", pa.binary())])
    row = {"at": datetime(2024, 7, 1), "tags": ["a"], "b": b"b"}
    participant = started(sink)
    writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
    writer.write(pa.RecordBatch.from_pylist([row], schema=first))
    participant.commit(*participant.prepare(attempt(), [writer.prepare()]))
    required = pa.list_(pa.field("item", pa.large_string(), nullable=False))
    sink.check(
        pa.schema(
            [
                pa.field("b", pa.large_binary(), nullable=False),
                ("tags", required),
                ("at", pa.timestamp("us", "UTC")),
            ]
        )
    )
    with pytest.raises(SchemaMismatch, match="column at is timestamp"):
        sink.check(pa.schema([("at", pa.timestamp("us")), ("tags", required), ("b", pa.binary())]))


@pytest.mark.parametrize(
    "kind",
    [pa.null(), pa.struct([]), pa.duration("us"), pa.month_day_nano_interval(), pa.list_(pa.null())],
    ids=str,
)
def test_columns_that_parquet_cannot_hold_are_refused_by_name(lake: Path, kind: pa.DataType) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        Files(str(lake)).check(pa.schema([("id", pa.int64()), ("odd", kind)]))
    assert str(caught.value) == (
        f"Parquet cannot hold these columns: odd ({kind}).\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Cast them to another type, or leave them out with select=[...]."
    )


def test_two_columns_of_one_name_are_refused(lake: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"Two columns of the rows have the same name: id\."):
        Files(str(lake)).check(pa.schema([("id", pa.int64()), ("id", pa.int64())]))
