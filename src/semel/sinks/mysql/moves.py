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
from semel.sinks.sql.moves import NUMBERED, Mover
from semel.sinks.sql.sink import DEDUP, LEDGER, UPSERT, VERSION_COLUMN, VERSIONS, VERSIONS_TABLE, Execute
from semel.sinks.sql.store import Session

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.mysql import MySql

#: A temporary table of the driver: rows that were stored as requests, for SQL to look at.
UNPACKED = "semel_unpacked"
DUPLICATE_KEY = 1062


class MySqlMover(Mover):
    sink: MySql
    run: Session
    delete_old = "DELETE t FROM {target} AS t JOIN " + NUMBERED + " ON {same} WHERE old.semel_place > %s"
    as_staged = f" ORDER BY {ORDER_COLUMN}"

    def move_new(self, table: str) -> int | None:
        columns = self.columns(table)
        return self._send_new(table) if is_packed(columns) else self.insert_new(table, columns)

    def move_one(self, table: str) -> int:
        columns = self.columns(table)
        if not is_packed(columns):
            return self.insert(table, columns)
        if self.sink.mode == DEDUP:
            return self._dedup_packed(table)
        return self._packed(table).send(self._inserting(), counted=self.sink.mode == LEDGER)

    def columns(self, table: str) -> list[str]:
        return [name for name in super().columns(table) if name != ORDER_COLUMN]

    def is_known_key(self, error: Exception) -> bool:
        return isinstance(error, pymysql_().err.IntegrityError) and error.args[0] == DUPLICATE_KEY

    # Requests that tasks have stored ----------------------------------------------------------------------------------

    def _packed(self, table: str) -> Packed:
        return Packed(self.run, self.sink.place.named(table))

    def _inserting(self) -> Callable[[Sequence[str]], str]:
        """Makes the statement for requests. Rows of one request follow each other, so the last of a key wins."""

        def statement(names: Sequence[str]) -> str:
            more = [(VERSION_COLUMN, f"{self.version}")] if self.sink.mode == VERSIONS else []
            updates = ", ".join(_updates(self.sink, names)) if self.sink.mode in (UPSERT, VERSIONS) else ""
            return inserting(self.sink.target, more, f" ON DUPLICATE KEY UPDATE {updates}" if updates else "")(names)

        return statement

    def _send_new(self, table: str) -> int | None:
        """Where a key that is there already is replaced, there is no need to know. A known id takes another look."""
        packed = self._packed(table)
        if self.sink.mode != DEDUP:
            return packed.send(self._inserting(), counted=False)
        if not packed.has_keys(self.sink.key):
            return None
        token = mysql_ids.new_token()
        ids = inserting(self.sink.names["seen"], [("semel_token", f"{token}")])
        if self.if_new(lambda: packed.send(ids, key=self.sink.key)) is None:
            return None
        mysql_ids.note(self.sink, self.run, token, packed.stage)
        return packed.send(inserting(self.sink.target))

    def _dedup_packed(self, table: str) -> int:
        """The rows in a table of this session, where SQL can look at them."""
        packed = self._packed(table)
        run, names = self.run, packed.names()
        known = {column.name.lower(): column for column in columns_of(run, self.sink.place, self.sink.table)}
        unpacked = self.sink.place.named(UNPACKED)
        run("DROP TEMPORARY TABLE IF EXISTS {unpacked}", unpacked=unpacked)
        if not names:
            return 0
        # Its engine has no transactions: what is left prepared must not hold on to a table of a session.
        run(
            "CREATE TEMPORARY TABLE {unpacked} ({columns}) ENGINE = Aria",
            unpacked=unpacked,
            columns=stage_columns([known[name.lower()] for name in names]),
        )
        staged = packed.send(inserting(unpacked))
        self.dedup(self.named(UNPACKED, names), names, packed.stage if packed.has_keys(self.sink.key) else "")
        run("DROP TEMPORARY TABLE {unpacked}", unpacked=unpacked)
        return staged

    # Upsert and versions ----------------------------------------------------------------------------------------------

    def upsert(self, named: dict[str, str], columns: Sequence[str]) -> None:
        """Nulls come last in descending order."""
        self.run(
            "INSERT INTO {target} ({names}{column}) SELECT {names}{value} FROM (SELECT {names}, row_number() OVER "
            "(PARTITION BY {key} ORDER BY {order}semel_order DESC) AS semel_place FROM {stage}"
            ") AS newest WHERE semel_place = 1 ON DUPLICATE KEY UPDATE {updates}",
            **named,
            order=f"{quote(self.sink.order_by)} DESC, " if self.sink.order_by else "",
            updates=", ".join(_updates(self.sink, columns)),
        )

    def next_version(self) -> int:
        ours, names = (self.sink.table,), self.sink.names
        if self.run("UPDATE {versions} SET version = version + 1 WHERE target = %s", ours, **names) == [(0,)]:
            # The table may hold versions from before it had a row here.
            self.run(
                "INSERT INTO {versions} (target, version) SELECT %s, coalesce(max({version}), 0) + 1 FROM {target} "
                "ON DUPLICATE KEY UPDATE version = {versions}.version + 1",
                ours,
                **names,
            )
        return int(self.run("SELECT version FROM {versions} WHERE target = %s", ours, **names)[0][0])

    # Dedup ------------------------------------------------------------------------------------------------------------

    def remember_new(self, named: dict[str, str]) -> None:
        token = mysql_ids.new_token()
        ids = "INSERT INTO {seen} ({key}, semel_token) SELECT {key}, %s FROM {stage}{in_order}"
        self.run(ids, (token,), **named)
        mysql_ids.note(self.sink, self.run, token)

    def dedup(self, named: dict[str, str], columns: Sequence[str], packed: str = "") -> None:
        """An id that is new gets our token. If somebody else is just writing the same id, we wait for them."""
        token, place = mysql_ids.new_token(), self.sink.place
        self.run(
            "INSERT INTO {seen} ({key}, semel_token) SELECT DISTINCT {key}, %s FROM {stage} "
            "ON DUPLICATE KEY UPDATE semel_token = semel_token",
            (token,),
            **named,
        )
        mysql_ids.note(self.sink, self.run, token, packed)
        self.run(
            "INSERT INTO {target} ({names}) SELECT {of_first} FROM (SELECT {names}, row_number() OVER "
            "(PARTITION BY {key} ORDER BY semel_order) AS semel_place FROM {stage}"
            ") AS f JOIN {seen} AS s ON {same} WHERE f.semel_place = 1 AND s.semel_token = %s",
            (token,),
            **named,
            of_first=place.listed(columns, "f."),
            same=place.equal(self.sink.key, "f", "s"),
        )

    def forget_old_ids(self) -> None:
        mysql_ids.forget_old(self.sink, self.run)


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


