"""What a test asks for it gets: checkpoints as `semel run` and `semel.configure` write them, or as Spark comes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from semel.session.local_files import CLASS, HADOOPS_OWN
from tests.quick_spark import OPTIONS, quick_conf
from tests.session.checkpoint_files import checkpoint_files, class_behind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark35


def test_no_process_is_started_for_a_file(spark: SparkSession) -> None:
    assert class_behind(checkpoint_files(spark, "file:/anywhere")) == CLASS
    assert "spark.hadoop.fs.AbstractFileSystem.file.impl" not in quick_conf()


@pytest.mark.hadoop_files
def test_with_the_mark_checkpoints_are_as_spark_comes(spark: SparkSession) -> None:
    assert OPTIONS not in os.environ
    assert class_behind(checkpoint_files(spark, "file:/anywhere")) == HADOOPS_OWN
    assert quick_conf()["spark.hadoop.fs.AbstractFileSystem.file.impl"] == HADOOPS_OWN
