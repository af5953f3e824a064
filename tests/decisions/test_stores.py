"""Which location gives which store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from semel.decisions.base import RecordStore
from semel.decisions.files import FileStore
from semel.decisions.hadoop import HadoopStore
from semel.decisions.stores import open_store
from semel.errors import CheckpointUnusable, Refused


@contextmanager
def settings(spark: SparkSession, **values: str) -> Iterator[None]:
    """Spark settings for a while; they reach the Hadoop configuration of the session too."""
    names = {name.replace("__", "."): value for name, value in values.items()}
    before = {name: spark.conf.get(name, None) for name in names}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, known in before.items():
            if known is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, known)


def opened(store: RecordStore) -> tuple[type[RecordStore], str]:
    return type(store), store.describe()


def test_a_bare_path_is_local_files(spark: SparkSession, tmp_path: Path) -> None:
    assert opened(open_store(spark, f"{tmp_path}/check point/semel")) == (FileStore, f"{tmp_path}/check point/semel")


@pytest.mark.parametrize("prefix", ["file:", "file://"])
def test_a_file_uri_is_local_files(spark: SparkSession, prefix: str) -> None:
    assert opened(open_store(spark, f"{prefix}/data/checkpoint")) == (FileStore, "/data/checkpoint")


def test_a_percent_sign_is_taken_as_spark_takes_it(spark: SparkSession) -> None:
    assert open_store(spark, "file:/data/a%20b").describe() == "/data/a%20b"


def test_a_relative_path_starts_in_the_working_folder(spark: SparkSession) -> None:
    assert opened(open_store(spark, "some/checkpoint")) == (FileStore, str(Path.cwd() / "some/checkpoint"))


def test_an_hdfs_uri_is_hadoop(spark: SparkSession, hdfs_uri: str) -> None:
    assert opened(open_store(spark, f"{hdfs_uri}/some/checkpoint")) == (HadoopStore, f"{hdfs_uri}/some/checkpoint")


def test_a_bare_path_goes_where_the_default_file_system_is(spark: SparkSession, hdfs_uri: str) -> None:
    with settings(spark, fs__defaultFS=hdfs_uri):
        assert opened(open_store(spark, "/some/checkpoint")) == (HadoopStore, f"{hdfs_uri}/some/checkpoint")
        assert opened(open_store(spark, "file:/some/checkpoint")) == (FileStore, "/some/checkpoint")


def test_a_mount_point_that_leads_to_hdfs_is_hadoop(spark: SparkSession, hdfs_uri: str) -> None:
    with settings(spark, **{"fs.viewfs.mounttable.good.link./data": f"{hdfs_uri}/"}):
        store = open_store(spark, "viewfs://good/data/mounted/checkpoint")
        assert opened(store) == (HadoopStore, "viewfs://good/data/mounted/checkpoint")
        assert (store.create("a/b", b"x"), store.create("a/b", b"y"), store.read("a/b")) == (True, False, b"x")
    assert open_store(spark, f"{hdfs_uri}/mounted/checkpoint").list("a") == ["b"]


def test_a_mount_point_that_leads_elsewhere_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with settings(spark, **{"fs.viewfs.mounttable.bad.link./data": f"file://{tmp_path}"}):
        with pytest.raises(Refused) as raised:
            open_store(spark, "viewfs://bad/data/checkpoint")
        assert raised.value.what.startswith(
            "The decision log cannot live in viewfs://bad/data/checkpoint: file has no "
        )


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n", "gs", "http", "https", "wasb", "wasbs", "oss", "ftp"])
def test_a_store_without_an_atomic_rename_is_refused_in_three_lines(spark: SparkSession, scheme: str) -> None:
    with pytest.raises(Refused) as raised:
        open_store(spark, f"{scheme}://bucket/checkpoint")
    assert str(raised.value) == (
        f"The decision log cannot live in {scheme}://bucket/checkpoint: {scheme} has no atomic create-if-absent rename "
        "through Spark's checkpoint manager, so a decision could be taken twice.\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Put the checkpointLocation on a local disk, HDFS or Azure Data Lake (abfss)."
    )


def test_a_bare_path_is_refused_where_the_default_file_system_is(spark: SparkSession) -> None:
    with settings(spark, fs__defaultFS="s3a://bucket"), pytest.raises(Refused, match="s3a has no atomic"):
        open_store(spark, "/some/checkpoint")


def test_a_file_system_that_does_not_open_is_told_in_three_lines(spark: SparkSession) -> None:
    with pytest.raises(CheckpointUnusable) as raised:
        open_store(spark, "viewfs://nowhere/checkpoint")
    what, data_now, remedy = str(raised.value).splitlines()
    assert what.startswith("The decision log cannot be opened: cannot open viewfs://nowhere/checkpoint: java.io.IOExc")
    assert data_now == "  the data now: this start wrote nothing; what was visible before still is"
    assert remedy == "  what to do: Name a checkpointLocation that this user can read and write."


def test_a_checkpoint_manager_that_the_user_set_is_not_used(spark: SparkSession, hdfs_uri: str) -> None:
    custom = "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
    with settings(spark, spark__sql__streaming__checkpointFileManagerClass=custom):
        store = HadoopStore(spark, f"{hdfs_uri}/custom")
    assert store._manager.getClass().getSimpleName() == "FileContextBasedCheckpointFileManager"


def test_a_file_system_for_which_spark_only_looks_and_then_renames_is_refused(spark: SparkSession) -> None:
    with (
        settings(spark, fs__odd__impl="org.apache.hadoop.fs.RawLocalFileSystem"),
        pytest.raises(Refused, match="Spark gave its FileSystemBasedCheckpointFileManager"),
    ):
        HadoopStore(spark, "odd:///checkpoint")
