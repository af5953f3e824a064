"""Who a pipeline is, and where in the stream its sinks begin: what would be doubled or left out is refused or said."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.errors import AnotherPipeline, ConfigError, Refused
from semel.runtime.pipeline import StreamWriter
from semel.sinks.base import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.spark35

NOTHING_STARTED = "nothing was started and no row was written; other sinks hold what they held"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "out.db"


@pytest.fixture
def out(database: Path) -> Sink:
    return semel.Sqlite(str(database), "out")


def finish(writer: StreamWriter) -> None:
    running = writer.trigger(availableNow=True).launch()
    running.query.awaitTermination()
    running.function.end()


def at(df: DataFrame, checkpoint: Path, *sinks: Sink, name: str = "") -> StreamWriter:
    writer = semel.write(df).to(*sinks).option("checkpointLocation", str(checkpoint))
    return writer.queryName(name) if name else writer


def drop_in(df: DataFrame, *sinks: Sink, guarantee: str = "exactly-once", name: str = "", **options: str) -> None:
    function = semel.sink(*sinks, guarantee=guarantee)
    writer = df.writeStream.foreachBatch(function).options(**options)
    writer = writer.queryName(name) if name else writer
    try:
        writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        function.end()


def ids(database: Path, table: str = "out") -> list[int]:
    with sqlite3.connect(database) as connection:
        return [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]  # noqa: S608 - our own


# No checkpoint --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guarantee", "name"), [("exactly-once", ""), ("exactly-once", "orders"), ("at-most-once", "")]
)
def test_the_drop_in_without_a_checkpoint_is_refused_before_anything_is_written(
    stream: DataFrame, out: Sink, database: Path, guarantee: str, name: str
) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="The query has no checkpointLocation") as caught:
            drop_in(stream, out, guarantee=guarantee, name=name)
        assert 'Add .option("checkpointLocation", "/path/of/its/own") to the query.' in str(caught.value)
    assert not database.exists()


def test_a_nameless_query_under_the_default_folder_of_the_session_is_refused_too(
    spark: SparkSession, stream: DataFrame, out: Sink, database: Path, tmp_path: Path
) -> None:
    """Spark gives it a folder with a random name, which no later start finds.

    A folder that the user has named is found again, whatever it is called; so is one that has the name of the query.
    """
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "all"))
    try:
        with pytest.raises(Exception, match="The query has no checkpointLocation"):
            drop_in(stream, out)
        assert not database.exists()
        drop_in(stream, out, checkpointLocation=str(tmp_path / "all" / "00000000-0000-4000-8000-000000000001"))
        drop_in(stream, semel.Sqlite(str(database), "named"), name="orders")
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert (tmp_path / "all" / "orders" / "semel").is_dir()
    assert ids(database) == ids(database, "named") == list(range(20))


def test_at_least_once_needs_no_checkpoint(stream: DataFrame, out: Sink, database: Path) -> None:
    drop_in(stream, out, guarantee="at-least-once")
    assert ids(database) == list(range(20))


# Another checkpoint ---------------------------------------------------------------------------------------------------


def test_a_nameless_pipeline_is_known_by_what_it_reads_not_by_where_its_checkpoint_is(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path
) -> None:
    finish(at(stream, tmp_path / "c1", out))
    with pytest.raises(AnotherPipeline, match="Sink sqlite_out holds batches that pipeline 'unnamed-") as caught:
        finish(at(stream, tmp_path / "c2", out))
    assert "say starts='again' on the sink" in caught.value.remedy
    with pytest.raises(Exception, match="Sink sqlite_out holds batches that pipeline 'unnamed-"):
        drop_in(stream, out, checkpointLocation=str(tmp_path / "c3"))
    assert ids(database) == list(range(20))
    again = semel.Sqlite(str(database), "out", starts="again")
    finish(at(stream, tmp_path / "c2", again))
    assert ids(database) == sorted([*range(20), *range(20)])


def test_a_pipeline_of_another_name_may_write_to_the_same_target_and_is_told(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finish(at(stream, tmp_path / "c1", out, name="first"))
    with caplog.at_level(logging.WARNING, logger="semel"):
        finish(at(stream, tmp_path / "c2", semel.Sqlite(str(database), "out", name="b"), name="second"))
    (told,) = [record.getMessage() for record in caplog.records if "also holds batches" in record.getMessage()]
    assert told.startswith("Sink b of pipeline 'second' also holds batches of 'first' (query ")
    assert ids(database) == sorted([*range(20), *range(20)])


def test_a_target_is_known_whatever_the_sink_is_called(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    finish(at(stream, tmp_path / "c1", out, name="orders"))
    renamed = semel.Sqlite(str(database), "out", name="b")
    with pytest.raises(AnotherPipeline, match="Sink b holds batches that pipeline 'orders' wrote under another"):
        finish(at(stream, tmp_path / "c2", renamed, name="orders"))
    assert ids(database) == list(range(20))
    # Added to a pipeline that has begun elsewhere, it takes both words.
    elsewhere = semel.Sqlite(str(database), "elsewhere")
    finish(at(stream, tmp_path / "c2", elsewhere, name="orders"))
    put(2)
    with pytest.raises(AnotherPipeline, match="Sink b holds batches"):
        finish(at(stream, tmp_path / "c2", elsewhere, replace(renamed, starts="now"), name="orders"))
    finish(at(stream, tmp_path / "c2", elsewhere, replace(renamed, starts="now, again"), name="orders"))
    assert (ids(database), ids(database, "elsewhere")) == (list(range(30)), list(range(30)))


def test_the_drop_in_has_the_name_of_its_query(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the refusal of a nameless one advises: give it a name with queryName()."""
    drop_in(stream, out, checkpointLocation=str(tmp_path / "c1"))
    with pytest.raises(Exception, match="Sink sqlite_out holds batches that pipeline 'unnamed-"):
        drop_in(stream, out, checkpointLocation=str(tmp_path / "c2"))
    with caplog.at_level(logging.WARNING, logger="semel"):
        drop_in(stream, out, name="second", checkpointLocation=str(tmp_path / "c2"))
    (told,) = [record.getMessage() for record in caplog.records if "also holds batches" in record.getMessage()]
    assert told.startswith("Sink sqlite_out of pipeline 'second' also holds batches of 'unnamed-")
    with pytest.raises(Exception, match="Sink sqlite_out holds batches that pipeline 'second' wrote under another"):
        drop_in(stream, out, name="second", checkpointLocation=str(tmp_path / "c3"))
    assert ids(database) == sorted([*range(20), *range(20)])


