"""kill -9 at every arrow of the protocol, with real Spark: nothing lost, nothing doubled, the state right.

One pipeline lives through all kills in a row, so that each life both recovers from the last kill and runs into the
next. After each kill the output must be the first k batches, whole and once. Kafka pipelines have a chain of their own,
in `test_kafka_kills.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.failpoints import FAILPOINTS
from tests.e2e.game import Game
from tests.e2e.kafka_points import POINTS as KAFKA_POINTS

SINKS = ("sqlite", "files")

# At which hit to kill, so that a life commits a batch before it dies. Before the second decision, the log has written
# a probe, the claim, the closing of a slot and the first decision.
NTH = {"log.written": 5} | dict.fromkeys((p for p in FAILPOINTS if p.startswith("startup.")), 1)


def points_of(sink: str) -> list[str]:
    """The failpoints that a pipeline with this sink passes."""
    return [p for p in FAILPOINTS if p.split(".")[0] not in {*SINKS, "kafka"} - {sink}]


@pytest.mark.parametrize(
    ("sink", "shape"),
    [
        ("sqlite", "stateless"),
        pytest.param("sqlite", "stateful", marks=pytest.mark.spark35),
        ("files", "stateless"),
        ("files", "stateful"),
    ],
)
def test_kill_at_every_failpoint(make_game: Callable[..., Game], sink: str, shape: str) -> None:
    game = make_game(sink=sink, shape=shape)
    reached = []
    for point in points_of(sink):
        life = game.live(f"{point}@{NTH.get(point, 2)}")
        # A task takes only its Python worker along; Spark then fails the batch, and the driver ends with an error.
        died = "failed before it was decided" in life.error if point.startswith("task.") else life.killed
        assert died, f"{point}: {life}"
        game.committed()
        reached.append(point)
    last = game.live()
    assert last.returncode == 0, last
    assert game.committed() == game.batches
    assert game.staged() == []
    assert reached == points_of(sink)


def test_the_matrix_covers_every_failpoint() -> None:
    assert set(FAILPOINTS) == {point for sink in SINKS for point in points_of(sink)} | set(KAFKA_POINTS)
    assert {sink: len(points_of(sink)) for sink in SINKS} == {"sqlite": 14, "files": 15}
    assert len(KAFKA_POINTS) == 14
