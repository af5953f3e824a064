"""Tables of SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from semel.errors import ConfigError, SemelError, SinkUnavailable
from semel.ids import PipelineId
from semel.sinks.sqlite import Sqlite
from semel.verify.readers.base import NumberOf, names_ours
from semel.verify.readers.tables import CONNECT_S_MAX, Table, TableReader
from semel.verify.workload import Workload


class SqliteReader(TableReader):
    def __init__(self, sink: Sqlite, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(sink, workload, number_of, marked=marked, table=SqliteTable(sink))


class SqliteTable(Table):
    """A connection for each look: a file that was put in the place of another is seen."""

    creates = True

    def __init__(self, sink: Sqlite) -> None:
        self.sink = sink

    def let_go(self) -> None:
        """Nothing is kept open."""

    def is_missing(self, error: Exception) -> bool:
        return isinstance(error, FileNotFoundError) or "no such table" in str(error)

    def columns(self) -> list[str]:
        if not os.path.exists(self.sink.path):
            return []
        with self._connected() as connection:
            return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({_quote(self.sink.table)})")]

    def has_rows(self) -> bool:
        with self._connected() as connection:
            sql = f"SELECT 1 FROM {_quote(self.sink.table)} LIMIT 1"  # noqa: S608 - quoted
            return connection.execute(sql).fetchone() is not None

    def identities(self, column: str) -> Iterator[Any]:
        # SQLite takes a name in quotes that no column has for a text, unless a table is named before it.
        sql = f"SELECT rows.{_quote(column)} FROM {_quote(self.sink.table)} AS rows"  # noqa: S608 - quoted
        with self._connected() as connection:
            for (value,) in connection.execute(sql):
                yield value

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        spool = Path(f"{self.sink.path}-semel")
        found = sorted(path.name for path in spool.iterdir()) if spool.is_dir() else []
        return [f"staged file {n}" for n in found if names_ours(n.removesuffix(".arrow"), pipeline, self.sink.name)]

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # A file that is no database is not away.
            kind: type[SemelError] = SinkUnavailable if isinstance(error, sqlite3.OperationalError) else ConfigError
            raise kind(f"{self.sink.describe()} cannot be read: {error}.") from None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if not os.path.exists(self.sink.path):
            raise FileNotFoundError(self.sink.path)
        address = f"{Path(self.sink.path).as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=CONNECT_S_MAX)) as connection:
            yield connection


def _quote(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
