"""PostgreSQL as driver and tasks see it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel import formats
from semel.deadline import within
from semel.ids import Branch, Incarnation, PipelineId, parse_branch
from semel.sinks.postgres.connection import PostgresPlace, execute, literal, one_line, psycopg_
from semel.sinks.postgres.types import Column
from semel.sinks.sql.store import STAGE_PREFIX, Store, definitions

if TYPE_CHECKING:
    import psycopg

_LOG = logging.getLogger("semel")

#: Any number will do, as long as nobody else locks by it: created once, at the same time by nobody.
CREATE_LOCK = 7_361_019_244_530_017

#: What ledger and fence of semel 0.1 do not have.
ADDED = {
    "ledger": {"format": f"smallint NOT NULL DEFAULT {formats.FIRST}", "plan": "text NOT NULL DEFAULT ''"},
    "fence": {"target": "text NOT NULL DEFAULT ''"},
}


LEDGER = f"""
CREATE TABLE IF NOT EXISTS {{ledger}} (
    pipeline text NOT NULL, sink text NOT NULL, batch bigint NOT NULL, part text NOT NULL, attempt integer NOT NULL,
    incarnation bigint NOT NULL, row_count bigint NOT NULL, committed_at timestamptz NOT NULL DEFAULT now(),
    {definitions(ADDED["ledger"])},
    PRIMARY KEY (pipeline, sink, batch, part)
)
"""
#: How long to wait for a table that a transaction has locked; others wait behind us.
ADD_WAIT = "SET LOCAL lock_timeout = '1s'"
FENCE = f"""
CREATE TABLE IF NOT EXISTS {{fence}} (
    pipeline text NOT NULL, sink text NOT NULL, incarnation bigint NOT NULL, name text NOT NULL,
    {definitions(ADDED["fence"])},
    PRIMARY KEY (pipeline, sink)
)
"""
#: A domain is as good as the type below it, and may be a domain itself. In numeric(p, s) the lower bits are the scale.
COLUMNS = """
WITH RECURSIVE below (attnum, type, typmod, required) AS (
    SELECT attnum, atttypid, atttypmod, attnotnull FROM pg_attribute
    WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT attnum, d.typbasetype, d.typtypmod, required OR d.typnotnull AND d.typdefault IS NULL
    FROM below JOIN pg_type d ON d.oid = type AND d.typtype = 'd'
)
SELECT a.attname, t.typname, t.typtype::text, coalesce(e.typname, ''), t.typelem,
       required AND NOT a.atthasdef AND a.attidentity = '', a.attgenerated <> '' OR a.attidentity = 'a',
       format_type(a.atttypid, a.atttypmod), coalesce(e.typtype::text, 'b'),
       CASE WHEN 'numeric' IN (t.typname, e.typname) AND typmod >= 4 THEN ((typmod - 4) & 2047 # 1024) - 1024 END
FROM below JOIN pg_attribute a ON a.attrelid = to_regclass(%(table)s) AND a.attnum = below.attnum
JOIN pg_type t ON t.oid = type AND t.typtype <> 'd'
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
ORDER BY a.attnum
"""


def columns_of(connection: psycopg.Connection[Any], table: str) -> list[Column]:
    """The columns of a table, given by its quoted name; none when it does not exist."""
    return [Column(*row) for row in connection.execute(COLUMNS, {"table": table}).fetchall()]


def application_name(pipeline: PipelineId, incarnation: Incarnation) -> str:
    """By which a newer incarnation finds the sessions of an older one."""
    return f"semel-{pipeline}-i{incarnation}"


class PostgresStore(Store):
    hides_new_tables = True
    added = ADDED
    sessions_are, sessions_end_by = "processes {} of PostgreSQL", "pg_terminate_backend"
    place: PostgresPlace

    def connect(self) -> psycopg.Connection[Any]:
        return self.place.connect(application_name(self.context.pipeline, self.context.incarnation))

    def is_broken(self, connection: psycopg.Connection[Any]) -> bool:
        return connection.closed

    def run(
        self, connection: psycopg.Connection[Any], sql: str, values: Sequence[Any] = (), **names: str
    ) -> list[tuple[Any, ...]]:
        return execute(connection, sql, values, **self.place.names, **names)

    def prepare_natively(self, connection: psycopg.Connection[Any], branch: Branch) -> None:
        # It may wait for a standby that is away, as a COMMIT does.
        with within(self.place.timeout_s):
            self.run(connection, "PREPARE TRANSACTION {gid}", gid=literal(branch))

    def commented_tables(self) -> list[tuple[Any, ...]]:
        return self.query(
            "SELECT c.relname, obj_description(c.oid, 'pg_class') FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = coalesce(nullif(%s, ''), current_schema()) AND starts_with(c.relname, %s)",
            (self.place.schema, STAGE_PREFIX),
        )

    def prepared(self) -> set[Branch]:
        found = self.query("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        return {branch for (gid,) in found if (branch := parse_branch(gid))}

    def commit_prepared(self, branch: Branch) -> bool:
        return self._end_prepared("COMMIT", branch)

    def roll_back_prepared(self, branch: Branch) -> None:
        self._end_prepared("ROLLBACK", branch)

    def _end_prepared(self, verb: str, branch: Branch) -> bool:
        try:
            self.query(f"{verb} PREPARED {{gid}}", gid=literal(branch))
        except psycopg_().errors.UndefinedObject:
            return False
        return True

    def end_session(self, session: int) -> None:
        self.query("SELECT pg_terminate_backend(%s)", (session,))

    def older_sessions(self) -> list[int]:
        prefix = application_name(self.context.pipeline, Incarnation(0))[:-1]
        found = self.query(
            "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND usename = current_user AND starts_with(application_name, %s)",
            (prefix,),
        )
        numbered = [(pid, name.removeprefix(prefix)) for pid, name in found]
        return [pid for pid, number in numbered if number.isdigit() and int(number) < self.context.incarnation]

    def create_ledger_and_fence(self) -> None:
        with self.transaction() as run:
            run("SELECT pg_advisory_xact_lock(%s)", (CREATE_LOCK,))
            run(LEDGER)
            run(FENCE)

    def add_columns(self, table: str, columns: Sequence[str]) -> None:
        """With a default that is a constant, PostgreSQL rewrites no row for it."""
        adding = ", ".join(f"ADD COLUMN IF NOT EXISTS {column}" for column in columns)
        try:
            with self.transaction() as run:
                run(ADD_WAIT)
                run(f"ALTER TABLE {{{table}}} {{adding}}", adding=adding)
        except psycopg_().Error as error:
            _LOG.info("semel_%s keeps the form of semel 0.1 until a later start: %s", table, one_line(error))
