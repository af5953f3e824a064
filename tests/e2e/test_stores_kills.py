"""One batch, several stores: kill -9 at every arrow of the protocol and of each server, with readers on all of them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest

from semel.dev.database import DatabaseServer
from semel.dev.kafka import KafkaCluster
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.sinks.base import Context
from semel.sinks.mysql import MySql
from semel.sinks.postgres import Postgres
from tests.e2e.kafka_game import forwarded
from tests.e2e.kafka_points import IN_A_TASK, nth
from tests.e2e.stores_game import POINTS, StoresGame
from tests.e2e.ways import died_as_it_should, way
from tests.sinks.participants import started

LEDGER_COLUMNS = "pipeline, sink, batch, part, attempt, incarnation, row_count"
#: Within the patience of a pipeline, and beyond that of any client.
AWAY_S = 30.0
ORDER = (
    "batch.began",
    "task.wrote",
    "kafka.marked",
    "task.prepared",
    "batch.staged",
    "postgres.moved",
    "mysql.moved",
    "startup.claimed",
    "startup.closed",
    "batch.prepared",
    "startup.swept",
    "log.written",
    "batch.decided",
    "startup.committed",
    "kafka.committed",
    "postgres.committed",
    "mysql.committed",
    "batch.committed",
)


def test_kill_at_every_failpoint(make_stores_game: Callable[..., StoresGame]) -> None:
    game = make_stores_game(batches=2 * len(ORDER))
    for turn, point in enumerate(ORDER):
        life = game.live(f"{point}@{nth(point, turn)}", **way(turn))
        assert died_as_it_should(life, turn, in_a_task=point in IN_A_TASK), f"{point}: {life}"
        game.committed()
    game.require_good_end(game.live())


def plant(game: StoresGame, kind: str, id_: int) -> None:
    """A row of somebody else's, under an id that the stream will bring."""
    game.run(kind, "CREATE UNIQUE INDEX one_of_each_{table} ON {table} (id)")
    game.run(kind, f"INSERT INTO {{table}} (id) VALUES ({id_})")  # noqa: S608 - ours


@pytest.mark.long
def test_a_unique_violation_in_one_store_names_the_key_and_shows_nothing_of_the_batch_in_any(
    make_stores_game: Callable[..., StoresGame],
) -> None:
    """A row of the second batch, first in PostgreSQL, then in MariaDB, which prepares after it."""
    game = make_stores_game(batches=3)
    batch_rows = game.setup.rows_per_batch
    taken = batch_rows + 17
    said = {"Postgres": f"Key (id)=({taken}) already exists", "MySql": f"Duplicate entry '{taken}' for key"}
    for kind in said:
        plant(game, kind, taken)
    for kind, words in said.items():
        life = game.live()
        assert (life.returncode, words in life.error) == (1, True), life
        assert game.committed() == batch_rows
        for store in game.tables:
            assert game.run(store, "SELECT count(*) FROM {table} WHERE part IS NOT NULL") == [(batch_rows,)]
        assert game.left_behind() == []
        game.run(kind, f"DELETE FROM {{table}} WHERE id = {taken} AND part IS NULL")  # noqa: S608 - ours
    game.require_good_end(game.live())


def test_a_store_that_is_gone_after_the_decision_is_told_and_the_next_start_completes_the_batch(
    make_stores_game: Callable[..., StoresGame],
) -> None:
    game = make_stores_game(batches=3, limits={"commit_patience_s": 2, "commit_pause_s": 0.1})
    child = game.start("batch.decided@2=stop")
    game.wait_until_stopped(child)
    game.databases["MySql"].kill()
    game.wake(child)
    life = game.finish(child)
    what, now, todo = life.error.partition("CommitStalled: ")[2].splitlines()[:3]
    table = f"out_{game.setup.topics[1].replace('-', '_')}"
    assert what.startswith(f"Batch 1 is decided but could not be committed to mysql_{table}: "), life
    done = ", ".join(sorted([game.sink, f"postgres_{table}"]))
    assert now == f"  the data now: batch 1 is decided; visible in: {done}; still to commit: mysql_{table}"
    assert "start the pipeline again (python " in todo
    assert game.committed() == game.tables["Postgres"].rows().total() == 2 * game.setup.rows_per_batch
    game.databases["MySql"].start()
    assert game.tables["MySql"].rows().total() == game.setup.rows_per_batch
    life = game.require_good_end(game.live())
    assert forwarded(life) == [(1, False)]


