"""A second `semel run` on a live pipeline: the newer one wins and runs on, the older one says who took over."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tests.quick_spark import quick_run

pytestmark = pytest.mark.usefixtures("class_archive")

PIPELINE = """
import os
import semel

HERE = os.path.dirname(os.path.abspath(__file__))

@semel.pipeline
def orders(spark):
    df = spark.readStream.schema("id long").json(f"{HERE}/input")
    sinks = [semel.Files(f"{HERE}/files")]
    if "FILES_ONLY" not in os.environ:
        sinks.append(semel.Sqlite(f"{HERE}/shop.db", "orders"))
    return (
        semel.write(df).to(*sinks).option("checkpointLocation", f"{HERE}/checkpoint")
        .trigger(processingTime="300 milliseconds")
    )
"""
DROP_IN = """
import json, os, sys, time
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
import semel

HERE = os.path.dirname(os.path.abspath(__file__))
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
)
write = semel.sink(semel.Files(f"{HERE}/files"), semel.Sqlite(f"{HERE}/shop.db", "orders"))

def tell(df, batch):
    pause("in hand", "hold_before")
    write(df, batch)
    pause("batch", "hold_after")

def pause(event, name):
    print(json.dumps({"event": event}), flush=True)
    while os.path.exists(f"{HERE}/{name}"):
        time.sleep(0.05)

rows = spark.readStream.schema("id long").json(f"{HERE}/input").writeStream.foreachBatch(tell)
rows = rows.option("checkpointLocation", f"{HERE}/checkpoint")
rows.trigger(processingTime=os.environ.get("TRIGGER", "300 milliseconds")).start().awaitTermination()
"""
RUN = ("-m", "semel.cli", "run", "pipelines.py", "--json")
FEED_EVERY_S = 0.4
PATIENCE_S = 120.0


class Driver:
    """A `semel run`, and what it has told so far."""

    def __init__(self, folder: Path, command: Sequence[str], **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.told: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.errors: list[str] = []
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.put(json.loads(line))
        self.told.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def wait_for(self, wanted: str) -> None:
        while True:
            event = self.told.get(timeout=PATIENCE_S)
            assert event is not None, "".join(self.errors)
            if event["event"] == wanted:
                return

    def wait_for_batch(self) -> None:
        self.wait_for("batch")

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=PATIENCE_S)
        for reader in self.readers:
            reader.join(timeout=PATIENCE_S)
        return code, "".join(self.errors)

    def forget(self) -> None:
        while not self.told.empty():
            self.told.get_nowait()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Feeder(threading.Thread):
    """Adds a file with one row now and then, until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder / "input"
        self.folder.mkdir()
        self.fed = 0
        self.is_over = threading.Event()
        self.add()

    def add(self) -> None:
        name = f"{self.fed:05d}.json"
        (self.folder / f".{name}").write_text(json.dumps({"id": self.fed}) + "\n")
        os.rename(self.folder / f".{name}", self.folder / name)
        self.fed += 1

    def run(self) -> None:
        while not self.is_over.wait(FEED_EVERY_S):
            self.add()


@pytest.fixture
def feeder(tmp_path: Path) -> Iterator[Feeder]:
    (tmp_path / "pipelines.py").write_text(PIPELINE)
    feeder = Feeder(tmp_path)
    feeder.start()
    yield feeder
    feeder.is_over.set()
    feeder.join()


@contextmanager
def drivers(folder: Path, command: Sequence[str] = (), **variables: str) -> Iterator[Callable[[], Driver]]:
    """Starts drivers, of `semel run` unless told otherwise; none outlives the test."""
    command = command or (*RUN, *quick_run())
    started: list[Driver] = []

    def start() -> Driver:
        started.append(Driver(folder, command, **variables))
        return started[-1]

    try:
        yield start
    finally:
        for driver in started:
            driver.kill()


def ids(folder: Path) -> list[int]:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM orders ORDER BY id")]


def ids_in_files(folder: Path) -> list[int]:
    import pyarrow.parquet as pq

    return sorted(i for path in (folder / "files").glob("*.parquet") for i in pq.read_table(path)["id"].to_pylist())


def rows_in_files(folder: Path) -> int:
    """By the manifests, of which there is one a batch."""
    return sum(json.loads(path.read_text())["rows"] for path in (folder / "files" / "_semel").rglob("*.json"))


def play(folder: Path, feeder: Feeder, handovers: int) -> None:
    with drivers(folder) as start:
        running = start()
        running.wait_for_batch()
        for _ in range(handovers):
            newer = start()
            code, errors = running.end()
            assert code == 3, errors
            assert f"claimed this pipeline (pid {newer.process.pid} on " in errors
            newer.wait_for_batch()
            running = newer
        feeder.is_over.set()
        feeder.join()
        wait_until(lambda: len(ids(folder)) >= feeder.fed, PATIENCE_S)
        running.process.send_signal(signal.SIGTERM)
        assert running.end()[0] == 0
    expected = list(range(feeder.fed))
    assert (ids(folder), ids_in_files(folder)) == (expected, expected)


