"""What is looked at before the first row: names, types, keys, and by a rehearsal without rows what this user may do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, Refused, SchemaMismatch
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.sinks.postgres.connection import execute
from semel.sinks.postgres.moves import PostgresMover, exists, is_set_up, set_up
from semel.sinks.postgres.store import CREATE_LOCK, FENCE, LEDGER, columns_of
from semel.sinks.postgres.types import Column, sql_type
from semel.sinks.postgres.writer import create_stage
from semel.sinks.sql.sink import DEDUP, KEYED, VERSION_COLUMN, VERSIONS, Execute
from semel.sinks.sql.store import stage_table

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from semel.sinks.postgres import Postgres

#: Indexes that ON CONFLICT can use, by their columns.
UNIQUE_KEYS = """
SELECT array_agg(a.attname::text) FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate
AND i.indpred IS NULL AND i.indexprs IS NULL
GROUP BY i.indexrelid
"""
#: The table and its partitions, where rows and the ledger do not share one fate: a crash empties unlogged tables, and
#: foreign ones commit for themselves.
FATES_OF_THEIR_OWN = """
SELECT c.oid::regclass::text, c.relkind::text FROM pg_class c JOIN (
    SELECT to_regclass(%s)::oid UNION SELECT relid::oid FROM pg_partition_tree(to_regclass(%s))
) AS part (id) ON c.oid = part.id WHERE c.relkind = 'f' OR c.relpersistence = 'u' ORDER BY 1
"""
#: The branch of a rehearsal, which is never seen.
NOBODY = Branch(Attempt(PipelineId("00000000-0000-0000-0000-000000000000"), 0, 0, Incarnation(0)), "rehearsal", 0, 0)
_LOG = logging.getLogger("semel")

CHANGES = ("INSERT ", "DELETE ", "UPDATE ", "WITH ")


def check(sink: Postgres, schema: pa.Schema) -> None:
    with (
        sink.translated("cannot take the rows", refused=ConfigError),
        sink.place.connect("semel") as connection,
    ):

        def run(sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
            return execute(connection, sql, values, **sink.place.names, **names)

        _check_ids(sink, schema)
        _check_server(sink, run)
        _check_names(sink, run, schema)
        _check_target(sink, run, schema)
        run("BEGIN")
        try:
            _rehearse(sink, run, connection, schema)
        finally:
            run("ROLLBACK")


def _check_ids(sink: Postgres, schema: pa.Schema) -> None:
    """Ids are written down as lists of them, and PostgreSQL has no lists of lists."""
    import pyarrow as pa

    lists = [name for name in sink.key if pa.types.is_list(schema.field(name).type)]
    if sink.mode == DEDUP and lists:
        raise SchemaMismatch(
            f"{sink.describe()}: an array cannot be an id in mode 'dedup': column {', '.join(lists)}.",
            remedy="Use another key, or turn it into text in select=[...].",
        )


def _check_server(sink: Postgres, run: Execute) -> None:
    if (sink.is_native or sink.firm) and run("SHOW max_prepared_transactions") == [("0",)]:
        raise sink.too_few_prepared("max_prepared_transactions is 0.", kind=ConfigError)
    if sink.schema and not run("SELECT to_regnamespace(%s) IS NOT NULL", (sink.place.quoted(sink.schema),))[0][0]:
        raise ConfigError(f"{sink.describe()}: there is no schema {sink.schema}.", remedy="Create it: semel does not.")
    if run("SHOW fsync") == [("off",)]:
        _LOG.warning(
            "%s: fsync is off: a power cut may take back what the server has committed. Turn it on.", sink.describe()
        )


def _check_names(sink: Postgres, run: Execute, schema: pa.Schema) -> None:
    """PostgreSQL would cut long names off, and then not find them."""
    bytes_max = int(run("SHOW max_identifier_length")[0][0])
    names = [sink.schema, sink.view if sink.mode == VERSIONS else sink.table, *schema.names]
    wrong = [repr(name) for name in names if len(name.encode()) > bytes_max or "\0" in name]
    if wrong:
        what = f"a name has at most {bytes_max} bytes and no NUL, not {', '.join(wrong)}"
        raise SchemaMismatch(f"{sink.describe()}: {what}.")


def _check_target(sink: Postgres, run: Execute, schema: pa.Schema) -> None:
    if exists(run, sink.target):
        _refuse_fates_of_their_own(sink, run)
        return
    if not sink.create:
        raise SchemaMismatch(
            f"{sink.describe()} does not exist.", remedy="Create it, or let semel do so with create=True."
        )
    if not schema.names:
        raise SchemaMismatch(f"{sink.describe()}: the rows have no columns.")
    unsupported = [f"{f.name} ({f.type})" for f in schema if sql_type(f.type) is None]
    if unsupported:
        raise SchemaMismatch(
            f"PostgreSQL cannot hold these columns: {', '.join(unsupported)}.",
            remedy="Turn them into text with to_json(), or leave them out with select=[...].",
        )


def _refuse_fates_of_their_own(sink: Postgres, run: Execute) -> None:
    """The ledger proves that rows are there only where both are committed, and kept, together."""
    for name, kind in run(FATES_OF_THEIR_OWN, (sink.target, sink.target)):
        if kind == "f":
            raise Refused(
                f"{sink.describe()}: {name} is a foreign table, whose server commits for itself: rows could be there "
                "without their marker, and be written twice.",
                remedy="Give the sink the url of the server that has the table.",
            )
        raise Refused(
            f"{sink.describe()}: {name} is UNLOGGED: a crash of the server empties it, and the ledger would still say "
            "that its rows are there.",
            remedy=f"ALTER TABLE {name} SET LOGGED, then start the pipeline.",
        )


def _rehearse(sink: Postgres, run: Execute, connection: psycopg.Connection[Any], schema: pa.Schema) -> None:
    """Do all that a batch does, without rows. The server says best what it does not allow; then it is rolled back."""
    if exists(run, sink.target):
        _check_table(sink, schema, columns_of(connection, sink.target), run(UNIQUE_KEYS, (sink.target,)))
    ready = is_set_up(sink, run, schema) and all(exists(run, name) for name in sink.place.names.values())
    if not ready:
        run("SELECT pg_advisory_xact_lock(%s)", (CREATE_LOCK,))
        set_up(sink, run, schema)
        for name, table in (("ledger", LEDGER), ("fence", FENCE)):
            if not exists(run, sink.place.names[name]):
                run(table)
    if sink.is_native:
        if not run("SELECT has_any_column_privilege(to_regclass(%s), 'INSERT')", (sink.target,))[0][0]:
            raise ConfigError(f"{sink.describe()}: this user may not INSERT into it.", remedy="GRANT it.")
        return
    create_stage(sink, run, str(NOBODY), sink.place.listed(schema.names))
    PostgresMover(sink, partial(_explained, run)).move_one(stage_table(str(NOBODY)))


def _explained(run: Execute, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
    """A user who may EXPLAIN a change may make it. Triggers of the table do not notice."""
    if not sql.startswith(CHANGES):
        return run(sql, values, **names)
    run(f"EXPLAIN {sql}", values, **names)
    return [(0,)]


def _check_table(sink: Postgres, schema: pa.Schema, columns: Sequence[Column], keys: Sequence[tuple[Any, ...]]) -> None:
    versioned = sink.mode == VERSIONS
    problems = sink.mismatches(schema, columns)
    if versioned and VERSION_COLUMN not in {c.name for c in columns}:
        problems.append(f"no column {VERSION_COLUMN}, which mode 'versions' needs")
    wanted = set(sink.unique)
    if sink.mode in KEYED and sink.mode != DEDUP and wanted not in [set(names) for (names,) in keys]:
        problems.append(f"no unique index on ({', '.join(sorted(wanted))}), which mode {sink.mode!r} needs")
    if problems:
        raise SchemaMismatch(f"{sink.describe()} does not match the rows: {'; '.join(problems)}.")
