"""Bad input: a clear error of three lines before any row is written, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.decisions.records import VERSION, encode
from semel.errors import (
    AnotherPipeline,
    CheckpointError,
    CheckpointRolledBack,
    CheckpointUnusable,
    ConfigError,
    CorruptRecord,
    NewerRecord,
    Refused,
    SchemaMismatch,
    SemelError,
)
from semel.runtime.pipeline import StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark35

NOTHING = "nothing was started and no row was written"
AS_BEFORE = "this start wrote nothing; what was visible before still is"


@pytest.fixture
def writer(stream: DataFrame, tmp_path: Path) -> StreamWriter:
    target = semel.Sqlite(str(tmp_path / "out.db"), "out")
    made = semel.write(stream).to(target).option("checkpointLocation", str(tmp_path / "checkpoint"))
    return made.trigger(availableNow=True).queryName("orders")


def run(writer: StreamWriter) -> None:
    running = writer.launch()
    running.query.awaitTermination()
    running.function.end()


def ids(tmp_path: Path) -> list[int]:
    with sqlite3.connect(tmp_path / "out.db") as connection:
        return sorted(row[0] for row in connection.execute("SELECT id FROM out"))


def lines(error: SemelError) -> tuple[str, str, str]:
    what, data, remedy = str(error).split("\n")
    return what, data.removeprefix("  the data now: "), remedy.removeprefix("  what to do: ")


def undo_the_last_checkpoint(tmp_path: Path) -> Path:
    """Make it look as if the driver died after batch 1 was committed and before Spark wrote commits/1."""
    for name in ("commits/1", "commits/.1.crc"):
        (tmp_path / "checkpoint" / name).unlink(missing_ok=True)
    return tmp_path / "checkpoint" / "semel" / "decisions" / "0000000001.0.json"


# The pipeline as written --------------------------------------------------------------------------------------------


def test_an_unknown_guarantee_is_refused(stream: DataFrame) -> None:
    with pytest.raises(ConfigError) as caught:
        semel.write(stream, guarantee="twice")
    remedy = "Use one of exactly-once, at-least-once, at-most-once."
    assert lines(caught.value) == ("There is no guarantee 'twice'.", NOTHING, remedy)
    with pytest.raises(ConfigError):
        semel.sink(semel.Memory("t"), guarantee="")


def test_two_sinks_with_one_name_are_refused(stream: DataFrame) -> None:
    with pytest.raises(ConfigError) as caught:
        semel.write(stream).to(semel.Memory("a", name="x"), semel.Memory("b", name="x"))
    remedy = "Give each a name of its own: Sqlite(..., name='orders_copy')."
    assert lines(caught.value) == ("Two sinks of the pipeline are named 'x'.", NOTHING, remedy)


def test_no_sink_and_no_sink_at_all_are_refused(stream: DataFrame, writer: StreamWriter) -> None:
    with pytest.raises(ConfigError, match=r"^The pipeline has no sink\."):
        semel.write(stream).to()
    with pytest.raises(ConfigError, match=r"^Not a sink: 'out\.db'\."):
        semel.write(stream).to("out.db")  # type: ignore[arg-type]  # what a user might type


def test_a_dataframe_that_is_no_stream_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError) as caught:
        semel.write(spark.range(3))
    assert lines(caught.value) == (
        "This DataFrame is not a stream, so there are no batches to commit.",
        NOTHING,
        "Read it with spark.readStream; trigger(availableNow=True) handles bounded input.",
    )


def test_a_missing_checkpoint_location_is_refused(stream: DataFrame) -> None:
    with pytest.raises(ConfigError) as caught:
        semel.write(stream).to(semel.Memory("t")).start()
    assert lines(caught.value)[0] == "The pipeline has no checkpointLocation, without which nothing can be recovered."


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"continuous": "1 second"}, "continuous processing has no micro-batches that could be decided"),
        ({"realTime": "5 minutes"}, "the real-time trigger hands rows to the sink before the batch ends"),
    ],
)
def test_triggers_without_micro_batches_are_refused(stream: DataFrame, arguments: dict[str, str], why: str) -> None:
    with pytest.raises(Refused) as caught:
        semel.write(stream).trigger(**arguments)
    assert lines(caught.value) == (
        f"trigger({next(iter(arguments))}=...) cannot be exactly-once: {why}.",
        NOTHING,
        "Use trigger(processingTime=...) or trigger(availableNow=True).",
    )


@pytest.mark.parametrize("option", ["asyncProgressTrackingEnabled", "ASYNCPROGRESSTRACKINGENABLED"])
def test_asynchronous_progress_tracking_is_refused(stream: DataFrame, option: str) -> None:
    with pytest.raises(Refused) as caught:
        semel.write(stream).option(option, True)
    assert lines(caught.value)[0].startswith(
        f"The option {option}=true breaks the guarantee: Spark then writes commits/N"
    )
    assert semel.write(stream).option(option, False).options_ == {option: False}


def test_a_source_that_may_skip_input_is_refused(spark: SparkSession, tmp_path: Path, writer: StreamWriter) -> None:
    lossy = spark.readStream.format("rate").option("failOnDataLoss", "false").load()
    with pytest.raises(Refused) as caught:
        semel.write(lossy).to(*writer.sinks).options(**writer.options_).start()
    assert lines(caught.value) == (
        "The source option failondataloss=false breaks the guarantee: "
        "Spark then skips input that is gone without a word, which is loss.",
        NOTHING,
        "Leave failondataloss out of the source.",
    )
    assert not (tmp_path / "checkpoint").exists()


def test_the_drop_in_refuses_the_same(spark: SparkSession, tmp_path: Path) -> None:
    lossy = spark.readStream.format("rate").option("failOnDataLoss", "false").load()
    function = semel.sink(semel.Sqlite(str(tmp_path / "out.db"), "out"))
    query = lossy.writeStream.foreachBatch(function).option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(Exception, match="failondataloss=false breaks the guarantee"):
        query.awaitTermination()
    assert not (tmp_path / "out.db").exists()


# The sink -------------------------------------------------------------------------------------------------------------


def test_a_table_that_does_not_match_is_refused(writer: StreamWriter, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "out.db") as connection:
        connection.execute("CREATE TABLE out (id TEXT, price REAL NOT NULL)")
    with pytest.raises(SchemaMismatch) as caught:
        writer.start()
    assert lines(caught.value) == (
        f"SQLite table out in {tmp_path}/out.db does not match the rows: no column name; "
        "column id is TEXT, the rows have int64; column price is required and the rows do not have it.",
        NOTHING,
        "Select or cast the columns so that they match the sink, or name another table or folder.",
    )
    assert ids(tmp_path) == []
    assert not (tmp_path / "checkpoint").exists()


def test_a_select_that_does_not_fit_the_rows_is_refused(stream: DataFrame, writer: StreamWriter) -> None:
    target = semel.Memory("t", select=["id", "price * 2 AS double"])
    with pytest.raises(ConfigError, match=r"^The select or where of sink memory_t does not fit the rows: .*price"):
        semel.write(stream).to(target).options(**writer.options_).start()


def test_a_column_that_arrow_cannot_carry_is_refused(stream: DataFrame, writer: StreamWriter) -> None:
    target = semel.Memory("t", select=["make_interval(1) AS a_year"])
    with pytest.raises(SchemaMismatch, match=r"^Sink memory_t gets a column that Arrow cannot carry: "):
        semel.write(stream).to(target).options(**writer.options_).start()


# The checkpoint -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_is_refused(writer: StreamWriter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    location = str(tmp_path / "file" / "checkpoint")
    with pytest.raises(CheckpointUnusable) as caught:
        writer.option("checkpointLocation", location).start()
    what, data, remedy = lines(caught.value)
    assert what.startswith(f"The checkpoint folder {location} cannot be written: ")
    assert (data, remedy) == (AS_BEFORE, "Name a checkpointLocation that this user can read and write.")
    assert not (tmp_path / "out.db").exists()


def test_a_checkpoint_of_another_pipeline_is_refused(writer: StreamWriter, tmp_path: Path) -> None:
    run(writer)
    with pytest.raises(AnotherPipeline) as caught:
        writer.queryName("payments").start()
    assert lines(caught.value) == (
        f"The checkpoint {tmp_path}/checkpoint/semel belongs to pipeline 'orders', not to 'payments'.",
        AS_BEFORE,
        "Give this pipeline a checkpointLocation of its own.",
    )
    assert ids(tmp_path) == list(range(20))


def test_mixed_checkpoints_are_refused(writer: StreamWriter, tmp_path: Path) -> None:
    run(writer)
    other = "11111111-2222-3333-4444-555555555555"
    (tmp_path / "checkpoint" / "metadata").write_text(json.dumps({"id": other}))
    (tmp_path / "checkpoint" / ".metadata.crc").unlink(missing_ok=True)
    with pytest.raises(AnotherPipeline, match=f"but the checkpoint's metadata says {other}"):
        writer.start()


def test_metadata_that_is_no_metadata_is_refused(writer: StreamWriter, tmp_path: Path) -> None:
    run(writer)
    (tmp_path / "checkpoint" / "metadata").write_text("{")
    with pytest.raises(CheckpointUnusable, match="does not hold a Spark query id"):
        writer.start()


@pytest.mark.parametrize("damage", ["cut short", "empty", "changed"])
def test_a_damaged_decision_is_never_guessed_at(writer: StreamWriter, tmp_path: Path, damage: str) -> None:
    run(writer)
    record = undo_the_last_checkpoint(tmp_path)
    whole = record.read_text()
    record.write_text(
        {"cut short": whole[:100], "empty": "", "changed": whole.replace('"rows": 10', '"rows": 11')}[damage]
    )
    with pytest.raises(CorruptRecord) as caught:
        writer.start()
    what, data, remedy = lines(caught.value)
    assert what.startswith(f"The record {record} ")
    assert (data, remedy) == (
        AS_BEFORE,
        "Restore the file from a copy of the checkpoint. Do not delete it: it may hold the decision of a batch.",
    )
    assert ids(tmp_path) == list(range(20))
    record.write_text(whole)
    run(writer)
    assert ids(tmp_path) == list(range(20))


def test_a_record_of_a_newer_semel_is_refused(writer: StreamWriter, tmp_path: Path) -> None:
    run(writer)
    record = undo_the_last_checkpoint(tmp_path)
    record.write_bytes(encode({"version": 7, "kind": "decided"}))
    with pytest.raises(NewerRecord) as caught:
        writer.start()
    assert lines(caught.value) == (
        f"The record {record} has version 7; this semel reads up to {VERSION}.",
        AS_BEFORE,
        "Run this pipeline with the newer semel that wrote the record.",
    )


def test_a_deleted_checkpoint_does_not_write_everything_twice(writer: StreamWriter, tmp_path: Path) -> None:
    run(writer)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(AnotherPipeline, match="Sink sqlite_out holds batches that pipeline 'orders' wrote"):
        writer.start()
    assert ids(tmp_path) == list(range(20))


def test_a_checkpoint_older_than_the_sink_is_refused(
    writer: StreamWriter, tmp_path: Path, put: Callable[[int], None]
) -> None:
    run(writer)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "backup")
    put(2)
    run(writer)
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "backup", tmp_path / "checkpoint")
    with pytest.raises(CheckpointRolledBack) as caught:
        writer.start()
    assert lines(caught.value)[:2] == (
        "Sink sqlite_out has seen batch 2, but the checkpoint knows batches only up to 1: it is older than the sink.",
        "every batch that the sink has seen is visible once; this start wrote nothing",
    )
    assert ids(tmp_path) == list(range(30))


def test_a_decided_batch_keeps_its_sinks(writer: StreamWriter, tmp_path: Path, stream: DataFrame) -> None:
    run(writer)
    undo_the_last_checkpoint(tmp_path)
    other = semel.write(stream).to(semel.Memory("elsewhere")).options(**writer.options_).queryName("orders")
    with pytest.raises(CheckpointError) as caught:
        other.start()
    assert lines(caught.value) == (
        "Batch 1 is decided and has yet to be committed to sqlite_out, which this pipeline does not have any more.",
        "batch 1 is decided; it may be visible in some of its sinks",
        "Start once with the sinks that the batch was decided with, then change them.",
    )


def test_a_batch_begun_at_most_once_is_not_taken_for_anything(
    stream: DataFrame, writer: StreamWriter, tmp_path: Path
) -> None:
    weak = semel.write(stream, guarantee="at-most-once").to(*writer.sinks).options(**writer.options_)
    run(weak.trigger(availableNow=True).queryName("orders"))
    undo_the_last_checkpoint(tmp_path)
    query: Any = writer.launch().query
    with pytest.raises(Exception, match="Batch 1 was begun under at-most-once, so nobody can say whether it was"):
        query.awaitTermination()
    assert ids(tmp_path) == list(range(20))


def test_an_object_store_checkpoint_is_refused(writer: StreamWriter) -> None:
    with pytest.raises(Refused, match="s3a"):
        writer.option("checkpointLocation", "s3a://bucket/checkpoint").start()
