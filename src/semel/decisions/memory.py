"""Records in memory: for unit tests and the simulation. It survives a simulated crash, not a real one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from semel.decisions.base import RecordStore


class MemoryStore(RecordStore):
    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, path: str, content: bytes) -> bool:
        with self._lock:
            if path in self._files:
                return False
            self._files[path] = content
            return True

    def replace(self, path: str, content: bytes) -> None:
        self._files[path] = content

    def read(self, path: str) -> bytes | None:
        return self._files.get(path)

    def exists(self, path: str) -> bool:
        return path in self._files

    def list(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        return sorted(
            p[len(prefix) :] for p in list(self._files) if p.startswith(prefix) and "/" not in p[len(prefix) :]
        )

    def folders(self, folder: str) -> Sequence[str]:
        prefix = f"{folder}/"
        below = [path.removeprefix(prefix) for path in list(self._files) if path.startswith(prefix)]
        return sorted({path.partition("/")[0] for path in below if "/" in path})

    def delete(self, path: str) -> None:
        self._files.pop(path, None)

    def describe(self) -> str:
        return "memory"