def test_the_newer_driver_runs_on_and_the_older_says_who_took_over(tmp_path: Path, feeder: Feeder) -> None:
    play(tmp_path, feeder, handovers=4)


def one_of(*both: Driver) -> tuple[Driver, Driver]:
    """The one that ends, and the one that runs on."""
    wait_until(lambda: any(driver.process.poll() is not None for driver in both), PATIENCE_S)
    (gone,) = [driver for driver in both if driver.process.poll() is not None]
    (stays,) = [driver for driver in both if driver is not gone]
    return gone, stays


@pytest.mark.long
def test_twenty_handovers_in_a_row_leave_one_running_each_time(tmp_path: Path, feeder: Feeder) -> None:
    play(tmp_path, feeder, handovers=20)


@pytest.mark.hadoop_files
@pytest.mark.long
@pytest.mark.parametrize("trigger", ["300 milliseconds", "10 seconds"])
def test_of_two_queries_with_the_drop_in_exactly_one_runs_on(tmp_path: Path, feeder: Feeder, trigger: str) -> None:
    """Which one is a matter of chance: Spark has read the checkpoint before we are asked.

    With a long trigger the older one may have ended its batch meanwhile, and have planned no other.
    """
    (tmp_path / "drop_in.py").write_text(DROP_IN)
    ended: list[str] = []
    with drivers(tmp_path, command=("drop_in.py",), TRIGGER=trigger) as start:
        running = start()
        running.wait_for_batch()
        for _ in range(3):
            gone, running = one_of(running, start())
            ended.append(gone.end()[1])
            running.forget()
            running.wait_for_batch()
        feeder.is_over.set()
        feeder.join()
        wait_until(lambda: len(ids(tmp_path)) >= feeder.fed, PATIENCE_S)
        assert running.process.poll() is None
    for errors in ended:
        assert re.search("another driver of this pipeline has gone on|claimed this pipeline|Concurrent update", errors)
    expected = list(range(feeder.fed))
    assert (ids(tmp_path), ids_in_files(tmp_path)) == (expected, expected)


@pytest.mark.hadoop_files
@pytest.mark.long
def test_a_drop_in_whose_batch_another_query_has_just_ended_leaves_that_one_alone(tmp_path: Path) -> None:
    """The newer Spark reads the checkpoint while batch 0 is under way. Then the older one ends it and waits for rows.

    Were it fenced, nobody would run: the newer one cannot write `commits/0` a second time.
    """
    (tmp_path / "drop_in.py").write_text(DROP_IN)
    feeder = Feeder(tmp_path)
    before, after = tmp_path / "hold_before", tmp_path / "hold_after"
    with drivers(tmp_path, command=("drop_in.py",)) as start:
        after.touch()
        older = start()
        older.wait_for_batch()
        before.touch()
        newer = start()
        newer.wait_for("in hand")
        after.unlink()
        wait_until((tmp_path / "checkpoint" / "commits" / "0").exists, PATIENCE_S)
        before.unlink()
        code, errors = newer.end()
        assert code != 0
        assert "This query runs batch 0, and the checkpoint is at batch 1 by now" in errors
        feeder.add()
        older.wait_for_batch()
        assert older.process.poll() is None
    assert ids(tmp_path) == ids_in_files(tmp_path) == [0, 1]


def test_a_driver_that_is_paused_holds_nobody_up_and_ends_fenced_when_it_wakes(tmp_path: Path, feeder: Feeder) -> None:
    """Without SQLite, which a driver that is paused within a batch keeps locked."""
    with drivers(tmp_path, FILES_ONLY="1") as start:
        paused = start()
        paused.wait_for_batch()
        # The JVM too: it runs in the same group.
        os.killpg(paused.process.pid, signal.SIGSTOP)
        newer = start()
        newer.wait_for_batch()
        os.killpg(paused.process.pid, signal.SIGCONT)
        code, errors = paused.end()
        assert (code, f"(pid {newer.process.pid} on " in errors) == (3, True), errors
        newer.forget()
        newer.wait_for_batch()
        feeder.is_over.set()
        feeder.join()
        wait_until(lambda: rows_in_files(tmp_path) >= feeder.fed, PATIENCE_S)
        newer.process.send_signal(signal.SIGTERM)
        code, errors = newer.end()
    assert code == 0, errors
    assert "did not stop within 10 s" in errors
    assert ids_in_files(tmp_path) == list(range(feeder.fed))
