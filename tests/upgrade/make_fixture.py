"""Makes the fixture: run with the release before this one, see README.md. Each scenario is one folder of `fixture/`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Where the scenario lay when it was made; a test puts its own folder there.
PLACEHOLDER = "/semel-upgrade-fixture"
FAILPOINTS = "SEMEL_FAILPOINTS"
#: A folder of the fixture -> the failpoint at which the run is stopped for it; the last one is of the end of the run.
SCENARIOS = {
    "staged": "batch.staged@2",
    "decided": "batch.decided@2",
    "committed_in_part": "sqlite.committed@2",
    "done": "",
}
BATCHES = 2
ROWS = 20
URL = "SEMEL_UPGRADE_POSTGRES"
WAIT_S_MAX = 900.0


def rows_of(batch: int) -> list[dict[str, object]]:
    return [{"id": batch * ROWS + n, "text": f"row {batch * ROWS + n} é"} for n in range(ROWS)]


def write_input(folder: Path, batch: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows_of(batch)]
    (folder / f"{batch}.json").write_text("\n".join(lines) + "\n")


def run_pipeline(root: Path, url: str) -> None:
    """One pipeline that reads files and writes to three stores, as a user of any release writes it."""
    from pyspark.sql import SparkSession

    import semel

    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    stream = spark.readStream.schema("id INT, text STRING").option("maxFilesPerTrigger", 1).json(str(root / "in"))
    query = (
        semel.write(stream)
        .to(
            semel.Sqlite(str(root / "shop.db"), "orders", name="small"),
            semel.Files(str(root / "lake"), name="lake"),
            semel.Postgres(url, "orders", create=True, firm=False, name="big"),
        )
        .option("checkpointLocation", str(root / "checkpoint"))
        .queryName("shop")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def make(target: Path, url: str) -> None:
    """One run. Where it is stopped, all that it has left behind is what a kill would leave."""
    root = Path(PLACEHOLDER)
    shutil.rmtree(root, ignore_errors=True)
    for batch in range(BATCHES):
        write_input(root / "in", batch)
        # Spark reads files in the order of their times.
        os.utime(root / "in" / f"{batch}.json", (1_700_000_000 + batch,) * 2)
    points = ",".join(f"{point}=stop" for point in SCENARIOS.values() if point)
    environment = {**os.environ, URL: url, "PYSPARK_PYTHON": sys.executable, FAILPOINTS: points}
    with subprocess.Popen([sys.executable, __file__, "pipeline"], env=environment) as pipeline:
        for scenario, point in SCENARIOS.items():
            wait_until(pipeline, is_stopped=bool(point))
            keep(root, target / scenario, url)
            pipeline.send_signal(signal.SIGCONT)
    shutil.rmtree(root)


def wait_until(pipeline: subprocess.Popen[bytes], *, is_stopped: bool) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < deadline:
        if pipeline.poll() is not None:
            if pipeline.returncode == 0 and not is_stopped:
                return
            raise SystemExit(f"the pipeline ended with {pipeline.returncode}")
        state = Path(f"/proc/{pipeline.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if is_stopped and state == "T":
            return
        time.sleep(0.5)
    raise SystemExit("the pipeline did not come so far")


def keep(root: Path, folder: Path, url: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # Without SQLite's map of its log, which it makes anew, and without checksums of files in which paths are replaced.
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(".*.crc", "*-shm"))
    command = [os.environ.get("PG_DUMP", "pg_dump"), "--no-owner", "--no-privileges", "--inserts", url]
    dump = subprocess.run(command, capture_output=True, text=True, check=True)
    # Newer dumps begin and end with a random word for psql.
    lines = [line for line in dump.stdout.splitlines() if not line.startswith("\\")]
    (folder / "postgres.sql").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["pipeline"]:
        run_pipeline(Path(PLACEHOLDER), os.environ[URL])
    else:
        make(Path(sys.argv[1]), os.environ[URL])
