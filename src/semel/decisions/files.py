"""Records on a local file system, as safe against power loss as POSIX allows."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from semel.decisions.base import RecordStore
from semel.durable import create_file, replace_file
from semel.failpoints import failpoint


class FileStore(RecordStore):
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def create(self, path: str, content: bytes) -> bool:
        return create_file(self.root / path, content, written=lambda: failpoint("log.written"))

    def replace(self, path: str, content: bytes) -> None:
        replace_file(self.root / path, content)

    def read(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def list(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(e.name for e in os.scandir(self.root / folder) if e.is_file() and not e.name.startswith("."))
        return []

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def describe(self) -> str:
        return str(self.root)
