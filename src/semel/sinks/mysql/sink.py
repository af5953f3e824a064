"""MySQL and MariaDB: rows in bulk, straight from Arrow.

How a batch commits depends on the mode: see semel.sinks.sql.sink, and docs/sinks/mysql.md for users.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from semel.errors import ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.sinks.base import Context, Writer
from semel.sinks.mysql.connection import MySqlPlace, is_mariadb, number_of, one_line, pymysql_, runner
from semel.sinks.mysql.moves import MySqlMover
from semel.sinks.mysql.store import MySqlStore, columns_of, engine_of
from semel.sinks.mysql.types import UNINDEXED, Column, encoder, is_nested, sql_type
from semel.sinks.mysql.url import database_of, settings_of
from semel.sinks.mysql.xa import RM_ERROR, prepared_branches
from semel.sinks.sql.moves import Mover
from semel.sinks.sql.sink import DEDUP, UPSERT, VERSION_COLUMN, VERSIONS, Execute, SqlSink
from semel.sinks.sql.store import Session, Store

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("semel")

#: What may be over in a moment, by number: connections, resources, prepared statements (1461), locks, deadlocks, rows
#: that another has changed meanwhile (1020, where innodb_snapshot_isolation is on), shutdowns, a read-only standby.
TRANSIENT = frozenset(
    {1021, 1040, 1041, 1053, 1077, 1079, 1080, 1129, 1135, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1205, 1206, 1213}
    | {1020, 1226, 1290, 1317, 1461, 1613, 1614, 1792, 1836, 1927, 1969, 3024, 3101, 3572, 4031}
)
PERMISSION_DENIED = frozenset({1044, 1142, 1143, 1227, 1370})
#: What does not end by itself: those, and names, values and constraints that a statement meets in vain.
LASTING = PERMISSION_DENIED | frozenset(
    {1048, 1049, 1054, 1062, 1064, 1146, 1264, 1292, 1364, 1366, 1406, 1451, 1452, 1644, 3819, 4025}
)
PERMISSION_REMEDY = "GRANT this user what docs/sinks/mysql.md lists for the mode, or use another user."
#: Numbers of the client's own, all about connections.
CLIENT_ERRORS = range(2000, 3000)
MYSQL_OLDEST, MARIADB_OLDEST = (8, 0), (10, 5)
NAME_LETTERS_MAX = 64
#: https://dev.mysql.com/doc/refman/8.0/en/innodb-limits.html
INNODB_COLUMNS_MAX = 1017

UNIQUE_KEYS = """
SELECT index_name, group_concat(hex(column_name) ORDER BY seq_in_index),
       max(sub_part IS NOT NULL OR column_name IS NULL)
