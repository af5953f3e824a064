"""One batch, several stores: kill -9 at every arrow of the protocol and of each server, with readers on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.kafka_points import IN_A_TASK
from tests.e2e.stores_game import POINTS, StoresGame

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


@pytest.mark.parametrize("point", ["batch.staged", "batch.prepared", "batch.decided", "batch.committed"])
def test_kill_a_server_between_two_steps(make_stores_game: Callable[..., StoresGame], point: str) -> None:
    """The driver is stopped, the server dies and comes back, the driver goes on as if nothing had happened."""
    game = make_stores_game(batches=4)
    child = game.start(f"{point}@2=stop")
    game.wait_until_stopped(child)
    for server in game.databases.values():
        server.kill()
        server.start()
    game.wake(child)
    game.require_good_end(game.finish(child))


def test_the_order_names_every_failpoint_that_such_a_pipeline_passes() -> None:
    assert sorted(ORDER) == sorted(POINTS)
