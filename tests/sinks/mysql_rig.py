"""What the tests of the MySQL sink share: tables of its own for each test on one server, and a server to kill."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pymysql
import pytest

from semel.dev.mariadb import MariaDbServer, mariadb
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Participant
from semel.sinks.mysql import MySql
from semel.sinks.mysql.connection import quote
from semel.sinks.mysql.url import settings_of
from semel.testing.harness import attempt, context, together
from tests.contract.mysql_harness import IMPATIENT
from tests.sinks.participants import prepare, started

KEYED = ("upsert", "dedup", "versions")
MODES = ("ledger", "xa", *KEYED)


class Database:
    """The database of a server. Each test has tables of its own, all with the same ending."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.suffix = f"_{uuid.uuid4().hex[:8]}"
        self.table = f"orders{self.suffix}"

    @contextmanager
    def session(self) -> Iterator[Any]:
        settings = settings_of(self.url)
        with pymysql.connect(**settings, autocommit=True, charset="utf8mb4", init_command=IMPATIENT) as connection:
            cursor = connection.cursor()
            cursor.execute("SET time_zone = '+00:00'")
            yield cursor

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.session() as cursor:
            cursor.execute(sql, values or None)
            return list(cursor.fetchall())

    def create(self, columns: str, engine: str = "InnoDB") -> None:
        self.run(f"CREATE TABLE {self.table} ({columns}) ENGINE = {engine} CHARACTER SET utf8mb4")

    def rows(self, what: str = "*", order: str = "1, 2", view: str = "") -> list[tuple[Any, ...]]:
        return self.run(f"SELECT {what} FROM {self.table}{view} ORDER BY {order}")  # noqa: S608 - ours

    def sink(self, mode: str = "ledger", **settings: Any) -> MySql:
        """A sink of any mode; it creates its table."""
        given: dict[str, Any] = {"key": ["id"] if mode in KEYED else [], "create": True, "timeout_s": 5}
        table = settings.pop("table", self.table)
        name = settings.pop("name", f"mysql{self.suffix}")
        return MySql(settings.pop("url", self.url), table, mode=mode, name=name, **{**given, **settings})

    def staged(self) -> list[str]:
        """Whatever is staged or prepared by us."""
        tables = self.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = database() "
            "AND left(table_name, 12) = 'semel_stage_' AND locate(%s, table_comment) > 0",
            self.suffix,
        )
        prepared = [str(row[3]) for row in self.run("XA RECOVER") if self.suffix in str(row[3])]
        return [name for (name,) in tables] + prepared

    def end(self) -> None:
        ours = self.run("SHOW FULL TABLES WHERE locate(%s, tables_in_semel) > 0", self.suffix)
        for name, kind in sorted(ours, key=lambda row: row[1] != "VIEW"):
            self.run(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} IF EXISTS {quote(name)}")


@pytest.fixture
def db(mariadb_server: MariaDbServer) -> Iterator[Database]:
    database = Database(mariadb_server.url)
    yield database
    database.end()


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer]:
    """One that does not take data from clients, and may be killed."""
    with mariadb(tmp_path_factory.mktemp("mariadb_own"), settings={"local_infile": "OFF"}, say=print) as server:
        yield server


def commit(participant: Participant, committables: Sequence[Committable]) -> Outcome:
    return together([participant.commit(c) for c in committables])


def write(sink: MySql, *batches: pa.RecordBatch | Sequence[pa.RecordBatch], incarnation: int = 1) -> None:
    """Every argument is a batch of the stream: the rows of one task, or a list of those of several."""
    sink.check((batches[0] if isinstance(batches[0], pa.RecordBatch) else batches[0][0]).schema)
    with started(sink, context(incarnation)) as participant:
        for number, batch in enumerate(batches, 100 * (incarnation - 1)):
            tasks = [batch] if isinstance(batch, pa.RecordBatch) else batch
            promise = prepare(participant, sink, attempt(number, 0, incarnation), *tasks)
            assert commit(participant, promise) is Outcome.COMMITTED


def stamped(*triples: tuple[int, str, int | None]) -> pa.RecordBatch:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("at", pa.int32())])
    return pa.RecordBatch.from_pylist([{"id": i, "text": t, "at": a} for i, t, a in triples], schema=schema)
