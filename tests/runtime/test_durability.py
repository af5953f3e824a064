"""What of a checkpoint is synced before a decision. That it survives a power cut is shown in tests/power."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import semel
from semel.decisions.files import FileStore
from semel.runtime import durability
from semel.runtime.durability import NOT_PROMISED, CheckpointSync, may_sync_whole
from semel.runtime.plans import SparkPlans


class Syncs:
    """Which paths were synced, as the kernel sees them; `broken` cannot be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: list[str] = []
        self.whole = 0
        self.broken = ""
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.broken and path.endswith(self.broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(descriptor)
        if path.startswith(str(self.root)):
            self.done.append(os.path.relpath(path, self.root))

    def taken(self) -> set[str]:
        done, self.done = set(self.done), []
        return done


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def syncs(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Syncs]:
    seen = Syncs(root)
    real = durability.sync_file_system

    def whole(descriptor: int, folder: Path) -> None:
        seen.whole += 1
        real(descriptor, folder)

    monkeypatch.setattr(os, "fsync", seen.fsync)
    monkeypatch.setattr(durability, "sync_file_system", whole)
    yield seen
    monkeypatch.undo()


def put(root: Path, *names: str) -> None:
    """As Spark does it: a temporary file that is renamed, and its checksum beside it."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for target in (path, path.with_name(f".{path.name}.crc")):
            temporary = target.with_name(f".{target.name}.0f.tmp")
            temporary.write_bytes(b"x" * 100)
            temporary.rename(target)


def batch(root: Path, n: int, partitions: int = 0, kind: str = "delta") -> None:
    put(root, f"sources/0/{n}", f"offsets/{n}", *([f"commits/{n - 1}"] if n else ["metadata"]))
    put(root, *(f"state/0/{partition}/{n + 1}.{kind}" for partition in range(partitions)))


def both(*names: str) -> set[str]:
    """A file and its checksum."""
    return {p for name in names for p in (name, os.path.join(os.path.dirname(name), f".{os.path.basename(name)}.crc"))}


@pytest.mark.parametrize("safe", [True, False])
def test_who_turns_it_off_is_told_what_is_not_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, safe: bool
) -> None:
    (tmp_path / "metadata").write_bytes(b"{}")
    function = semel.sink(semel.Sqlite(str(tmp_path / "out.db"), "out"), power_loss_safe=safe)
    plans = SparkPlans(FileStore(tmp_path))
    checkpoint: Any = SimpleNamespace(
        store=plans.checkpoint, plans=plans, keep_query_id=lambda sync: sync.keep("metadata")
    )
    spark: Any = None
    function._keep_through_power_loss(spark, checkpoint)
    assert caplog.messages == ([] if safe else [NOT_PROMISED])
    assert hasattr(plans.make_durable, "__self__") is safe


def test_the_id_of_the_query_is_durable_before_anything_is_claimed_for_it(root: Path, syncs: Syncs) -> None:
    put(root, "metadata")
    with CheckpointSync(root) as sync:
        sync.keep("metadata")
        assert syncs.taken() == {"metadata", "."}
        syncs.broken = "metadata"
        with pytest.raises(OSError, match="metadata cannot be made durable"):
            sync.keep("metadata")


def test_a_batch_syncs_its_files_and_the_folders_of_their_names(root: Path, syncs: Syncs) -> None:
    batch(root, 0, partitions=1)
    with CheckpointSync(root, "fsync") as sync:
        sync.settle(0)
        files = both("metadata", "offsets/0", "sources/0/0", "state/0/0/1.delta")
        folders = {".", "offsets", "sources", "sources/0", "state", "state/0", "state/0/0"}
        assert syncs.taken() == files | folders
        batch(root, 1, partitions=1)
        sync.settle(1)
        # The state that batch 0 left is near enough to be synced again.
        files = both("offsets/1", "commits/0", "sources/0/1", "state/0/0/1.delta", "state/0/0/2.delta")
        assert syncs.taken() == files | {".", "offsets", "commits", "sources/0", "state/0/0"}
    assert syncs.whole == 0


def test_what_is_old_is_synced_once(root: Path, syncs: Syncs) -> None:
    with CheckpointSync(root, "fsync") as sync:
        for n in range(6):
            batch(root, n)
        sync.settle(5)
        assert both("offsets/0", "commits/1") <= syncs.taken()
        batch(root, 6)
        sync.settle(6)
        assert not both("offsets/0", "offsets/4", "commits/1", "metadata") & syncs.taken()


def test_a_snapshot_that_maintenance_wrote_late_is_synced_too(root: Path, syncs: Syncs) -> None:
    with CheckpointSync(root, "fsync") as sync:
        batch(root, 9, partitions=1)
        sync.settle(9)
        syncs.taken()
        put(root, "state/0/0/3.snapshot", "state/0/0/SSTs/000008-a.sst")
        batch(root, 10, partitions=1)
        sync.settle(10)
        wanted = both("state/0/0/3.snapshot", "state/0/0/SSTs/000008-a.sst") | {"state/0/0", "state/0/0/SSTs"}
        assert wanted <= syncs.taken()


def test_a_file_that_was_written_anew_is_synced_again(root: Path, syncs: Syncs) -> None:
    with CheckpointSync(root, "fsync") as sync:
        batch(root, 9)
        put(root, "state/0/0/5.zip")
        sync.settle(9)
        syncs.taken()
        put(root, "state/0/0/5.zip")
        sync.settle(9)
        assert both("state/0/0/5.zip") <= syncs.taken()


def test_unfinished_files_and_our_own_log_are_left_alone(root: Path, syncs: Syncs) -> None:
    batch(root, 0)
    (root / "semel" / "decisions").mkdir(parents=True)
    (root / "semel" / "decisions" / "1.json").write_bytes(b"{}")
    (root / "offsets" / ".1.7f.tmp").write_bytes(b"half")
    with CheckpointSync(root, "fsync") as sync:
        sync.settle(0)
    assert not [path for path in syncs.taken() if path.startswith("semel") or path.endswith(".tmp")]


@pytest.mark.parametrize("broken", ["offsets/1", "commits/.0.crc", "state/0/0/2.delta", "sources/0"])
def test_what_cannot_be_synced_is_an_error_that_names_it(root: Path, syncs: Syncs, broken: str) -> None:
    batch(root, 0, partitions=1)
    with CheckpointSync(root, "fsync") as sync:
        sync.settle(0)
        batch(root, 1, partitions=1)
        syncs.broken = broken
        with pytest.raises(OSError, match=f"{broken} cannot be made durable"):
            sync.settle(1)
        # It was not synced, so the next try has to do all of it again.
        syncs.broken = ""
        syncs.taken()
        sync.settle(1)
        assert both("offsets/1", "commits/0", "state/0/0/2.delta") <= syncs.taken()


@pytest.mark.parametrize("how", durability.HOWS)
def test_a_batch_that_spark_has_not_planned_is_an_error(root: Path, syncs: Syncs, how: durability.How) -> None:
    batch(root, 0)
    with CheckpointSync(root, how) as sync, pytest.raises(OSError, match="offsets/1 is not there"):
        sync.settle(1)


def test_syncfs_syncs_the_whole_file_system_and_no_single_file(root: Path, syncs: Syncs) -> None:
    batch(root, 0, partitions=2)
    with CheckpointSync(root, "syncfs") as sync:
        sync.settle(0)
        assert (syncs.taken(), syncs.whole) == (set(), 1)


def test_auto_takes_syncfs_for_many_partitions_only(root: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "may_sync_whole", lambda _: True)
    batch(root, 0, partitions=1)
    with CheckpointSync(root) as sync:
        sync.settle(0)
        assert syncs.whole == 0
        assert both("state/0/0/1.delta") <= syncs.taken()
        batch(root, 1, partitions=durability.FOLDERS_MAX)
        sync.settle(1)
        assert (syncs.taken(), syncs.whole) == (set(), 1)


def test_auto_syncs_each_file_where_syncfs_is_not_to_be_trusted(
    root: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "may_sync_whole", lambda _: False)
    batch(root, 0, partitions=durability.FOLDERS_MAX)
    with CheckpointSync(root) as sync:
        sync.settle(0)
    assert syncs.whole == 0
    assert both(*(f"state/0/{n}/1.delta" for n in range(durability.FOLDERS_MAX))) <= syncs.taken()


def test_an_old_checkpoint_is_synced_in_one_call(root: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "may_sync_whole", lambda _: True)
    for n in range(50):
        batch(root, n)
    with CheckpointSync(root) as sync:
        sync.settle(49)
        assert syncs.whole == 1
        batch(root, 50)
        sync.settle(50)
        assert syncs.whole == 1
        assert both("offsets/50", "commits/49") <= syncs.taken()


def test_another_disk_below_the_checkpoint_is_synced_too(
    root: Path, syncs: Syncs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(root, 0)
    elsewhere = Path("/dev/shm")  # noqa: S108  a second file system
    if os.stat(elsewhere).st_dev == os.stat(root).st_dev:
        pytest.skip("there is no second file system here")
    (root / "state").symlink_to(elsewhere)
    with CheckpointSync(root, "syncfs") as sync:
        sync.settle(0)
    assert syncs.whole == 2


def test_old_kernels_do_not_tell_errors_of_syncfs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(durability, "_kernel", lambda: (5, 7))
    assert not may_sync_whole(root)


def test_a_file_system_that_nobody_vouches_for_is_not_synced_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(durability, "SYNCED_WHOLE", frozenset())
    assert not may_sync_whole(root)


@pytest.fixture
def lost_and_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What mkfs.ext4 makes in the root of each volume. Root may list it, and tests may run as root."""
    batch(root, 0)
    (root / "lost+found").mkdir(mode=0o700)
    real = os.scandir

    def scandir(folder: str | Path) -> Any:
        if Path(folder).name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    return root / "lost+found"


@pytest.mark.parametrize("how", durability.HOWS)
def test_a_checkpoint_may_be_the_root_of_a_volume(
    root: Path, syncs: Syncs, lost_and_found: Path, monkeypatch: pytest.MonkeyPatch, how: durability.How
) -> None:
    monkeypatch.setattr(durability, "is_ours", lambda folder: folder != str(lost_and_found))
    with CheckpointSync(root, how) as sync:
        sync.settle(0)
    assert how == "syncfs" or both("offsets/0", "sources/0/0") <= syncs.taken()


def test_a_folder_of_ours_that_cannot_be_listed_is_an_error(root: Path, syncs: Syncs, lost_and_found: Path) -> None:
    with CheckpointSync(root, "fsync") as sync, pytest.raises(PermissionError, match=r"lost\+found"):
        sync.settle(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a folder that is another's")
def test_a_user_who_is_not_root_gets_by_lost_and_found(root: Path, tmp_path: Path) -> None:
    batch(root, 0)
    (root / "lost+found").mkdir(mode=0o700)
    for path in (root, *root.rglob("*")):
        if path.name != "lost+found":
            os.chown(path, 65534, 65534)
    pid = os.fork()
    if pid == 0:
        try:
            # The folders of pytest above are root's alone, so that the path must be a relative one.
            os.chdir(root)
            os.setuid(65534)
            sync = CheckpointSync(Path("/proc/self/cwd"), "fsync")
            sync.root = Path()
            sync.settle(0)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_tree_without_end_is_refused(root: Path, syncs: Syncs) -> None:
    batch(root, 0)
    (root / "state").mkdir()
    (root / "state" / "again").symlink_to(root / "state")
    with CheckpointSync(root, "fsync") as sync, pytest.raises(OSError, match="no checkpoint of Spark"):
        sync.settle(0)
