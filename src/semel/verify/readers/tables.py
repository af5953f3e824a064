"""Tables of databases: one statement for each look, which shows one state of the table.

The connections are a plain user's: the sink's url and nothing else of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from semel.errors import ConfigError
from semel.ids import PipelineId
from semel.sinks.base import Sink
from semel.sinks.sql.sink import VERSIONS, SqlSink
from semel.verify.readers.base import NumberOf, Reader
from semel.verify.workload import Workload

CONNECT_S_MAX = 5
#: So long a statement may be silent.
LOOK_S_MAX = 60
ROWS_PER_FETCH = 10_000


class Table(ABC):
    """A table and how to ask for it. Whatever is asked may raise the client's own errors."""

    #: Names of columns that differ in case only are one and the same.
    ignores_case = True

    @property
    @abstractmethod
    def creates(self) -> bool:
        """Whether the sink makes the table when it is missing."""

    @abstractmethod
    def is_missing(self, error: Exception) -> bool:
        """Whether the error says that there is no such table."""

    @abstractmethod
    def columns(self) -> list[str]:
        """None when there is no table."""

    @abstractmethod
    def has_rows(self) -> bool: ...

    @abstractmethod
    def identities(self, column: str) -> Iterator[Any]:
        """This column of all rows, by one statement, a few rows at a time."""

    @abstractmethod
    def left_behind(self, pipeline: PipelineId) -> list[str]: ...

    @abstractmethod
    def translated(self) -> AbstractContextManager[None]:
        """Turns the client's errors into ours."""

    @abstractmethod
    def let_go(self) -> None:
        """Close the connection."""


class TableReader(Reader):
    def __init__(
        self, sink: Sink, workload: Workload, number_of: NumberOf, *, table: Table, marked: bool = True
    ) -> None:
        super().__init__(sink, workload, number_of, marked=marked)
        self.table = table
        # Where each task commits for itself, readers see some of a batch before the rest, and that is known.
        self.snapshots = not sink.capabilities.commits_by_task

    def check_ready(self) -> None:
        try:
            with self.table.translated():
                self._check_ready()
        finally:
            self.let_go()

    def _check_ready(self) -> None:
        what, identity = self.sink.describe(), self.workload.identity
        columns = self.table.columns()
        if not columns:
            if self.table.creates:
                return
            raise ConfigError(f"{what} does not exist.", remedy="Create it, or let the sink do so with create=True.")
        known = {name.lower() for name in columns} if self.table.ignores_case else set(columns)
        if (identity.lower() if self.table.ignores_case else identity) not in known:
            raise ConfigError(
                f"{what} has no column {identity}, by which rows could be told apart. It has: {', '.join(columns)}.",
                remedy='Name one of them: @semel.workload(identity="..."), or add the column to table and rows.',
            )
        if self.table.has_rows():
            raise ConfigError(
                f"{what} is not empty.",
                remedy="Let the pipeline write to a new table for this run: nobody else's rows can be compared.",
            )

    def look(self) -> None:
        began_s = time.time()
        try:
            self.show(began_s, self.table.identities(self.workload.identity))
        except Exception as error:
            if not (self.table.creates and self.table.is_missing(error)):
                raise
            # The sink has not made it yet.
            self.show(began_s, ())

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        return self.table.left_behind(pipeline)

    def let_go(self) -> None:
        self.table.let_go()


# Servers ------------------------------------------------------------------------------------------------------------


class ServerTable(Table):
    """A table of a database server, over one connection that is made when it is needed."""

    def __init__(self, sink: SqlSink) -> None:
        self.sink = sink
        self._open: Any = None
        self._shown = ""

    @property
    def creates(self) -> bool:
        return self.sink.create

    @property
    def connection(self) -> Any:
        if self._open is None:
            self._open = self.connect()
        return self._open

    def let_go(self) -> None:
        connection, self._open = self._open, None
        if connection is not None:
            connection.close()

    @property
    def shown(self) -> str:
        """What readers read, quoted: the table; in mode `versions` the view of the newest, where there is one."""
        if not self._shown:
            view = f"{self.sink.table}_latest"
            has_view = self.sink.mode == VERSIONS and (self.creates or self.columns_of(view))
            self._shown = self.sink.place.named(view if has_view else self.sink.table)
        return self._shown

    def columns(self) -> list[str]:
        return self.columns_of(self.sink.table)

    def has_rows(self) -> bool:
        return bool(self.query(f"SELECT 1 FROM {self.sink.target} LIMIT 1"))  # noqa: S608 - quoted

    def statement(self, column: str) -> str:
        return f"SELECT {self.sink.place.quoted(column)} FROM {self.shown}"  # noqa: S608 - quoted

    def query(self, sql: str, *values: Any) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return list(cursor.fetchall())

    def translated(self) -> AbstractContextManager[None]:
        return self.sink.translated("cannot be read", refused=ConfigError)

    @abstractmethod
    def connect(self) -> Any: ...

    @abstractmethod
    def columns_of(self, table: str) -> list[str]: ...
