"""Files and folders in memory, each in two states: as programs see it, and as it is on the disk. Pure.

The rules are those of POSIX and no kinder: content is durable after fsync of the file, and a name after fsync of its
folder; neither brings the other along. Modes, owners and times are durable at once: nobody here rests on them.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

PAGE_BYTES = 4096

#: What a power cut takes: all that was not synced; a part of it, drawn from a seed; or, of files whose names are all
#: there, the end of what was not synced, from a page on.
Mode = Literal["all", "some", "torn"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Inode:
    """A file, or a folder if it has `names`. What begins with `safe` is on the disk."""

    def __init__(self, number: int, mode: int) -> None:
        self.number = number
        self.mode = mode
        self.owner = (os.getuid(), os.getgid())
        self.links = 1
        self.read_ns = self.written_ns = self.changed_ns = time.time_ns()
        self.names: dict[str, Inode] | None = {} if stat.S_ISDIR(mode) else None
        self.safe_names: dict[str, Inode] = {}
        self.data = bytearray()
        self.safe_data = bytearray()
        self.unsynced: set[int] = set()

    # A file -----------------------------------------------------------------------------------------------------------

    def write(self, data: bytes, offset: int) -> int:
        size = len(self.data)
        if offset > size:
            self.data.extend(bytes(offset - size))
        self.data[offset : offset + len(data)] = data
        self._touch(min(offset, size), offset + len(data))
        return len(data)

    def truncate(self, size: int) -> None:
        old = len(self.data)
        if size < old:
            del self.data[size:]
            self.unsynced = {page for page in self.unsynced if page * PAGE_BYTES < size}
        else:
            self.data.extend(bytes(size - old))
        self._touch(old, size)

    def _touch(self, begin: int, end: int) -> None:
        self.written_ns = self.changed_ns = time.time_ns()
        if end > begin:
            self.unsynced.update(range(begin // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1))

    @property
    def is_unsynced(self) -> bool:
        return bool(self.unsynced) or len(self.data) != len(self.safe_data)

    def sync(self) -> None:
        self._save(self.unsynced, len(self.data))
        self.unsynced.clear()

    def _save(self, pages: set[int], size: int) -> None:
        """Only these pages reach the disk, and a size. What was never written there reads as zeros."""
        del self.safe_data[size:]
        self.safe_data.extend(bytes(size - len(self.safe_data)))
        for page in pages:
            begin = page * PAGE_BYTES
            piece = self.data[begin : min(begin + PAGE_BYTES, size)]
            self.safe_data[begin : begin + len(piece)] = piece

    def save_some(self, dice: random.Random) -> None:
        """Any of the pages, in no order: the kernel writes them as it likes. The size may be known before the data."""
        pages = {page for page in sorted(self.unsynced) if dice.random() < 0.5}
        reached = max((page + 1 for page in pages), default=0) * PAGE_BYTES
        old = len(self.safe_data)
        size = len(self.data) if dice.random() < 0.5 else min(len(self.data), max(reached, old))
        self._save(pages, size)

    def tear(self, dice: random.Random) -> None:
        """The first pages, not all of them."""
        pages = sorted(self.unsynced)
        kept = pages[: dice.randrange(len(pages))] if pages else []
        reached = (kept[-1] + 1) * PAGE_BYTES if kept else 0
        self._save(set(kept), min(len(self.data), max(reached, len(self.safe_data))))


@dataclass(frozen=True)
class Change:
    """Names that come to mean another inode, or nothing, all of them at once: a rename changes two."""

    names: tuple[tuple[Inode, str, Inode | None], ...]

    @property
    def keys(self) -> set[tuple[int, str]]:
        return {(folder.number, name) for folder, name, _ in self.names}

    def touches(self, folder: Inode) -> bool:
        return any(changed is folder for changed, _, _ in self.names)

    def save(self) -> None:
        for folder, name, inode in self.names:
            if inode is None:
                folder.safe_names.pop(name, None)
            else:
                folder.safe_names[name] = inode


#: Not counted as lost: the memory that users of an SQLite database share. It is made anew, and never synced.
SCRATCH = ("-shm",)


@dataclass(frozen=True)
class Loss:
    """The paths that a power cut took: names that are gone or mean what they meant before, names that came back, and
    files that lost content. What was written and removed before the cut does not count."""

    gone: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return len(self.gone) + len(self.back) + len(self.torn)


@dataclass
class Tree:
    """The whole disk. Errors are OSError with the number that the kernel would give."""

    root: Inode = field(default_factory=lambda: Inode(1, stat.S_IFDIR | 0o755))
    pending: list[Change] = field(default_factory=list)
    _numbers: int = 1

    # Looking ----------------------------------------------------------------------------------------------------------

    def find(self, path: str) -> Inode:
        inode = self.root
        for name in filter(None, path.split("/")):
            if inode.names is None:
                raise OSError(errno.ENOTDIR, path)
            if name not in inode.names:
                raise OSError(errno.ENOENT, path)
            inode = inode.names[name]
        return inode

    def walk(self) -> Iterator[tuple[str, Inode]]:
        """Everything that has a name, by its path."""
        waiting = [("", self.root)]
        while waiting:
            path, inode = waiting.pop()
            yield path or "/", inode
            waiting += [(f"{path}/{name}", child) for name, child in (inode.names or {}).items()]

    def _place(self, path: str) -> tuple[Inode, dict[str, Inode], str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        if folder.names is None:
            raise OSError(errno.ENOTDIR, path)
        return folder, folder.names, name

    # Names ------------------------------------------------------------------------------------------------------------

    def create(self, path: str, mode: int) -> Inode:
        folder, names, name = self._place(path)
        if name in names:
            raise OSError(errno.EEXIST, path)
        self._numbers += 1
        inode = Inode(self._numbers, mode)
        self._change((folder, name, inode))
        return inode

    def link(self, old: str, new: str) -> None:
        inode = self.find(old)
        folder, names, name = self._place(new)
        if name in names:
            raise OSError(errno.EEXIST, new)
        if inode.names is not None:
            raise OSError(errno.EPERM, old)
        inode.links += 1
        self._change((folder, name, inode))

    def unlink(self, path: str) -> None:
        folder, _, name = self._place(path)
        inode = self.find(path)
        if inode.names is not None:
            raise OSError(errno.EISDIR, path)
        inode.links -= 1
        self._change((folder, name, None))

    def rmdir(self, path: str) -> None:
        folder, _, name = self._place(path)
        inode = self.find(path)
        if inode.names is None:
            raise OSError(errno.ENOTDIR, path)
        if inode.names:
            raise OSError(errno.ENOTEMPTY, path)
        self._change((folder, name, None))

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        from_folder, _, from_name = self._place(old)
        to_folder, to_names, to_name = self._place(new)
        inode = self.find(old)
        there = to_names.get(to_name)
        if there is inode:
            return
        if there is not None:
            self._refuse_to_replace(inode, there, new, replace=replace)
            there.links -= 1
        self._change((from_folder, from_name, None), (to_folder, to_name, inode))

    @staticmethod
    def _refuse_to_replace(inode: Inode, there: Inode, new: str, *, replace: bool) -> None:
        if not replace:
            raise OSError(errno.EEXIST, new)
        if there.names is None and inode.names is not None:
            raise OSError(errno.ENOTDIR, new)
        if there.names is not None and inode.names is None:
            raise OSError(errno.EISDIR, new)
        if there.names:
            raise OSError(errno.ENOTEMPTY, new)

    def _change(self, *names: tuple[Inode, str, Inode | None]) -> None:
        for folder, name, inode in names:
            if folder.names is None:
                raise OSError(errno.ENOTDIR, name)
            if inode is None:
                del folder.names[name]
            else:
                folder.names[name] = inode
            folder.written_ns = folder.changed_ns = time.time_ns()
        self.pending.append(Change(names))

    # The disk ---------------------------------------------------------------------------------------------------------

    def sync_folder(self, folder: Inode) -> None:
        """Its names are durable, and what had to happen before: half a rename is never on a disk."""
        self._save({n for n, change in enumerate(self.pending) if change.touches(folder)})

    def _save(self, chosen: set[int]) -> None:
        needed: set[tuple[int, str]] = set()
        for n in reversed(range(len(self.pending))):
            if n in chosen or self.pending[n].keys & needed:
                chosen.add(n)
                needed |= self.pending[n].keys
        for n in sorted(chosen):
            self.pending[n].save()
        self.pending = [change for n, change in enumerate(self.pending) if n not in chosen]

    def cut_power(self, mode: Mode, seed: int) -> Loss:
        """From here on the disk holds what was durable, and of the rest what the mode leaves."""
        before = {path: (inode, bytes(inode.data)) for path, inode in self.walk()}
        dice = random.Random(f"power {mode} {seed}")  # noqa: S311 - a game, not a secret
        if mode == "torn":
            self._save(set(range(len(self.pending))))
        elif mode == "some":
            self._save(self._chosen(dice))
        for inode in self._unsynced_files(before):
            if mode == "torn":
                inode.tear(dice)
            elif mode == "some":
                inode.save_some(dice)
        self._forget()
        return _loss(before, dict(self.walk()))

    def _chosen(self, dice: random.Random) -> set[int]:
        """The first changes of names, as a journal has them; or any, as POSIX allows."""
        if dice.random() < 0.5:
            return set(range(dice.randint(0, len(self.pending))))
        return {n for n in range(len(self.pending)) if dice.random() < 0.5}

    def _unsynced_files(self, before: dict[str, tuple[Inode, bytes]]) -> list[Inode]:
        seen = {inode.number: inode for inode, _ in before.values()}
        return [seen[n] for n in sorted(seen) if seen[n].names is None and seen[n].is_unsynced]

    def _forget(self) -> None:
        self.pending.clear()
        links: dict[int, int] = {}
        waiting = [self.root]
        while waiting:
            inode = waiting.pop()
            links[inode.number] = inode.links = links.get(inode.number, 0) + 1
            if inode.names is None:
                inode.data = bytearray(inode.safe_data)
                inode.unsynced.clear()
            else:
                inode.names = dict(inode.safe_names)
                waiting += inode.names.values()


def _loss(before: dict[str, tuple[Inode, bytes]], after: dict[str, Inode]) -> Loss:
    gone = [p for p, (inode, _) in before.items() if after.get(p) is not inode]
    back = [p for p in after if p not in before]
    torn = [p for p, (inode, data) in before.items() if after.get(p) is inode and bytes(inode.data) != data]
    kept = [tuple(path for path in sorted(paths) if not path.endswith(SCRATCH)) for paths in (gone, back, torn)]
    return Loss(*kept)
