"""What a decision presupposes is on the disk before the decision is. Spark closes and renames its files and syncs none.

For batch N that is `metadata`, `offsets/N`, `commits/N-1`, the logs of the sources (`sources/<n>/<batch>`) and what the
tasks of the batch wrote below `state/`; files, Hadoop's checksums beside them (`.N.crc`), and the folders that hold
their names. Only a checkpoint on a local file system can be made durable from here; docs/power-loss.md has HDFS.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from semel.durable import sync_file, sync_folder
from semel.runtime.options import POWER_LOSS_SAFE

How = Literal["auto", "fsync", "syncfs"]
HOWS: tuple[How, ...] = ("auto", "fsync", "syncfs")

NOT_PROMISED = (
    f"{POWER_LOSS_SAFE} is false: a batch is decided before Spark's own files about it are on the disk. "
    "Kills and crashes of processes lose and double nothing, as before; a power cut or a crash of the machine may lose "
    "rows, or leave a checkpoint that Spark cannot read."
)

#: The decision log syncs what it writes.
OWN_FOLDER = "semel"
STATE_FOLDER = "state"
#: With more folders, or more new names, than this, one call for the whole file system is quicker than one for each.
FOLDERS_MAX = 16
NEW_MAX = 40
DEPTH_MAX = 12
SYNCS_AT_ONCE = 8
#: Linux reports errors of writing back from syncfs(2) since then.
SYNCFS_TELLS_ERRORS_SINCE = (5, 8)
#: statfs(2): file systems whose syncfs(2) writes everything to the disk. Of others we do not know: of FUSE the kernel
#: does not even pass it on.
SYNCED_WHOLE = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0x794C7630,  # overlay
        0x01021994,  # tmpfs, which forgets everything anyhow
    }
)
#: Names that are still to be given their content, or will be renamed: nobody presupposes them.
_UNFINISHED = re.compile(r"\.tmp(\.crc)?$")
_NUMBER = re.compile(r"\.?(\d+)")


@dataclass
class CheckpointSync:
    """Makes durable what is new in the checkpoint below `root`. It remembers what it has seen, so keep it for a run.

    "fsync" syncs each new file and each folder whose names changed; "syncfs" the whole file system, neighbours
    included; "auto" the first while there are few folders, else the second where it can be trusted.
    """

    root: Path
    how: How = "auto"
    #: What the folders held when they were last synced: names, and the inodes behind them.
    _seen: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    #: One descriptor per file system, kept open: syncfs tells the errors since its descriptor was opened.
    _systems: dict[int, int] = field(default_factory=dict, init=False)
    _began: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ValueError(f"unknown way to sync {self.how!r}; use {', '.join(HOWS)}")
        self.root = self.root.resolve()
        #: There are more folders than are looked into.
        self._many = False
        self._may_sync_whole = self.how == "auto" and may_sync_whole(self.root)

    def keep(self, name: str) -> None:
        """A file of Spark's that is there is durable, before anything is written that rests on it."""
        _durable(sync_file, str(self.root / name))
        _durable(sync_folder, str(self.root))

    def settle(self, batch: int) -> None:
        """All that a decision of this batch presupposes is durable. Call it when the tasks of the batch have ended.

        Raises OSError when it cannot be made durable.
        """
        if not (self.root / "offsets" / str(batch)).is_file():
            raise FileNotFoundError(f"{self.root}/offsets/{batch} is not there, and batch {batch} is to be decided")
        new = None
        if self.how != "syncfs" and not self._many:
            new = self._new_names(batch)
        if new is None or (self._may_sync_whole and len(new.files) + len(new.folders) > NEW_MAX):
            self._sync_whole_systems()
        else:
            sync_each(new.files, sync_file)
            sync_each(new.folders, sync_folder)
        if new is not None:
            self._seen |= new.seen
        if not self._began:
            self._sync_parents()
            self._began = True

    def close(self) -> None:
        for descriptor in self._systems.values():
            os.close(descriptor)
        self._systems.clear()

    def __enter__(self) -> CheckpointSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Each file --------------------------------------------------------------------------------------------------------

    def _new_names(self, batch: int) -> _New | None:
        """What was not synced yet; None from where on there are too many folders to look into."""
        new = _New([], [], {})
        for listing in _walk(self.root):
            new.seen[listing.folder] = listing.names
            if self._may_sync_whole and len(new.seen) > FOLDERS_MAX:
                self._many = True
                self._seen = {}
                return None
            known = self._seen.get(listing.folder)
            files = listing.new_files(known or {}, batch)
            new.files.extend(files)
            if files or known is None or listing.names.keys() - known.keys():
                new.folders.append(listing.folder)
        return new

    # Everything -------------------------------------------------------------------------------------------------------

    def _sync_whole_systems(self) -> None:
        for folder in self._places():
            device = os.stat(folder).st_dev
            if device not in self._systems:
                self._systems[device] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for descriptor in self._systems.values():
            sync_file_system(descriptor, self.root)

    def _places(self) -> Iterator[str]:
        """The folders behind which another disk may be mounted. Spark makes those below itself."""
        yield str(self.root)
        for folder in (self.root, self.root / "state", self.root / "sources"):
            with suppress(FileNotFoundError):
                yield from (entry.path for entry in os.scandir(folder) if entry.is_dir())

    def _sync_parents(self) -> None:
        """The name of the checkpoint itself. Folders that we may not read were not made by this user either."""
        for folder in self.root.parents:
            with suppress(PermissionError):
                _durable(sync_folder, str(folder))


