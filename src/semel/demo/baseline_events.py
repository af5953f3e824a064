"""What both plain Spark programs of the demo share: a session, and events as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession


def tell(event: str, pipeline: str, batch: int | None = None) -> None:
    sys.stdout.write(json.dumps({"event": event, "pipeline": pipeline, "batch": batch}) + "\n")
    sys.stdout.flush()


def open_session() -> SparkSession:
    builder: Any = SparkSession.builder
    for key, value in json.loads(os.environ.get("SEMEL_DEMO_CONF", "{}")).items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
