"""What a power cut tore is dropped where nothing rests on it, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel.durable import checksum_of
from semel.runtime import torn
from semel.runtime.torn import drop_torn, drop_undecided_state, is_whole

COMMIT = b'v1\n{"nextBatchWatermarkMs":1767225619000}'
#: What Spark 4.0.5 wrote beside it.
COMMIT_CRC = bytes.fromhex("63726300000002004ed39072")
PLAN = b'v1\n{"batchWatermarkMs":0}\n{"logOffset":%d}'
ENTRY = b'v1\n{"path":"file:///in/%d.json","timestamp":1,"batchId":%d}'
KAFKA_START = b'\x00v1\n{"in":{"0":0}}'


def put(path: Path, content: bytes, kept: int | None = None, *, checksum: bool = True) -> Path:
    """A file as Spark writes it, of which only the first bytes reached the disk if `kept` says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if kept is None else content[:kept])
    if checksum:
        pieces = [content[n : n + 512] for n in range(0, len(content), 512)]
        sums = b"".join(zlib.crc32(piece).to_bytes(4, "big") for piece in pieces)
        checksum_of(path).write_bytes(b"crc\0" + (512).to_bytes(4, "big") + sums)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Batches 0 to 2 are over, batch 3 is planned."""
    for n in range(4):
        put(tmp_path / "offsets" / str(n), PLAN % n)
        put(tmp_path / "sources" / "0" / str(n), ENTRY % (n, n))
    for n in range(3):
        put(tmp_path / "commits" / str(n), COMMIT)
    put(tmp_path / "sources" / "1" / "0", KAFKA_START)
    return tmp_path


def below(*batches: int) -> Callable[[int], bool]:
    return lambda batch: batch in batches


def test_spark_writes_checksums_as_we_read_them(tmp_path: Path) -> None:
    path = put(tmp_path / "commits" / "1", COMMIT)
    assert checksum_of(path).read_bytes() == COMMIT_CRC
    assert is_whole(path)


def test_of_a_whole_checkpoint_nothing_is_dropped(root: Path) -> None:
    before = sorted(root.rglob("*"))
    assert drop_torn(root, below(0, 1, 2)) == []
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("kept", [0, 2, 10])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_torn_plan_that_is_not_decided_is_dropped_with_its_checksum(root: Path, kept: int, checksum: bool) -> None:
    checksum_of(root / "offsets" / "3").unlink()
    path = put(root / "offsets" / "3", PLAN % 3, kept, checksum=checksum)
    assert drop_torn(root, below(0, 1, 2)) == ["offsets/3"]
    assert not path.exists()
    assert not checksum_of(path).exists()


def test_zeros_are_torn(root: Path) -> None:
    (root / "offsets" / "3").write_bytes(bytes(4096))
    checksum_of(root / "offsets" / "3").unlink()
    assert drop_torn(root, below(0, 1, 2)) == ["offsets/3"]


def test_a_torn_plan_that_is_decided_is_left(root: Path) -> None:
    put(root / "offsets" / "3", PLAN % 3, 0)
    assert drop_torn(root, below(0, 1, 2, 3)) == []
    assert (root / "offsets" / "3").exists()


def test_a_plan_goes_with_a_torn_or_missing_entry_of_its_source(root: Path) -> None:
    put(root / "sources" / "0" / "3", ENTRY % (3, 3), 20)
    assert drop_torn(root, below(0, 1, 2)) == ["sources/0/3", "offsets/3"]
    put(root / "offsets" / "3", PLAN % 3)
    assert drop_torn(root, below(0, 1, 2)) == ["offsets/3"]


def test_an_entry_that_was_compacted_is_not_missing(root: Path) -> None:
    (root / "sources" / "0" / "3").rename(root / "sources" / "0" / "3.compact")
    assert drop_torn(root, below(0, 1, 2)) == []


def test_lists_have_numbers_of_their_own(root: Path) -> None:
    """A batch without new files has no list: the torn one of an undecided batch has the number of a decided one."""
    for n in (1, 2):
        put(root / "offsets" / str(n), PLAN % 0)
        (root / "sources" / "0" / str(n + 1)).unlink()
    put(root / "offsets" / "3", PLAN % 1)
    put(root / "sources" / "0" / "1", ENTRY % (1, 1), 10)
    assert drop_torn(root, below(0, 1, 2)) == ["sources/0/1", "offsets/3"]


def test_a_list_behind_a_missing_one_is_of_no_use(root: Path) -> None:
    """Two attempts at batch 3 made lists 3 and 4, and the name of list 3 is lost: Spark would stop there."""
    put(root / "offsets" / "3", PLAN % 4)
    put(root / "sources" / "0" / "4", ENTRY % (4, 4))
    assert drop_torn(root, below(0, 1, 2)) == []
    (root / "sources" / "0" / "3").unlink()
    assert drop_torn(root, below(0, 1, 2)) == ["sources/0/4", "offsets/3"]


def test_lists_that_only_the_log_knows_as_decided_are_left(root: Path) -> None:
    """A copy whose offsets are older than its sources: the decisions put back what is missing between them."""
    (root / "offsets" / "3").unlink()
    put(root / "sources" / "0" / "5", ENTRY % (5, 5))
    assert drop_torn(root, below(0, 1, 2, 3)) == []


def test_plans_of_another_guarantee_are_left(root: Path) -> None:
    """Their batches are done, although no decision knows them. Spark reads the last two, and cleans old lists."""
    for n in (0, 1):
        (root / "sources" / "0" / str(n)).unlink()
    put(root / "offsets" / "1", PLAN % 1, 5)
    put(root / "commits" / "3", COMMIT)
    assert drop_torn(root, below()) == []


def test_behind_a_torn_plan_that_is_done_nothing_is_dropped(root: Path) -> None:
    """Plain Spark wrote it, and its old lists are cleaned: which of the others are done cannot be read any more."""
    put(root / "offsets" / "2", PLAN % 2, 5)
    (root / "sources" / "0" / "0").unlink()
    assert drop_torn(root, below()) == []


def test_a_plan_without_the_one_before_it_is_left(root: Path) -> None:
    """Spark stops there. Without any plan it would begin with batch 0 again."""
    for n in range(3):
        (root / "offsets" / str(n)).unlink()
    put(root / "offsets" / "3", PLAN % 3, 5)
    assert drop_torn(root, below()) == []


def test_the_first_plan_of_kafka_goes_when_it_is_not_known_where_the_source_began(tmp_path: Path) -> None:
    """Spark would ask again where to begin, and might go on from the newest record."""
    put(tmp_path / "offsets" / "0", b'v1\n{"batchWatermarkMs":0}\n{"logOffset":{"0":5}}')
    assert drop_torn(tmp_path, below(0)) == []
    assert drop_torn(tmp_path, below()) == ["offsets/0"]


def test_the_first_plan_goes_with_a_torn_file_that_its_source_keeps_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As Iceberg's: it would not read it, or begin elsewhere. Behind the first batch nobody reads it any more."""
    iceberg = b'v1\n{}\n{"version":1,"snapshot_id":5,"position":0}'
    put(tmp_path / "offsets" / "0", iceberg)
    beginning = put(tmp_path / "sources" / "0" / "offsets" / "0", b'{"version":1,"snapshot_id":4,"position":0}')
    assert drop_torn(tmp_path, below()) == []
    beginning.write_bytes(b"")
    assert drop_torn(tmp_path, below(0)) == []
    assert drop_torn(tmp_path, below()) == ["sources/0/offsets/0", "offsets/0"]


