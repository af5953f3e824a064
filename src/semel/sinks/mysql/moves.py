"""How staged rows get into the target: one small set of statements for each mode.

A statement that creates something would commit the driver's transaction, so tables are made ahead, by the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from semel.sinks.mysql import ids as mysql_ids
from semel.sinks.mysql.connection import pymysql_, quote
from semel.sinks.mysql.loaders.packed import Packed, inserting, is_packed
from semel.sinks.mysql.store import ORDER_COLUMN, columns_of, engine_of
from semel.sinks.mysql.types import MARIADB_EXACT, MYSQL_EXACT, Column, sql_type
from semel.sinks.sql.sink import DEDUP, LEDGER, UPSERT, VERSION_COLUMN, VERSIONS, Mover, Run
from semel.sinks.sql.store import StagedGone

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.mysql import MySql

VERSIONS_TABLE = "semel_versions"
#: Of a session of the driver: rows that were stored as requests, for SQL to look at.
UNPACKED = "semel_unpacked"
PLACE_COLUMN = "semel_place"
DUPLICATE_KEY = 1062


class MySqlMover(Mover):
    sink: MySql

    def next_version(self) -> int:
        return _next_version(self.sink, self.run)

    def forget_old_ids(self) -> None:
        mysql_ids.forget_old(self.sink, self.run)

    def move_new(self, table: str) -> int | None:
        columns = self._columns(table)
        if is_packed(columns):
            return _send_new(self.sink, self._packed(table), self.version)
        return _move_new(self.sink, self.run, table, _names_of(columns), self.version)

    def move_one(self, table: str) -> int:
        columns = self._columns(table)
        if not is_packed(columns):
            return _move_one(self.sink, self.run, table, _names_of(columns), self.version)
        if self.sink.mode == DEDUP:
            return _dedup_packed(self.sink, self._packed(table))
        return self._packed(table).send(_inserting(self.sink, self.version), counted=self.sink.mode == LEDGER)

    def _columns(self, table: str) -> list[Column]:
        columns = columns_of(self.run, self.sink.place, table)
        if not columns:
            raise StagedGone(f"table {table}")
        return columns

    def _packed(self, table: str) -> Packed:
        return Packed(self.run, self.sink.place.named(table))


def _names_of(columns: Sequence[Column]) -> list[str]:
    return [column.name for column in columns if column.name != ORDER_COLUMN]


def _move_new(sink: MySql, run: Run, stage: str, names: Sequence[str], version: int) -> int | None:
    """Move the rows of one table if all of its keys are new and different, else nothing and return None.

    In the order of the keys, so that neighbours in an index are written together.
    """
    named = _names(sink, stage, names)
    run("SAVEPOINT semel_new")
    try:
        if sink.mode == DEDUP:
            token = mysql_ids.new_token()
            ids = "INSERT INTO {seen} ({key}, semel_token) SELECT {key}, %s FROM {stage} ORDER BY {key}"
            run(ids, (token,), **named, **mysql_ids.names_of(sink))
            mysql_ids.note(sink, run, token)
        staged = _changed(
            run,
            "INSERT INTO {target} ({names}{column}) SELECT {names}{version} FROM {stage} ORDER BY {sorted}",
            **named,
            **_versioned(sink, version),
            sorted=named["in_order" if sink.mode == DEDUP else "key"],
        )
    except pymysql_().err.IntegrityError as error:
        if error.args[0] != DUPLICATE_KEY:
            raise
        run("ROLLBACK TO SAVEPOINT semel_new")
        return None
    run("RELEASE SAVEPOINT semel_new")
    _drop_old_versions(sink, run, stage)
    return staged


def _move_one(sink: MySql, run: Run, stage: str, names: Sequence[str], version: int) -> int:
    if sink.mode in (UPSERT, VERSIONS):
        return _upsert(sink, run, stage, names, version)
    if sink.mode == DEDUP:
        return _dedup(sink, run, stage, names)
    return _changed(run, "INSERT INTO {target} ({names}) SELECT {names} FROM {stage}", **_names(sink, stage, names))


def _names(sink: MySql, stage: str, names: Sequence[str]) -> dict[str, str]:
    return {
        "target": sink.target,
        "stage": sink.place.named(stage),
        "names": _list(names),
        "key": _list(sink.key),
        "place": quote(PLACE_COLUMN),
        "in_order": quote(ORDER_COLUMN),
    }


def _versioned(sink: MySql, version: int) -> dict[str, str]:
    """What stands behind the other columns and their values."""
    if sink.mode != VERSIONS:
        return {"column": "", "version": ""}
    return {"column": f", {quote(VERSION_COLUMN)}", "version": f", {version}"}


def _list(names: Sequence[str], of: str = "") -> str:
    return ", ".join(f"{of}{quote(name)}" for name in names)


def _equal(names: Sequence[str], left: str, right: str) -> str:
    return " AND ".join(f"{left}.{quote(name)} = {right}.{quote(name)}" for name in names)


def _changed(run: Run, sql: str, **names: str) -> int:
    return int(run(sql, **names)[0][0])


def _count(sink: MySql, run: Run, stage: str) -> int:
    return int(run("SELECT count(*) FROM {stage}", stage=sink.place.named(stage))[0][0])


# Requests that tasks have stored --------------------------------------------------------------------------------------


def _inserting(sink: MySql, version: int) -> Callable[[Sequence[str]], str]:
    """Makes the statement for requests. Rows of one request follow each other, so the last of a key wins by itself."""

    def statement(names: Sequence[str]) -> str:
        more = [(VERSION_COLUMN, f"{version}")] if sink.mode == VERSIONS else []
        updates = ", ".join(_updates(sink, names)) if sink.mode in (UPSERT, VERSIONS) else ""
        return inserting(sink.target, more, f" ON DUPLICATE KEY UPDATE {updates}" if updates else "")(names)

    return statement


def _send_new(sink: MySql, packed: Packed, version: int) -> int | None:
    """Where a key that is there already is replaced, there is no need to know. A known id takes another look."""
    if sink.mode != DEDUP:
        return packed.send(_inserting(sink, version), counted=False)
    if not packed.has_keys(sink.key):
        return None
    run, token = packed.session, mysql_ids.new_token()
    run("SAVEPOINT semel_new")
    try:
        packed.send(inserting(mysql_ids.names_of(sink)["seen"], [("semel_token", f"{token}")]), key=sink.key)
    except pymysql_().err.IntegrityError as error:
        if error.args[0] != DUPLICATE_KEY:
            raise
        run("ROLLBACK TO SAVEPOINT semel_new")
        return None
    mysql_ids.note(sink, run, token, packed.stage)
    staged = packed.send(inserting(sink.target))
    run("RELEASE SAVEPOINT semel_new")
    return staged


def _dedup_packed(sink: MySql, packed: Packed) -> int:
    """The rows in a table of this session, where SQL can look at them."""
    run, names = packed.session, packed.names()
    known = {column.name.lower(): column for column in columns_of(run, sink.place, sink.table)}
    unpacked = sink.place.named(UNPACKED)
    run("DROP TEMPORARY TABLE IF EXISTS {unpacked}", unpacked=unpacked)
    if not names:
        return 0
    # Of an engine without transactions: what is left prepared must not hold on to a table of a session.
    run(
        "CREATE TEMPORARY TABLE {unpacked} ({columns}) ENGINE = Aria",
        unpacked=unpacked,
        columns=stage_columns([known[name.lower()] for name in names]),
    )
    packed.send(inserting(unpacked))
    staged = _dedup(sink, run, UNPACKED, names, packed=packed.stage if packed.has_keys(sink.key) else "")
    run("DROP TEMPORARY TABLE {unpacked}", unpacked=unpacked)
    return staged


def stage_columns(columns: Sequence[Column]) -> str:
    """The columns of the target without its keys, and a number for the order of rows.

    What breaks a key does so when the driver moves the rows.
    """
    order = f"{quote(ORDER_COLUMN)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"
    return ", ".join([*(f"{quote(c.name)} {c.definition} NULL" for c in columns), order])


# Upsert and versions ------------------------------------------------------------------------------------------------


def _upsert(sink: MySql, run: Run, stage: str, names: Sequence[str], version: int) -> int:
    """Of the rows of one key the newest wins: by `order_by`, else by their order in the task that brought them.

    A row without a value in `order_by` is older than any that has one. Nulls come last in descending order.
    """
    run(
        "INSERT INTO {target} ({names}{column}) SELECT {names}{version} FROM ("
        "SELECT {names}, row_number() OVER (PARTITION BY {key} ORDER BY {order}{in_order} DESC) AS {place} FROM {stage}"
        ") AS newest WHERE {place} = 1 ON DUPLICATE KEY UPDATE {updates}",
        **_names(sink, stage, names),
        **_versioned(sink, version),
        order=f"{quote(sink.order_by)} DESC, " if sink.order_by else "",
        updates=", ".join(_updates(sink, names)),
    )
    _drop_old_versions(sink, run, stage)
    return _count(sink, run, stage)


def _updates(sink: MySql, names: Sequence[str]) -> Iterator[str]:
    """What a newer row changes. MySQL sets one column after the other, so the one that is compared comes last."""
    keys, order = {name.lower() for name in sink.key}, sink.order_by.lower()
    others = sorted((n for n in names if n.lower() not in keys), key=lambda n: n.lower() == order)
    if not others:
        # There is nothing to change, and to say nothing is not allowed.
        yield f"{quote(sink.key[0])} = {sink.target}.{quote(sink.key[0])}"
    for name in others:
        new = f"VALUES({quote(name)})"
        if sink.order_by:
            old, stored = f"{sink.target}.{quote(name)}", f"{sink.target}.{quote(sink.order_by)}"
            new = f"IF({stored} IS NULL OR {stored} <= VALUES({quote(sink.order_by)}), {new}, {old})"
        yield f"{quote(name)} = {new}"


def _next_version(sink: MySql, run: Run) -> int:
    """Versions grow in the order of commits: who asks for the next one waits for whoever has asked before."""
    names = {"versions": sink.place.named(VERSIONS_TABLE), "target": sink.target, "version": quote(VERSION_COLUMN)}
    following = "UPDATE {versions} SET version = version + 1 WHERE target = %s"
    if run(following, (sink.table,), **names) == [(0,)]:
        # The table may hold versions from before it had a row here.
        run(
            "INSERT INTO {versions} (target, version) SELECT %s, coalesce(max({version}), 0) + 1 FROM {target} "
            "ON DUPLICATE KEY UPDATE version = {versions}.version + 1",
            (sink.table,),
            **names,
        )
    return int(run("SELECT version FROM {versions} WHERE target = %s", (sink.table,), **names)[0][0])


def _drop_old_versions(sink: MySql, run: Run, stage: str) -> None:
    """Only of the keys that got a new one."""
    if sink.mode != VERSIONS or not sink.versions_kept:
        return
    run(
        "DELETE t FROM {target} AS t JOIN (SELECT {key}, {version}, "
        "row_number() OVER (PARTITION BY {key} ORDER BY {version} DESC) AS {place} "
        "FROM {target} WHERE ({key}) IN (SELECT {key} FROM {stage})) AS old ON {same} WHERE old.{place} > %s",
        (sink.versions_kept,),
        target=sink.target,
        stage=sink.place.named(stage),
        key=_list(sink.key),
        version=quote(VERSION_COLUMN),
        place=quote(PLACE_COLUMN),
        same=_equal([*sink.key, VERSION_COLUMN], "t", "old"),
    )


# Dedup --------------------------------------------------------------------------------------------------------------


def _dedup(sink: MySql, run: Run, stage: str, names: Sequence[str], *, packed: str = "") -> int:
    """The first row of an id is written, and the id is remembered in the same transaction.

    An id that is new gets our token; who brings one that somebody else is writing waits for him.
    """
    token = mysql_ids.new_token()
    named = {**_names(sink, stage, names), **mysql_ids.names_of(sink)}
    run(
        "INSERT INTO {seen} ({key}, semel_token) SELECT DISTINCT {key}, %s FROM {stage} "
        "ON DUPLICATE KEY UPDATE semel_token = semel_token",
        (token,),
        **named,
    )
    mysql_ids.note(sink, run, token, packed)
    run(
        "INSERT INTO {target} ({names}) SELECT {of_first} FROM ("
        "SELECT {names}, row_number() OVER (PARTITION BY {key} ORDER BY {in_order}) AS {place} FROM {stage}"
        ") AS f JOIN {seen} AS s ON {same} WHERE f.{place} = 1 AND s.semel_token = %s",
        (token,),
        **named,
        of_first=_list(names, "f."),
        same=_equal(sink.key, "f", "s"),
    )
    return _count(sink, run, stage)


# Tables that do not exist yet ---------------------------------------------------------------------------------------


def create_side_tables(sink: MySql, run: Run, *, packs: bool) -> None:
    """What the mode needs beside the target. Asked before it is created: to create waits for whoever uses the table.

    `packs` says whether the server takes packed requests.
    """
    if sink.mode == VERSIONS and not engine_of(run, sink.place, VERSIONS_TABLE):
        run(
            "CREATE TABLE IF NOT EXISTS {versions} ("
            "target varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, version bigint NOT NULL"
            ") ENGINE = InnoDB",
            versions=sink.place.named(VERSIONS_TABLE),
        )
    if sink.mode == DEDUP:
        mysql_ids.create(sink, run, by_token=not packs)


def create_target(sink: MySql, run: Run, schema: pa.Schema) -> None:
    if not engine_of(run, sink.place, sink.table):
        exact = MARIADB_EXACT if "mariadb" in run("SELECT lower(version())")[0][0] else MYSQL_EXACT
        run(
            "CREATE TABLE IF NOT EXISTS {target} ({columns}) ENGINE = InnoDB",
            target=sink.target,
            columns=", ".join(_target_columns(sink, schema, exact)),
        )
    if sink.mode == VERSIONS and not engine_of(run, sink.place, latest_view(sink)):
        run(
            "CREATE OR REPLACE VIEW {view} AS SELECT t.* FROM {target} AS t WHERE t.{version} = ("
            "SELECT max(n.{version}) FROM {target} AS n WHERE {same})",
            view=sink.place.named(latest_view(sink)),
            target=sink.target,
            version=quote(VERSION_COLUMN),
            same=_equal(sink.key, "n", "t"),
        )


def latest_view(sink: MySql) -> str:
    return f"{sink.table}_latest"


def _target_columns(sink: MySql, schema: pa.Schema, exact: str) -> Iterator[str]:
    """`exact` is the collation of keys."""
    for field in schema:
        if field.name in sink.key:
            yield f"{quote(field.name)} {sql_type(field.type, key=exact)} NOT NULL"
        else:
            yield f"{quote(field.name)} {sql_type(field.type)} NULL"
    if sink.mode == VERSIONS:
        yield f"{quote(VERSION_COLUMN)} bigint NOT NULL"
    if sink.mode in (UPSERT, VERSIONS):
        yield f"PRIMARY KEY ({_list([*sink.key, *([VERSION_COLUMN] * (sink.mode == VERSIONS))])})"
