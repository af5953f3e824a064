"""Tables of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.ids import PipelineId
from semel.sinks.postgres import Postgres
from semel.verify.readers.base import NumberOf, names_ours
from semel.verify.readers.tables import CONNECT_S_MAX, LOOK_S_MAX, ROWS_PER_FETCH, ServerTable, TableReader
from semel.verify.workload import Workload


class PostgresReader(TableReader):
    def __init__(self, sink: Postgres, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(sink, workload, number_of, marked=marked, table=PostgresTable(sink))


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
