"""The records of the decision log, at the end of a line that breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semel.decisions.base import RecordStore
from semel.decisions.memory import MemoryStore
from semel.simulation.line import LOG, Line

Created = Callable[[str, bytes], None]
Deleted = Callable[[str], None]


class SimulatedRecords(RecordStore):
    """What one driver sees of the records. `created` and `deleted` are told of each at the moment when it happens."""

    def __init__(self, records: MemoryStore, line: Line, created: Created, deleted: Deleted) -> None:
        self.records = records
        self.line = line
        self.created = created
        self.deleted = deleted

    def create(self, path: str, content: bytes) -> bool:
        verb = {"decisions": "decide", "incarnations": "claim"}.get(path.partition("/")[0], "create")
        return self.line.ask(LOG, verb, lambda: self._create(path, content), path)

    def _create(self, path: str, content: bytes) -> bool:
        is_new = self.records.create(path, content)
        if is_new:
            self.created(path, content)
        return is_new

    def replace(self, path: str, content: bytes) -> None:
        self.line.ask(LOG, "replace", lambda: self.records.replace(path, content), path)

    def read(self, path: str) -> bytes | None:
        found = self.line.ask(LOG, "read", lambda: self.records.read(path) or b"", path, changes=False)
        return found or None

    def exists(self, path: str) -> bool:
        return self.line.ask(LOG, "exists", lambda: self.records.exists(path), path, changes=False)

    def list(self, folder: str) -> list[str]:
        return self.line.ask(LOG, "list", lambda: self.records.list(folder), folder, changes=False)

    def folders(self, folder: str) -> Sequence[str]:
        return self.line.ask(LOG, "list folders", lambda: self.records.folders(folder), folder, changes=False)

    def delete(self, path: str) -> None:
        self.line.ask(LOG, "delete", lambda: self._delete(path), path)

    def _delete(self, path: str) -> None:
        self.records.delete(path)
        self.deleted(path)

    def describe(self) -> str:
        return "the simulated log"
