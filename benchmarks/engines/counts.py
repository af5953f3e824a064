"""What a count per key must come to, and what a sink shows of it: the check of every benchmark that keeps state."""

from __future__ import annotations

import math
import sqlite3
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from benchmarks.reader import WrongRows, consumer_of
from benchmarks.rows import SPREAD

if TYPE_CHECKING:
    import numpy as np

POLL_S = 0.5
ROWS_AT_ONCE = 10_000
#: With fewer, nothing is there that has not been read.
QUIET_S = 1.0


def expected(rows: int, keys: int) -> np.ndarray[Any, Any]:
    """By key, as `rows.key_of` hands them out."""
    import numpy as np

    return np.bincount(np.arange(rows, dtype="int64") * SPREAD % keys, minlength=keys)


def require_even(keys: int) -> None:
    if math.gcd(keys, SPREAD) != 1:
        raise ValueError(f"{keys} keys cannot be dealt out evenly; take a number that {SPREAD} does not divide")


class Counts(ABC):
    """The newest count of each key that readers see."""

    def __init__(self, keys: int) -> None:
        import numpy as np

        self.keys = keys
        self.newest = np.zeros(keys, "int64")

    @abstractmethod
    def look(self) -> None:
        """Brings `newest` up to date."""

    @abstractmethod
    def total(self) -> int:
        """Rows that were counted so far."""

    def wait_for(self, rows: int, seconds_max: float) -> None:
        """Until so many rows were counted. Returns at the limit, too: what is missing is told by `require`."""
        deadline = time.monotonic() + seconds_max
        while self.total() < rows and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def require(self, who: str, rows: int) -> None:
        self.look()
        wrong = int((self.newest != expected(rows, self.keys)).sum())
        if wrong:
            raise WrongRows(f"{who}: {wrong:,} of {self.keys:,} keys have a wrong count after {rows:,} rows")


class TopicCounts(Counts):
    """A key is only ever counted up: one that comes again with the same count or a smaller one came twice."""

    def __init__(self, keys: int, servers: str, topic: str) -> None:
        super().__init__(keys)
        self.records = 0
        self.again = 0
        self.last_append_ms = 0
        self._consumer = consumer_of(servers, [topic])

    def look(self) -> None:
        while messages := self._consumer.consume(ROWS_AT_ONCE, QUIET_S):
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
                key, count = int(message.key()), int(message.value())
                self.again += count <= self.newest[key]
                self.newest[key] = max(count, self.newest[key])
                self.last_append_ms = max(self.last_append_ms, message.timestamp()[1])
            self.records += len(messages)
            if len(messages) < ROWS_AT_ONCE:
                return

    def total(self) -> int:
        self.look()
        return int(self.newest.sum())

    def require(self, who: str, rows: int) -> None:
        super().require(who, rows)
        if self.again:
            raise WrongRows(f"{who}: {self.again:,} of {self.records:,} counts came twice, or after a newer one")

    def end(self) -> None:
        self._consumer.close()


class TableCounts(Counts):
    """A table with one row a key. Before the first batch there is none."""

    def __init__(self, keys: int, place: str, table: str) -> None:
        super().__init__(keys)
        self._place, self._table = place, table

    def look(self) -> None:
        self.newest[:] = 0
        for key, count in self._rows('"key", "count"'):
            self.newest[int(key)] = count

    def total(self) -> int:
        return int(next(iter(self._rows('sum("count")')), (0,))[0] or 0)

    @abstractmethod
    def _rows(self, what: str) -> list[tuple[Any, ...]]: ...


class SqliteCounts(TableCounts):
    def _rows(self, what: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self._place, timeout=60)
        try:
            there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self._table,)).fetchone()
            query = f'SELECT {what} FROM "{self._table}"'  # noqa: S608 - our own names
            return connection.execute(query).fetchall() if there else []
        finally:
            connection.close()


class PostgresCounts(TableCounts):
    def _rows(self, what: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._place, autocommit=True) as connection:
            there = connection.execute("SELECT to_regclass(%s)", (self._table,)).fetchone()
            query = f'SELECT {what} FROM "{self._table}"'  # noqa: S608 - our own names
            return connection.execute(query).fetchall() if there and there[0] else []
