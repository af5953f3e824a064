"""Kafka to Kafka and databases in one batch, in a child process that is killed, with a reader on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semel.dev.database import DatabaseServer
from semel.failpoints import FAILPOINTS
from semel.protocol.invariants import nothing_duplicated, nothing_lost
from tests.e2e.kafka_audit import PARTITIONS, Findings
from tests.e2e.kafka_game import KafkaGame
from tests.e2e.tables import TableWatcher, wrong_looks


def connect(kind: str, url: str) -> Any:
    """A plain client of the database, as a user of the table would have."""
    if kind == "Postgres":
        import psycopg

        return psycopg.connect(url, autocommit=True, connect_timeout=5)
    from urllib.parse import urlsplit

    import pymysql

    at = urlsplit(url)
    return pymysql.connect(
        host=at.hostname,
        port=at.port or 3306,
        user=at.username,
        password=at.password or "",
        database=at.path.lstrip("/"),
        autocommit=True,
        connect_timeout=5,
    )


@dataclass
class StoresGame(KafkaGame):
    """`databases` are the servers, by the kind of their sink."""

    databases: Mapping[str, DatabaseServer] = field(default_factory=dict)
    tables: dict[str, TableWatcher] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        table = f"out_{self.setup.topics[1].replace('-', '_')}"
        for kind, server in self.databases.items():
            connection = connect(kind, server.url)
            for sql in (CREATE_TABLE, CREATE_INDEX):
                connection.cursor().execute(sql.format(table=table))
            connection.close()
            self.tables[kind] = TableWatcher(table, _connector(kind, server.url))
            self.tables[kind].start()

    def end(self) -> None:
        super().end()
        for watcher in self.tables.values():
            watcher.stop()

    def require_exactly_once(self) -> Findings:
        findings = super().require_exactly_once()
        wrong = {kind: words[:5] for kind, words in self.wrong_elsewhere().items() if words}
        assert wrong == {}, wrong
        left = self.left_behind()
        assert left == [], left
        return findings

    def wrong_elsewhere(self) -> dict[str, list[str]]:
        """After the end: every table has every row once, and no reader ever saw part of a batch, or one too early."""
        expected: Counter[Hashable] = Counter((i, i % PARTITIONS, i // PARTITIONS) for i in range(self.dealt))
        wrong: dict[str, list[str]] = {"lost": [], "duplicated": [], "torn": []}
        for kind, watcher in self.tables.items():
            rows = watcher.rows()
            wrong["lost"] += [f"{kind}: {words}" for words in nothing_lost(expected, rows)]
            wrong["duplicated"] += [f"{kind}: {words}" for words in nothing_duplicated(expected, rows)]
            wrong["torn"] += [f"{kind}: {w}" for w in wrong_looks(watcher.looks, self.plan(), self.decided_at())]
        return wrong

    def left_behind(self) -> list[str]:
        """Open transactions of Kafka; staging tables and prepared transactions of this pipeline in any database."""
        found = super().left_behind()
        for kind, server in self.databases.items():
            connection = connect(kind, server.url)
            cursor = connection.cursor()
            for sql in LEFTOVERS[kind]:
                cursor.execute(sql)
                found += [f"{kind}: {row}" for row in cursor.fetchall() if self.prefix in str(row)]
            connection.close()
        return found


def _connector(kind: str, url: str) -> Any:
    return lambda: connect(kind, url)


CREATE_TABLE = "CREATE TABLE {table} (id bigint, part bigint, place bigint, task bigint)"
CREATE_INDEX = "CREATE INDEX i_{table} ON {table} (part, place)"
#: What such a pipeline passes.
KINDS = ("startup", "batch", "log", "task", "kafka", "postgres", "mysql")
POINTS = tuple(p for p in FAILPOINTS if p.split(".")[0] in KINDS)
#: What lists staging tables with their comments, and prepared transactions.
LEFTOVERS = {
    "Postgres": (
        "SELECT relname, obj_description(oid, 'pg_class') FROM pg_class WHERE starts_with(relname, 'semel_stage_')",
        "SELECT gid FROM pg_prepared_xacts",
    ),
    "MySql": (
        "SELECT table_name, table_comment FROM information_schema.tables WHERE table_name LIKE 'semel_stage_%'",
        "XA RECOVER",
    ),
}
