"""Records on a local file system, as safe against power loss as POSIX allows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from semel.decisions.base import RecordStore
from semel.durable import create_file, make_folders, replace_file, sync_folder
from semel.failpoints import failpoint

#: How many names a store remembers, of those that it need not sync again.
DURABLE_KEPT_MAX = 10_000


class FileStore(RecordStore):
    """A record is synced, then linked to its name, then its folder is synced.

    Between the last two the creator may die, and others see a name that a power cut takes away again: see
    `make_durable`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        #: Names of which this process knows that they are on the disk.
        self._durable: set[str] = set()

    def create(self, path: str, content: bytes) -> bool:
        created = create_file(self.root / path, content, written=lambda: failpoint("log.written"))
        if created:
            self._is_durable(path)
        return created

    def replace(self, path: str, content: bytes) -> None:
        replace_file(self.root / path, content)

    def read(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_durable(self, path: str) -> None:
        if path in self._durable:
            return
        folder = (self.root / path).parent
        sync_folder(folder)
        make_folders(folder)
        self._is_durable(path)

    def _is_durable(self, path: str) -> None:
        if len(self._durable) >= DURABLE_KEPT_MAX:
            self._durable.clear()
        self._durable.add(path)

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def list(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(e.name for e in os.scandir(self.root / folder) if e.is_file() and not e.name.startswith("."))
        return []

    def folders(self, folder: str) -> Sequence[str]:
        with suppress(FileNotFoundError):
            return sorted(e.name for e in os.scandir(self.root / folder) if e.is_dir())
        return []

    def delete(self, path: str) -> None:
        self._durable.discard(path)
        (self.root / path).unlink(missing_ok=True)

    def describe(self) -> str:
        return str(self.root)
