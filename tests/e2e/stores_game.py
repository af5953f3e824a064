"""Kafka to Kafka and databases in one batch, in a child process that is killed, with a reader on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from semel.dev.database import DatabaseServer
from semel.failpoints import all_failpoints
from semel.protocol.invariants import nothing_duplicated, nothing_lost
from tests.e2e.kafka_audit import PARTITIONS, Findings
from tests.e2e.kafka_game import KafkaGame
from tests.e2e.tables import TableWatcher, wrong_looks
from tests.processes import wait_until


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


class LedgerRow(NamedTuple):
    sink: str
    batch: int
    part: str
    attempt: int
    incarnation: int
    rows: int


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

    def run(self, kind: str, sql: str) -> list[Any]:
        """A statement in one of the databases, as somebody else's client."""
        connection = connect(kind, self.databases[kind].url)
        try:
            cursor = connection.cursor()
            cursor.execute(sql.format(table=self.tables[kind].table))
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def require_exactly_once(self) -> Findings:
        findings = super().require_exactly_once()
        wrong = {kind: words[:5] for kind, words in self.wrong_elsewhere().items() if words}
        assert wrong == {}, wrong
        left = self.left_behind()
        assert left == [], left
        for kind, watcher in self.tables.items():
            # A reader that never got through would find nothing wrong.
            wait_until(partial(self._has_seen_the_end, watcher))
            assert self.ledger(kind) == self.decided_for(kind)
        return findings

    def _has_seen_the_end(self, watcher: TableWatcher) -> bool:
        return any(sum(look.ends) == self.dealt for look in watcher.looks)

    # The ledger -------------------------------------------------------------------------------------------------------

    def ledger(self, kind: str) -> list[LedgerRow]:
        """What the pipeline has marked in a database."""
        pipeline = self.prefix.removeprefix("semel-").removesuffix("-")
        return [LedgerRow(*row) for row in self.run(kind, LEDGER.format(pipeline=pipeline))]

    def decided_for(self, kind: str) -> list[LedgerRow]:
        """What it should have marked: of every batch what was decided, and nothing of incarnations that lost it."""
        sink = f"{kind.lower()}_{self.tables[kind].table}"
        decided = [(batch, c) for batch in range(self.batches) for d in self.decisions(batch) for c in d.committables]
        return [
            LedgerRow(sink, batch, "", c.attempt.attempt, c.attempt.incarnation, c.rows)
            for batch, c in decided
            if c.sink == sink
        ]

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
        # The name of an XA transaction has no room for hyphens in the id.
        names = self.prefix, f"{self.prefix.removeprefix('semel-').replace('-', '')}-"
        rows = [(kind, row) for kind, looks in LEFTOVERS.items() for sql in looks for row in self.run(kind, sql)]
        ours = [f"{kind}: {row}" for kind, row in rows if any(name in str(row) for name in names)]
        return [*super().left_behind(), *ours]


def _connector(kind: str, url: str) -> Any:
    return lambda: connect(kind, url)


CREATE_TABLE = "CREATE TABLE {table} (id bigint, part bigint, place bigint, task bigint)"
CREATE_INDEX = "CREATE INDEX i_{table} ON {table} (part, place)"
#: What such a pipeline passes.
KINDS = ("startup", "batch", "log", "task", "kafka", "postgres", "mysql")
POINTS = tuple(name for name, p in all_failpoints().items() if name.split(".")[0] in KINDS and not p.seldom)
LEDGER = (
    "SELECT sink, batch, part, attempt, incarnation, row_count FROM semel_ledger "
    "WHERE pipeline = '{pipeline}' ORDER BY batch, part"
)
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
