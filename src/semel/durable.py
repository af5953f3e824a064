"""What it takes for a local file to survive a power cut."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp-"


def create_file(target: Path, content: bytes, *, written: Callable[[], None] = lambda: None) -> bool:
    """Create a file whole and durable, or not at all. False when it exists; of several creators one gets True.

    A synced temporary file is linked to its name: `link` fails if the name exists, atomically. `written` is called
    in between, where a test may kill the process.
    """
    make_folders(target.parent)
    temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written()
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    # The name is in the folder, and the folder reaches the disk before anybody acts on the file.
    sync_folder(target.parent)
    return True


def replace_file(target: Path, content: bytes) -> None:
    """Write a file whole and durable, in place of whatever is there.

    Hadoop keeps a checksum of each local file beside it, under a name of its own. It would be that of the old content.
    """
    make_folders(target.parent)
    temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        target.with_name(f".{target.name}.crc").unlink(missing_ok=True)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


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


def make_folders(folder: Path) -> None:
    """Create a folder and make its name durable in each parent that had to be created too."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    sync_folder(folder.parent)


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
