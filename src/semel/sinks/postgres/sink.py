"""PostgreSQL: rows by binary COPY, straight from Arrow.

How a batch commits depends on the mode: see semel.sinks.sql.sink, and docs/sinks/postgres.md for users.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semel.errors import BatchFailed, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.sinks.base import NUMBER_OF_TASKS, Context, Writer
from semel.sinks.postgres.connection import PostgresPlace, one_line, psycopg_, refuse_torn_url
from semel.sinks.postgres.moves import PostgresMover
from semel.sinks.postgres.store import PostgresStore
from semel.sinks.postgres.types import Column, encoder
from semel.sinks.sql.moves import Mover
from semel.sinks.sql.sink import DEDUP, SqlSink
from semel.sinks.sql.store import Session, Store

if TYPE_CHECKING:
    import pyarrow as pa

#: What may be over in a moment, by SQLSTATE or its class: connections, resources, locks, deadlocks, shutdowns.
TRANSIENT = ("08", "40", "53", "55P03", "57")
#: What does not end by itself: features, values, constraints, names, rights, and what a trigger raises.
LASTING = ("0A", "22", "23", "26", "28", "3D", "3F", "42", "P0")
#: An id has at most 2.7 KB, for it must fit an index.
IDS_MAX = 50_000
PERMISSION_DENIED = "42501"
PERMISSION_REMEDY = "GRANT this user what docs/sinks/postgres.md lists for the mode, or use another user."


@dataclass(frozen=True)
class Postgres(SqlSink):
    """`Postgres("postgresql://user:password@host/shop", "orders")`: rows of the stream into a table.

    `mode` says what becomes of the rows:

    - "ledger", the default: append. The driver moves staged rows in one transaction.
    - "prepared": append, faster. Each task leaves a prepared transaction; readers may see some tasks of a batch
      before the others.
    - "upsert": the newest row of a `key` wins; `order_by` says which is the newest.
    - "dedup": a row whose `key` was seen within `retention_s` is left out.
    - "versions": every batch adds a version of a key; the view <table>_latest shows the newest. `versions_kept` limits
      them; 0 keeps all.

    `create` makes the table when it is missing. `timeout_s` is how long to wait for the server, and for locks that
    others hold.
    `piece_rows` is how many rows a task stages before the driver begins to move them.
    """

    kind: ClassVar[str] = "postgres"
    modules: ClassVar[tuple[str, ...]] = ("psycopg", "numpy")
    native: ClassVar[str] = "prepared"

    def __post_init__(self) -> None:
        # Before anything is shown.
        refuse_torn_url(self.url)
        super().__post_init__()

    @property
    def place(self) -> PostgresPlace:
        return PostgresPlace(self.url, self.schema, self.timeout_s)

    def describe(self) -> str:
        name = f"{self.schema}.{self.table}" if self.schema else self.table
        return f"PostgreSQL table {name}{_where(self.url)}"

    def store(self, context: Context) -> Store:
        return PostgresStore.shared(f"{self.url}#{self.schema}", context, lambda: PostgresStore(self.place, context))

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        from semel.sinks.postgres.writer import PostgresWriter

        return PostgresWriter(self, branch, durable=durable, plan=plan)

    def mover(self, run: Session) -> Mover:
        return PostgresMover(self, run)

    def check(self, schema: pa.Schema) -> None:
        from semel.sinks.postgres.checks import check

        self.check_columns(schema)
        with self.in_time():
            check(self, schema)

    def room(self, piece: int) -> int:
        """In mode dedup, the ids of a piece become one value (`moves`), which PostgreSQL holds in memory."""
        return min(super().room(piece), IDS_MAX) if self.mode == DEDUP else super().room(piece)

    def encoder(self, arrow: Any, column: Column) -> object | None:
        return encoder(arrow, column)

    # What goes wrong --------------------------------------------------------------------------------------------------

    @contextmanager
    def translated(
        self, what: str, *, refused: type[SemelError] = SinkUnavailable, lasting: type[SemelError] | None = None
    ) -> Iterator[None]:
        client = psycopg_()
        try:
            yield
        except client.Error as error:
            state = error.sqlstate or ""
            if "max_prepared_transactions" in (error.diag.message_hint or ""):
                raise self.too_few_prepared(str(error.diag.message_hint), kind=refused) from None
            away = isinstance(error, client.OperationalError | client.InterfaceError) and not state
            kind = SinkUnavailable if away or state.startswith(TRANSIENT) else refused
            if lasting is not None and state.startswith(LASTING):
                kind = lasting
            remedy = PERMISSION_REMEDY if state == PERMISSION_DENIED else ""
            raise kind(f"{self.describe()} {what}: {one_line(error)}.", remedy=remedy) from None

    def too_few_prepared(self, hint: str, kind: type[SemelError] = BatchFailed) -> SemelError:
        return kind(
            f"{self.describe()}: the server allows too few prepared transactions. {hint}",
            remedy="Set max_prepared_transactions and restart the server. It must be at least "
            f"{NUMBER_OF_TASKS} in mode 'prepared', and twice that if Spark may run tasks twice; the other modes take "
            "one for each sink beside other sinks, else none.",
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
