"""A reader of one table that polls it while everything else is being killed, and remembers what it saw.

Each batch adds the next rows of every input partition. So one look at how far each partition has come tells whether
whole batches are visible: it is where some batch ends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.kafka_audit import PARTITIONS, BatchPlan

POLL_S = 0.05
LATE_S_MAX = 60.0


@dataclass(frozen=True)
class Look:
    """How far each partition has come, and when it was asked for."""

    at: float
    ends: tuple[int, ...]


class TableWatcher(threading.Thread):
    """`connect` gives a DB-API connection in autocommit."""

    def __init__(self, table: str, connect: Callable[[], Any]) -> None:
        super().__init__(name=f"watcher of {table}", daemon=True)
        self.table = table
        self.looks: list[Look] = []
        self.misses = 0
        self._connect = connect
        self._connection: Any = None
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            time.sleep(POLL_S)

    def look(self) -> Look | None:
        """None when the server is away, or the table not there yet."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            rows = _query(self._connection, " UNION ALL ".join(self._end_of(p) for p in range(PARTITIONS)))
        except Exception:  # noqa: BLE001 - whatever it is, there is nothing to see
            self.misses += 1
            self._connection = None
            return None
        ends = {int(part): int(place) + 1 for part, place in rows if place is not None}
        seen = Look(time.time(), tuple(ends.get(p, 0) for p in range(PARTITIONS)))
        if not self.looks or self.looks[-1].ends != seen.ends:
            self.looks.append(seen)
        return seen

    def _end_of(self, part: int) -> str:
        """One look is one statement, which sees one state of the table."""
        return f"SELECT {part}, max(place) FROM {self.table} WHERE part = {part}"  # noqa: S608 - ours

    def rows(self) -> Counter[Hashable]:
        """All rows: id, partition, offset. Over a connection of its own: the thread uses the other one meanwhile."""
        connection = self._connect()
        try:
            found = _query(connection, f"SELECT id, part, place FROM {self.table}")  # noqa: S608 - ours
        finally:
            connection.close()
        return Counter((int(a), int(b), int(c)) for a, b, c in found)

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join(LATE_S_MAX)


def _query(connection: Any, sql: str) -> list[Any]:
    cursor = connection.cursor()
    cursor.execute(sql)
    return list(cursor.fetchall())


def wrong_looks(looks: list[Look], plan: BatchPlan, decided_at: Mapping[tuple[int, int], float]) -> list[str]:
    """Looks that show part of a batch, and batches that were seen before they were decided."""
    ends = {tuple(plan.ends[p][batch] for p in range(PARTITIONS)): batch for batch in range(plan.batches)}
    wrong = []
    for look in looks:
        if not any(look.ends):
            continue
        batch = ends.get(look.ends)
        if batch is None:
            wrong.append(f"part of a batch was visible: {look.ends}")
            continue
        decided = min((at for (number, _), at in decided_at.items() if number == batch), default=float("inf"))
        if look.at < decided:
            wrong.append(f"batch {batch} was seen before it was decided")
    return wrong
