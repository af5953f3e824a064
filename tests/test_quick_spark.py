"""What a test asks for it gets: Spark without a process for each file, or the checkpoints that users have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from semel.decisions.hadoop import _first_class, hadoop_conf, jvm_of
from tests.quick_spark import FILE_SYSTEM, OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark35


def writes_with(spark: SparkSession, folder: str) -> tuple[str, str]:
    jvm: Any = jvm_of(spark)
    conf, path = hadoop_conf(spark), jvm.org.apache.hadoop.fs.Path(folder)
    manager = _first_class(jvm).create(path, conf)
    return str(manager.getClass().getSimpleName()), str(path.getFileSystem(conf).getClass().getName())


def test_no_process_is_started_for_a_file(spark: SparkSession, tmp_path: Path) -> None:
    assert writes_with(spark, str(tmp_path)) == ("FileSystemBasedCheckpointFileManager", FILE_SYSTEM)


@pytest.mark.hadoop_files
def test_with_the_mark_checkpoints_are_as_users_have_them(spark: SparkSession, tmp_path: Path) -> None:
    assert OPTIONS not in os.environ
    assert writes_with(spark, str(tmp_path))[0] == "FileContextBasedCheckpointFileManager"
