"""How staged rows get into the target: one small set of statements for each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from semel.sinks.postgres.connection import psycopg_, quote
from semel.sinks.postgres.types import sql_type
from semel.sinks.sql.moves import NUMBERED, Mover
from semel.sinks.sql.sink import DEDUP, VERSIONS, Execute

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.postgres import Postgres

Statement = tuple[str, dict[str, str]]
#: Whether tasks have sorted the rows (`in_order_of`).
IS_SORTED = """
SELECT bool_and(typname IN ('int2', 'int4', 'int8', 'numeric', 'date'))
FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
WHERE attrelid = to_regclass(%s) AND attname = ANY (%s)
"""
SEEN = (
    "CREATE TABLE {seen} AS SELECT {key} FROM {target} WITH NO DATA",
    "ALTER TABLE {seen} ADD PRIMARY KEY ({key})",
    "COMMENT ON TABLE {seen} IS 'ids that semel has written lately'",
)
DUE = (
    "CREATE TABLE {due} AS SELECT {lists} FROM {target} WITH NO DATA",
    "ALTER TABLE {due} ADD semel_at timestamptz NOT NULL DEFAULT now(), {as_it_is}",
    "CREATE INDEX ON {due} (semel_at)",
    "COMMENT ON TABLE {due} IS 'when semel may forget ids'",
)
#: Three thousand years. PostgreSQL knows no moment much earlier than that before today.
RETENTION_S_MAX = 1e11


class PostgresMover(Mover):
    sink: Postgres
    delete_old = "DELETE FROM {target} t USING " + NUMBERED + " WHERE old.semel_place > %s AND {same}"  # noqa: S608 - our own words
    #: Whether tasks have put the rows into the order of their keys; None until somebody asks.
    _is_sorted: bool | None = None

    def move_new(self, table: str) -> int | None:
        columns = self.columns(table)
        if self._is_sorted is None:
            self._is_sorted = self.run(IS_SORTED, (self.sink.place.named(table), list(self.sink.key)))[0][0]
        return self.insert_new(table, columns, is_sorted=bool(self._is_sorted))

    def is_known_key(self, error: Exception) -> bool:
        return isinstance(error, psycopg_().errors.UniqueViolation)

    def finish(self) -> None:
        # What a deferred constraint refuses must be refused now: after the decision it would be too late.
        self.run("SET CONSTRAINTS ALL IMMEDIATE")

    # Upsert and versions ----------------------------------------------------------------------------------------------

    def upsert(self, named: dict[str, str], columns: Sequence[str]) -> None:
        """One statement cannot touch a row twice, so of each key one row is chosen first."""
        by = quote(self.sink.order_by)
        updates = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in columns if n not in self.sink.key)
        newer = f" WHERE t.{by} <= excluded.{by} OR t.{by} IS NULL" if self.sink.order_by else ""
        self.run(
            "INSERT INTO {target} AS t ({names}{column}) "
            "SELECT DISTINCT ON ({key}) {names}{value} FROM {stage} ORDER BY {key}, {order}ctid DESC "
            "ON CONFLICT ({unique}) DO {action}",
            **named,
            order=f"{by} DESC NULLS LAST, " if self.sink.order_by else "",
            action=f"UPDATE SET {updates}{newer}" if updates else "NOTHING",
        )

    def next_version(self) -> int:
        ours, names = (self.sink.table,), self.sink.names
        following = "UPDATE {versions} SET version = version + 1 WHERE target = %s RETURNING version"
        found = self.run(following, ours, **names)
        if not found:
            # The table may hold versions from before it had a row here.
            latest = "SELECT %s, coalesce(max({version}), 0) FROM {target}"
            self.run(f"INSERT INTO {{versions}} {latest} ON CONFLICT DO NOTHING", ours, **names)
            found = self.run(following, ours, **names)
        return int(found[0][0])

    # Dedup ------------------------------------------------------------------------------------------------------------
    # An id is remembered by a row of its own. When it is to be forgotten is written down for all ids of a piece at once
    # in lists of them: an index by time would take a third of what it takes to write the rows (docs/performance.md).

    def remember_new(self, named: dict[str, str]) -> None:
        self.run("INSERT INTO {seen} ({key}) SELECT {key} FROM {stage}{in_order}", **named)
        noted = "INSERT INTO {due} ({key}) SELECT {lists} FROM {stage} HAVING count(*) > 0"
        self.run(noted, **named, lists=_lists(self.sink))

    def dedup(self, named: dict[str, str], columns: Sequence[str]) -> None:  # noqa: ARG002 - they are in `named`
        self.run(
            "WITH fresh AS (INSERT INTO {seen} ({key}) SELECT DISTINCT {key} FROM {stage} ON CONFLICT DO NOTHING "
            "RETURNING {key}), noted AS (INSERT INTO {due} ({key}) SELECT {lists} FROM fresh HAVING count(*) > 0) "
            "INSERT INTO {target} ({names}) SELECT DISTINCT ON ({key}) {names} FROM {stage} "
            "WHERE ({key}) IN (SELECT {key} FROM fresh) ORDER BY {key}, ctid",
            **named,
            lists=_lists(self.sink),
        )

    def forget_old_ids(self) -> None:
        self.run(
            "WITH old AS (DELETE FROM {due} WHERE semel_at < now() - %s * interval '1 second' RETURNING *) "
            "DELETE FROM {seen} s USING (SELECT {each} FROM old) o WHERE {same}",
            (min(self.sink.retention_s, RETENTION_S_MAX),),
            **self.sink.names,
            each=", ".join(f"unnest({quote(name)}) AS {quote(name)}" for name in self.sink.key),
            same=self.sink.place.equal(self.sink.key, "s", "o"),
        )


def _lists(sink: Postgres) -> str:
    """The ids of a piece, as one value for each column."""
    return ", ".join(f"array_agg({quote(name)}) AS {quote(name)}" for name in sink.key)


def exists(run: Execute, name: str) -> bool:
    """Whether there is a table or view of this quoted name."""
    return run("SELECT to_regclass(%s)", (name,))[0][0] is not None


# What does not exist yet --------------------------------------------------------------------------------------------


def set_up(sink: Postgres, run: Execute, schema: pa.Schema) -> None:
    """Create what is missing. The caller sees to it that nobody else does the same at the same time."""
    for name, statements in _needed(sink, schema):
        if not exists(run, name):
            for statement, names in statements:
                run(statement, **names)


def is_set_up(sink: Postgres, run: Execute, schema: pa.Schema) -> bool:
    return all(exists(run, name) for name, _ in _needed(sink, schema))


def _needed(sink: Postgres, schema: pa.Schema) -> Iterator[tuple[str, list[Statement]]]:
    """What rows of this schema need beside staging tables: its quoted name, and how it is made."""
    names = sink.names
    if sink.create:
        yield sink.target, [_target(sink, schema)]
    if sink.create and sink.mode == VERSIONS:
        view = sink.place.named(sink.view)
        latest = "CREATE VIEW {view} AS SELECT DISTINCT ON ({key}) * FROM {target} ORDER BY {key}, {version} DESC"
        yield view, [(latest, {**names, "view": view})]
    if sink.mode == VERSIONS:
        numbers = "CREATE TABLE {versions} (target text PRIMARY KEY, version bigint NOT NULL)"
        yield names["versions"], [(numbers, names)]
    if sink.mode == DEDUP:
        # Lists are stored as they are: to compress them would take longer than to write the ids.
        as_it_is = ", ".join(f"ALTER {quote(name)} SET STORAGE EXTERNAL" for name in sink.key)
        more = {**names, "lists": _lists(sink), "as_it_is": as_it_is}
        yield names["seen"], [(statement, more) for statement in SEEN]
        yield names["due"], [(statement, more) for statement in DUE]


def _target(sink: Postgres, schema: pa.Schema) -> Statement:
    columns = [f"{quote(f.name)} {sql_type(f.type)}{' NOT NULL' * (f.name in sink.key)}" for f in schema]
    names = {"target": sink.target, "columns": ", ".join([*columns, *sink.own_definitions])}
    return "CREATE TABLE {target} ({columns})", names
