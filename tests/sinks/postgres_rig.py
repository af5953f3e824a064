"""What the tests of the PostgreSQL sink share: a schema for each test on one server, and eyes of their own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from semel.dev.postgres import PostgresServer
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Participant
from semel.sinks.postgres import Postgres
from semel.testing.harness import attempt, context, together
from tests.sinks.participants import prepare, started

KEYED = ("upsert", "dedup", "versions")
MODES = ("ledger", "prepared", *KEYED)


class Database:
    """One schema of a server."""

    def __init__(self, url: str, schema: str = "") -> None:
        self.url = url
        self.schema = schema or f"s_{uuid.uuid4().hex[:8]}"
        self.run(f"CREATE SCHEMA {quoted(self.schema)}")

    @contextmanager
    def session(self, url: str = "") -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            connection.execute(f"SET search_path TO {quoted(self.schema)}, public")
            yield connection

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.session() as connection:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def sink(self, table: str = "orders", **settings: Any) -> Postgres:
        defaults: dict[str, Any] = {"schema": self.schema, "timeout_s": 5, "mode": "ledger"}
        return Postgres(settings.pop("url", self.url), table, **{**defaults, **settings})

    def keyed(self, mode: str, table: str = "orders", **settings: Any) -> Postgres:
        """A sink of any mode; it creates its table."""
        key = ["id"] if mode in KEYED else []
        return self.sink(table, **{"mode": mode, "key": key, "create": True, **settings})

    def staged(self) -> list[str]:
        """Whatever is staged or prepared by us."""
        tables = self.run(
            "SELECT relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = %s AND starts_with(relname, 'semel_stage_')",
            self.schema,
        )
        return [name for (name,) in tables] + [gid for (gid,) in self.run("SELECT gid FROM pg_prepared_xacts")]

    def sessions(self) -> list[str]:
        found = self.run("SELECT application_name FROM pg_stat_activity WHERE starts_with(application_name, 'semel')")
        return [name for (name,) in found]

    def end(self) -> None:
        for (gid,) in self.run("SELECT gid FROM pg_prepared_xacts"):
            self.run(f"ROLLBACK PREPARED '{gid}'")
        self.run(f"DROP SCHEMA {quoted(self.schema)} CASCADE")


@pytest.fixture
def db(postgres_server: PostgresServer) -> Iterator[Database]:
    database = Database(postgres_server.url)
    yield database
    database.end()


def commit(participant: Participant, committables: Sequence[Committable]) -> set[Outcome]:
    return {participant.commit(c) for c in committables}


def write(sink: Postgres, *batches: pa.RecordBatch | Sequence[pa.RecordBatch], incarnation: int = 1) -> None:
    """Every argument is a batch of the stream: the rows of one task, or a list of those of several."""
    sink.check((batches[0] if isinstance(batches[0], pa.RecordBatch) else batches[0][0]).schema)
    with started(sink, context(incarnation)) as participant:
        for number, batch in enumerate(batches, 100 * (incarnation - 1)):
            tasks = [batch] if isinstance(batch, pa.RecordBatch) else batch
            which = attempt(number, 0, incarnation)
            outcomes = commit(participant, prepare(participant, sink, which, *tasks))
            # A task without rows has nothing to commit.
            assert together(list(outcomes)) is Outcome.COMMITTED


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def eventually(holds: Callable[[], bool], seconds_max: float = 10.0) -> bool:
    """A server takes a moment to notice that a client has gone."""
    end = time.monotonic() + seconds_max
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
