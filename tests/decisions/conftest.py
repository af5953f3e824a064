"""The stores that every test of this folder runs over: memory, local files, and Hadoop on a real HDFS."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from semel import failpoints
from semel.decisions.base import RecordStore
from semel.decisions.files import FileStore
from semel.decisions.hadoop import HadoopStore
from semel.decisions.memory import MemoryStore


@pytest.fixture
def hadoop_store(spark: SparkSession, hdfs_uri: str) -> HadoopStore:
    return HadoopStore(spark, f"{hdfs_uri}/{uuid.uuid4().hex}")


@pytest.fixture(params=["memory", "files", "hadoop"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    """A fresh store of each kind."""
    if request.param == "memory":
        return MemoryStore()
    if request.param == "files":
        return FileStore(tmp_path / "log")
    hadoop: HadoopStore = request.getfixturevalue("hadoop_store")
    return hadoop


@pytest.fixture
def failing_at_log_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail once, when a record is on disk under its temporary name."""
    monkeypatch.setattr(failpoints, "_hits", Counter())
    monkeypatch.setenv(failpoints.VARIABLE, "log.written=fail")
