"""Harnesses of MySQL and MariaDB: one for each mode, on a real server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, ClassVar

import pymysql

from semel.ids import parse_branch
from semel.sinks.base import Sink
from semel.sinks.mysql import MySql
from semel.sinks.mysql.url import settings_of
from semel.sinks.mysql.xa import parse_xid
from semel.sinks.sql.store import stage_table
from semel.testing.harness import Harness, Rows

#: By default it is a day: a table that a test left locked would stop all that come after it.
IMPATIENT = "SET lock_wait_timeout = 30"


class MySqlHarness(Harness):
    """Tests share a database, so each has tables and sink names of its own."""

    kind = "mysql"
    committed_failpoint = "mysql.committed"
    mode: ClassVar[str] = "ledger"
    firm: ClassVar[bool] = False
    leak_batches = 60

    def __init__(self, folder: Path, address: str = "") -> None:
        super().__init__(folder, address)
        self.suffix = uuid.uuid4().hex[:8]

    def run(self, sql: str, *values: Any) -> list[Any]:
        with pymysql.connect(**settings_of(self.address), autocommit=True, init_command=IMPATIENT) as connection:
            cursor = connection.cursor()
            cursor.execute(sql, values or None)
            return list(cursor.fetchall())

    def _sink(self, table: str, name: str) -> MySql:
        key = ["id"] if self.mode in ("upsert", "dedup", "versions") else []
        return MySql(
            self.address,
            f"{table} {self.suffix}",
            mode=self.mode,
            key=key,
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
        if not isinstance(sink, MySql):
            raise TypeError(sink)
        table = f"{sink.table}_latest" if self.mode == "versions" else sink.table
        if not self._exists(table):
            return []
        return self.run(f"SELECT id, text FROM `{table}` ORDER BY 1, 2")  # noqa: S608 - ours

    def _exists(self, table: str) -> bool:
        return bool(self.run("SHOW TABLES WHERE tables_in_semel = %s", table))

    def staged(self) -> list[str]:
        tables = self.run(
            "SELECT coalesce(nullif(table_comment, ''), table_name) FROM information_schema.tables "
            "WHERE table_schema = database() AND left(table_name, 12) = 'semel_stage_'"
        )
        names = {row[0] for row in tables} | {name for name, _ in self._prepared()}
        # What the driver left prepared has the name of a staging table.
        return sorted(name for name in names if self.suffix in name)

    def _prepared(self) -> list[tuple[str, str]]:
        """Of each prepared transaction the name that we give it, and the one that the server does."""
        found = []
        for _, length, _, data in self.run("XA RECOVER"):
            # MariaDB gives bytes, MySQL text.
            text = data.decode() if isinstance(data, bytes) else data
            gtrid, bqual = text[:length], text[length:]
            found.append((str(parse_xid(gtrid, bqual) or gtrid), f"'{gtrid}','{bqual}'"))
        return found

    def lose(self, branch: str) -> None:
        for name, known_as in self._prepared():
            if name == branch or (self.firm and self.suffix in name):
                self.run(f"XA ROLLBACK {known_as}")
        if self.mode != "xa":
            self.run(f"DROP TABLE `{stage_table(branch)}`")

    def markers(self) -> int:
        tables = [t for t in ("semel_ledger", "semel_fence") if self._exists(t)]
        query = "SELECT count(*) FROM {} WHERE locate(%s, sink) > 0"
        return sum(self.run(query.format(t), self.suffix)[0][0] for t in tables)

    def put_foreign_things(self) -> None:
        self.run(f"CREATE TABLE semel_stage_notes_{self.suffix} (id int)")
        self.run(f"CREATE TABLE theirs_{self.suffix} (id int) ENGINE = InnoDB")
        with pymysql.connect(**settings_of(self.address), autocommit=True) as connection:
            cursor = connection.cursor()
            cursor.execute(f"XA START 'semel-nonsense-{self.suffix}'")
            cursor.execute(f"INSERT INTO theirs_{self.suffix} VALUES (1)")  # noqa: S608 - ours
            cursor.execute(f"XA END 'semel-nonsense-{self.suffix}'")
            cursor.execute(f"XA PREPARE 'semel-nonsense-{self.suffix}'")

    def end(self) -> None:
        for name, known_as in self._prepared():
            if self.suffix in name:
                self.run(f"XA ROLLBACK {known_as}")
        staged = [stage_table(name) for name in self.staged() if parse_branch(name)]
        sinks = [sink for sink in (self.sink(), self.neighbour()) if isinstance(sink, MySql)]
        ours = [name for sink in sinks for name in (sink.seen_table, sink.due_table)]
        mine = self.run("SHOW FULL TABLES WHERE locate(%s, tables_in_semel) > 0", self.suffix)
        for table, kind in [*mine, *((name, "TABLE") for name in [*staged, *ours])]:
            self.run(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} IF EXISTS `{table}`")


class MySqlFirmHarness(MySqlHarness):
    firm = True


class MySqlXaHarness(MySqlHarness):
    mode = "xa"


class MySqlUpsertHarness(MySqlHarness):
    mode = "upsert"


class MySqlDedupHarness(MySqlHarness):
    mode = "dedup"


class MySqlVersionsHarness(MySqlHarness):
    mode = "versions"


MYSQL_HARNESSES = {
    f"{harness.kind}-{harness.mode}{'-firm' * harness.firm}": harness
    for harness in (
        MySqlHarness,
        MySqlFirmHarness,
        MySqlXaHarness,
        MySqlUpsertHarness,
        MySqlDedupHarness,
        MySqlVersionsHarness,
    )
}
