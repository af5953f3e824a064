"""A connection to PostgreSQL, and how statements and names are written on it."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from semel.deadline import limited, seconds_left
from semel.errors import ConfigError, MissingExtra, SinkUnavailable
from semel.ids import Branch
from semel.sinks.sql.sink import Execute
from semel.sinks.sql.store import Place, with_names

if TYPE_CHECKING:
    import psycopg

#: What the server says when a login can never succeed: class 28, and a database that does not exist.
LOGIN_REFUSED = re.compile(
    r"authentication failed|no pg_hba.conf entry|no password supplied|(role|database) \"[^\"]*\" does not exist"
    r"|is not permitted to log in|permission denied for database"
    # Nor can one over TLS that does not say what the url asks for.
    r"|certificate verify failed|does not match host name|root certificate file|does not support SSL"
)
#: Seven weeks and a bit: PostgreSQL counts milliseconds in 31 bits.
MILLISECONDS_MAX = 2**31 - 1
#: Rows that wait for the driver, or for Spark to compute the next ones, are neither idle nor slow.
UNLIMITED = ["idle_in_transaction_session_timeout", "idle_session_timeout", "statement_timeout", "transaction_timeout"]
SESSION = (
    "SELECT set_config('lock_timeout', %s, false), set_config('client_encoding', 'UTF8', false), "
    # What is committed must survive a crash, whatever is the habit of this user or database.
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', false) END, "
    "(SELECT count(set_config(name, '0', false)) FROM pg_settings WHERE name = ANY (%s))"
)
COLUMNS = """
SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


@dataclass(frozen=True)
class PostgresPlace(Place):
    """A database, a schema in it, and how long to wait for either."""

    def quoted(self, identifier: str) -> str:
        return quote(identifier)

    def columns(self, run: Execute, table: str) -> list[str]:
        return [row[0] for row in run(COLUMNS, (self.named(table),))]

    def connect(self, application: str) -> psycopg.Connection[Any]:
        """A connection in autocommit, whose open transaction nobody ends for being idle or long."""
        client = psycopg_()
        kind = connection_type()
        # Zero would mean to wait forever.
        milliseconds = str(int(min(max(self.timeout_s * 1000, 1), MILLISECONDS_MAX)))
        seconds = max(2, int(milliseconds) // 1000)
        try:
            connection: psycopg.Connection[Any] = kind.connect(
                self.url,
                autocommit=True,
                prepare_threshold=None,
                application_name=application,
                connect_timeout=max(2, int(limited(seconds))),
                # A machine that vanished is noticed after about that time, too.
                tcp_user_timeout=milliseconds,
                keepalives_idle=max(1, seconds // 2),
                keepalives_interval=max(1, seconds // 6),
                keepalives_count=3,
            )
        except client.OperationalError as error:
            text = one_line(error)
            if LOGIN_REFUSED.search(text):
                raise ConfigError(f"PostgreSQL refused the login: {text}.", remedy="Correct the url.") from None
            raise SinkUnavailable(f"PostgreSQL cannot be reached: {text}.") from None
        except client.ProgrammingError as error:
            # The text may hold the url.
            raise ConfigError("The url of a Postgres sink cannot be read.", remedy=URL_REMEDY) from error.__cause__
        try:
            connection.execute(SESSION, (milliseconds, UNLIMITED))
        except client.Error as error:
            connection.close()
            if isinstance(error, client.OperationalError):
                raise SinkUnavailable(f"PostgreSQL cannot be reached: {one_line(error)}.") from None
            raise ConfigError(f"PostgreSQL does not take the settings of a session: {one_line(error)}.") from None
        return connection


@cache
def connection_type() -> Any:
    """psycopg's connection, but one that waits for an answer no longer than `semel.deadline` says.

    No setting of the server does that. A COMMIT that waits for a synchronous standby does not end by
    `statement_timeout` (SyncRepWaitForLSN), and a server that has stopped ends nothing. So it is the client that gives
    up: it closes the connection, and what became of the statement is not known. It is not cancelled: a COMMIT that is
    cancelled while it waits for a standby becomes visible without it.
    """
    client = psycopg_()

    class Connection(client.Connection):  # type: ignore[misc, name-defined] # the client is imported late
        def wait(self, gen: Any, *values: Any, **named: Any) -> Any:
            left = seconds_left()
            if left is None:
                return super().wait(gen, *values, **named)
            try:
                return super().wait(_until(gen, time.monotonic() + left), *values, **named)
            except TimeoutError:
                self.close()
                raise client.OperationalError(f"no answer within {left:.0f} s") from None

    return Connection


def _until(gen: Any, give_up_at: float) -> Generator[Any, Any, Any]:
    """The steps of a call to the server. The client looks in now and then, also when nothing has come."""
    try:
        step = next(gen)
        while True:
            ready = yield step
            if not ready and time.monotonic() > give_up_at:
                raise TimeoutError
            step = gen.send(ready)
    except StopIteration as end:
        return end.value


URL_REMEDY = (
    "Write it as postgresql://user:password@host:5432/database, with %40 for @ and %2F for / in a password, "
    "or as `host=... dbname=...`."
)


def refuse_torn_url(url: str) -> None:
    """Refuse a url whose password has a bare @ or /: part of it would be taken for a host, and be shown."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    if scheme in ("postgresql", "postgres") and (authority.count("@") > 1 or "@" in path.partition("?")[0]):
        raise ConfigError("The url of a Postgres sink cannot be read.", remedy=URL_REMEDY)


def execute(
    connection: psycopg.Connection[Any], sql: str, values: Sequence[Any] = (), **names: str
) -> list[tuple[Any, ...]]:
    """The rows of a statement. If it has none, how many rows it changed."""
    cursor = connection.execute(with_names(sql, values, names), tuple(values) or None)
    return cursor.fetchall() if cursor.description else [(cursor.rowcount,)]


def quote(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def literal(name: Branch | str) -> str:
    """The names of branches and their pieces have neither quotes nor backslashes."""
    return f"'{name}'"


def psycopg_() -> Any:
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("The Postgres sink needs psycopg, which is not installed.", extra="postgres") from None
    return psycopg


def one_line(error: Any) -> str:
    """What the server said: the message, the detail that names the key, and where in a COPY it was."""
    said = getattr(error, "diag", None)
    lines = [said.message_primary, said.message_detail, said.context] if said and said.message_primary else []
    text = "; ".join(line.strip().splitlines()[0].rstrip(".") for line in lines if line and line.strip())
    return text or " ".join(str(error).split()).rstrip(".")
