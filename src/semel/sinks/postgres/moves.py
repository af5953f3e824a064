"""How staged rows get into the target: one small set of statements for each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from semel.sinks.postgres.connection import psycopg_, quote
from semel.sinks.postgres.types import sql_type
from semel.sinks.sql.sink import DEDUP, UPSERT, VERSION_COLUMN, VERSIONS, Mover, Run
from semel.sinks.sql.store import StagedGone

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
#: Three thousand years. PostgreSQL knows no moment much earlier than that before today.
RETENTION_S_MAX = 1e11


class PostgresMover(Mover):
    """The functions below take the quoted names of tables."""

    sink: Postgres
    #: Whether tasks have put the rows into the order of their keys; None until somebody asks.
    _is_sorted: bool | None = None

    def next_version(self) -> int:
        return _next_version(self.sink, self.run)

    def forget_old_ids(self) -> None:
        _forget_old_ids(self.sink, self.run)

    def move(self, table: str) -> int:
        stage = self.sink.place.named(table)
        if not exists(self.run, stage):
            raise StagedGone(f"table {table}")
        return super().move(stage)

    def move_new(self, table: str) -> int | None:
        if self._is_sorted is None:
            self._is_sorted = self.run(IS_SORTED, (table, list(self.sink.key)))[0][0]
        return _move_new(self.sink, self.run, table, self.version, is_sorted=bool(self._is_sorted))

    def move_one(self, table: str) -> int:
        return move_one(self.sink, self.run, table, self.version)

    def finish(self) -> None:
        # What a deferred constraint refuses must be refused now: after the decision it would be too late.
        self.run("SET CONSTRAINTS ALL IMMEDIATE")


def move_one(sink: Postgres, run: Run, stage: str, version: int = 0) -> int:
    """Move the rows of one table, which is there. Returns how many were staged."""
    names = _columns(run, stage)
    if sink.mode in (UPSERT, VERSIONS):
        return _upsert(sink, run, stage, names, version)
    if sink.mode == DEDUP:
        return _dedup(sink, run, stage, names)
    return _changed(run, "INSERT INTO {target} ({names}) SELECT {names} FROM {stage}", **_names(sink, stage, names))


def _move_new(sink: Postgres, run: Run, stage: str, version: int, *, is_sorted: bool) -> int | None:
    """Move the rows of one table if all of its keys are new and different, else nothing and return None."""
    named = _names(sink, stage, _columns(run, stage))
    in_order = "" if is_sorted else f" ORDER BY {named['key']}"
    run("SAVEPOINT semel_new")
    try:
        if sink.mode == DEDUP:
            ids = {**named, **_of_ids(sink)}
            run("INSERT INTO {seen} ({key}) SELECT {key} FROM {stage}{in_order}", **ids, in_order=in_order)
            run("INSERT INTO {due} ({key}) SELECT {lists} FROM {stage} HAVING count(*) > 0", **ids)
        staged = _changed(
            run,
            "INSERT INTO {target} ({names}{column}) SELECT {names}{version} FROM {stage}{in_order}",
            **named,
            **_versioned(sink, version),
            in_order="" if sink.mode == DEDUP else in_order,
        )
    except psycopg_().errors.UniqueViolation:
        run("ROLLBACK TO SAVEPOINT semel_new")
        return None
    run("RELEASE SAVEPOINT semel_new")
    _drop_old_versions(sink, run, stage)
    return staged


def exists(run: Run, name: str) -> bool:
    """Whether there is a table or view of this quoted name."""
    return run("SELECT to_regclass(%s)", (name,))[0][0] is not None


NAMES_OF_COLUMNS = """
SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


def _columns(run: Run, stage: str) -> list[str]:
    return [row[0] for row in run(NAMES_OF_COLUMNS, (stage,))]


def _versioned(sink: Postgres, version: int) -> dict[str, str]:
    """What stands behind the other columns and their values."""
    if sink.mode != VERSIONS:
        return {"column": "", "version": ""}
    return {"column": f", {quote(VERSION_COLUMN)}", "version": f", {version}"}


def _names(sink: Postgres, stage: str, names: Sequence[str]) -> dict[str, str]:
    return {"target": sink.target, "stage": stage, "names": _list(names), "key": _list(sink.key)}


def _list(names: Sequence[str], of: str = "") -> str:
    return ", ".join(f"{of}{quote(name)}" for name in names)


