"""MySQL and MariaDB as driver and tasks see them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from semel import formats
from semel.deadline import limited
from semel.errors import SinkUnavailable
from semel.ids import Branch, PipelineId
from semel.sinks.base import Context
from semel.sinks.mysql.connection import (
    STATEMENT_S_MAX,
    MySqlPlace,
    close_quietly,
    execute,
    number_of,
    one_line,
    pymysql_,
)
from semel.sinks.mysql.types import Column
from semel.sinks.mysql.xa import RM_ERROR, end_prepared, leave_prepared, prepared_branches, xid
from semel.sinks.sql.sink import Execute
from semel.sinks.sql.store import STAGE_PREFIX, Store, definitions

_LOG = logging.getLogger("semel")

#: Numbers the rows of a staging table: their order in the batch.
ORDER_COLUMN = "semel_order"
#: How many connections of one driver a newer one looks for, and how many incarnations back.
SESSIONS_MAX = 16
OLDER_ASKED = 20

NO_SUCH_THREAD, NOT_OWNER_OF_THREAD = 1094, 1095

_LETTERS = "CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
#: What ledger and fence of semel 0.1 do not have.
ADDED = {
    "ledger": {"format": f"smallint NOT NULL DEFAULT {formats.FIRST}", "plan": f"varchar(80) {_LETTERS} DEFAULT ''"},
    "fence": {"target": "varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''"},
}
LEDGER = (
    "CREATE TABLE IF NOT EXISTS {ledger} ("
    f"pipeline varchar(36) {_LETTERS}, sink varchar(40) {_LETTERS}, batch bigint NOT NULL, "
    f"part varchar(255) {_LETTERS}, attempt int NOT NULL, incarnation bigint NOT NULL, row_count bigint NOT NULL, "
    f"committed_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), {definitions(ADDED['ledger'])}, "
    "PRIMARY KEY (pipeline, sink, batch, part)"
    ") ENGINE = InnoDB"
)
FENCE = (
    "CREATE TABLE IF NOT EXISTS {fence} ("
    f"pipeline varchar(36) {_LETTERS}, sink varchar(40) {_LETTERS}, incarnation bigint NOT NULL, "
    f"name text CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, {definitions(ADDED['fence'])}, "
    "PRIMARY KEY (pipeline, sink)) ENGINE = InnoDB"
)
COLUMNS = """
SELECT column_name, data_type, column_type, is_nullable = 'YES',
       is_nullable = 'NO' AND column_default IS NULL AND extra NOT LIKE '%%auto_increment%%'
       AND coalesce(generation_expression, '') = '', coalesce(generation_expression, '') <> '',
       extra LIKE '%%auto_increment%%', coalesce(numeric_precision, 0), coalesce(numeric_scale, 0),
       coalesce(datetime_precision, 0), coalesce(character_octet_length, 0), coalesce(character_set_name, ''),
       coalesce(collation_name, '')
