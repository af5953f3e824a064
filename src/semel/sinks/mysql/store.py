"""MySQL and MariaDB as driver and tasks see them."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from semel import formats
from semel.deadline import limited
from semel.errors import ConfigError, SinkUnavailable
from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch
from semel.sinks.base import Context
from semel.sinks.mysql.connection import connection_type, pymysql_, quote
from semel.sinks.mysql.types import Column
from semel.sinks.mysql.url import settings_of
from semel.sinks.sql.sink import Run
from semel.sinks.sql.store import STAGE_PREFIX, Store, with_names
from semel.sinks.sql.store import Place as SqlPlace

_LOG = logging.getLogger("semel")

#: Numbers the rows of a staging table: their order in the batch.
ORDER_COLUMN = "semel_order"
SESSION_END_S_MAX = 10.0
SESSION_END_PAUSE_S = 0.02
#: How many connections of one driver a newer one looks for, and how many incarnations back.
SESSIONS_MAX = 16
OLDER_ASKED = 20
DETACH_PAUSE_S = 0.005
#: MariaDB takes a session off its list, frees its buffers, and only then does the storage engine let go of what it
#: prepared (`unlink_thd`). No statement tells when. Whoever is early finds the transaction gone, see `end_prepared`.
LET_GO_S = 0.01
SECONDS_MAX = 2_000_000
#: What Linux takes.
KEEPALIVE_S_MAX = 32_767
#: Moving a large batch takes its time; a server that has stopped takes longer.
STATEMENT_S_MAX = 3600.0

#: What the server says when a login can never succeed: wrong user, password, host or database.
LOGIN_REFUSED = frozenset(
    {1044, 1045, 1049, 1130, 1133, 1227, 1251, 1275, 1449, 1524, 1698, 1862, 2059, 2061, 3118, 4151}
)
#: The same of TLS, which the client takes for a server that cannot be reached.
TLS_REFUSED = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSL is required")
UNKNOWN_XID, RM_ERROR, ROLLED_BACK = 1397, 1401, frozenset({1402, 1613, 1614})
NO_SUCH_THREAD, NOT_OWNER_OF_THREAD = 1094, 1095
#: A row that somebody else holds, in MariaDB and in MySQL.
LOCKED = frozenset({1205, 3572})

SQL_MODE = (
    "STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,"
    # A zero is a number and not a wish for the next one.
    "NO_AUTO_VALUE_ON_ZERO"
)
SESSION = (
    "SET SESSION sql_mode = %s, time_zone = '+00:00', innodb_lock_wait_timeout = %s, lock_wait_timeout = %s, "
    "wait_timeout = 2147483, sql_notes = 1, sql_safe_updates = 0, unique_checks = 1, "
    "foreign_key_checks = 1, completion_type = 0"
)
#: An open transaction of the driver may be idle for long, and a move may take long.
MARIADB_SESSION = "SET SESSION idle_transaction_timeout = 0, idle_write_transaction_timeout = 0, max_statement_time = 0"
# With repeatable reads, INSERT .. SELECT would lock the gaps of what it reads.
ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE"

_LETTERS = "CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
#: What ledger and fence of semel 0.1 do not have.
ADDED = {
    "ledger": {"format": f"smallint NOT NULL DEFAULT {formats.FIRST}", "plan": f"varchar(80) {_LETTERS} DEFAULT ''"},
    "fence": {"target": "varchar(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''"},
}


def _added(table: str) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in ADDED[table].items())


LEDGER = (
    "CREATE TABLE IF NOT EXISTS {ledger} ("
    f"pipeline varchar(36) {_LETTERS}, sink varchar(40) {_LETTERS}, batch bigint NOT NULL, "
    f"part varchar(255) {_LETTERS}, attempt int NOT NULL, incarnation bigint NOT NULL, row_count bigint NOT NULL, "
    f"committed_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), {_added('ledger')}, "
    "PRIMARY KEY (pipeline, sink, batch, part)"
    ") ENGINE = InnoDB"
)
FENCE = (
    "CREATE TABLE IF NOT EXISTS {fence} ("
    f"pipeline varchar(36) {_LETTERS}, sink varchar(40) {_LETTERS}, incarnation bigint NOT NULL, "
    f"name text CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, {_added('fence')}, "
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


# The connection -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place(SqlPlace):
    """A server, a database in it, and how long to wait for either."""

    def quoted(self, identifier: str) -> str:
        return quote(identifier)

    @property
    def seconds(self) -> int:
        """Whole seconds: zero would mean forever, and milliseconds are counted in 31 bits."""
        return int(min(max(self.timeout_s, 1), SECONDS_MAX))

    def connect(self) -> Any:
        """A connection in autocommit, whose open transaction nobody ends for being idle."""
        client, kind = pymysql_(), connection_type()
        connection = None
        try:
            connection = kind(
                **settings_of(self.url),
                charset="utf8mb4",
                autocommit=True,
                local_infile=True,
                connect_timeout=max(2, limited(self.seconds)),
                read_timeout=max(2, limited(self.seconds)),
                write_timeout=limited(STATEMENT_S_MAX),
            )
            self._set_up(connection)
        except client.Error as error:
            _close(connection)
            text = one_line(error)
            if number_of(error) in LOGIN_REFUSED or TLS_REFUSED.search(text):
                raise ConfigError(f"MySQL refused the login: {text}.", remedy="Correct the url.") from None
            what = "cannot be reached" if connection is None else "did not set up a session"
            raise SinkUnavailable(f"MySQL {what}: {text}.") from None
        except (RuntimeError, OSError) as error:
            if connection is not None:
                _close(connection)
                raise SinkUnavailable(f"MySQL cannot be reached: {error}.") from None
            # A way to log in that needs another library, a certificate that cannot be read.
            raise ConfigError(f"MySQL cannot be logged in to: {error}.", remedy="Correct the url.") from None
        return connection

    def _set_up(self, connection: Any) -> None:
        execute(connection, SESSION, (SQL_MODE, self.seconds, self.seconds))
        if is_mariadb(connection):
            execute(connection, MARIADB_SESSION)
        execute(connection, ISOLATION)
        connection._read_timeout = limited(STATEMENT_S_MAX)
        if connection._sock.family in (socket.AF_INET, socket.AF_INET6):
            self._notice_when_it_vanishes(connection._sock)

    def _notice_when_it_vanishes(self, connection: socket.socket) -> None:
        """A machine that does not answer any more is noticed after about `seconds`, also in a long statement."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        wanted = {
            "TCP_USER_TIMEOUT": self.seconds * 1000,
            "TCP_KEEPIDLE": min(max(1, self.seconds // 2), KEEPALIVE_S_MAX),
            "TCP_KEEPINTVL": min(max(1, self.seconds // 6), KEEPALIVE_S_MAX),
            "TCP_KEEPCNT": 3,
        }
        for name, value in wanted.items():
            # Not every system has all of them.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close(connection: Any) -> None:
    if connection is not None:
        with suppress(Exception):  # it is being dropped
            connection.close()


def execute(connection: Any, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
    """The rows of a statement; of one that has none, how many rows it changed."""
    cursor = connection.cursor()
    cursor.execute(with_names(sql, values, names), tuple(values) or None)
    return list(cursor.fetchall()) if cursor.description else [(cursor.rowcount,)]


def is_mariadb(connection: Any) -> bool:
    return "mariadb" in str(connection.get_server_info()).lower()


def number_of(error: BaseException) -> int:
    """The number by which server and client tell errors apart."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def one_line(error: BaseException) -> str:
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    return " ".join(text.split()).rstrip(".") or "the connection is closed"


# Tables -------------------------------------------------------------------------------------------------------------


def columns_of(run: Run, place: Place, table: str) -> list[Column]:
    """The columns of a table; none when it does not exist."""
    return [_column(row) for row in run(COLUMNS, (place.schema, table))]


def _column(row: Sequence[Any]) -> Column:
    texts, flags, numbers, letters = row[:3], row[3:7], row[7:11], row[11:]
    name, kind, full = map(_text, texts)
    return Column(name, kind.lower(), full.lower(), *map(bool, flags), *map(int, numbers), *map(_text, letters))  # type: ignore[arg-type]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def engine_of(run: Run, place: Place, table: str) -> str:
    """The storage engine of a table, VIEW for a view; nothing when it does not exist."""
    found = run(ENGINE, (place.schema, table))
    if not found:
        return ""
    return str(found[0][1] or "VIEW") if "TABLE" in found[0][0] else str(found[0][0])


# Names of XA transactions -------------------------------------------------------------------------------------------

_GTRID = re.compile(r"([0-9a-f]{32})-b(\d+)a(\d+)i(\d+)t(\d+)r(\d+)")
_BQUAL_PREFIX = "semel-"
_PART_MAX = 64


def xid(branch: Branch) -> str:
    """The name of a branch as the two parts of an XA transaction's, each of which holds 64 bytes."""
    a = branch.attempt
    numbers = f"b{a.batch}a{a.attempt}i{a.incarnation}t{branch.task}r{branch.retry}"
    gtrid, bqual = f"{a.pipeline.replace('-', '')}-{numbers}", _BQUAL_PREFIX + branch.sink
    if len(gtrid) > _PART_MAX or parse_xid(gtrid, bqual) != branch:
        raise ValueError(f"not the name of an XA transaction: {branch}")
    return f"'{gtrid}','{bqual}'"


def parse_xid(gtrid: str, bqual: str) -> Branch | None:
    """The branch that a name spells, or None when the name is not one of ours."""
    match = _GTRID.fullmatch(gtrid)
    if match is None or not bqual.startswith(_BQUAL_PREFIX):
        return None
    digits, *numbers = match.groups()
    pipeline = PipelineId(str(uuid.UUID(digits)))
    batch, attempt, incarnation, task, retry = map(int, numbers)
    sink = bqual.removeprefix(_BQUAL_PREFIX)
    branch = Branch(Attempt(pipeline, batch, attempt, Incarnation(incarnation)), sink, task, retry)
    # The other spelling is checked by its own parser: numbers with leading zeros are nobody's of ours.
    spelled = f"{digits}-b{batch}a{attempt}i{incarnation}t{task}r{retry}" == gtrid
    return branch if spelled and parse_branch(str(branch)) == branch else None


def prepared_branches(run: Run) -> set[Branch]:
    """The prepared transactions of this server that are named as we name them."""
    found = set()
    for format_id, gtrid_bytes, bqual_bytes, data in run("XA RECOVER"):
        content = data if isinstance(data, bytes) else str(data).encode()
        if format_id == 1 and len(content) == gtrid_bytes + bqual_bytes and content.isascii():
            text = content.decode()
            found.add(parse_xid(text[:gtrid_bytes], text[gtrid_bytes:]))
    return {branch for branch in found if branch is not None}


# The end of an XA transaction ---------------------------------------------------------------------------------------

VISIBLE, FREE, HELD = "visible", "free", "held"


def fate(run: Run, branch: Branch) -> str:
    """What became of a prepared transaction, by its ledger row: visible, not there, or held by whoever inserted it.

    This is asked of the storage engine's own locks, which is more than the server's list of transactions can say. The
    row has the name of the branch if a task wrote it, and none if the driver did.
    """
    try:
        found = [_mark_of(run, branch, part) for part in (str(branch), "")]
    except pymysql_().Error as error:
        if number_of(error) in LOCKED:
            return HELD
        raise
    return VISIBLE if any(found) else FREE


def _mark_of(run: Run, branch: Branch, part: str) -> bool:
    """Whether a ledger row is visible. It is asked for by its whole key, so that no other row is touched."""
    a = branch.attempt
    sql = "SELECT 1 FROM {ledger} WHERE pipeline = %s AND sink = %s AND batch = %s AND part = %s FOR UPDATE NOWAIT"
    return bool(run(sql, (a.pipeline, branch.sink, a.batch, part)))


def leave_prepared(place: Place, connection: Any, other: Run, branch: Branch) -> None:
    """Prepare the XA transaction of a connection and close it: only then can another session end what it prepared.

    `other` runs statements on another connection.
    """
    execute(connection, f"XA END {xid(branch)}")
    execute(connection, f"XA PREPARE {xid(branch)}")
    session = connection.thread_id()
    connection.close()
    wait_for_session_end(place, other, session)
    time.sleep(LET_GO_S)


def end_prepared(place: Place, run: Run, verb: str, branch: Branch) -> bool:
    """Commit or roll back a prepared transaction. Returns whether the server knew it and it came to pass.

    MariaDB's answers cannot be trusted while the session that prepared it is going away. Before, the transaction is
    said to be unknown. For a moment, the server's list has let go of it and the storage engine has not: then the
    answer is OK, nothing is done, and the name is forgotten while the rows stay locked. So it is the ledger row that
    says whether it ended, and a transaction that has lost its name gets it back, to be rolled back by it.
    """
    deadline = time.monotonic() + limited(place.timeout_s)
    while True:
        known = _ended(run, verb, branch)
        now = fate(run, branch)
        if now != HELD:
            return known and (now == VISIBLE) == (verb == "COMMIT")
        if branch not in prepared_branches(run):
            _roll_back_nameless(place, run, branch)
        if time.monotonic() > deadline:
            raise SinkUnavailable(
                f"MySQL still holds the rows of {branch} and lets nobody end it: XA transaction {xid(branch)}.",
                remedy="End the session that prepared it, or restart the server, then start the pipeline again.",
            )
        time.sleep(DETACH_PAUSE_S)


def _ended(run: Run, verb: str, branch: Branch) -> bool:
    try:
        run(f"XA {verb} {xid(branch)}")
    except pymysql_().Error as error:
        if number_of(error) != UNKNOWN_XID and number_of(error) not in ROLLED_BACK:
            raise
        return False
    return True


def _roll_back_nameless(place: Place, run: Run, branch: Branch) -> None:
    """An empty transaction of the same name is prepared; rolled back by name, it takes the nameless one along.

    If the name is in use after all, the server refuses it and nothing happens.
    """
    with suppress(pymysql_().Error):
        connection = place.connect()
        try:
            for verb in ("START", "END", "PREPARE"):
                execute(connection, f"XA {verb} {xid(branch)}")
            session = connection.thread_id()
        finally:
            connection.close()
        wait_for_session_end(place, run, session)
        _ended(run, "ROLLBACK", branch)


def wait_for_session_end(place: Place, run: Run, session: int) -> None:
    """A connection that is closed ends a little later in the server, and with it what it held."""
    deadline = time.monotonic() + limited(place.timeout_s)
    while run("SELECT 1 FROM information_schema.processlist WHERE id = %s", (session,)):
        if time.monotonic() > deadline:
            raise SinkUnavailable(f"MySQL does not end session {session}, which was closed.")
        time.sleep(DETACH_PAUSE_S)


# The store ----------------------------------------------------------------------------------------------------------


def session_lock(pipeline: PipelineId, incarnation: int, number: int) -> str:
    """The user lock that a connection of a driver holds: by it a newer incarnation finds the sessions of an older."""
    return f"semel-{hashlib.sha256(pipeline.encode()).hexdigest()[:16]}-i{incarnation}-c{number}"


class MySqlStore(Store):
    hides_new_tables = False
    place: Place

    def __init__(self, place: Place, context: Context) -> None:
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
            _close(connection)
            raise
        _close(connection)
        raise SinkUnavailable(f"This driver has {SESSIONS_MAX} connections to MySQL already, more than it should need.")

    def is_broken(self, connection: Any) -> bool:
        return not connection.open

    def run(self, connection: Any, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        # Who reads in vain for so long closes the connection: what became of the statement is not known then.
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

    def end_older_sessions(self) -> None:
        deadline = time.monotonic() + SESSION_END_S_MAX
        while older := self._older_sessions():
            for session in older:
                self._kill(session)
            if time.monotonic() > deadline:
                raise self._does_not_end(older)
            time.sleep(SESSION_END_PAUSE_S)

    def _kill(self, session: int) -> None:
        try:
            self.query(f"KILL CONNECTION {session:d}")
        except pymysql_().Error as error:
            if number_of(error) == NOT_OWNER_OF_THREAD:
                raise self._does_not_end([session]) from None
            if number_of(error) != NO_SUCH_THREAD:
                raise

    def _does_not_end(self, sessions: Sequence[int]) -> SinkUnavailable:
        return SinkUnavailable(
            f"Sessions of an older incarnation of this pipeline do not end: connections {list(sessions)} of MySQL.",
            remedy="End them with KILL CONNECTION as a user who may do so, then start the pipeline again.",
        )

    def _older_sessions(self) -> list[int]:
        """Those that hold a lock of an older incarnation. Nobody else's connection can be among them."""
        mine = self.context.incarnation
        fences = self.query("SELECT incarnation FROM {fence} WHERE pipeline = %s", (self.context.pipeline,))
        older = {*range(max(0, mine - OLDER_ASKED), mine), *(row[0] for row in fences if row[0] < mine)}
        locks = [session_lock(self.context.pipeline, i, n) for i in sorted(older) for n in range(SESSIONS_MAX)]
        if not locks:
            return []
        (found,) = self.query("SELECT " + ", ".join(["IS_USED_LOCK(%s)"] * len(locks)), locks)
        return [session for session in found if session is not None]

    def create_bookkeeping(self) -> None:
        if self.has_bookkeeping():
            self._add_columns("ledger", self.ledger_columns())
            self._add_columns("fence", self.fence_columns())
            return
        self.query(LEDGER)
        self.query(FENCE)

    def _add_columns(self, table: str, found: set[str]) -> None:
        """Only where the server can do so without copying the table, and without waiting for who has marked it."""
        missing = sorted(ADDED[table].keys() - found)
        if not missing:
            return
        columns = ", ".join(f"ADD COLUMN {name} {ADDED[table][name]}" for name in missing)
        try:
            self.query("SET SESSION lock_wait_timeout = 1")
            self.query(f"ALTER TABLE {{{table}}} {{columns}}, ALGORITHM = INSTANT", columns=columns)
        except pymysql_().Error as error:
            _LOG.info("semel_%s keeps the form of semel 0.1 until a later start: %s", table, one_line(error))
        finally:
            self.query("SET SESSION lock_wait_timeout = %s", (self.place.seconds,))

    def ledger_columns(self) -> set[str]:
        return own_columns(self.query, self.place)

    def fence_columns(self) -> set[str]:
        return own_columns(self.query, self.place, "fence")

    def has_bookkeeping(self) -> bool:
        return all(engine_of(self.query, self.place, table) for table in ("semel_ledger", "semel_fence"))


def own_columns(run: Run, place: SqlPlace, table: str = "ledger") -> set[str]:
    found = run(
        "SELECT column_name FROM information_schema.columns "
        "WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s",
        (place.schema, f"semel_{table}"),
    )
    return {str(row[0]).lower() for row in found}


def runner(connection: Any, place: Place) -> Callable[..., list[tuple[Any, ...]]]:
    """Runs statements on a connection, with the names of our own tables."""
    return partial(execute, connection, **place.names)
