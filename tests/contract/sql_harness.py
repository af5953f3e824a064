"""Harnesses of the SQL databases: one for each mode, on a real server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from semel.sinks.base import Sink
from semel.sinks.postgres import Postgres
from semel.sinks.sql.store import stage_table
from semel.testing.harness import Harness, Rows


class PostgresHarness(Harness):
    """Tests share a server, so each has a schema and sink names of its own."""

    kind = "postgres"
    committed_failpoint = "postgres.committed"
    mode: ClassVar[str] = "ledger"
    firm: ClassVar[bool] = False
    leak_batches = 60

    def __init__(self, folder: Path, address: str = "") -> None:
        super().__init__(folder, address)
        self.suffix = uuid.uuid4().hex[:8]
        self.schema = f"Shop {self.suffix}"
        self.run(f'CREATE SCHEMA "{self.schema}"')

    def run(self, sql: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.address, autocommit=True) as connection:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def _sink(self, table: str, name: str) -> Postgres:
        key = ["id"] if self.mode in ("upsert", "dedup", "versions") else []
        return Postgres(
            self.address,
            table,
            mode=self.mode,
            key=key,
            schema=self.schema,
            create=True,
            firm=self.firm,
            name=f"{name}_{self.suffix}",
            timeout_s=5,
        )

    def sink(self, name: str = "") -> Sink:
        return self._sink("Orders", name or "orders")

    def neighbour(self) -> Sink:
        return self._sink("Returns", "returns")

    def visible(self, sink: Sink) -> Rows:
        if not isinstance(sink, Postgres):
            raise TypeError(sink)
        table = f"{sink.table}_latest" if self.mode == "versions" else sink.table
        if not self._exists(table):
            return []
        return self.run(f'SELECT id, text FROM "{self.schema}"."{table}" ORDER BY 1, 2')  # noqa: S608 - ours

    def _exists(self, table: str) -> bool:
        return bool(self.run("SELECT to_regclass(%s) IS NOT NULL", f'"{self.schema}"."{table}"')[0][0])

    def staged(self) -> list[str]:
        tables = self.run(
            "SELECT coalesce(obj_description(c.oid, 'pg_class'), c.relname) FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND starts_with(c.relname, 'semel_stage_')",
            self.schema,
        )
        prepared = self.run("SELECT gid FROM pg_prepared_xacts")
        # What the driver left prepared has the name of a staging table.
        return sorted({row[0] for row in tables} | {gid for (gid,) in prepared if self.suffix in gid})

    def lose(self, branch: str) -> None:
        for (gid,) in self.run("SELECT gid FROM pg_prepared_xacts"):
            if gid == branch or (self.firm and self.suffix in gid):
                self.run(f"ROLLBACK PREPARED '{gid}'")
        if self.mode != "prepared":
            self.run(f'DROP TABLE "{self.schema}"."{stage_table(branch)}"')

    def markers(self) -> int:
        tables = [t for t in ("semel_ledger", "semel_fence") if self._exists(t)]
        return sum(self.run(f'SELECT count(*) FROM "{self.schema}"."{t}"')[0][0] for t in tables)  # noqa: S608 - ours

    def put_foreign_things(self) -> None:
        self.run(f'CREATE TABLE "{self.schema}".semel_stage_notes (id int)')
        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute("BEGIN")
            connection.execute(f'CREATE TABLE "{self.schema}".theirs (id int)')
            connection.execute(f"PREPARE TRANSACTION 'semel-nonsense-{self.suffix}'")

    def end(self) -> None:
        for (gid,) in self.run("SELECT gid FROM pg_prepared_xacts"):
            if self.suffix in gid:
                self.run(f"ROLLBACK PREPARED '{gid}'")
        self.run(f'DROP SCHEMA "{self.schema}" CASCADE')


class PostgresFirmHarness(PostgresHarness):
    firm = True


class PostgresPreparedHarness(PostgresHarness):
    mode = "prepared"


class PostgresUpsertHarness(PostgresHarness):
    mode = "upsert"


class PostgresDedupHarness(PostgresHarness):
    mode = "dedup"


class PostgresVersionsHarness(PostgresHarness):
    mode = "versions"


SQL_HARNESSES = {
    f"{harness.kind}-{harness.mode}{'-firm' * harness.firm}": harness
    for harness in (
        PostgresHarness,
        PostgresFirmHarness,
        PostgresPreparedHarness,
        PostgresUpsertHarness,
        PostgresDedupHarness,
        PostgresVersionsHarness,
    )
}
