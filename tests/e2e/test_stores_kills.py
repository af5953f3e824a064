"""One batch, several stores: kill -9 at every arrow of the protocol and of each server, with readers on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from semel.dev.database import DatabaseServer
from semel.dev.kafka import KafkaCluster
from tests.e2e.kafka_points import IN_A_TASK
from tests.e2e.stores_game import POINTS, StoresGame

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
NTH = {"log.written": 5, "kafka.committed": 3} | dict.fromkeys((p for p in ORDER if p.startswith("startup.")), 1)


def test_kill_at_every_failpoint(make_stores_game: Callable[..., StoresGame]) -> None:
    game = make_stores_game(batches=2 * len(ORDER))
    for point in ORDER:
        life = game.live(f"{point}@{NTH.get(point, 2)}")
        died = "failed before it was decided" in life.error if point in IN_A_TASK else life.killed
        assert died, f"{point}: {life}"
        game.committed()
    game.require_good_end(game.live())


def test_servers_that_die_and_stay_away_for_half_a_minute_at_each_step_cost_time_and_nothing_else(
    make_stores_game: Callable[..., StoresGame], kafka_cluster: KafkaCluster
) -> None:
    """One driver, which is stopped while servers die, and goes on without them until they come back."""
    game = make_stores_game(batches=10)
    postgres, mariadb = game.databases["Postgres"], game.databases["MySql"]
    steps: dict[str, tuple[KafkaCluster | DatabaseServer, ...]] = {
        "batch.staged@2": (postgres, mariadb),
        "batch.prepared@4": (mariadb, kafka_cluster),
        "batch.decided@6": (postgres, kafka_cluster),
        "batch.committed@8": (postgres, mariadb, kafka_cluster),
    }
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


def test_the_order_names_every_failpoint_that_such_a_pipeline_passes() -> None:
    assert sorted(ORDER) == sorted(POINTS)
