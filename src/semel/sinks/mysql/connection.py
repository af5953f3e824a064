"""A connection to MySQL or MariaDB: the client, its settings, and how statements run on it."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from semel.deadline import limited
from semel.errors import ConfigError, MissingExtra, SinkUnavailable
from semel.sinks.mysql import wire as mysql_wire
from semel.sinks.mysql.url import settings_of
from semel.sinks.sql.sink import Execute
from semel.sinks.sql.store import Place, with_names

#: After these the connection is of no use: killed, shut down, idle for too long.
CONNECTION_ENDED = frozenset({1053, 1079, 1080, 1152, 1184, 1927, 2006, 2013, 2055, 4031})


def pymysql_() -> Any:
    try:
        import pymysql
        import pymysql.connections
    except ImportError:
        raise MissingExtra("The MySql sink needs PyMySQL, which is not installed.", extra="mysql") from None
    return pymysql


@cache
def unchecked_tls() -> ssl.SSLContext:
    """For a server that nobody asked to prove who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class QuickTls:
    """Goes before PyMySQL's connection, which would read all authorities of this machine first, for every connection,
    also where it asks none of them: 20 ms, for which a task has to wait."""

    def _create_ssl_ctx(self, settings: Any) -> Any:
        return super()._create_ssl_ctx(settings) if settings else unchecked_tls()  # type: ignore[misc]


def _result_type(client: Any) -> Any:
    """The answer to a statement, which may ask for the bytes of a LOAD DATA LOCAL.

    It is the server that names the file to send, in answer to any statement: a hostile server could ask for any file
    of this machine. Ours sends the bytes that were offered for that statement, and nothing else.
    """

    class Result(client.connections.MySQLResult):  # type: ignore[misc] # the client has no types
        def _read_load_local_packet(self, first_packet: Any) -> None:
            connection = self.connection
            asked = bytes(first_packet.get_all_data()[1:])
            name, pieces = connection.take_offer()
            if asked != name:
                connection._force_close()
                raise ConfigError(
                    f"The MySQL server at {connection.host} asked for a file of this machine that nobody offered: "
                    f"{asked.decode(errors='replace')!r}. Nothing was sent.",
                    data_now="nothing of the batch is visible",
                    remedy="Do not trust this server before you know why it asks.",
                )
            for piece in pieces:
                connection.write_packet(piece)
            connection.write_packet(b"")
            self._read_ok_packet(connection._read_packet())

    return Result


@cache
def connection_type() -> Any:
    """PyMySQL's connection, but one that never opens a file, and agrees on what PyMySQL does not know."""
    client = pymysql_()
    result_type = _result_type(client)

    class Connection(QuickTls, mysql_wire.Extended, client.connections.Connection):  # type: ignore[misc, name-defined]
        _offer: tuple[bytes, Sequence[Any]] = (b"", ())

        def offer(self, name: bytes, pieces: Sequence[Any]) -> None:
            self._offer = (name, pieces)

        def take_offer(self) -> tuple[bytes, Sequence[Any]]:
            """What may be sent: once."""
            offer, self._offer = self._offer, (b"", ())
            return offer

        def _read_query_result(self, unbuffered: bool = False) -> Any:  # noqa: ARG002 - we read all at once
            self._result = None
            result = result_type(self)
            try:
                result.read()
            except client.Error as error:
                if error.args and error.args[0] in CONNECTION_ENDED:
                    self._force_close()
                raise
            self._result = result
            if result.server_status is not None:
                self.server_status = result.server_status
            return result.affected_rows

    return Connection


def quote(identifier: str) -> str:
    return "`" + identifier.replace("`", "``") + "`"


# The server ---------------------------------------------------------------------------------------------------------


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

COLUMNS = """
SELECT column_name FROM information_schema.columns
WHERE table_schema = coalesce(nullif(%s, ''), database()) AND table_name = %s ORDER BY ordinal_position
"""


@dataclass(frozen=True)
class MySqlPlace(Place):
    """A server, a database in it, and how long to wait for either."""

    def quoted(self, identifier: str) -> str:
        return quote(identifier)

    def columns(self, run: Execute, table: str) -> list[str]:
        return [row[0] for row in run(COLUMNS, (self.schema, table))]

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
            close_quietly(connection)
            text = one_line(error)
            if number_of(error) in LOGIN_REFUSED or TLS_REFUSED.search(text):
                raise ConfigError(f"MySQL refused the login: {text}.", remedy="Correct the url.") from None
            what = "cannot be reached" if connection is None else "did not set up a session"
            raise SinkUnavailable(f"MySQL {what}: {text}.") from None
        except (RuntimeError, OSError) as error:
            if connection is not None:
                close_quietly(connection)
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


def close_quietly(connection: Any) -> None:
    if connection is not None:
        with suppress(Exception):  # it is being dropped
            connection.close()


def execute(connection: Any, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
    """The rows of a statement. If it has none, how many rows it changed."""
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


def runner(connection: Any, place: MySqlPlace) -> Callable[..., list[tuple[Any, ...]]]:
    """Runs statements on a connection, with the names of our own tables."""
    return partial(execute, connection, **place.names)
