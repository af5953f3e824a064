"""Checkpoint and decision log on a real HDFS, killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from semel.decisions.stores import open_store
from tests.e2e.game import Game

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: HDFS is told apart by the claim, by a record that is written and not yet named, and by the state behind a decision.
FEW = ("startup.claimed@1", "log.written@5", "batch.decided@2")
ALL = (*FEW, "batch.prepared@2", "batch.committed@2")


@pytest.mark.parametrize("points", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.long)])
def test_kills_with_the_checkpoint_on_hdfs(
    make_game: Callable[..., Game], hdfs_uri: str, points: tuple[str, ...]
) -> None:
    game = make_game(batches=8, shape="stateful", checkpoint=f"{hdfs_uri}/checkpoints/{len(points)}")
    for point in points:
        life = game.live(point)
        assert life.killed, f"{point}: {life}"
        game.committed()
    last = game.live()
    assert last.returncode == 0, last
    assert game.committed() == game.batches
    assert game.staged() == []
    assert not game.checkpoint.exists()


def test_a_plan_that_hdfs_has_lost_is_put_back(
    make_game: Callable[..., Game], hdfs_uri: str, spark: SparkSession
) -> None:
    game = make_game(batches=4, checkpoint=f"{hdfs_uri}/checkpoints/forgotten")
    assert game.live("batch.decided@2").killed
    store = open_store(spark, game.setup.checkpoint)
    lost = ("offsets/1", "sources/0/1", "commits/0")
    decided = {path: store.read(path) for path in lost}
    assert None not in decided.values()
    for path in lost:
        store.delete(path)
    assert game.live("startup.restored@3").killed
    assert {path: store.read(path) for path in lost} == decided
    life = game.live()
    assert life.returncode == 0, life
    assert life.batches("forwarded") == [1]
    assert game.committed() == game.batches