FROM information_schema.statistics
WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s AND non_unique = 0
GROUP BY index_name ORDER BY index_name
"""
SERVER = (
    "SELECT @@GLOBAL.log_bin, @@GLOBAL.binlog_format, @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.sync_binlog"
)


@dataclass(frozen=True)
class MySql(SqlSink):
    """`MySql("mysql://user:password@host/shop", "orders")`: rows of the stream into a table of MySQL or MariaDB.

    `mode` says what becomes of the rows:

    - "ledger", the default: append. The driver moves staged rows in one transaction.
    - "xa": append, faster. Each task leaves a prepared XA transaction; readers may see some tasks of a batch
      before the others.
    - "upsert": the newest row of a `key` wins; `order_by` says which is the newest.
    - "dedup": a row whose `key` was seen within `retention_s` is left out.
    - "versions": every batch adds a version of a key; the view <table>_latest shows the newest. `versions_kept` limits
      them; 0 keeps all.

    `schema` is another database of the server. `create` makes the table when it is missing. `timeout_s` is how long to
    wait for the server, and for locks that others hold.
    `piece_rows` is how many rows a task stages before the driver begins to move them.
    """

    kind: ClassVar[str] = "mysql"
    modules: ClassVar[tuple[str, ...]] = ("pymysql", "numpy")
    native: ClassVar[str] = "xa"

    def __post_init__(self) -> None:
        # Before anything is shown.
        settings_of(self.url)
        super().__post_init__()
        if not self.schema and not database_of(self.url):
            raise ConfigError("The url of a MySql sink names no database.", remedy="Add it: mysql://.../database.")
        longest = self.view if self.mode == VERSIONS else self.table
        if len(longest) > NAME_LETTERS_MAX:
            raise ConfigError(f"MySQL has no names of more than {NAME_LETTERS_MAX} letters: {longest!r}.")

    @property
    def place(self) -> MySqlPlace:
        return MySqlPlace(self.url, self.schema, self.timeout_s)

    @property
    def uses_xa(self) -> bool:
        """Whether the tasks leave XA transactions, or the driver does."""
        return self.is_native or bool(self.firm)

    def describe(self) -> str:
        """Database and host, and nothing that could be secret."""
        parts = urlsplit(self.url)
        where = f"{parts.hostname}:{parts.port}" if parts.port else f"{parts.hostname}"
        return f"MySQL table {self.table} in {self.schema or database_of(self.url)} at {where}"

    def store(self, context: Context) -> Store:
        store = MySqlStore.shared(f"{self.url}#{self.schema}", context, lambda: MySqlStore(self.place, context))
        store.uses_xa = store.uses_xa or self.uses_xa
        return store

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        from semel.sinks.mysql.writer import MySqlWriter

        return MySqlWriter(self, branch, durable=durable, plan=plan)

    def mover(self, run: Session) -> Mover:
        return MySqlMover(self, run)

    # Before the first row ---------------------------------------------------------------------------------------------

    def check(self, schema: pa.Schema) -> None:
        self._check_number_of_columns(schema)
        self.check_columns(schema)
        with self.in_time(), self.translated("cannot be checked", refused=ConfigError):
            connection = self.place.connect()
            with connection:
                run = runner(connection, self.place)
                self._check_server(connection, run)
                columns = columns_of(run, self.place, self.table)
                engine = engine_of(run, self.place, self.table)
                keys = unique_keys(run, self)
        if columns:
            self._check_table(schema, columns, engine, keys)
        elif not self.create:
            raise SchemaMismatch(
                f"{self.describe()} does not exist.", remedy="Create it, or let semel do so with create=True."
            )
        else:
            self._check_types(schema)

    def _check_number_of_columns(self, schema: pa.Schema) -> None:
        """Staged rows have a number, and versions too: that takes a column."""
        columns_max = INNODB_COLUMNS_MAX if self.is_native else INNODB_COLUMNS_MAX - 1
        if not 0 < len(schema.names) <= columns_max:
            raise SchemaMismatch(
                f"{self.describe()}: the rows have {len(schema.names):,} columns, and must have 1 to {columns_max:,}.",
                remedy="Choose columns with select=[...], or put some of them into one with to_json().",
            )

    def _check_server(self, connection: Any, run: Execute) -> None:
        mariadb, version = is_mariadb(connection), _version(str(connection.get_server_info()))
        if version < (MARIADB_OLDEST if mariadb else MYSQL_OLDEST):
            raise ConfigError(
                f"{self.describe()}: the server is {connection.get_server_info()}, which is too old.",
                remedy="Use MySQL 8.0 or MariaDB 10.5, or newer.",
            )
        if self.schema and not run("SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", (self.schema,)):
            raise ConfigError(f"{self.describe()}: there is no database {self.schema}, or this user may not see it.")
        ((binlog, binlog_format, flush, sync_binlog),) = run(SERVER)
        if binlog and str(binlog_format).upper() == "STATEMENT":
            raise ConfigError(
                f"{self.describe()}: the server logs statements, which does not go with reading what is committed.",
                remedy="Set binlog_format to ROW or MIXED.",
            )
        if int(flush) not in (1, 3):
            _LOG.warning(
                "%s: innodb_flush_log_at_trx_commit is %s: a crash of the server may lose what it has committed. "
                "Set it to 1.",
                self.describe(),
                flush,
            )
        if binlog and int(sync_binlog) != 1:
            # After a crash a transaction counts as committed if it is in the log.
            _LOG.warning(
                "%s: the server has its binary log on and sync_binlog is %s: a power cut may take back what it has "
                "committed. Set it to 1.",
                self.describe(),
                sync_binlog,
            )
        if self.uses_xa:
            self._check_xa(run, binlog=bool(binlog), mariadb=mariadb)

    def _check_xa(self, run: Execute, *, binlog: bool, mariadb: bool) -> None:
        try:
            prepared_branches(run)
        except pymysql_().Error as error:
            if number_of(error) != RM_ERROR:
                raise
            raise ConfigError(
                f"{self.describe()}: this user may not list XA transactions, as a sink beside others must.",
                remedy="GRANT XA_RECOVER_ADMIN ON *.* TO the user, or use mode='ledger' with firm=False.",
            ) from None
        if binlog and mariadb:
            _LOG.warning(
                "%s: with its binary log on, MariaDB may lose or double XA transactions when it crashes (MDEV-21469). "
                "Use mode='ledger' with firm=False, or turn the log off.",
                self.describe(),
            )

    def _check_table(
        self, schema: pa.Schema, columns: Sequence[Column], engine: str, keys: dict[str, list[str]]
    ) -> None:
        problems = self.problems(schema, columns, engine) + self._key_problems(schema, columns, keys)
        if not problems:
            return
        what = f"{self.describe()} does not match the rows: {'; '.join(problems)}."
        nested = [f.name for f in schema if is_nested(f.type)]
        if nested:
            raise SchemaMismatch(what, remedy=_nested_remedy(nested))
        raise SchemaMismatch(what, remedy=ENGINE_REMEDY if "stored by" in what else TYPES_REMEDY)

    def folded(self, name: str) -> str:
        return name.lower()

    def encoder(self, arrow: Any, column: Column) -> object | None:
        return encoder(arrow, column)

    def problems(self, schema: pa.Schema, columns: Sequence[Column], engine: str) -> list[str]:
        """What keeps rows of this schema out, with what is wrong with the table itself."""
        found = self.mismatches(schema, columns)
        if not columns:
            return ["it does not exist"]
        if engine.lower() != "innodb":
            found.append(f"it is stored by {engine}, which has no transactions")
        if self.mode == VERSIONS and VERSION_COLUMN not in {c.name for c in columns}:
            found.append(f"no column {VERSION_COLUMN}, which mode 'versions' needs")
        return found

    def _key_problems(self, schema: pa.Schema, columns: Sequence[Column], keys: dict[str, list[str]]) -> list[str]:
        lower = {name.lower() for name in self.key}
        if self.mode == DEDUP:
            long = [c for c in columns if c.name.lower() in lower and c.type in UNINDEXED]
            return [f"key {c.name} is {c.type}, and an index needs a length: make it varchar(255)" for c in long]
        if self.mode not in (UPSERT, VERSIONS):
            return []
        wanted = {name.lower() for name in self.unique}
        problems = []
        if wanted not in (set(names) for names in keys.values()):
            problems.append(f"no unique index on ({', '.join(sorted(wanted))}), which mode {self.mode!r} needs")
        brought = {name.lower() for name in schema.names}
        counting = {c.name.lower() for c in columns if c.counts_up} - brought
        for index, names in keys.items():
            # MySQL would update the row that any of the indexes finds.
            if set(names) != wanted and not counting & set(names):
                problems.append(f"unique index {index} could match another row than that of the key")
        return problems

    def _check_types(self, schema: pa.Schema) -> None:
        wrong = [repr(n) for n in schema.names if not n.strip(" ") or n.endswith(" ") or len(n) > NAME_LETTERS_MAX]
        if wrong:
            what = (
                f"a column's name has 1 to {NAME_LETTERS_MAX} letters and no space at its end, not {', '.join(wrong)}"
            )
            raise SchemaMismatch(f"{self.describe()}: {what}.", remedy="Give it another name in select=[...].")
        unsupported = [f for f in schema if sql_type(f.type) is None]
        if unsupported:
            raise SchemaMismatch(
                f"MySQL cannot hold these columns: {', '.join(f'{f.name} ({f.type})' for f in unsupported)}.",
                remedy=_nested_remedy([f.name for f in unsupported]),
            )

    # What goes wrong --------------------------------------------------------------------------------------------------

    @contextmanager
    def translated(
        self, what: str, *, refused: type[SemelError] = SinkUnavailable, lasting: type[SemelError] | None = None
    ) -> Iterator[None]:
        client = pymysql_()
        try:
            yield
        except client.Error as error:
            number = number_of(error)
            away = number in CLIENT_ERRORS or number < 1000 or isinstance(error, client.InterfaceError)
            kind = SinkUnavailable if away or number in TRANSIENT else refused
            if lasting is not None and number in LASTING:
                kind = lasting
            remedy = PERMISSION_REMEDY if number in PERMISSION_DENIED else ""
            raise kind(f"{self.describe()} {what}: {one_line(error)}.", remedy=remedy) from None


ENGINE_REMEDY = "Turn it into a table with transactions: ALTER TABLE ... ENGINE = InnoDB."
TYPES_REMEDY = (
    "Select or cast the columns so that they match the table, or name another one. A TIMESTAMP of Spark goes into a "
    "timestamp, a TIMESTAMP_NTZ into a datetime."
)


def _nested_remedy(names: Sequence[str]) -> str:
    return f"Turn {', '.join(names)} into text with to_json(), or leave them out with select=[...]."


def _version(text: str) -> tuple[int, ...]:
    # Some servers put a version before their own, for clients that stop at the first.
    found = re.search(r"(\d+)\.(\d+)", text.removeprefix("5.5.5-"))
    return tuple(map(int, found.groups())) if found else (0,)


def unique_keys(run: Execute, sink: MySql) -> dict[str, list[str]]:
    """The unique indexes: name -> columns in lower case; none for an index of parts of columns, or of expressions."""
    found = run(UNIQUE_KEYS, (sink.schema, sink.table))
    return {
        name: [] if in_part else [bytes.fromhex(column).decode().lower() for column in str(columns).split(",")]
        for name, columns, in_part in found
    }
