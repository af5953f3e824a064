"""Checkpoint and decision log on a real HDFS, killed."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.game import Game

POINTS = ("startup.claimed@1", "batch.prepared@2", "log.written@5", "batch.decided@2", "batch.committed@2")


def test_kills_with_the_checkpoint_on_hdfs(make_game: Callable[..., Game], hdfs_uri: str) -> None:
    game = make_game(batches=8, shape="stateful", checkpoint=f"{hdfs_uri}/checkpoints/killed")
    for point in POINTS:
        life = game.live(point)
        assert life.killed, f"{point}: {life}"
        game.committed()
    last = game.live()
    assert last.returncode == 0, last
    assert game.committed() == game.batches
    assert game.staged() == []
    assert not game.checkpoint.exists()
