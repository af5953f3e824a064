"""What it takes for a local file to survive a power cut."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-"

#: Folders whose names this process has made certain of: path, device and inode.
_NAMED: set[tuple[str, int, int]] = set()
_NAMED_MAX = 100_000


def create_file(target: Path, content: bytes, *, written: Callable[[], None] = lambda: None) -> bool:
    """Create a file whole and durable, or not at all. False when it exists. If several create it, one gets True.

    A synced temporary file is linked to its name: `link` fails if the name exists, atomically. `written` is called
    in between, where a test may kill the process. Two creators must not write the same bytes.
    """
    make_folders(target.parent)
    # Most races are lost long before: then nothing is written, and a link that fails is one that was raced for.
    if target.exists():
        return False
    with _synced(target, content) as temporary:
        written()
        if not _link(temporary, target, content):
            return False
    # The name is in the folder, and the folder reaches the disk before anybody acts on the file.
    sync_folder(target.parent)
    return True


def replace_file(target: Path, content: bytes) -> None:
    """Write a file whole and durable, in place of whatever is there.

    Hadoop keeps a checksum of each local file beside it, under a name of its own. It would be that of the old content,
    and a power cut may take back its removal alone. So it is gone from the disk before the new content is there.
    """
    make_folders(target.parent)
    with _synced(target, content) as temporary:
        drop_checksum(target)
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            # As with a link: NFS may say so of a rename that it has done and was asked for twice.
            if not (target.exists() and target.read_bytes() == content):
                raise
    sync_folder(target.parent)


@contextmanager
def _synced(target: Path, content: bytes) -> Iterator[Path]:
    """A temporary file beside the target, whole and on the disk; what is left of it is removed."""
    temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def checksum_of(path: Path) -> Path:
    """Where Hadoop's local file system keeps the checksum of a file (ChecksumFileSystem)."""
    return path.with_name(f".{path.name}.crc")


def drop_checksum(path: Path) -> None:
    """Remove it durably, if there is one. Hadoop reads a file that has none without asking."""
    with suppress(FileNotFoundError):
        checksum_of(path).unlink()
        sync_folder(path.parent)


def drop_file(path: Path) -> None:
    """Remove a file durably, if it is there, and the checksum that Hadoop keeps of it."""
    with suppress(FileNotFoundError):
        checksum_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def drop_stray_checksums(folder: Path) -> None:
    """Remove checksums that Hadoop keeps of files which are not there, as a power cut may leave them.

    Hadoop renames a file together with its checksum, and where that is in the way it fails as if the file were there:
    Spark then takes another query to be at work, at every start.
    """
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            name = entry.name
            if name.startswith(".") and name.endswith(".crc") and not (folder / name[1 : -len(".crc")]).exists():
                Path(entry.path).unlink(missing_ok=True)


def _link(temporary: Path, target: Path, content: bytes) -> bool:
    """Give the file its name. False when the name is somebody else's.

    An error does not say that nothing was done: NFS sends a request again whose answer was lost, and the server then
    answers that the name exists (RFC 1813, section 4.5). So the file itself is asked whose it is. One that is not there
    says nothing: the error is raised, and whoever created it is not known.
    """
    try:
        os.link(temporary, target)
    except OSError as error:
        try:
            ours = os.path.samefile(temporary, target) or target.read_bytes() == content
        except OSError:
            raise error from None
        if not ours and not isinstance(error, FileExistsError):
            raise
        return ours
    return True


def make_folders(folder: Path) -> None:
    """Create a folder and make its name durable, and those of its parents.

    Whoever created one that is there may have died before it was synced, and Spark syncs none: so each name is made
    certain of once in the life of a process.
    """
    known = _identity(folder)
    if known in _NAMED:
        return
    given, folder = folder, folder.resolve()
    if known is None:
        make_folders(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)
    elif not os.path.ismount(folder):
        make_folders(folder.parent)
        # One that we may not read is not one that we made.
        with suppress(PermissionError):
            sync_folder(folder.parent)
    _remember(given)


def _identity(folder: Path) -> tuple[str, int, int] | None:
    """What tells a folder from one that was removed and made again under the same name; None when it is not there."""
    with suppress(FileNotFoundError):
        there = folder.stat()
        return str(folder), there.st_dev, there.st_ino
    return None


def _remember(folder: Path) -> None:
    known = _identity(folder)
    if known is not None:
        if len(_NAMED) >= _NAMED_MAX:
            _NAMED.clear()
        _NAMED.add(known)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a synced file whose name is lost is lost (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a written file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
