"""Power cuts at every arrow of the protocol, with real Spark on a disk that forgets: lost = doubled = 0.

Checkpoint, decision log, SQLite and files lie on the disk. A life is killed at a failpoint, the disk drops what was not
synced, and the next life goes on from what is left. Each look compares all rows with the input. A cut by which nothing
was dropped shows nothing, so it does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from semel.failpoints import all_failpoints
from semel.verify.power.disk import PowerDisk
from semel.verify.power.forgetful import MODES, Mode
from tests.e2e.test_kill_at_every_failpoint import NTH, POINTS
from tests.power.power_game import CHANGELOG, HDFS_BACKED, ROCKSDB, PowerGame, power_game

Cut = tuple[str, Mode]

#: Where most is unsynced, and where a decision rests on what must not be.
FEW_HDFS: tuple[Cut, ...] = (
    ("batch.began@2", "torn"),
    ("batch.staged@2", "all"),
    ("batch.decided@2", "all"),
    ("batch.committed@2", "some"),
    ("files.half_renamed@2", "some"),
)
FEW_ROCKSDB: tuple[Cut, ...] = (
    ("batch.began@2", "all"),
    ("batch.staged@2", "torn"),
    ("batch.decided@2", "torn"),
    ("batch.committed@2", "all"),
    ("files.renamed@2", "all"),
)


#: What a power cut leaves behind depends on how the files were written.
pytestmark = [pytest.mark.hadoop_files, pytest.mark.usefixtures("class_archive")]


@pytest.fixture
def games(disk: PowerDisk) -> Iterator[list[PowerGame]]:
    """No child outlives the test."""
    made: list[PowerGame] = []
    yield made
    for game in made:
        game.end()


def play(game: PowerGame, cuts: Sequence[Cut], seed: int) -> int:
    """How many of the cuts count."""
    for n, (point, mode) in enumerate(cuts):
        life = game.lose_power(point, mode, seed + n)
        died = "failed before it was decided" in life.error if point.startswith("task.") else life.killed
        assert died, f"{point}, {mode}, seed {seed + n}: {life}"
    game.play_on()
    return sum(loss.total > 0 for loss in game.losses)


@pytest.mark.parametrize(
    ("conf", "cuts"),
    [pytest.param(HDFS_BACKED, FEW_HDFS, id="hdfs"), pytest.param(CHANGELOG, FEW_ROCKSDB, id="rocksdb")],
)
def test_power_cuts_lose_and_double_nothing(
    disk: PowerDisk, games: list[PowerGame], conf: tuple[tuple[str, str], ...], cuts: Sequence[Cut]
) -> None:
    games.append(power_game(disk, 2 * len(cuts), shape="stateful", conf=conf))
    assert play(games[0], cuts, seed=1) >= 4


def test_power_cuts_of_the_drop_in_leave_a_query_that_can_be_started_again(
    disk: PowerDisk, games: list[PowerGame]
) -> None:
    """Spark wrote the id of the query, and never synced it: with another one the log would be somebody else's."""
    points = ("startup.claimed@1", "batch.staged@1", "batch.decided@2", "batch.committed@2")
    game = power_game(disk, 2 * len(points), drop_in=True)
    games.append(game)
    assert play(game, [(point, "all") for point in points], seed=1) == len(points)
    assert not any(path.endswith("/metadata") for loss in game.losses for path in loss.gone)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "conf"),
    [
        pytest.param("stateless", (), id="stateless"),
        pytest.param("stateful", HDFS_BACKED, id="hdfs"),
        pytest.param("stateful", ROCKSDB, id="rocksdb"),
        pytest.param("stateful", CHANGELOG, id="changelog"),
    ],
)
def test_power_cuts_at_every_failpoint(
    disk: PowerDisk, games: list[PowerGame], shape: str, conf: tuple[tuple[str, str], ...], mode: Mode
) -> None:
    """Twelve chains of 17 cuts, of which 10 count at least in each: after a start there may be nothing to lose."""
    game = power_game(disk, 3 * len(POINTS), shape=shape, conf=conf)
    games.append(game)
    cuts = [(f"{point}@{NTH.get(point, 2)}", mode) for point in POINTS]
    assert play(game, cuts, seed=100) >= 10


def test_the_chain_covers_every_point_that_these_sinks_pass() -> None:
    assert {point.split("@")[0] for point, _ in (*FEW_HDFS, *FEW_ROCKSDB)} <= set(POINTS) <= set(all_failpoints())
    assert len(POINTS) == 17


# The test of the test -------------------------------------------------------------------------------------------------


def test_without_the_syncs_a_power_cut_is_found_out(disk: PowerDisk, games: list[PowerGame]) -> None:
    """The state of a decided batch is gone: whoever goes on counts wrong, or cannot go on."""
    game = power_game(disk, 6, shape="stateful", conf=HDFS_BACKED, power_loss_safe=False)
    games.append(game)
    with pytest.raises(AssertionError) as found:
        play(game, [("batch.decided@2", "all")], seed=1)
    # The checkpoint is older than the sinks; were only its plans put back, Spark would miss its state.
    assert "CheckpointRolledBack" in str(found.value) or ".delta" in str(found.value)
    lost = {path for loss in game.losses for path in loss.gone}
    assert "/game/checkpoint/offsets/1" in lost
    assert "/game/checkpoint/state/0/0/2.delta" in lost