@pytest.mark.parametrize("planned", [True, False])
def test_before_anything_is_planned_a_list_behind_a_missing_one_is_of_no_use_either(
    tmp_path: Path, planned: bool
) -> None:
    """The name of list 0 is lost, and Spark would stop there. That it is a source of files its entries say."""
    put(tmp_path / "sources" / "0" / "1", ENTRY % (1, 1))
    if planned:
        put(tmp_path / "offsets" / "0", PLAN % 1)
    assert drop_torn(tmp_path, below()) == ["sources/0/1", *(["offsets/0"] if planned else [])]


def test_what_kafka_keeps_before_anything_is_planned_stays(tmp_path: Path) -> None:
    put(tmp_path / "sources" / "0" / "0", KAFKA_START)
    put(tmp_path / "sources" / "1" / "7", b"v1\n17")
    assert drop_torn(tmp_path, below()) == []


def test_a_source_that_keeps_nothing_lacks_nothing(tmp_path: Path) -> None:
    put(tmp_path / "offsets" / "0", b'v1\n{"batchWatermarkMs":0}\n17')
    assert drop_torn(tmp_path, below()) == []


def test_the_start_of_a_kafka_source_is_dropped_only_with_the_first_plan(tmp_path: Path) -> None:
    put(tmp_path / "offsets" / "0", b'v1\n{"batchWatermarkMs":0}\n{"in":{"0":5}}')
    put(tmp_path / "sources" / "0" / "0", KAFKA_START)
    assert drop_torn(tmp_path, below()) == []
    put(tmp_path / "sources" / "0" / "0", KAFKA_START, 7)
    assert drop_torn(tmp_path, below()) == ["sources/0/0", "offsets/0"]


