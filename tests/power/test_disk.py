"""The disk that forgets: what is synced stays, what is not goes, and nothing in between is kinder than POSIX."""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from semel.durable import create_file, sync_file, sync_folder
from semel.verify.power.disk import PowerDisk
from semel.verify.power.forgetful import PAGE_BYTES, Loss, Mode


def cut(disk: PowerDisk, mode: Mode = "all", seed: int = 0) -> Loss:
    loss = disk.cut_power(mode, seed)
    disk.restore_power()
    return loss


def kept(folder: Path, name: str = "file", content: bytes = b"old") -> Path:
    """A file that is durable, name and all."""
    path = folder / name
    path.write_bytes(content)
    sync_file(path)
    sync_folder(folder)
    return path


def test_what_was_not_synced_is_lost(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    path.write_bytes(b"newer")
    (disk.folder / "other").write_bytes(b"x")
    loss = cut(disk)
    assert path.read_bytes() == b"old"
    assert not (disk.folder / "other").exists()
    assert loss == Loss(gone=("/other",), torn=("/file",))


def test_a_synced_file_whose_name_is_not_synced_is_lost(disk: PowerDisk) -> None:
    path = disk.folder / "file"
    path.write_bytes(b"x")
    sync_file(path)
    assert cut(disk) == Loss(gone=("/file",))
    assert not path.exists()


def test_a_synced_name_of_a_file_that_is_not_synced_leads_to_an_empty_file(disk: PowerDisk) -> None:
    path = disk.folder / "file"
    path.write_bytes(b"x")
    sync_folder(disk.folder)
    assert cut(disk) == Loss(torn=("/file",))
    assert path.read_bytes() == b""


def test_when_nothing_was_unsynced_nothing_is_lost(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    assert cut(disk) == Loss()
    assert path.read_bytes() == b"old"


def test_what_was_written_and_removed_before_the_cut_is_no_loss(disk: PowerDisk) -> None:
    (disk.folder / "temporary").write_bytes(b"x")
    (disk.folder / "temporary").unlink()
    assert cut(disk).total == 0


def test_a_rename_comes_undone_without_a_sync_of_the_folder(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    path.rename(disk.folder / "new")
    assert cut(disk) == Loss(gone=("/new",), back=("/file",))
    assert os.listdir(disk.folder) == ["file"]


def test_a_rename_over_a_file_comes_undone(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    kept(disk.folder, "next", b"new").replace(path)
    assert path.read_bytes() == b"new"
    cut(disk)
    assert path.read_bytes() == b"old"


def test_a_rename_to_another_folder_is_never_half_durable(disk: PowerDisk) -> None:
    for name in ("a", "b"):
        (disk.folder / name).mkdir()
    sync_folder(disk.folder)
    kept(disk.folder / "a").rename(disk.folder / "b" / "file")
    sync_folder(disk.folder / "b")
    cut(disk)
    assert (os.listdir(disk.folder / "a"), os.listdir(disk.folder / "b")) == ([], ["file"])


def test_a_removed_file_comes_back(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    path.unlink()
    assert cut(disk) == Loss(back=("/file",))
    assert path.read_bytes() == b"old"


def test_a_folder_without_a_synced_name_takes_all_that_is_in_it_along(disk: PowerDisk) -> None:
    (disk.folder / "a" / "b").mkdir(parents=True)
    kept(disk.folder / "a" / "b")
    assert cut(disk) == Loss(gone=("/a", "/a/b", "/a/b/file"))
    assert os.listdir(disk.folder) == []


def test_a_file_that_semel_made_durable_survives(disk: PowerDisk) -> None:
    path = disk.folder / "a" / "b" / "record"
    assert create_file(path, b"x" * 10_000)
    cut(disk)
    assert path.read_bytes() == b"x" * 10_000
    assert not create_file(path, b"other")


def test_a_torn_file_ends_at_a_page(disk: PowerDisk) -> None:
    seen = set()
    for seed in range(20):
        path = disk.folder / f"file-{seed}"
        path.write_bytes(b"x" * (3 * PAGE_BYTES + 10))
        assert cut(disk, "torn", seed) == Loss(torn=(f"/file-{seed}",))
        seen.add(len(path.read_bytes()))
        sync_folder(disk.folder)
        path.unlink()
        sync_folder(disk.folder)
    assert seen == {n * PAGE_BYTES for n in range(4)}


def test_a_part_of_what_was_not_synced_survives_and_the_seed_says_which(disk: PowerDisk) -> None:
    def play(seed: int) -> list[tuple[str, bytes]]:
        for n in range(12):
            (disk.folder / f"{seed}-{n}").write_bytes(bytes([n + 1]) * 2 * PAGE_BYTES)
        cut(disk, "some", seed)
        left = sorted(disk.folder.iterdir())
        found = [(path.name.split("-")[1], path.read_bytes()) for path in left]
        for path in left:
            path.unlink()
        sync_folder(disk.folder)
        return found

    first = {seed: play(seed) for seed in range(8)}
    assert {seed: play(seed) for seed in range(8)} == first
    contents = [content for found in first.values() for _, content in found]
    # Whole files, halves, holes full of zeros, empty ones and none at all.
    assert {len(content) for content in contents} >= {0, 2 * PAGE_BYTES}
    assert any(content.startswith(bytes(PAGE_BYTES)) for content in contents)
    assert len({len(found) for found in first.values()}) > 1


def test_of_pages_that_were_overwritten_some_are_old(disk: PowerDisk) -> None:
    path = kept(disk.folder, content=b"o" * 64 * PAGE_BYTES)
    with path.open("r+b") as file:
        file.write(b"n" * 64 * PAGE_BYTES)
    cut(disk, "some", 1)
    content = path.read_bytes()
    assert len(content) == 64 * PAGE_BYTES
    assert {content[n : n + PAGE_BYTES] for n in range(0, len(content), PAGE_BYTES)} == {
        b"o" * PAGE_BYTES,
        b"n" * PAGE_BYTES,
    }


def test_without_power_nothing_works_and_open_files_stay_broken(disk: PowerDisk) -> None:
    path = kept(disk.folder)
    with path.open("r+b", buffering=0) as file:
        disk.cut_power("all", 0)
        for broken in (lambda: file.write(b"x"), path.read_bytes, lambda: sync_folder(disk.folder)):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                broken()
        disk.restore_power()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.write(b"x")
    assert path.read_bytes() == b"old"


def test_a_file_is_used_after_its_name_is_gone(disk: PowerDisk) -> None:
    with (disk.folder / "file").open("w+b") as file:
        (disk.folder / "file").unlink()
        file.write(b"abc")
        file.flush()
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), 2)
        file.seek(0)
        assert file.read() == b"ab"
    assert os.listdir(disk.folder) == []


def test_a_map_of_a_file_is_durable_when_it_is_flushed(disk: PowerDisk) -> None:
    path = kept(disk.folder, content=bytes(2 * PAGE_BYTES))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:3] = b"abc"
        view.flush()
        os.fsync(file.fileno())
        view[PAGE_BYTES : PAGE_BYTES + 3] = b"def"
        disk.cut_power("all", 0)
    disk.restore_power()
    assert path.read_bytes()[:3] == b"abc"
    assert path.read_bytes()[PAGE_BYTES : PAGE_BYTES + 3] == bytes(3)


def test_syncfs_is_not_heard_here_so_it_makes_nothing_durable(disk: PowerDisk) -> None:
    (disk.folder / "file").write_bytes(b"x")
    os.sync()
    assert cut(disk) == Loss(gone=("/file",))


def test_a_long_list_of_losses_is_told_whole(disk: PowerDisk) -> None:
    names = [f"{n:04d}-{'x' * 200}" for n in range(1000)]
    for name in names:
        (disk.folder / name).touch()
    assert cut(disk).gone == tuple(f"/{name}" for name in names)


COUNT = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None) as c:
    c.execute("PRAGMA journal_mode=WAL")
    for _ in range(25):
        c.execute("BEGIN IMMEDIATE")
        c.execute("UPDATE t SET n = n + 1")
        c.execute("COMMIT")
"""


def test_sqlite_works_here_for_several_processes(disk: PowerDisk) -> None:
    path = disk.folder / "a.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (n)")
        connection.execute("INSERT INTO t VALUES (0)")
        connection.commit()
    writers = [subprocess.Popen([sys.executable, "-c", COUNT, str(path)]) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT n FROM t").fetchone() == (75,)


@pytest.mark.parametrize(("synchronous", "survives"), [("FULL", True), ("OFF", False)])
def test_what_sqlite_committed_survives_if_it_was_told_to_sync(
    disk: PowerDisk, synchronous: str, survives: bool
) -> None:
    path = disk.folder / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t (n)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sync_file(path)
        sync_folder(disk.folder)
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("INSERT INTO t VALUES (1)")
        disk.cut_power("all", 0)
    disk.restore_power()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM t").fetchall() == ([(1,)] if survives else [])


def test_the_folder_is_a_plain_one_again_when_the_disk_is_closed(fuse: None, tmp_path: Path) -> None:
    with PowerDisk(tmp_path / "disk") as disk:
        assert os.path.ismount(disk.folder)
    assert not os.path.ismount(disk.folder)
    assert os.listdir(disk.folder) == []
