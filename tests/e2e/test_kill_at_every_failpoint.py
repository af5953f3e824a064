"""kill -9 at every arrow of the protocol, with real Spark: nothing lost, nothing doubled, the state right.

One pipeline lives through all kills in a row, so that each life both recovers from the last kill and runs into the
next. After each kill the output must be the first k batches, whole and once. Kafka and the databases have chains of
their own, in `test_kafka_kills.py` and `test_stores_kills.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.failpoints import all_failpoints
from tests.e2e.game import Game
from tests.e2e.kafka_points import POINTS as KAFKA_POINTS
from tests.e2e.stores_game import POINTS as STORES_POINTS
from tests.e2e.ways import died_as_it_should, way

#: They share each batch, so that a kill between their commits leaves one with it and the other without.
SINKS = ("sqlite", "files")
SHARED = ("startup", "batch", "task", "log")
FAILPOINTS = all_failpoints()
POINTS = [name for name, p in FAILPOINTS.items() if name.split(".")[0] in (*SHARED, *SINKS) and not p.seldom]

# At which hit to kill, so that a life commits a batch before it dies. Before the second decision, the log has written
# a probe, the claim, the closing of a slot and the first decision.
NTH = {"log.written": 5} | dict.fromkeys((p for p in FAILPOINTS if p.startswith("startup.")), 1)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("stateless", marks=pytest.mark.long),
        pytest.param("stateful", marks=pytest.mark.spark35),
    ],
)
def test_kill_at_every_failpoint(make_game: Callable[..., Game], shape: str) -> None:
    """In turns by our local files and by Hadoop's: a checkpoint goes on whichever way it was written."""
    game = make_game(sink="both", shape=shape, batches=2 * len(POINTS))
    for turn, point in enumerate(POINTS):
        life = game.live(f"{point}@{NTH.get(point, 2)}", **way(turn), **game.in_turns())
        assert died_as_it_should(life, turn, in_a_task=point.startswith("task.")), f"{point}: {life}"
        for sink in SINKS:
            game.committed(sink)
    last = game.live()
    assert last.returncode == 0, last
    assert [game.committed(sink) for sink in SINKS] == [game.batches] * 2
    assert game.staged() == []


def test_the_chains_cover_every_failpoint() -> None:
    # These have their own kills: large batches in tests/sinks/test_sql_ahead.py, lost plans in test_forgotten_plans.py.
    seldom = {name for name, point in FAILPOINTS.items() if point.seldom}
    assert seldom == {"startup.restored", "postgres.ahead", "mysql.ahead"}
    assert set(FAILPOINTS) == {*POINTS, *KAFKA_POINTS, *STORES_POINTS, *seldom}
    assert (len(POINTS), len(KAFKA_POINTS)) == (17, 14)