def _changed(run: Run, sql: str, **names: str) -> int:
    return int(run(sql, **names)[0][0])


def _count(run: Run, stage: str) -> int:
    return int(run("SELECT count(*) FROM {stage}", stage=stage)[0][0])


# Upsert and versions ------------------------------------------------------------------------------------------------


def _upsert(sink: Postgres, run: Run, stage: str, names: Sequence[str], version: int) -> int:
    """Of the rows of one key the newest wins: by `order_by`, else by their order in the task that brought them.

    One statement cannot touch a row twice, so of each key one row is chosen first.
    """
    order = f"{quote(sink.order_by)} DESC NULLS LAST, " if sink.order_by else ""
    others = [name for name in names if name not in sink.key]
    updates = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in others)
    # A row that does not say when it was made is older than all that do.
    by = quote(sink.order_by)
    newer = f" WHERE t.{by} <= excluded.{by} OR t.{by} IS NULL" if sink.order_by else ""
    run(
        "INSERT INTO {target} AS t ({names}{column}) "
        "SELECT DISTINCT ON ({key}) {names}{version} FROM {stage} ORDER BY {key}, {order}ctid DESC "
        "ON CONFLICT ({conflict}) DO {action}",
        **_names(sink, stage, names),
        **_versioned(sink, version),
        conflict=_list([*sink.key, VERSION_COLUMN] if sink.mode == VERSIONS else sink.key),
        order=order,
        action=f"UPDATE SET {updates}{newer}" if updates else "NOTHING",
    )
    _drop_old_versions(sink, run, stage)
    return _count(run, stage)


def _next_version(sink: Postgres, run: Run) -> int:
    """Versions grow in the order of commits: who asks for the next one waits for whoever has asked before."""
    names = {"versions": _versions(sink), "target": sink.target, "version": quote(VERSION_COLUMN)}
    following = "UPDATE {versions} SET version = version + 1 WHERE target = %s RETURNING version"
    found = run(following, (sink.table,), **names)
    if not found:
        # The table may hold versions from before it had a row here.
        run(
            "INSERT INTO {versions} SELECT %s, coalesce(max({version}), 0) FROM {target} ON CONFLICT DO NOTHING",
            (sink.table,),
            **names,
        )
        found = run(following, (sink.table,), **names)
    return int(found[0][0])


def _versions(sink: Postgres) -> str:
    return sink.place.named("semel_versions")


def _drop_old_versions(sink: Postgres, run: Run, stage: str) -> None:
    """Only of the keys that got a new one."""
    if sink.mode != VERSIONS or not sink.versions_kept:
        return
    run(
        "DELETE FROM {target} t USING (SELECT {key}, {version}, "
        "row_number() OVER (PARTITION BY {key} ORDER BY {version} DESC) AS semel_place "
        "FROM {target} WHERE ({key}) IN (SELECT {key} FROM {stage})) old "
        "WHERE old.semel_place > %s AND ({of_t}) = ({of_old})",
        (sink.versions_kept,),
        target=sink.target,
        stage=stage,
        key=_list(sink.key),
        version=quote(VERSION_COLUMN),
        of_t=_list([*sink.key, VERSION_COLUMN], "t."),
        of_old=_list([*sink.key, VERSION_COLUMN], "old."),
    )


# Dedup --------------------------------------------------------------------------------------------------------------
# An id is remembered by a row of its own. When it is to be forgotten is written down for all ids of a piece at once, as
# lists of them: an index by time would take a third of what it takes to write the rows (docs/performance.md).


def _of_ids(sink: Postgres) -> dict[str, str]:
    """Where the ids of one target are remembered, and when they are due to be forgotten."""
    return {
        "seen": sink.place.named(f"semel_seen_{sink.suffix_of_ids}"),
        "due": sink.place.named(f"semel_due_{sink.suffix_of_ids}"),
        "lists": ", ".join(f"array_agg({quote(name)}) AS {quote(name)}" for name in sink.key),
    }


