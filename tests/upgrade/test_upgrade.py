"""What the release before has left is taken over: every row once, decided and undecided batches included."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
import pytest

import semel
from semel.decisions import records
from semel.dev.postgres import PostgresServer
from semel.errors import NewerRecord
from semel.ids import Incarnation, PipelineId
from semel.sinks.base import Context, Sink
from tests.upgrade.make_fixture import BATCHES, PLACEHOLDER, ROWS, SCENARIOS, rows_of, write_input

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIXTURE = Path(__file__).parent / "fixture"
Rows = list[tuple[int, str]]


@dataclass(frozen=True)
class World:
    """A copy of one scenario: a folder, and a database of its own."""

    root: Path
    url: str

    @property
    def sinks(self) -> tuple[Sink, Sink, Sink]:
        return (
            semel.Sqlite(str(self.root / "shop.db"), "orders", name="small"),
            semel.Files(str(self.root / "lake"), name="lake"),
            semel.Postgres(self.url, "orders", create=True, firm=False, name="big"),
        )

    @property
    def pipeline(self) -> PipelineId:
        return PipelineId(json.loads((self.root / "checkpoint" / "metadata").read_text())["id"])

    def sql(self, text: str) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def visible(self) -> dict[str, Rows]:
        files = sorted((self.root / "lake").glob("*.parquet"))
        with closing(sqlite3.connect(self.root / "shop.db")) as small:
            return {
                "sqlite": sorted(small.execute("SELECT id, text FROM orders")),
                "files": sorted((row["id"], row["text"]) for f in files for row in pq.read_table(f).to_pylist()),
                "postgres": sorted(self.sql("SELECT id, text FROM public.orders")),
            }

    def staged(self) -> list[str]:
        folders = (self.root / "shop.db-semel", self.root / "lake" / "_semel" / "staging")
        tables = self.sql("SELECT relname FROM pg_class WHERE starts_with(relname, 'semel_stage_') AND relkind = 'r'")
        return [str(p) for folder in folders if folder.is_dir() for p in folder.iterdir()] + [
            name for (name,) in tables
        ]

    def plans(self) -> dict[int, set[bool]]:
        """Of each batch, whether its markers say what was planned for it."""
        marks = [m for sink in self.sinks for m in sink.evidence(self.pipeline, range(10)).marks]
        assert all(m.plan.startswith("sha256:") or not m.plan for m in marks)
        return {batch: {bool(m.plan) for m in marks if m.batch == batch} for batch in sorted({m.batch for m in marks})}

    def start(self, spark: SparkSession) -> None:
        stream = spark.readStream.schema("id INT, text STRING").option("maxFilesPerTrigger", 1)
        query = (
            semel.write(stream.json(str(self.root / "in")))
            .to(*self.sinks)
            .option("checkpointLocation", str(self.root / "checkpoint"))
            .queryName("shop")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


def restored(scenario: str, root: Path, server: PostgresServer) -> World:
    """The database has the name of the folder."""
    shutil.copytree(FIXTURE / scenario, root)
    for batch in range(BATCHES):
        os.utime(root / "in" / f"{batch}.json", (1_700_000_000 + batch,) * 2)
    for path in filter(Path.is_file, (root / "checkpoint").rglob("*")):
        content = path.read_text()
        if PLACEHOLDER in content:
            path.write_text(_with_checksum(content.replace(PLACEHOLDER, str(root))))
    name = f"upgrade_{root.name}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    world = World(root, server.url.rpartition("/")[0] + f"/{name}")
    world.sql((root / "postgres.sql").read_text())
    return world


def _with_checksum(content: str) -> str:
    """A record of ours has one; files of Spark have none."""
    try:
        whole = json.loads(content)
        del whole["checksum"]
    except (ValueError, KeyError, TypeError):
        return content
    return json.dumps({**whole, "checksum": records._checksum(whole)})


def all_rows(batches: int) -> Rows:
    return [(int(str(row["id"])), str(row["text"])) for batch in range(batches) for row in rows_of(batch)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_the_release_before_has_left_is_taken_over_exactly(
    scenario: str, tmp_path: Path, postgres_server: PostgresServer, spark: SparkSession
) -> None:
    world = restored(scenario, tmp_path / scenario, postgres_server)
    before = world.visible()
    assert before["postgres"] == all_rows(2 if scenario in ("done", "committed_in_part") else 1)
    assert bool(world.staged()) == (scenario != "done")
    assert ("format",) not in world.sql("SELECT attname FROM pg_attribute WHERE attrelid = 'semel_ledger'::regclass")

    write_input(world.root / "in", BATCHES)
    world.start(spark)

    assert len(all_rows(3)) == 3 * ROWS
    assert world.visible() == dict.fromkeys(("sqlite", "files", "postgres"), all_rows(3))
    assert world.staged() == []
    # What was decided by the release before has no plan; what was only staged is decided anew.
    assert world.plans() == {0: {False}, 1: {scenario == "staged"}, 2: {True}}


def test_what_a_newer_semel_has_marked_is_refused_by_name(tmp_path: Path, postgres_server: PostgresServer) -> None:
    world = restored("done", tmp_path / "newer", postgres_server)
    pg = world.sinks[2]
    participant = pg.participant(Context(world.pipeline, "shop", Incarnation(9)))
    try:
        assert participant.recover().newest_batch == 1
        participant.fence()
        world.sql("UPDATE semel_ledger SET format = format + 1 WHERE batch = 1")
        with pytest.raises(NewerRecord) as caught:
            participant.recover()
    finally:
        participant.close()
    assert caught.value.what == f"The ledger of sink big ({pg.describe()}) has format 2; this semel reads up to 1."
