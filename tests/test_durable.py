"""Files that are created once, also where the file system loses an answer, and names that outlive a power cut."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from semel import durable
from semel.durable import TEMPORARY, create_file, make_folders, replace_file

real_link, real_fsync, real_replace = os.link, os.fsync, os.replace
Link = Callable[[Path, Path], None]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of everything that is synced, in order. The process knows of no folder yet."""
    found: list[str] = []

    def fsync(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(durable, "_NAMED", set())
    return found


def retransmitted(error: int) -> Link:
    """The server has done it, and its answer was lost: NFS asks again, and gets the answer to the second request."""

    def link(source: Path, target: Path) -> None:
        real_link(source, target)
        raise OSError(error, os.strerror(error))

    return link


def refused(error: int) -> Link:
    def link(source: Path, target: Path) -> None:
        raise OSError(error, os.strerror(error))

    return link


def outrun(source: Path, target: Path) -> None:
    """Somebody else is a moment quicker."""
    target.write_bytes(b"theirs")
    real_link(source, target)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY)]


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("inodes", ["kept", "made up"])
def test_a_link_that_was_made_though_an_error_came_back_is_found_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, inodes: str
) -> None:
    monkeypatch.setattr(os, "link", retransmitted(error))
    if inodes == "made up":
        # Some file systems give each name a number of its own.
        monkeypatch.setattr(os.path, "samefile", lambda *_: False)
    assert create_file(tmp_path / "record", b"ours") is True
    assert ((tmp_path / "record").read_bytes(), left_in(tmp_path)) == (b"ours", [])


def test_a_name_that_is_found_ours_is_synced_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    monkeypatch.setattr(os, "link", retransmitted(errno.EEXIST))
    create_file(tmp_path / "record", b"ours")
    assert synced[-1] == str(tmp_path)


def test_a_name_that_another_took_a_moment_before_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", outrun)
    assert create_file(tmp_path / "record", b"ours") is False
    assert ((tmp_path / "record").read_bytes(), left_in(tmp_path)) == (b"theirs", [])


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO])
def test_when_there_is_no_file_to_ask_the_error_is_raised_and_nothing_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(os, "link", refused(error))
    with pytest.raises(OSError, match=os.strerror(error)):
        create_file(tmp_path / "record", b"ours")
    assert left_in(tmp_path) == []


def test_an_error_beside_a_file_of_somebody_else_says_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is taken; but the error was another one, and who knows what is still under way."""

    def link(source: Path, target: Path) -> None:
        target.write_bytes(b"theirs")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        create_file(tmp_path / "record", b"ours")


@pytest.mark.parametrize("is_done", [True, False])
def test_a_rename_whose_answer_was_lost_is_found_done_or_the_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str], is_done: bool
) -> None:
    def rename(source: Path, target: Path) -> None:
        if is_done:
            real_replace(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    (tmp_path / "record").write_bytes(b"before")
    monkeypatch.setattr(os, "replace", rename)
    if is_done:
        replace_file(tmp_path / "record", b"ours")
        assert synced[-1] == str(tmp_path)
    else:
        with pytest.raises(FileNotFoundError):
            replace_file(tmp_path / "record", b"ours")
    expected = b"ours" if is_done else b"before"
    assert ((tmp_path / "record").read_bytes(), left_in(tmp_path)) == (expected, [])


def test_a_name_that_is_taken_already_costs_no_temporary_file(tmp_path: Path, synced: list[str]) -> None:
    assert create_file(tmp_path / "record", b"first") is True
    del synced[:]
    assert create_file(tmp_path / "record", b"second") is False
    assert synced == []


@pytest.mark.parametrize("had_checksum", [True, False])
def test_the_checksum_of_the_old_content_is_gone_from_the_disk_before_the_new_content_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str], had_checksum: bool
) -> None:
    """A power cut in between leaves the old content without a checksum, which Hadoop reads."""
    (tmp_path / "5").write_bytes(b"before")
    if had_checksum:
        (tmp_path / ".5.crc").write_bytes(b"of before")

    def rename(source: Path, target: Path) -> None:
        assert not (tmp_path / ".5.crc").exists()
        assert (str(tmp_path) in synced[made:]) is had_checksum
        real_replace(source, target)

    make_folders(tmp_path)
    made = len(synced)
    monkeypatch.setattr(os, "replace", rename)
    replace_file(tmp_path / "5", b"ours")
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert synced[-1] == str(tmp_path)


# Folders --------------------------------------------------------------------------------------------------------------


def test_new_folders_are_named_durably_in_each_parent(tmp_path: Path, synced: list[str]) -> None:
    make_folders(tmp_path / "a" / "b")
    assert synced[-2:] == [str(tmp_path), str(tmp_path / "a")]


def test_folders_that_another_made_and_may_not_have_synced_are_synced_once(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    make_folders(tmp_path / "a" / "b")
    assert synced[-2:] == [str(tmp_path), str(tmp_path / "a")]
    del synced[:]
    for _ in range(3):
        make_folders(tmp_path / "a" / "b")
    assert synced == []


def test_a_folder_that_was_removed_and_made_again_is_another_one(tmp_path: Path, synced: list[str]) -> None:
    make_folders(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").rmdir()
    # Takes the inode of the one before, so that the next has another.
    (tmp_path / "keeps the inode").mkdir()
    del synced[:]
    make_folders(tmp_path / "a" / "b")
    assert str(tmp_path / "a") in synced
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "keeps this inode, too").mkdir()
    (tmp_path / "a" / "b").mkdir()
    del synced[:]
    make_folders(tmp_path / "a" / "b")
    assert str(tmp_path / "a") in synced


def test_a_folder_behind_a_symbolic_link_is_synced_where_it_is(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make_folders(tmp_path / "link" / "a")
    assert synced[-1] == str(tmp_path / "real")
    assert (tmp_path / "real" / "a").is_dir()


def test_parents_that_may_not_be_read_are_nobody_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()

    def sync(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "not yours", str(folder))

    monkeypatch.setattr(durable, "_NAMED", set())
    monkeypatch.setattr(durable, "sync_folder", sync)
    make_folders(tmp_path / "ours")
    with pytest.raises(PermissionError):
        make_folders(tmp_path / "ours" / "new")
