"""Power cuts at every arrow of the protocol, with real Spark on a disk that forgets: lost = doubled = 0.

Checkpoint, decision log, SQLite and files lie on the disk. A life is killed at a failpoint, the disk drops what was not
synced, and the next life goes on from what is left. Each look compares all rows with the input. A cut by which nothing
was dropped shows nothing, so it does not count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import pytest

from semel.audit.compare import compare
from semel.audit.gather import gather
from semel.audit.results import Audit
from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.durable import checksum_of, sync_file, sync_folder
from semel.failpoints import all_failpoints
from semel.runtime.checkpoint import LOG_FOLDER, Checkpoint
from semel.runtime.plans import SparkPlans
from semel.verify.power.disk import PowerDisk
from semel.verify.power.forgetful import MODES, Mode
from tests.e2e.child import sinks
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


pytestmark = pytest.mark.usefixtures("class_archive")
#: What a power cut leaves behind depends on how the files were written.
AS_SPARK_COMES = pytest.mark.hadoop_files


@pytest.fixture
def games(disk: PowerDisk) -> Iterator[list[PowerGame]]:
    """No child outlives the test."""
    made: list[PowerGame] = []
    yield made
    for game in made:
        game.end()


def audited(game: PowerGame) -> Audit:
    """What `semel audit` says. The checkpoint is a local one, and no Spark is needed to read it."""
    store = FileStore(game.checkpoint)
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint.location, checkpoint.store = str(game.checkpoint), store
    checkpoint.log, checkpoint.plans = DecisionLog(FileStore(game.checkpoint / LOG_FOLDER)), SparkPlans(store)
    targets = sinks(game.setup)
    return compare(gather("killed", "exactly-once", checkpoint, [sink.among(targets) for sink in targets]))


def play(game: PowerGame, cuts: Sequence[Cut], seed: int, *, in_turns: bool = False) -> int:
    """How many of the cuts count. `in_turns` by our local files and by Hadoop's."""
    for n, (point, mode) in enumerate(cuts):
        life = game.lose_power(point, mode, seed + n, **(game.in_turns() if in_turns else {}))
        died = "failed before it was decided" in life.error if point.startswith("task.") else life.killed
        assert died, f"{point}, {mode}, seed {seed + n}: {life}"
    game.play_on()
    assert (found := audited(game)).verdict is True, found
    return sum(loss.total > 0 for loss in game.losses)


@pytest.mark.parametrize(
    ("conf", "cuts", "in_turns"),
    [
        pytest.param(HDFS_BACKED, FEW_HDFS, False, id="hdfs"),
        pytest.param(CHANGELOG, FEW_ROCKSDB, True, id="rocksdb"),
        pytest.param(HDFS_BACKED, FEW_HDFS, False, id="hdfs, as Spark comes", marks=[AS_SPARK_COMES, pytest.mark.long]),
    ],
)
def test_power_cuts_lose_and_double_nothing(
    disk: PowerDisk, games: list[PowerGame], conf: tuple[tuple[str, str], ...], cuts: Sequence[Cut], in_turns: bool
) -> None:
    games.append(power_game(disk, 2 * len(cuts), shape="stateful", conf=conf))
    assert play(games[0], cuts, seed=1, in_turns=in_turns) >= 4


@AS_SPARK_COMES
def test_power_cuts_of_the_drop_in_leave_a_query_that_can_be_started_again(
    disk: PowerDisk, games: list[PowerGame]
) -> None:
    """Spark wrote the id of the query, and never synced it: with another one the log would be somebody else's."""
    points = ("startup.claimed@1", "batch.staged@1", "batch.decided@2", "batch.committed@2")
    game = power_game(disk, 2 * len(points), drop_in=True)
    games.append(game)
    assert play(game, [(point, "all") for point in points], seed=1) == len(points)
    assert not any(path.endswith("/metadata") for loss in game.losses for path in loss.gone)


@pytest.mark.parametrize("mode", ["some", pytest.param("torn", marks=AS_SPARK_COMES)])
def test_a_power_cut_behind_a_plan_that_was_put_back(disk: PowerDisk, games: list[PowerGame], mode: Mode) -> None:
    """Somebody planned the decided batch anew, and a checksum of that plan lies beside it."""
    game = power_game(disk, 6, shape="stateful", conf=HDFS_BACKED)
    games.append(game)
    assert game.lose_power("batch.decided@2", "all", seed=1).killed
    plan = game.checkpoint / "offsets" / "1"
    decided = plan.read_bytes()
    other = decided.replace(b'{"logOffset":1}', b'{"logOffset":5}')
    assert other != decided
    plan.write_bytes(other)
    checksum = b"crc\0" + (512).to_bytes(4, "big") + zlib.crc32(other).to_bytes(4, "big")
    checksum_of(plan).write_bytes(checksum)
    for path in (plan, checksum_of(plan)):
        sync_file(path)
    sync_folder(plan.parent)
    assert game.lose_power("startup.restored@1", mode, seed=2).killed
    assert (plan.read_bytes(), checksum_of(plan).exists()) == (decided, False)
    game.play_on()
    assert audited(game).verdict is True


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "conf"),
    [
        pytest.param("stateless", (), id="stateless", marks=AS_SPARK_COMES),
        pytest.param("stateful", HDFS_BACKED, id="hdfs"),
        pytest.param("stateful", ROCKSDB, id="rocksdb"),
        pytest.param("stateful", CHANGELOG, id="changelog", marks=AS_SPARK_COMES),
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