def test_a_name_that_is_left_out_later_is_kept(stream: DataFrame, out: Sink, tmp_path: Path) -> None:
    finish(at(stream, tmp_path / "c1", out, name="orders"))
    finish(at(stream, tmp_path / "c1", out))
    with pytest.raises(AnotherPipeline, match="that pipeline 'orders' wrote under another checkpoint"):
        finish(at(stream, tmp_path / "c2", out, name="orders"))


# In the middle of the stream ------------------------------------------------------------------------------------------


def begins_at_batch_2(sink: Sink, why: str) -> str:
    return (
        f"Sink {sink.name} ({sink.describe()}) would begin at batch 2, behind offsets "
        f'{{"logOffset":1}}, and lack all rows before that: {why}.'
    )


def refused(writer: StreamWriter) -> Refused:
    with pytest.raises(Refused) as caught:
        finish(writer)
    assert caught.value.data_now == NOTHING_STARTED
    assert "say starts='now' on the sink" in caught.value.remedy
    return caught.value


def test_an_added_sink_is_refused_until_it_is_meant(
    stream: DataFrame,
    out: Sink,
    database: Path,
    tmp_path: Path,
    put: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    finish(at(stream, tmp_path / "c", out))
    put(2)
    added = semel.Sqlite(str(database), "added")
    claims = sorted((tmp_path / "c" / "semel" / "incarnations").iterdir())
    for _ in range(2):
        error = refused(at(stream, tmp_path / "c", out, added))
        assert error.what == begins_at_batch_2(added, "batch 1 went to sqlite_out only")
    assert sorted((tmp_path / "c" / "semel" / "incarnations").iterdir()) == claims
    assert ids(database) == list(range(20))
    with caplog.at_level(logging.WARNING, logger="semel"):
        finish(at(stream, tmp_path / "c", out, semel.Sqlite(str(database), "added", starts="now")))
    assert (ids(database), ids(database, "added")) == (list(range(30)), list(range(20, 30)))
    assert [r.getMessage() for r in caplog.records if "begins at" in r.getMessage()] == [
        f"Sink sqlite_added ({added.describe()}) begins at batch 2, behind offsets "
        '{"logOffset":1}: what the stream brought before is not in it.'
    ]
    put(3)
    finish(at(stream, tmp_path / "c", out, added))
    assert ids(database, "added") == list(range(20, 40))


def test_a_sink_that_was_left_out_for_a_while_has_a_gap_and_is_refused(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    other = semel.Sqlite(str(database), "other")
    finish(at(stream, tmp_path / "c", out, other))
    put(2)
    finish(at(stream, tmp_path / "c", out))
    with pytest.raises(Refused, match=r"Sink sqlite_other .* would begin at batch 3"):
        finish(at(stream, tmp_path / "c", out, other))


def test_a_table_that_is_renamed_under_the_same_sink_name_is_refused(
    stream: DataFrame, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    before = semel.Sqlite(str(database), "out", name="target")
    finish(at(stream, tmp_path / "c", before))
    put(2)
    renamed = semel.Sqlite(str(database), "orders", name="target")
    error = refused(at(stream, tmp_path / "c", renamed))
    assert error.what == begins_at_batch_2(renamed, f"under this name batch 1 went to {before.describe()}")
    finish(at(stream, tmp_path / "c", semel.Sqlite(str(database), "orders", name="target", starts="now")))
    assert (ids(database), ids(database, "orders")) == (list(range(20)), list(range(20, 30)))


def test_a_database_that_moved_is_known_by_its_markers(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    finish(at(stream, tmp_path / "c", out))
    put(2)
    elsewhere = semel.Sqlite(str(tmp_path / "moved.db"), "out")
    assert "would begin at batch 2" in refused(at(stream, tmp_path / "c", elsewhere)).what
    database.rename(tmp_path / "moved.db")
    finish(at(stream, tmp_path / "c", elsewhere))
    assert ids(tmp_path / "moved.db") == list(range(30))


def test_a_plain_checkpoint_of_spark_is_taken_over_with_the_word_only(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    location = tmp_path / "c"
    plain = stream.writeStream.foreachBatch(lambda _df, _batch: None).option("checkpointLocation", str(location))
    plain.trigger(availableNow=True).start().awaitTermination()
    put(2)
    error = refused(at(stream, location, out))
    why = "batch 1 was not written through semel under this guarantee"
    assert error.what == begins_at_batch_2(out, why)
    with pytest.raises(Exception, match="would begin at batch 2, behind offsets"):
        drop_in(stream, out, checkpointLocation=str(location))
    assert not database.exists()
    finish(at(stream, location, semel.Sqlite(str(database), "out", starts="now")))
    assert ids(database) == list(range(20, 30))


def test_a_guarantee_that_kept_no_log_is_followed_by_another_with_the_word_only(
    stream: DataFrame, out: Sink, tmp_path: Path, put: Callable[[int], None]
) -> None:
    writer = at(stream, tmp_path / "c", out)
    finish(semel.write(stream, guarantee="at-least-once").to(out).option("checkpointLocation", writer.checkpoint))
    put(2)
    refused(writer)
    refused(semel.write(stream, guarantee="at-most-once").to(out).option("checkpointLocation", writer.checkpoint))


def test_at_most_once_and_exactly_once_follow_on_each_other(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, put: Callable[[int], None]
) -> None:
    location = str(tmp_path / "c")
    for batch, guarantee in enumerate(("exactly-once", "at-most-once", "exactly-once"), 2):
        finish(semel.write(stream, guarantee=guarantee).to(out).option("checkpointLocation", location))
        put(batch)
    assert ids(database) == list(range(40))


def test_the_word_is_checked_when_the_sink_is_made() -> None:
    with pytest.raises(ConfigError, match="A sqlite sink cannot have starts='later'"):
        semel.Sqlite("out.db", "out", starts="later")


# Other machines -------------------------------------------------------------------------------------------------------


def test_a_store_of_this_machine_alone_is_refused_on_a_cluster(
    stream: DataFrame, out: Sink, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream.sparkSession.sparkContext, "master", "spark://db7:7077")
    with pytest.raises(Refused, match=r"is on this machine alone, and the tasks run elsewhere: the master is spark:"):
        finish(at(stream, tmp_path / "c", out))
    assert not database.exists()


def test_sources_are_known_by_what_they_read() -> None:
    from semel.sources.plan import PlannedSource, known_by

    def kafka(**options: Any) -> str:
        return known_by([PlannedSource("kafka", {"kafka.bootstrap.servers": "a:1,b:1", **options})])

    orders = kafka(subscribe="orders")
    assert orders == kafka(subscribe="orders", maxoffsetspertrigger="7", **{"kafka.sasl.jaas.config": "secret"})
    assert orders == kafka(subscribe="orders", **{"kafka.bootstrap.servers": "b:1, a:1"})
    assert orders == kafka(subscribe="orders", **{"kafka.bootstrap.servers": "c.new.house:1"})
    assert kafka(subscribe="b,a") == kafka(subscribe="a,b")
    assert len({orders, kafka(subscribe="returns"), kafka(subscribepattern="orders"), known_by([])}) == 4
    files = [known_by([PlannedSource("json", {"path": path})]) for path in ("/in", "/in/", "file:/in", "file:///in")]
    assert len(set(files)) == 1
    assert files[0] != known_by([PlannedSource("csv", {"path": "/in"})])
    assert len(orders) < 40