def stage_columns(columns: Sequence[Column]) -> str:
    """The columns of the target without its keys, and a number for the order of rows.

    What breaks a key does so when the driver moves the rows.
    """
    order = f"{quote(ORDER_COLUMN)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY"
    return ", ".join([*(f"{quote(c.name)} {c.definition} NULL" for c in columns), order])


# Tables that do not exist yet ---------------------------------------------------------------------------------------


def create_side_tables(sink: MySql, run: Execute, *, packs: bool) -> None:
    """What the mode needs beside the target. Asked before it is created: to create waits for whoever uses the table.

    `packs` says whether the server takes packed requests.
    """
    if sink.mode == VERSIONS and not engine_of(run, sink.place, VERSIONS_TABLE):
        run(
            "CREATE TABLE IF NOT EXISTS {versions} ("
            "target varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, version bigint NOT NULL"
            ") ENGINE = InnoDB",
            versions=sink.names["versions"],
        )
    if sink.mode == DEDUP:
        mysql_ids.create(sink, run, by_token=not packs)


def create_target(sink: MySql, run: Execute, schema: pa.Schema) -> None:
    if not engine_of(run, sink.place, sink.table):
        exact = MARIADB_EXACT if "mariadb" in run("SELECT lower(version())")[0][0] else MYSQL_EXACT
        run(
            "CREATE TABLE IF NOT EXISTS {target} ({columns}) ENGINE = InnoDB",
            target=sink.target,
            columns=", ".join(_target_columns(sink, schema, exact)),
        )
    if sink.mode == VERSIONS and not engine_of(run, sink.place, sink.view):
        run(
            "CREATE OR REPLACE VIEW {view} AS SELECT t.* FROM {target} AS t WHERE t.{version} = ("
            "SELECT max(n.{version}) FROM {target} AS n WHERE {same})",
            view=sink.place.named(sink.view),
            target=sink.target,
            version=quote(VERSION_COLUMN),
            same=sink.place.equal(sink.key, "n", "t"),
        )


def _target_columns(sink: MySql, schema: pa.Schema, exact: str) -> Iterator[str]:
    """`exact` is the collation of keys."""
    for field in schema:
        if field.name in sink.key:
            yield f"{quote(field.name)} {sql_type(field.type, key=exact)} NOT NULL"
        else:
            yield f"{quote(field.name)} {sql_type(field.type)} NULL"
    yield from sink.own_definitions
