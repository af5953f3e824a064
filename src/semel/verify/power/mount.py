"""The forgetful disk as a file system: `python -m semel.verify.power.mount FOLDER`, until its standard input ends.

It answers one request at a time. Its power is cut by writing the extended attribute `user.semel.power` of its root;
`user.semel.power.0` and so on then read as what was lost. Without power every request fails with EIO, and what was open
stays broken.

Linux does not tell a file system of this kind that somebody called sync(2) or syncfs(2): neither makes anything durable
here, which errs on the safe side. Pages are cached, because SQLite maps its `-shm` into memory; locks are the kernel's.
A file whose name is gone can be read and written while it is open; fstat(2) of it fails, as libfuse has it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mfusepy

from semel.verify.power.forgetful import Inode, Tree

ATTRIBUTE = "user.semel.power"
RENAME_NOREPLACE = 1
BLOCKS = 1 << 22
UNMOUNT_S_MAX = 30.0
PIECE_BYTES = 32_768


class Mounted(mfusepy.FUSE):  # type: ignore[misc]  # it has no types
    """With what mfusepy does not pass on: the handle of an open file, by which it is known when its name is gone."""

    def truncate_fuse_3(self, path: bytes | None, length: int, fip: Any) -> int:
        return int(self.operations.truncate(_text(path), length, _handle(fip)))

    def chmod_fuse_3(self, path: bytes | None, mode: int, fip: Any) -> int:
        return int(self.operations.chmod(_text(path), mode, _handle(fip)))

    def chown_fuse_3(self, path: bytes | None, uid: int, gid: int, fip: Any) -> int:
        return int(self.operations.chown(_text(path), uid, gid, _handle(fip)))

    def utimens_fuse_3(self, path: bytes | None, buf: Any, fip: Any) -> int:
        times = [buf.contents.actime, buf.contents.modtime] if buf else []
        return int(self.operations.utimens(_text(path), [t.tv_sec * 10**9 + t.tv_nsec for t in times], _handle(fip)))

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        return int(self.operations.rename(_text(old), _text(new), flags))


def _text(path: bytes | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def _handle(fip: Any) -> int | None:
    return int(fip.contents.fh) if fip else None


class Forgetful(mfusepy.Operations):  # type: ignore[misc]  # it has no types
    """What the kernel asks for."""

    use_ns = True
    flag_nopath = flag_nullpath_ok = True

    def __init__(self) -> None:
        self.tree = Tree()
        self.has_power = True
        self.loss: Mapping[str, Any] = {}
        self._open: dict[int, Inode] = {}
        self._handles = 0

    # Power ------------------------------------------------------------------------------------------------------------

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        if (path, name) != ("/", ATTRIBUTE):
            raise OSError(errno.ENOTSUP, name)
        order = json.loads(value)
        if order["power"] == "on":
            self.has_power = True
            return 0
        self.loss = asdict(self.tree.cut_power(order["mode"], order["seed"]))
        self.has_power = False
        # A process that has an old file open keeps it: it is not the file that is there now.
        self._open = {handle: Inode(0, 0) for handle in self._open}
        return 0

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        if path != "/" or not name.startswith(f"{ATTRIBUTE}."):
            raise OSError(errno.ENODATA, name)
        begin = int(name.removeprefix(f"{ATTRIBUTE}."))
        return json.dumps(self.loss).encode()[begin : begin + PIECE_BYTES]

    def _inode(self, path: str | None, fh: int | None = None) -> Inode:
        self._require_power(path)
        if fh is not None:
            inode = self._open.get(fh)
            if inode is None or inode.number == 0:
                raise OSError(errno.EIO, str(path))
            return inode
        return self.tree.find(path or "/")

    def _require_power(self, path: str | None) -> None:
        # Its root is there, so that the power can be given back.
        if not self.has_power and path != "/":
            raise OSError(errno.EIO, str(path))

    def _handle_of(self, inode: Inode) -> int:
        self._handles += 1
        self._open[self._handles] = inode
        return self._handles

    # Files ------------------------------------------------------------------------------------------------------------

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._require_power(path)
        return self._handle_of(self.tree.create(path, stat.S_IFREG | (mode & 0o7777)))

    def open(self, path: str, flags: int) -> int:
        inode = self._inode(path)
        if flags & os.O_TRUNC:
            inode.truncate(0)
        return self._handle_of(inode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._inode(path, fh).data[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._inode(path, fh).write(data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._inode(path, fh).truncate(length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._inode(path, fh).sync()
        return 0

    def release(self, path: str, fh: int) -> int:
        self._open.pop(fh, None)
        return 0

    # Names ------------------------------------------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int) -> int:
        self._require_power(path)
        self.tree.create(path, stat.S_IFDIR | (mode & 0o7777))
        return 0

    def unlink(self, path: str) -> int:
        self._require_power(path)
        self.tree.unlink(path)
        return 0

    def rmdir(self, path: str) -> int:
        self._require_power(path)
        self.tree.rmdir(path)
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        self._require_power(old)
        if flags & ~RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, old)
        self.tree.rename(old, new, replace=not flags)
        return 0

    def link(self, target: str, source: str) -> int:
        self._require_power(source)
        self.tree.link(source, target)
        return 0

    def opendir(self, path: str) -> int:
        return self._handle_of(self._inode(path))

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        names = self._inode(path, fh).names or {}
        entries = [(name, {"st_mode": inode.mode, "st_ino": inode.number}, 0) for name, inode in names.items()]
        return [(".", {"st_mode": stat.S_IFDIR}, 0), ("..", {"st_mode": stat.S_IFDIR}, 0), *entries]

    def releasedir(self, path: str, fh: int) -> int:
        return self.release(path, fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.tree.sync_folder(self._inode(path, fh))
        return 0

    # What is durable at once ------------------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        inode = self._inode(path, fh)
        return {
            "st_ino": inode.number,
            "st_mode": inode.mode,
            "st_nlink": inode.links if inode.names is None else 2,
            "st_uid": inode.owner[0],
            "st_gid": inode.owner[1],
            "st_size": len(inode.data),
            "st_blocks": -(-len(inode.data) // 512),
            "st_atime": inode.read_ns,
            "st_mtime": inode.written_ns,
            "st_ctime": inode.changed_ns,
        }

    def chmod(self, path: str, mode: int, fh: int | None = None) -> int:
        inode = self._inode(path, fh)
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        return 0

    def chown(self, path: str, uid: int, gid: int, fh: int | None = None) -> int:
        inode = self._inode(path, fh)
        inode.owner = (inode.owner[0] if uid == -1 else uid, inode.owner[1] if gid == -1 else gid)
        return 0

    def utimens(self, path: str, times: Any = None, fh: int | None = None) -> int:
        inode = self._inode(path, fh)
        inode.read_ns, inode.written_ns = times or (time.time_ns(), time.time_ns())
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        sizes = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255} | dict.fromkeys(sizes, BLOCKS)


def serve(folder: str) -> None:
    threading.Thread(target=_end_with_the_starter, args=(folder,), daemon=True).start()
    Mounted(
        Forgetful(),
        folder,
        foreground=True,
        nothreads=True,
        use_ino=True,
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="semel-power",
    )


def _end_with_the_starter(folder: str) -> None:
    """The process that mounted us closes our input, or died: either way the folder becomes a plain one again."""
    sys.stdin.buffer.read()
    command = ["fusermount3", "-u", "-z", folder]
    subprocess.run(command, capture_output=True, timeout=UNMOUNT_S_MAX, check=False)  # noqa: S603  the arguments are ours
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
