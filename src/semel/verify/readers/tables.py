"""Tables of PostgreSQL, MySQL, MariaDB and SQLite: one statement for each look, which shows one state of the table.

The connections are a plain user's: the sink's url and nothing else of it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from semel.errors import ConfigError, SemelError, SinkUnavailable
from semel.ids import PipelineId
from semel.sinks.base import Sink
from semel.sinks.mysql import MySql
from semel.sinks.mysql.connection import number_of
from semel.sinks.mysql.url import settings_of
from semel.sinks.mysql.xa import RM_ERROR
from semel.sinks.postgres import Postgres
from semel.sinks.sql.sink import VERSIONS, SqlSink
from semel.sinks.sqlite import Sqlite
from semel.verify.readers.base import NumberOf, Reader, names_ours
from semel.verify.workload import Workload

CONNECT_S_MAX = 5
#: So long a statement may be silent.
LOOK_S_MAX = 60
ROWS_PER_FETCH = 10_000
NO_SUCH_TABLE = frozenset({1146, 1049})


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
    def __init__(self, sink: Sink, table: Table, workload: Workload, number_of: NumberOf) -> None:
        super().__init__(sink, workload, number_of)
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


class PostgresTable(ServerTable):
    ignores_case = False
    sink: Postgres

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(
            self.sink.url,
            autocommit=True,
            prepare_threshold=None,
            application_name="semel verify",
            connect_timeout=CONNECT_S_MAX,
            tcp_user_timeout=LOOK_S_MAX * 1000,
            keepalives_idle=CONNECT_S_MAX,
            keepalives_interval=CONNECT_S_MAX,
            keepalives_count=3,
        )

    def is_missing(self, error: Exception) -> bool:
        return getattr(error, "sqlstate", None) == "42P01"

    def columns_of(self, table: str) -> list[str]:
        found = self.query(
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped "
            "ORDER BY attnum",
            self.sink.place.named(table),
        )
        return [name for (name,) in found]

    def identities(self, column: str) -> Iterator[Any]:
        # A cursor of the server: the client would hold all rows, else.
        with self.connection.transaction(), self.connection.cursor(name="semel_verify") as cursor:
            cursor.itersize = ROWS_PER_FETCH
            cursor.execute(self.statement(column))
            for (value,) in cursor:
                yield value

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        prepared = self.query("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY 1")
        staged = self.query(
            "SELECT relname, coalesce(obj_description(oid, 'pg_class'), '') FROM pg_class "
            "WHERE starts_with(relname, 'semel_stage_') ORDER BY 1"
        )
        return [
            *(f"prepared transaction {gid}" for (gid,) in prepared if names_ours(gid, pipeline, self.sink.name)),
            *(f"staging table {t} of {of}" for t, of in staged if names_ours(of, pipeline, self.sink.name)),
        ]


class MySqlTable(ServerTable):
    sink: MySql

    def connect(self) -> Any:
        import pymysql

        limits = {"connect_timeout": CONNECT_S_MAX, "read_timeout": LOOK_S_MAX, "write_timeout": LOOK_S_MAX}
        return pymysql.connect(**settings_of(self.sink.url), charset="utf8mb4", autocommit=True, **limits)

    def is_missing(self, error: Exception) -> bool:
        return number_of(error) in NO_SUCH_TABLE

    def columns_of(self, table: str) -> list[str]:
        found = self.query(
            "SELECT column_name FROM information_schema.columns "
            "WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s ORDER BY ordinal_position",
            self.sink.schema,
            table,
        )
        return [str(name) for (name,) in found]

    def identities(self, column: str) -> Iterator[Any]:
        from pymysql.cursors import SSCursor

        # Unlike the usual one, this cursor leaves the rows with the server until they are asked for.
        with self.connection.cursor(SSCursor) as cursor:
            cursor.execute(self.statement(column))
            while rows := cursor.fetchmany(ROWS_PER_FETCH):
                yield from (value for (value,) in rows)

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        staged = self.query(
            "SELECT table_name, table_comment FROM information_schema.tables "
            "WHERE left(table_name, 12) = 'semel_stage_' ORDER BY 1"
        )
        return [
            *(f"prepared XA transaction {name}" for name in self._prepared(pipeline)),
            *(f"staging table {t} of {of}" for t, of in staged if names_ours(of, pipeline, self.sink.name)),
        ]

    def _prepared(self, pipeline: PipelineId) -> list[str]:
        """The name of one has two parts: the pipeline and numbers, and the sink."""
        try:
            found = self.query("XA RECOVER")
        except Exception as error:
            if number_of(error) == RM_ERROR and not self.sink.uses_xa:
                return []  # this user may not list them, and leaves none
            raise
        names = [(data if isinstance(data, bytes) else str(data).encode(), length) for _, length, _, data in found]
        ours, sink = pipeline.replace("-", "").encode(), f"semel-{self.sink.name}".encode()
        return [name.decode(errors="replace") for name, n in names if ours in name[:n] and name[n:] == sink]


# SQLite -------------------------------------------------------------------------------------------------------------


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