@dataclass(frozen=True)
class _New:
    """What is to be synced, and what will have been seen then."""

    files: list[str]
    folders: list[str]
    seen: dict[str, dict[str, int]]


@dataclass(frozen=True)
class _Listing:
    """What is in one folder: names, with the inode of each."""

    folder: str
    files: dict[str, int]
    names: dict[str, int]
    is_state: bool

    def new_files(self, known: dict[str, int], batch: int) -> list[str]:
        """Those that were not synced before. State of this batch always is: a second try may be given an old inode."""
        return [
            f"{self.folder}/{name}"
            for name, inode in self.files.items()
            if known.get(name) != inode or (self.is_state and _version(name) in (batch, batch + 1))
        ]


def _version(name: str) -> int:
    """Batch N makes version N+1 of the state: `N+1.delta`, `.N+1.delta.crc`."""
    number = _NUMBER.match(name)
    return int(number[1]) if number else -1


def _walk(root: Path) -> Iterator[_Listing]:
    """Every folder of a checkpoint but our own, each after its parent."""
    waiting = [(str(root), 0)]
    state = str(root / STATE_FOLDER)
    while waiting:
        folder, depth = waiting.pop()
        if depth > DEPTH_MAX:
            raise OSError(f"{folder} lies more than {DEPTH_MAX} folders below {root}: that is no checkpoint of Spark")
        files: dict[str, int] = {}
        folders: dict[str, int] = {}
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            continue  # Spark's clean-up was here
        except PermissionError:
            if is_ours(folder):
                raise
            continue  # lost+found, where the checkpoint is the root of a volume: Spark keeps nothing there
        for entry in entries:
            if entry.is_dir():
                folders[entry.name] = entry.inode()
            elif not _UNFINISHED.search(entry.name):
                files[entry.name] = entry.inode()
        yield _Listing(folder, files, {**files, **folders}, folder.startswith(state))
        waiting += [(f"{folder}/{name}", depth + 1) for name in folders if depth or name != OWN_FOLDER]


def is_ours(folder: str) -> bool:
    return os.stat(folder).st_uid == os.geteuid()


def sync_each(paths: Sequence[str], sync: Callable[[Path], None]) -> None:
    """Several at once: a journal takes them together, and a disk behind a network is waited for once."""

    def one(path: str) -> None:
        # Spark's maintenance deletes old files at any moment: what is gone is not presupposed by anybody.
        with suppress(FileNotFoundError):
            _durable(sync, path)

    if len(paths) <= SYNCS_AT_ONCE:
        for path in paths:
            one(path)
        return
    with ThreadPoolExecutor(SYNCS_AT_ONCE, "semel-sync") as pool:
        for _ in pool.map(one, paths):
            pass


def _durable(sync: Callable[[Path], None], path: str) -> None:
    try:
        sync(Path(path))
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be made durable: {error.strerror}") from error


# syncfs(2) ------------------------------------------------------------------------------------------------------------


def may_sync_whole(folder: Path) -> bool:
    """Whether syncfs(2) is there, tells errors, and reaches the disk of this folder."""
    libc = _libc()
    if libc is None or _kernel() < SYNCFS_TELLS_ERRORS_SINCE:
        return False
    # struct statfs begins with the type, a word of the machine; the rest is not looked at.
    answer = ctypes.create_string_buffer(512)
    if libc.statfs(os.fsencode(folder), answer) != 0:
        return False
    return ctypes.c_ulong.from_buffer(answer).value & 0xFFFFFFFF in SYNCED_WHOLE


def sync_file_system(descriptor: int, folder: Path) -> None:
    libc = _libc()
    if libc is None:
        raise OSError(f"this system has no syncfs(2), by which {folder} was to be made durable")
    if libc.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the file system of {folder} cannot be made durable: {os.strerror(number)}")


def _libc() -> ctypes.CDLL | None:
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "syncfs") and hasattr(libc, "statfs") else None


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
