"""The memory of a task is bounded by the Arrow batch, not by the partition."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import semel
from semel.runtime.phases import Report
from tests.processes import descends

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2_000_000
RESIDENT_MB_MAX = 400


def test_two_million_rows_in_one_partition_fit_into_400_mb(spark: SparkSession, tmp_path: Path) -> None:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 1).load()
    rows = source.selectExpr("value AS id", "repeat(cast(value AS string), 8) AS text", "timestamp")
    sinks = (semel.Files(str(tmp_path / "files")), semel.Sqlite(str(tmp_path / "out.db"), "out"))
    reports: list[Report] = []
    running = semel.write(rows).to(*sinks).option("checkpointLocation", str(tmp_path / "c")).launch(reports.append)
    end = time.monotonic() + 240
    while not reports:
        assert time.monotonic() < end, "waited too long"
        assert running.query.isActive, running.query.exception()
        time.sleep(0.2)
    peak_mb = max(worker_peaks_mb())
    running.stop(grace_s=0)
    assert reports[0].rows == 2 * ROWS
    assert 50 < peak_mb < RESIDENT_MB_MAX, peak_mb


def worker_peaks_mb() -> list[float]:
    """The largest resident memory that each Python worker below this process has had, in MB."""
    peaks = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"pyspark.worker" not in (path / "cmdline").read_bytes() or not descends(int(path.name), os.getpid()):
                continue
            status = (path / "status").read_text()
        except OSError:  # it ended while we looked
            continue
        peaks += [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    return peaks
