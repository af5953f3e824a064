"""How staged rows get into the target: one small set of statements for each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from semel.sinks.postgres_store import quote
from semel.sinks.postgres_types import sql_type
from semel.sinks.sql import DEDUP, UPSERT, VERSION_COLUMN, VERSIONS, Run
from semel.sinks.sql_store import StagedGone

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.postgres import Postgres

Statement = tuple[str, dict[str, str]]


def move(sink: Postgres, run: Run, stages: Sequence[str]) -> int:
    """Move the rows of these tables, given by their quoted names, in their order. Returns how many were staged."""
    staged = 0
    version = _next_version(sink, run) if sink.mode == VERSIONS else 0
    if sink.mode == DEDUP:
        _forget_old_ids(sink, run)
    for stage in stages:
        if run("SELECT to_regclass(%s)", (stage,))[0][0] is None:
            raise StagedGone(f"table {stage}")
        names = [row[0] for row in run(NAMES_OF_COLUMNS, (stage,))]
        if sink.mode in (UPSERT, VERSIONS):
            staged += _upsert(sink, run, stage, names, version)
        elif sink.mode == DEDUP:
            staged += _dedup(sink, run, stage, names)
        else:
            staged += _changed(
                run, "INSERT INTO {target} ({names}) SELECT {names} FROM {stage}", **_names(sink, stage, names)
            )
    return staged


NAMES_OF_COLUMNS = """
SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


def _names(sink: Postgres, stage: str, names: Sequence[str]) -> dict[str, str]:
    return {"target": sink.target, "stage": stage, "names": ", ".join(map(quote, names)), "key": _list(sink.key)}


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quote, names))


def _changed(run: Run, sql: str, **names: str) -> int:
    return int(run(sql, **names)[0][0])


def _count(run: Run, stage: str) -> int:
    return int(run("SELECT count(*) FROM {stage}", stage=stage)[0][0])


# Upsert and versions ------------------------------------------------------------------------------------------------


def _upsert(sink: Postgres, run: Run, stage: str, names: Sequence[str], version: int) -> int:
    """Of the rows of one key the newest wins: by `order_by`, else by their order in the batch, task after task.

    One statement cannot touch a row twice, so of each key one row is chosen first.
    """
    order = f"{quote(sink.order_by)} DESC NULLS LAST, " if sink.order_by else ""
    others = [name for name in names if name not in sink.key]
    updates = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in others)
    newer = f" WHERE t.{quote(sink.order_by)} <= excluded.{quote(sink.order_by)}" if sink.order_by else ""
    versioned = sink.mode == VERSIONS
    run(
        "INSERT INTO {target} AS t ({names}{column}) "
        "SELECT DISTINCT ON ({key}) {names}{version} FROM {stage} ORDER BY {key}, {order}ctid DESC "
        "ON CONFLICT ({conflict}) DO {action}",
        **_names(sink, stage, names),
        column=f", {quote(VERSION_COLUMN)}" if versioned else "",
        version=f", {version}" if versioned else "",
        conflict=_list([*sink.key, VERSION_COLUMN] if versioned else sink.key),
        order=order,
        action=f"UPDATE SET {updates}{newer}" if updates else "NOTHING",
    )
    if versioned and sink.versions_kept:
        _drop_old_versions(sink, run, stage)
    return _count(run, stage)


def _next_version(sink: Postgres, run: Run) -> int:
    """Versions grow in the order of commits: who asks for the next one waits for whoever has asked before."""
    run(
        "CREATE TABLE IF NOT EXISTS {versions} (target text PRIMARY KEY, version bigint NOT NULL)",
        versions=sink.place.named("semel_versions"),
    )
    found = run(
        "INSERT INTO {versions} AS v VALUES (%s, 1) ON CONFLICT (target) DO UPDATE SET version = v.version + 1 "
        "RETURNING version",
        (sink.table,),
        versions=sink.place.named("semel_versions"),
    )
    return int(found[0][0])


