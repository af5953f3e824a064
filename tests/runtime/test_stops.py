"""Queries that are stopped while a store never answers."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.errors import CommitStalled
from semel.ids import Incarnation, pipeline_id
from semel.run.happenings import error_in
from semel.runtime.commits import TELL_AFTER_S
from semel.runtime.phases import Limits, Report
from semel.runtime.pipeline import STOP_S_MAX, Running, StreamWriter
from semel.sinks.base import Context
from semel.sinks.sqlite.database import Database
from semel.sinks.sqlite.sink import _SqliteParticipant
from tests.processes import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: On a machine that is busy with other tests.
SLACK_S = 15.0
GRACE_S = 0.5


class Hang:
    """The SQLite store hangs in one step, in its second sink, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, step: str) -> None:
        self.met = threading.Event()
        self.released = threading.Event()
        real = getattr(_SqliteParticipant, step)

        def hang(participant: Any, *values: Any) -> Any:
            if participant.sink.name == "second" and not self.released.is_set():
                self.met.set()
                self.released.wait(300)
            return real(participant, *values)

        patch.setattr(_SqliteParticipant, step, hang)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Hang]]:
    made: list[Hang] = []

    def make(step: str) -> Hang:
        made.append(Hang(monkeypatch, step))
        return made[-1]

    yield make
    for one in made:
        one.released.set()


def writer(stream: DataFrame, folder: Path) -> StreamWriter:
    sinks = [semel.Sqlite(str(folder / f"{name}.db"), "out", name=name) for name in ("first", "second")]
    made = semel.write(stream).to(*sinks).option("checkpointLocation", str(folder / "c"))
    return made.commit_limits(Limits(commit_patience_s=600, tell_after_s=0.5))


def rows(folder: Path, name: str) -> int:
    with closing(sqlite3.connect(folder / f"{name}.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM out").fetchone()[0])


def require_told(error: BaseException | None) -> None:
    assert isinstance(error, CommitStalled)
    assert error.what == "Batch 0 is decided and was stopped before it was committed to second: it gave no answer."
    assert error.data_now == "batch 0 is decided; visible in: first; still to commit: second"


def require_completed_by_the_next_start(stream: DataFrame, folder: Path) -> None:
    reports: list[Report] = []
    running = writer(stream, folder).trigger(availableNow=True).launch(reports.append)
    running.query.awaitTermination()
    running.function.end()
    assert [(r.batch, r.how) for r in reports] == [(0, "forwarded"), (1, "committed")]
    assert (rows(folder, "first"), rows(folder, "second")) == (20, 20)


def test_a_stop_returns_within_its_grace_though_a_commit_hangs_and_says_what_is_open(
    stream: DataFrame, tmp_path: Path, hang: Callable[[str], Hang]
) -> None:
    stuck = hang("commit")
    running = writer(stream, tmp_path).launch()
    assert stuck.met.wait(120)
    began = time.monotonic()
    assert running.stop(GRACE_S) is False
    assert time.monotonic() - began < GRACE_S + STOP_S_MAX + SLACK_S
    wait_until(lambda: not running.query.isActive)
    require_told(running.undone())
    require_told(error_in(str(running.query.exception())))
    assert rows(tmp_path, "first") == 10
    stuck.released.set()
    require_completed_by_the_next_start(stream, tmp_path)


def test_spark_s_own_stop_ends_the_waiting_too(stream: DataFrame, tmp_path: Path, hang: Callable[[str], Hang]) -> None:
    stuck = hang("commit")
    query = writer(stream, tmp_path).start()
    assert stuck.met.wait(120)
    began = time.monotonic()
    query.stop()
    assert time.monotonic() - began < SLACK_S
    require_told(error_in(str(query.exception())))
    stuck.released.set()
    require_completed_by_the_next_start(stream, tmp_path)