FROM information_schema.columns
WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s ORDER BY ordinal_position
"""
ENGINE = """
SELECT table_type, coalesce(engine, '') FROM information_schema.tables
WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s
"""


# Tables -------------------------------------------------------------------------------------------------------------


def columns_of(run: Execute, place: MySqlPlace, table: str) -> list[Column]:
    """The columns of a table; none when it does not exist."""
    return [_column(row) for row in run(COLUMNS, (place.schema, table))]


def _column(row: Sequence[Any]) -> Column:
    texts, flags, numbers, letters = row[:3], row[3:7], row[7:11], row[11:]
    name, kind, full = map(_text, texts)
    return Column(name, kind.lower(), full.lower(), *map(bool, flags), *map(int, numbers), *map(_text, letters))  # type: ignore[arg-type]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def engine_of(run: Execute, place: MySqlPlace, table: str) -> str:
    """The storage engine of a table, VIEW for a view; nothing when it does not exist."""
    found = run(ENGINE, (place.schema, table))
    if not found:
        return ""
    return str(found[0][1] or "VIEW") if "TABLE" in found[0][0] else str(found[0][0])


# The store ----------------------------------------------------------------------------------------------------------


def session_lock(pipeline: PipelineId, incarnation: int, number: int) -> str:
    """The user lock that a connection of a driver holds: by it a newer incarnation finds the sessions of an older."""
    return f"semel-{hashlib.sha256(pipeline.encode()).hexdigest()[:16]}-i{incarnation}-c{number}"


class MySqlStore(Store):
    hides_new_tables = False
    added = ADDED
    sessions_are, sessions_end_by = "connections {} of MySQL", "KILL CONNECTION as a user who may do so"
    place: MySqlPlace

    def __init__(self, place: MySqlPlace, context: Context) -> None:
        super().__init__(place, context)
        #: Whether a sink in here leaves XA transactions. Only then the right to list them is needed.
        self.uses_xa = False

    def connect(self) -> Any:
        connection = self.place.connect()
        us = self.context.pipeline, self.context.incarnation
        try:
            for number in range(SESSIONS_MAX):
                if execute(connection, "SELECT GET_LOCK(%s, 0)", (session_lock(*us, number),))[0][0] == 1:
                    return connection
        except BaseException:
            close_quietly(connection)
            raise
        close_quietly(connection)
        raise SinkUnavailable(f"This driver has {SESSIONS_MAX} connections to MySQL already, more than it should need.")

    def is_broken(self, connection: Any) -> bool:
        return not connection.open

    def run(self, connection: Any, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        # A client that reads in vain for so long closes the connection: what became of the statement is not known then.
        connection._read_timeout = connection._write_timeout = limited(STATEMENT_S_MAX)
        return execute(connection, sql, values, **self.place.names, **names)

    def begin(self, connection: Any, branch: Branch | None) -> None:
        self.run(connection, f"XA START {xid(branch)}" if branch else "BEGIN")

    def roll_back(self, connection: Any, branch: Branch | None) -> None:
        """By its name, which is free then. A connection that is closed lets go of it a little later."""
        if branch is None:
            super().roll_back(connection, branch)
            return
        with suppress(pymysql_().Error):  # it may have ended already
            self.run(connection, f"XA END {xid(branch)}")
        self.run(connection, f"XA ROLLBACK {xid(branch)}")

    def prepare_natively(self, connection: Any, branch: Branch) -> None:
        leave_prepared(self.place, connection, self.query, branch)

    def commented_tables(self) -> list[tuple[Any, ...]]:
        return self.query(
            "SELECT table_name, table_comment FROM information_schema.tables "
            "WHERE table_schema = coalesce(nullif(%s, ''), database()) AND left(table_name, %s) = %s",
            (self.place.schema, len(STAGE_PREFIX), STAGE_PREFIX),
        )

    def prepared(self) -> set[Branch]:
        try:
            return prepared_branches(self.query)
        except pymysql_().Error as error:
            if number_of(error) == RM_ERROR and not self.uses_xa:
                return set()
            raise

    def commit_prepared(self, branch: Branch) -> bool:
        return end_prepared(self.place, self.query, "COMMIT", branch)

    def roll_back_prepared(self, branch: Branch) -> None:
        end_prepared(self.place, self.query, "ROLLBACK", branch)

    def end_session(self, session: int) -> None:
        try:
            self.query(f"KILL CONNECTION {session:d}")
        except pymysql_().Error as error:
            if number_of(error) == NOT_OWNER_OF_THREAD:
                raise self.does_not_end([session]) from None
            if number_of(error) != NO_SUCH_THREAD:
                raise

    def older_sessions(self) -> list[int]:
        """Those that hold a lock of an older incarnation. Nobody else's connection can be among them."""
        mine = self.context.incarnation
        fences = self.query("SELECT incarnation FROM {fence} WHERE pipeline = %s", (self.context.pipeline,))
        older = {*range(max(0, mine - OLDER_ASKED), mine), *(row[0] for row in fences if row[0] < mine)}
        locks = [session_lock(self.context.pipeline, i, n) for i in sorted(older) for n in range(SESSIONS_MAX)]
        if not locks:
            return []
        (found,) = self.query("SELECT " + ", ".join(["IS_USED_LOCK(%s)"] * len(locks)), locks)
        return [session for session in found if session is not None]

    def create_ledger_and_fence(self) -> None:
        self.query(LEDGER)
        self.query(FENCE)

    def add_columns(self, table: str, columns: Sequence[str]) -> None:
        """Only where the server can do so without copying the table, and without waiting for who has marked it."""
        adding = ", ".join(f"ADD COLUMN {column}" for column in columns)
        try:
            self.query("SET SESSION lock_wait_timeout = 1")
            self.query(f"ALTER TABLE {{{table}}} {{adding}}, ALGORITHM = INSTANT", adding=adding)
        except pymysql_().Error as error:
            _LOG.info("semel_%s keeps the form of semel 0.1 until a later start: %s", table, one_line(error))
        finally:
            self.query("SET SESSION lock_wait_timeout = %s", (self.place.seconds,))
