"""Input for the tests that run Spark in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id long, name string"


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