def test_a_stop_returns_within_its_grace_though_a_store_hangs_before_the_decision(
    stream: DataFrame, tmp_path: Path, hang: Callable[[str], Hang]
) -> None:
    stuck = hang("prepare")
    running: Running = writer(stream, tmp_path).launch()
    assert stuck.met.wait(120)
    began = time.monotonic()
    assert running.stop(GRACE_S) is False
    assert time.monotonic() - began < GRACE_S + STOP_S_MAX + SLACK_S
    # Nothing is decided, so there is nothing to say.
    assert running.undone() is None
    stuck.released.set()
    wait_until(lambda: not running.query.isActive)


def test_what_a_batch_works_with_is_closed_when_it_has_ended_and_not_under_its_hands(
    stream: DataFrame, tmp_path: Path, hang: Callable[[str], Hang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SQLite connection that is closed in the middle of a statement takes the process along."""
    stuck = hang("prepare")
    closed_at_work: list[bool] = []
    real = _SqliteParticipant.close

    def close(participant: Any) -> None:
        # What the test before has let go of may be closed only now.
        if participant.sink.path.startswith(str(tmp_path)):
            closed_at_work.append(not stuck.released.is_set())
        real(participant)

    monkeypatch.setattr(_SqliteParticipant, "close", close)
    running = writer(stream, tmp_path).launch()
    assert stuck.met.wait(120)
    assert running.stop(GRACE_S) is False
    running.function.end()
    assert closed_at_work == []
    stuck.released.set()
    wait_until(lambda: len(closed_at_work) == 2)
    assert closed_at_work == [False, False]


def test_the_last_user_of_a_database_waits_for_a_thread_that_is_at_work_on_it(tmp_path: Path) -> None:
    context = Context(pipeline_id("0b0e6a5e-2ab2-4b5c-9f0a-1f2e3d4c5b6a"), "orders", Incarnation(1))
    database = Database.shared(str(tmp_path / "a.db"), context, 5.0)
    at_work, go_on = threading.Event(), threading.Event()
    written: list[int] = []

    def work() -> None:
        with database.transaction("write"):
            database.execute("CREATE TABLE t (i INTEGER)")
            at_work.set()
            go_on.wait(30)
            database.executemany("INSERT INTO t VALUES (?)", ((i,) for i in range(1000)))
            written.append(database.execute("SELECT count(*) FROM t").fetchone()[0])

    threads = [threading.Thread(target=work), threading.Thread(target=database.release)]
    threads[0].start()
    assert at_work.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert written == [1000]


#: A program of a user, who has set up no logging.
SCRIPT = """
import sys, threading, time
from pyspark.sql import SparkSession
import semel
from semel.sinks.sqlite.sink import _SqliteParticipant

root, real = sys.argv[1], _SqliteParticipant.commit

def hang(participant, committable):
    if participant.sink.name == "second":
        print("hangs at", time.time(), flush=True)
        threading.Event().wait(300)
    return real(participant, committable)

_SqliteParticipant.commit = hang
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
)
sinks = [semel.Sqlite(f"{root}/{name}.db", "out", name=name) for name in ("first", "second")]
query = (
    semel.write(spark.readStream.schema("id INT").json(root + "/in")).to(*sinks)
    .option("checkpointLocation", root + "/c").start()
)
sys.stdin.readline()
query.stop()
print("ERROR", str(query.exception()).count("Batch 0 is decided and was stopped before it was committed to second"))
"""


def test_a_script_that_has_set_up_no_logging_hears_of_what_waits_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1}\n')
    (tmp_path / "script.py").write_text(SCRIPT)
    child = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        hangs_at = float(child.stdout.readline().rpartition(" ")[2])
        told = next(line for line in child.stderr if "is decided" in line)
        assert time.time() - hangs_at < TELL_AFTER_S + SLACK_S
        assert told.startswith("batch 0 is decided and waits for second since ")
        assert told.endswith("s of at most 60; visible in: first\n")
        began = time.monotonic()
        output, errors = child.communicate("\n", timeout=120)
        assert time.monotonic() - began < 4 * SLACK_S
        assert (child.returncode, output) == (0, "ERROR 1\n"), errors[-3000:]
    finally:
        child.kill()