def test_a_torn_commit_is_dropped_even_of_a_decided_batch(root: Path) -> None:
    put(root / "commits" / "2", COMMIT, 0)
    assert drop_torn(root, below(0, 1, 2)) == ["commits/2"]


def test_folders_of_the_system_are_not_looked_into(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sources` and `state` may be volumes of their own, with a lost+found that root alone may list."""
    for name in ("sources", "state"):
        (root / name / "lost+found").mkdir(parents=True)
    real = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert drop_torn(root, below(0, 1, 2)) == []
    assert drop_undecided_state(root, 3, may_be_in_use=False) == 0


def test_a_torn_checksum_alone_is_no_harm(root: Path) -> None:
    checksum_of(root / "offsets" / "3").write_bytes(b"crc")
    assert drop_torn(root, below(0, 1, 2)) == []


# State ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(root: Path) -> Path:
    for version in range(1, 5):
        put(root / "state" / "0" / "0" / f"{version}.delta", b"delta" * 100)
    put(root / "state" / "0" / "0" / "2.snapshot", b"snapshot" * 1000)
    return root / "state" / "0" / "0"


def test_a_torn_snapshot_whose_delta_is_there_is_dropped(root: Path, store: Path) -> None:
    put(store / "4.snapshot", b"snapshot" * 1000, 4096)
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/4.snapshot"]


def test_torn_snapshots_are_dropped_down_to_the_first_whole_one(root: Path, store: Path) -> None:
    for version in (3, 4):
        put(store / f"{version}.snapshot", b"snapshot" * 1000, 0)
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/4.snapshot", "state/0/0/3.snapshot"]


def test_a_torn_snapshot_without_its_delta_is_left(root: Path, store: Path) -> None:
    put(store / "9.snapshot", b"snapshot" * 1000, 0)
    assert drop_torn(root, below(0, 1, 2)) == []


def record(root: Path, name: str, at_s: float) -> None:
    path = root / "semel" / "decisions" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{}")
    os.utime(path, (at_s, at_s))


BEGAN_S = 1_700_000_000


@pytest.fixture
def unsynced(root: Path, store: Path) -> Path:
    """Batch 2 was planned at `BEGAN_S` and decided 100 s later; what is torn was written 50 s after it was planned."""
    record(root, "0000000001.0.json", BEGAN_S - 900)
    record(root, "0000000002.0.json", BEGAN_S + 100)
    os.utime(root / "offsets" / "2", (BEGAN_S, BEGAN_S))
    path = put(store / "3.snapshot", b"snapshot" * 1000, 4096)
    os.utime(path, (BEGAN_S + 50, BEGAN_S + 50))
    return path


def test_snapshots_from_before_the_last_decided_plan_are_not_read(root: Path, unsynced: Path) -> None:
    """They were synced with its decision, and may be large."""
    os.utime(unsynced, (BEGAN_S - 10, BEGAN_S - 10))
    assert drop_torn(root, below(0, 1, 2)) == []


def test_a_snapshot_that_was_written_while_its_batch_was_being_synced_is_read(root: Path, unsynced: Path) -> None:
    """It is older than the decision, and the sync may have passed by before."""
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/3.snapshot"]


@pytest.mark.parametrize("name", ["0000000002.1.json", "0000000003.0.json"])
def test_that_a_slot_was_closed_says_nothing_of_what_is_synced(root: Path, unsynced: Path, name: str) -> None:
    """A start closed it, and synced nothing. Behind the decision: a snapshot, kill -9, a start, a power cut."""
    os.utime(unsynced, (BEGAN_S + 150, BEGAN_S + 150))
    record(root, name, BEGAN_S + 900)
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/3.snapshot"]


def test_a_plan_that_was_put_back_after_its_decision_says_nothing_of_what_was_synced_before(
    root: Path, unsynced: Path
) -> None:
    os.utime(unsynced, (BEGAN_S + 150, BEGAN_S + 150))
    os.utime(root / "offsets" / "2", (BEGAN_S + 900, BEGAN_S + 900))
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/3.snapshot"]


def test_without_the_plan_of_the_last_decision_all_newest_snapshots_are_read(root: Path, unsynced: Path) -> None:
    os.utime(unsynced, (BEGAN_S - 10, BEGAN_S - 10))
    (root / "offsets" / "2").unlink()
    assert "state/0/0/3.snapshot" in drop_torn(root, below(0, 1, 2))


def test_a_batch_under_way_is_not_torn_and_not_decided_either(root: Path, unsynced: Path) -> None:
    """Spark has read its plan. A slot of it was closed later than the snapshot, which says nothing of that."""
    record(root, "0000000003.0.json", BEGAN_S + 900)
    os.utime(root / "offsets" / "3", (BEGAN_S + 900, BEGAN_S + 900))
    put(root / "offsets" / "3", PLAN % 3, 10)
    assert drop_torn(root, below(0, 1, 2), under_way=3) == ["state/0/0/3.snapshot"]


def rocksdb(store: Path, version: int) -> Path:
    """A snapshot as the RocksDB provider of Spark 4.0.5 has it."""
    put(store / "SSTs" / "000008-a.sst", b"rows" * 500)
    put(store / f"{version}.changelog", b"changes")
    described = {"sstFiles": [{"localFileName": "000008.sst", "dfsSstFileName": "000008-a.sst", "sizeBytes": 2000}]}
    with zipfile.ZipFile(store / "made", "w") as archive:
        archive.writestr("metadata", "v1\n" + json.dumps(described))
    path = put(store / f"{version}.zip", (store / "made").read_bytes())
    (store / "made").unlink()
    return path


@pytest.mark.parametrize("broken", ["nothing", "zip", "short", "missing", "changed"])
def test_a_snapshot_of_rocksdb_is_as_whole_as_its_files(root: Path, broken: str) -> None:
    store = root / "state" / "0" / "0"
    path = rocksdb(store, 3)
    if broken == "zip":
        path.write_bytes(path.read_bytes()[:50])
        checksum_of(path).unlink()
    elif broken == "short":
        put(store / "SSTs" / "000008-a.sst", b"rows" * 500, 1000)
    elif broken == "missing":
        (store / "SSTs" / "000008-a.sst").unlink()
    elif broken == "changed":
        (store / "SSTs" / "000008-a.sst").write_bytes(bytes(1000) + b"rows" * 250)
    assert drop_torn(root, below(0, 1, 2)) == ([] if broken == "nothing" else ["state/0/0/3.zip"])


def test_the_only_copy_of_a_version_is_left(root: Path) -> None:
    path = rocksdb(root / "state" / "0" / "0", 3)
    path.with_name("3.changelog").unlink()
    path.write_bytes(b"")
    assert drop_torn(root, below(0, 1, 2)) == []


def test_stores_with_a_name_are_looked_at(root: Path) -> None:
    store = root / "state" / "0" / "0" / "left-keyToNumValues"
    put(store / "4.delta", b"delta")
    put(store / "4.snapshot", b"snapshot", 0)
    assert drop_torn(root, below(0, 1, 2)) == ["state/0/0/left-keyToNumValues/4.snapshot"]


# State of a batch that is not decided ---------------------------------------------------------------------------------


def state_of(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.is_file())


@pytest.mark.parametrize("kept", [None, 4096, 0])
@pytest.mark.parametrize("with_delta", [True, False])
def test_a_snapshot_of_a_batch_that_runs_again_goes_whole_or_torn(
    root: Path, kept: int | None, with_delta: bool
) -> None:
    """Spark rewrites the delta alone, and from then on would read the rows of the dropped plan from the snapshot."""
    store = root / "state" / "0" / "0"
    put(store / "3.delta", b"delta")
    before = state_of(store)
    if with_delta:
        put(store / "4.delta", b"of a plan that is gone")
    put(store / "4.snapshot", b"snapshot" * 1000, kept)
    assert drop_undecided_state(root, 3, may_be_in_use=False) == 2 + 2 * with_delta
    assert state_of(store) == before


@pytest.mark.parametrize("with_changelog", [True, False])
@pytest.mark.parametrize("name", ["4", "4_f1d5a1fe-0f2c-4a43-9e3a-2c4f5a7c1f10"])
def test_of_rocksdb_too(root: Path, with_changelog: bool, name: str) -> None:
    store = root / "state" / "0" / "0"
    rocksdb(store, 3)
    before = state_of(store)
    made = rocksdb(store, 4)
    for suffix in ("zip", *(["changelog"] if with_changelog else [])):
        put(store / f"{name}.{suffix}", made.read_bytes())
    if name != "4":
        for suffix in ("zip", "changelog"):
            (store / f"4.{suffix}").unlink()
            checksum_of(store / f"4.{suffix}").unlink()
    elif not with_changelog:
        (store / "4.changelog").unlink()
    assert drop_undecided_state(root, 3, may_be_in_use=False) >= 2
    assert state_of(store) == before
    assert (store / "SSTs" / "000008-a.sst").exists()


def test_a_checksum_whose_state_is_gone_goes_too(root: Path) -> None:
    """Hadoop renames a file together with its checksum, and stops at one that is there."""
    crc = checksum_of(put(root / "state" / "0" / "0" / "4.delta", b"delta"))
    (root / "state" / "0" / "0" / "4.delta").unlink()
    assert drop_undecided_state(root, 3, may_be_in_use=False) == 1
    assert not crc.exists()


def test_state_of_every_store_goes_and_what_spark_knows_of_them_stays(root: Path, store: Path) -> None:
    join = root / "state" / "1" / "7" / "left-keyToNumValues"
    put(join / "4.delta", b"delta")
    described = [
        put(root / "state" / "0" / "_metadata" / "metadata", b"v1"),
        put(store / "_metadata" / "schema", b"v1"),
    ]
    (root / "state" / "lost+found").mkdir()
    assert drop_undecided_state(root, 3, may_be_in_use=False) == 4
    assert (state_of(join), [path.exists() for path in described]) == ([], [True, True])
    assert "3.delta" in state_of(store)


def test_before_anything_is_decided_no_state_rests_on_a_decision(root: Path, store: Path) -> None:
    drop_undecided_state(root, 0, may_be_in_use=False)
    assert state_of(store) == []


def test_of_a_batch_under_way_goes_only_what_stands_there_twice(root: Path, store: Path) -> None:
    """Somebody may have counted its rows before we were given them: then Spark has written its state already."""
    put(store / "4.snapshot", b"of a plan that is gone" * 100)
    other = root / "state" / "1" / "0"
    rocksdb(other, 4)
    only = root / "state" / "2" / "0"
    rocksdb(only, 4).with_name("4.changelog").unlink()
    assert drop_undecided_state(root, 3, may_be_in_use=True) == 4
    assert {"4.delta", "2.snapshot"} <= set(state_of(store))
    assert "4.snapshot" not in state_of(store)
    assert "4.changelog" in state_of(other)
    assert "4.zip" not in state_of(other)
    assert "4.zip" in state_of(only)


def test_what_was_dropped_is_dropped_on_the_disk_too(root: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(torn, "sync_folder", lambda folder: synced.append(str(folder)))
    drop_undecided_state(root, 4, may_be_in_use=False)
    assert synced == []
    drop_undecided_state(root, 3, may_be_in_use=False)
    assert synced == [str(store)]