#: Step -> the servers that die there. Together, each server dies at each step.
DEATHS: dict[str, dict[str, tuple[str, ...]]] = {
    "most": {
        "batch.staged@2": ("Postgres", "MySql"),
        "batch.prepared@4": ("MySql", "Kafka"),
        "batch.decided@6": ("Postgres", "Kafka"),
        "batch.committed@8": ("Postgres", "MySql", "Kafka"),
    },
    "rest": {"batch.staged@2": ("Kafka",), "batch.prepared@4": ("Postgres",), "batch.decided@6": ("MySql",)},
}


@pytest.mark.long
@pytest.mark.parametrize("deaths", DEATHS)
def test_servers_that_die_and_stay_away_for_half_a_minute_at_each_step_cost_time_and_nothing_else(
    make_stores_game: Callable[..., StoresGame], kafka_cluster: KafkaCluster, deaths: str
) -> None:
    """One driver, which is stopped while servers die, and goes on without them until they come back."""
    game = make_stores_game(batches=10)
    stores: dict[str, KafkaCluster | DatabaseServer] = {**game.databases, "Kafka": kafka_cluster}
    steps = {step: [stores[name] for name in names] for step, names in DEATHS[deaths].items()}
    child = game.start(",".join(f"{step}=stop" for step in steps))
    for servers in steps.values():
        game.wait_until_stopped(child)
        for server in servers:
            server.kill()
        game.wake(child)
        time.sleep(AWAY_S)
        for server in servers:
            server.start()
    life = game.require_good_end(game.finish(child))
    assert [event["batch"] for event in life.events if event.get("how") == "committed"] == list(range(10))


def test_the_look_for_leftovers_finds_each_kind_and_that_into_the_ledger_a_row_of_a_dead_incarnation(
    make_stores_game: Callable[..., StoresGame],
) -> None:
    """Otherwise it would prove nothing that the other tests find none."""
    game = make_stores_game(batches=0)
    pipeline = PipelineId(str(uuid.uuid4()))
    game.checkpoint.mkdir()
    (game.checkpoint / "metadata").write_text(json.dumps({"id": pipeline}))
    found = {}
    for kind, mode in ((Postgres, "ledger"), (Postgres, "prepared"), (MySql, "ledger"), (MySql, "xa")):
        name = kind.__name__
        sink = kind(game.databases[name].url, game.tables[name].table, mode=mode, name="left")
        with started(sink, Context(pipeline, "left", Incarnation(1))) as participant:
            writer = sink.writer(Branch(Attempt(pipeline, 0, 0, Incarnation(1)), "left", 0, 0))
            writer.write(pa.RecordBatch.from_pydict({"id": [1]}))
            writer.prepare()
            found[name, mode] = [words.partition(":")[0] for words in game.left_behind()]
            participant.abort(participant.recover().branches)
    assert found == {(name, mode): [name] for name, mode in found}
    assert (len(found), game.left_behind()) == (4, [])
    for name in game.databases:
        assert game.ledger(name) == game.decided_for(name) == []
        values = f"('{pipeline}', 'left', 0, '', 0, 1, 1)"
        game.run(name, f"INSERT INTO semel_ledger ({LEDGER_COLUMNS}) VALUES {values}")  # noqa: S608 - ours
        assert game.ledger(name) == [("left", 0, "", 0, 1, 1)] != game.decided_for(name)


def test_the_order_names_every_failpoint_that_such_a_pipeline_passes() -> None:
    assert sorted(ORDER) == sorted(POINTS)
