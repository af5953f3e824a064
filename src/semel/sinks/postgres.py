"""PostgreSQL: rows by binary COPY, straight from Arrow.

How a batch commits depends on the mode: see semel.sinks.sql, and docs/sinks/postgres.md for users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.sinks.base import Context, Writer
from semel.sinks.postgres_moves import create_statements, move
from semel.sinks.postgres_store import (
    Place,
    PostgresStore,
    columns_of,
    execute,
    one_line,
    psycopg_,
    stage_table,
)
from semel.sinks.postgres_types import Column, mismatches, sql_type
from semel.sinks.sql import VERSION_COLUMN, VERSIONS, Run, SqlSink
from semel.sinks.sql_store import Store

if TYPE_CHECKING:
    import pyarrow as pa

#: What may be over in a moment, by SQLSTATE or its class: connections, resources, locks, deadlocks, shutdowns.
TRANSIENT = ("08", "40", "53", "55P03", "57")
UNIQUE_KEYS = """
SELECT array_agg(a.attname::text) FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid
"""


@dataclass(frozen=True)
class Postgres(SqlSink):
    """`Postgres("postgresql://user:password@host/shop", "orders")`: rows of the stream into a table.

    `mode` is "ledger" (the default when this is the only sink: append, the driver moves staged rows in one
    transaction), "prepared" (the default beside other sinks: append, each task leaves a prepared transaction), "upsert"
    (the newest row of a `key` wins; `order_by` says which is the newest), "dedup" (a row whose `key` was seen within
    `retention_s` is left out) or "versions" (every batch adds a version of a key; the view <table>_latest shows the
    newest; `versions_kept` limits them, 0 keeps all). `create` makes the table when it is missing. `timeout_s` is how
    long to wait for the server, and for locks that others hold.
    """

    kind: ClassVar[str] = "postgres"
    native: ClassVar[str] = "prepared"

    @property
    def place(self) -> Place:
        return Place(self.url, self.schema, self.timeout_s)

    @property
    def target(self) -> str:
        return self.place.named(self.table)

    def describe(self) -> str:
        name = f"{self.schema}.{self.table}" if self.schema else self.table
        return f"PostgreSQL table {name}{_where(self.url)}"

    def store(self, context: Context) -> Store:
        return PostgresStore.shared(f"{self.url}#{self.schema}", context, lambda: PostgresStore(self.place, context))

    def writer(self, branch: Branch, *, durable: bool = True) -> Writer:
        from semel.sinks.postgres_writer import PostgresWriter

        return PostgresWriter(self, branch, durable=durable)

    def stage_name(self, branch: str) -> str:
        return stage_table(branch)

    def move(self, run: Run, stages: Sequence[str]) -> int:
        return move(self, run, [self.place.named(stage) for stage in stages])

    def create_target(self, run: Run, schema: pa.Schema) -> None:
        if run("SELECT to_regclass(%s)", (self.target,))[0][0] is None:
            for statement, names in create_statements(self, schema):
                run(statement, **names)

    # Before the first row ---------------------------------------------------------------------------------------------

    def check(self, schema: pa.Schema) -> None:
        self.check_columns(schema)
        with self.translated("cannot be checked"):
            connection = self.place.connect("semel")
            with connection:
                columns = columns_of(connection, self.target)
                keys = [set(row[0]) for row in execute(connection, UNIQUE_KEYS, (self.target,))]
                allowed = int(execute(connection, "SHOW max_prepared_transactions")[0][0])
        if self.is_native and allowed == 0:
            raise self.too_few_prepared("(currently 0)", kind=ConfigError)
        if columns:
            self._check_table(schema, columns, keys)
        elif not self.create:
            raise SchemaMismatch(
                f"{self.describe()} does not exist.", remedy="Create it, or let semel do so with create=True."
            )
        else:
            self._check_types(schema)

    def _check_table(self, schema: pa.Schema, columns: Sequence[Column], keys: Sequence[set[str]]) -> None:
        versioned = self.mode == VERSIONS
        problems = self.mismatches(schema, columns)
        if versioned and VERSION_COLUMN not in {c.name for c in columns}:
            problems.append(f"no column {VERSION_COLUMN}, which mode 'versions' needs")
        wanted = {*self.key, *([VERSION_COLUMN] if versioned else [])}
        if self.mode in ("upsert", "versions") and wanted not in keys:
            problems.append(f"no unique index on ({', '.join(sorted(wanted))}), which mode {self.mode!r} needs")
        if problems:
            raise SchemaMismatch(f"{self.describe()} does not match the rows: {'; '.join(problems)}.")

    def mismatches(self, schema: pa.Schema, columns: Sequence[Column]) -> list[str]:
        """What keeps rows of this schema out. The number of a version is not theirs to bring."""
        own = (VERSION_COLUMN,) if self.mode == VERSIONS else ()
        return mismatches(schema, [c for c in columns if c.name not in own])

    def _check_types(self, schema: pa.Schema) -> None:
        unsupported = [f"{f.name} ({f.type})" for f in schema if sql_type(f.type) is None]
        if unsupported:
            raise SchemaMismatch(
                f"PostgreSQL cannot hold these columns: {', '.join(unsupported)}.",
                remedy="Turn them into text with to_json(), or leave them out with select=[...].",
            )

    # What goes wrong --------------------------------------------------------------------------------------------------

    @contextmanager
    def translated(self, what: str, *, refused: type[SemelError] = SinkUnavailable) -> Iterator[None]:
        client = psycopg_()
        try:
            yield
        except client.Error as error:
            state = error.sqlstate or ""
            away = isinstance(error, client.OperationalError | client.InterfaceError) and not state
            kind = SinkUnavailable if away or state.startswith(TRANSIENT) else refused
            raise kind(f"{self.describe()} {what}: {one_line(error)}.") from None

    def too_few_prepared(self, hint: str, kind: type[SemelError] = BatchFailed) -> SemelError:
        return kind(
            f"{self.describe()}: each task of a batch holds a prepared transaction; the server allows too few. {hint}",
            remedy="Set max_prepared_transactions to the number of tasks or more (2 x spark.sql.shuffle.partitions is "
            "plenty) and restart the server, or use mode='ledger', which needs none.",
        )


def _where(url: str) -> str:
    """Database and host, and nothing that could be secret."""
    try:
        from psycopg.conninfo import conninfo_to_dict

        found: dict[str, Any] = conninfo_to_dict(url)
    except Exception:  # noqa: BLE001 - without the client, or with a url that it cannot read, there is less to say
        return ""
    host = ":".join(str(found[part]) for part in ("host", "port") if found.get(part))
    return f" in {found.get('dbname', 'the default database')}" + (f" at {host}" if host else "")