def _drop_old_versions(sink: Postgres, run: Run, stage: str) -> None:
    """Only of the keys that got a new one."""
    run(
        "DELETE FROM {target} t USING (SELECT {key}, {version}, "
        "row_number() OVER (PARTITION BY {key} ORDER BY {version} DESC) AS place "
        "FROM {target} WHERE ({key}) IN (SELECT {key} FROM {stage})) old "
        "WHERE old.place > %s AND ({of_t}) = ({of_old})",
        (sink.versions_kept,),
        target=sink.target,
        stage=stage,
        key=_list(sink.key),
        version=quote(VERSION_COLUMN),
        of_t=", ".join(f"t.{quote(n)}" for n in (*sink.key, VERSION_COLUMN)),
        of_old=", ".join(f"old.{quote(n)}" for n in (*sink.key, VERSION_COLUMN)),
    )


# Dedup --------------------------------------------------------------------------------------------------------------


def seen_table(sink: Postgres) -> str:
    """Where the ids of one target are remembered."""
    import hashlib

    return f"semel_seen_{hashlib.sha256(sink.table.encode()).hexdigest()[:16]}"


def _dedup(sink: Postgres, run: Run, stage: str, names: Sequence[str]) -> int:
    """The first row of an id is written, and the id is remembered in the same transaction."""
    run(
        "WITH fresh AS (INSERT INTO {seen} ({key}) SELECT DISTINCT {key} FROM {stage} ON CONFLICT DO NOTHING "
        "RETURNING {key}) INSERT INTO {target} ({names}) SELECT DISTINCT ON ({key}) {names} FROM {stage} "
        "WHERE ({key}) IN (SELECT {key} FROM fresh) ORDER BY {key}, ctid",
        **_names(sink, stage, names),
        seen=sink.place.named(seen_table(sink)),
    )
    return _count(run, stage)


def _forget_old_ids(sink: Postgres, run: Run) -> None:
    seen = sink.place.named(seen_table(sink))
    if run("SELECT to_regclass(%s)", (seen,))[0][0] is None:
        named = {"seen": seen, "target": sink.target, "key": _list(sink.key)}
        run("CREATE TABLE {seen} AS SELECT {key} FROM {target} WITH NO DATA", **named)
        run("ALTER TABLE {seen} ADD seen_at timestamptz NOT NULL DEFAULT now(), ADD PRIMARY KEY ({key})", **named)
        run("CREATE INDEX ON {seen} (seen_at)", **named)
        run("COMMENT ON TABLE {seen} IS 'ids that semel has written lately'", **named)
    run("DELETE FROM {seen} WHERE seen_at < now() - %s * interval '1 second'", (sink.retention_s,), seen=seen)


# A table that does not exist yet ------------------------------------------------------------------------------------


def create_statements(sink: Postgres, schema: pa.Schema) -> Iterator[Statement]:
    required = set(sink.key)
    columns = [f"{quote(f.name)} {sql_type(f.type)}{' NOT NULL' * (f.name in required)}" for f in schema]
    if sink.mode == VERSIONS:
        columns.append(f"{quote(VERSION_COLUMN)} bigint NOT NULL")
    if sink.mode in (UPSERT, VERSIONS):
        columns.append(f"PRIMARY KEY ({_list([*sink.key, *([VERSION_COLUMN] * (sink.mode == VERSIONS))])})")
    yield "CREATE TABLE {target} ({columns})", {"target": sink.target, "columns": ", ".join(columns)}
    if sink.mode == VERSIONS:
        yield (
            "CREATE VIEW {view} AS SELECT DISTINCT ON ({key}) * FROM {target} ORDER BY {key}, {version} DESC",
            {
                "view": sink.place.named(f"{sink.table}_latest"),
                "target": sink.target,
                "key": _list(sink.key),
                "version": quote(VERSION_COLUMN),
            },
        )
