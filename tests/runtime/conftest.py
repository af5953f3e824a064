"""One Spark session for the tests that need no kill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id long, name string"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def put(tmp_path: Path) -> Callable[[int], None]:
    """Add the input of batch n: ten rows."""

    def add(batch: int) -> None:
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        rows = [{"id": batch * 10 + k, "name": f"n{k}"} for k in range(10)]
        path = folder / f"{batch:03d}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))

    return add


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path, put: Callable[[int], None]) -> DataFrame:
    """A stream over `tmp_path/in`, one file a batch, with the input of batches 0 and 1."""
    put(0)
    put(1)
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
