"""Tables of MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.ids import PipelineId
from semel.sinks.mysql import MySql
from semel.sinks.mysql.connection import number_of
from semel.sinks.mysql.url import settings_of
from semel.sinks.mysql.xa import RM_ERROR
from semel.verify.readers.base import NumberOf, names_ours
from semel.verify.readers.tables import CONNECT_S_MAX, LOOK_S_MAX, ROWS_PER_FETCH, ServerTable, TableReader
from semel.verify.workload import Workload

NO_SUCH_TABLE = frozenset({1146, 1049})


class MySqlReader(TableReader):
    def __init__(self, sink: MySql, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(sink, workload, number_of, marked=marked, table=MySqlTable(sink))


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
