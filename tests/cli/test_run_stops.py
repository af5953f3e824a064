"""`semel run` that is stopped while a batch is decided and a store does not commit it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel.dev.postgres import PostgresServer
from semel.failpoints import VARIABLE
from tests.cli.test_run import events, iter_lines
from tests.processes import is_stopped, wait_until
from tests.quick_spark import quick_run
from tests.sinks.postgres_rig import Database
from tests.sinks.waiting import standby_away

pytestmark = pytest.mark.usefixtures("class_archive")

PIPELINES = """
import os
import semel

HERE = os.path.dirname(os.path.abspath(__file__))

@semel.pipeline
def orders(spark):
    df = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(f"{HERE}/input")
    postgres = semel.Postgres(os.environ["URL"], "orders", schema=os.environ["SCHEMA"], create=True, name="postgres")
    writer = semel.write(df).to(postgres, semel.Sqlite(f"{HERE}/shop.db", "orders", name="sqlite"))
    writer = writer.option("checkpointLocation", f"{HERE}/checkpoint").trigger(availableNow=True)
    return writer.commit_limits(semel.Limits(commit_patience_s=600))
"""
#: How much longer than its grace a stop takes at most, the end of Spark included, on a machine that is busy.
STOP_S_MAX = 60.0


@pytest.fixture
def db(postgres_server: PostgresServer) -> Iterator[Database]:
    database = Database(postgres_server.url)
    yield database
    database.end()


def start(folder: Path, db: Database, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "semel.cli", "run", "pipelines.py", "--json", "--grace-s", "1", *quick_run()],
        cwd=folder,
        env={**os.environ, "URL": db.url, "SCHEMA": db.schema, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def in_sqlite(folder: Path) -> list[int]:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM orders ORDER BY id")]


def test_a_stop_while_postgresql_waits_for_a_standby_says_what_is_open_and_the_next_start_completes_it(
    tmp_path: Path, db: Database, postgres_server: PostgresServer
) -> None:
    (tmp_path / "pipelines.py").write_text(PIPELINES)
    (tmp_path / "input").mkdir()
    for number in range(3):
        (tmp_path / "input" / f"{number}.json").write_text(json.dumps({"id": number}))
    child = start(tmp_path, db, **{VARIABLE: "batch.decided@2=stop"})
    try:
        wait_until(lambda: is_stopped(child.pid) or child.poll() is not None, 180)
        with standby_away(postgres_server) as wait_for_one:
            wait_for_one()
            os.killpg(child.pid, signal.SIGCONT)
            lines = iter_lines(child)
            waiting = next(event for event in lines if event["event"] == "waiting")
            os.kill(child.pid, signal.SIGTERM)
            asked = time.monotonic()
            rest = list(lines)
            assert child.wait(STOP_S_MAX) == 4
            assert time.monotonic() - asked < STOP_S_MAX
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    require_told(waiting, rest[-1], child)
    seen = in_sqlite(tmp_path)
    assert len(seen) == 2
    assert len(db.run("SELECT id FROM orders")) >= 1

    output, errors = start(tmp_path, db).communicate(timeout=180)
    batches = [(e["batch"], e["how"]) for e in events(output) if e["event"] == "batch"]
    assert batches == [(1, "forwarded"), (2, "committed")], errors
    assert in_sqlite(tmp_path) == [0, 1, 2]
    assert db.run("SELECT id FROM orders ORDER BY id") == [(0,), (1,), (2,)]
    assert db.staged() == []


def require_told(waiting: dict[str, Any], last: dict[str, Any], child: subprocess.Popen[str]) -> None:
    assert (waiting["batch"], waiting["waits_for"], waiting["visible_in"]) == (1, ["postgres"], ["sqlite"])
    assert waiting["since"]
    assert waiting["seconds"] >= 5
    assert child.stderr is not None
    text = child.stderr.read()
    assert "batch 1 is decided and waits for postgres since " in text
    told = text[text.index("Batch 1 is decided") :].splitlines()
    assert told[0].startswith("Batch 1 is decided and was stopped before it was committed to postgres: ")
    assert told[1] == "  the data now: batch 1 is decided; visible in: sqlite; still to commit: postgres"
    assert told[2].startswith("  what to do: Bring the sink back and start the pipeline again (semel run pipelines.py)")
    assert last["event"] == "failed"
    assert last["error"].splitlines() == told[:3]