def _dedup(sink: Postgres, run: Run, stage: str, names: Sequence[str]) -> int:
    """The first row of an id is written, and the id is remembered in the same transaction."""
    run(
        "WITH fresh AS (INSERT INTO {seen} ({key}) SELECT DISTINCT {key} FROM {stage} ON CONFLICT DO NOTHING "
        "RETURNING {key}), noted AS (INSERT INTO {due} ({key}) SELECT {lists} FROM fresh HAVING count(*) > 0) "
        "INSERT INTO {target} ({names}) SELECT DISTINCT ON ({key}) {names} FROM {stage} "
        "WHERE ({key}) IN (SELECT {key} FROM fresh) ORDER BY {key}, ctid",
        **_names(sink, stage, names),
        **_of_ids(sink),
    )
    return _count(run, stage)


def _forget_old_ids(sink: Postgres, run: Run) -> None:
    run(
        "WITH old AS (DELETE FROM {due} WHERE semel_at < now() - %s * interval '1 second' RETURNING *) "
        "DELETE FROM {seen} s USING (SELECT {each} FROM old) o WHERE ({of_s}) = ({of_o})",
        (min(sink.retention_s, RETENTION_S_MAX),),
        **_of_ids(sink),
        each=", ".join(f"unnest({quote(name)}) AS {quote(name)}" for name in sink.key),
        of_s=_list(sink.key, "s."),
        of_o=_list(sink.key, "o."),
    )


# What does not exist yet --------------------------------------------------------------------------------------------


def set_up(sink: Postgres, run: Run, schema: pa.Schema) -> None:
    """Create what is missing. The caller sees to it that nobody else does the same at the same time."""
    for name, statements in _needed(sink, schema):
        if not exists(run, name):
            for statement, names in statements:
                run(statement, **names)


def is_set_up(sink: Postgres, run: Run, schema: pa.Schema) -> bool:
    return all(exists(run, name) for name, _ in _needed(sink, schema))


def _needed(sink: Postgres, schema: pa.Schema) -> Iterator[tuple[str, list[Statement]]]:
    """What rows of this schema need beside staging tables: its quoted name, and how it is made."""
    names = {"target": sink.target, "key": _list(sink.key), "version": quote(VERSION_COLUMN)}
    if sink.create:
        yield sink.target, [_target(sink, schema)]
    if sink.create and sink.mode == VERSIONS:
        view = sink.place.named(sink.view)
        latest = "CREATE VIEW {view} AS SELECT DISTINCT ON ({key}) * FROM {target} ORDER BY {key}, {version} DESC"
        yield view, [(latest, {**names, "view": view})]
    if sink.mode == VERSIONS:
        numbers = "CREATE TABLE {versions} (target text PRIMARY KEY, version bigint NOT NULL)"
        yield _versions(sink), [(numbers, {"versions": _versions(sink)})]
    if sink.mode == DEDUP:
        ids = {**names, **_of_ids(sink)}
        yield (
            ids["seen"],
            [
                ("CREATE TABLE {seen} AS SELECT {key} FROM {target} WITH NO DATA", ids),
                ("ALTER TABLE {seen} ADD PRIMARY KEY ({key})", ids),
                ("COMMENT ON TABLE {seen} IS 'ids that semel has written lately'", ids),
            ],
        )
        # Lists are stored as they are: to compress them would take longer than to write the ids.
        as_it_is = ", ".join(f"ALTER {quote(name)} SET STORAGE EXTERNAL" for name in sink.key)
        yield (
            ids["due"],
            [
                ("CREATE TABLE {due} AS SELECT {lists} FROM {target} WITH NO DATA", ids),
                (
                    "ALTER TABLE {due} ADD semel_at timestamptz NOT NULL DEFAULT now(), {as_it_is}",
                    {**ids, "as_it_is": as_it_is},
                ),
                ("CREATE INDEX ON {due} (semel_at)", ids),
                ("COMMENT ON TABLE {due} IS 'when semel may forget ids'", ids),
            ],
        )


def _target(sink: Postgres, schema: pa.Schema) -> Statement:
    required = set(sink.key)
    columns = [f"{quote(f.name)} {sql_type(f.type)}{' NOT NULL' * (f.name in required)}" for f in schema]
    if sink.mode == VERSIONS:
        columns.append(f"{quote(VERSION_COLUMN)} bigint NOT NULL")
    if sink.mode in (UPSERT, VERSIONS):
        columns.append(f"PRIMARY KEY ({_list([*sink.key, *([VERSION_COLUMN] * (sink.mode == VERSIONS))])})")
    return "CREATE TABLE {target} ({columns})", {"target": sink.target, "columns": ", ".join(columns)}
