"""The ids that mode dedup has written lately, and when it may forget them.

    semel_seen_...    an id | token
    semel_due_...     number | since when | token | layout and ids of a packed stage

An id has a row of its own, with the token of the stage that brought it; another stage that brings it again finds it and
leaves it alone. When it may be forgotten is written down for all ids of a stage at once: an index by time would cost as
much as the ids themselves (docs/performance.md). Where tasks have packed the ids, the request that inserted them is
kept, with the number of its format, and deletes those with its token in the end. Else they are found by the token
alone, for which a server that knows no such requests has an index.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

from semel import formats
from semel.sinks.mysql.connection import quote
from semel.sinks.mysql.loaders.bulk import BLOB, VAR_STRING
from semel.sinks.mysql.store import columns_of, engine_of
from semel.sinks.mysql.wire import STMT_BULK_OPERATIONS, Statement

if TYPE_CHECKING:
    from semel.sinks.mysql import MySql
    from semel.sinks.sql.sink import Execute
    from semel.sinks.sql.store import Session

TOKEN_MAX = 2**63 - 1
MICROSECONDS = 1_000_000
#: Three hundred years. MySQL knows no moment much earlier than that before today.
RETENTION_S_MAX = 1e10
#: So many numbers stand in one statement.
LISTED_MAX = 1_000


def new_token() -> int:
    return 1 + secrets.randbelow(TOKEN_MAX)


def create(sink: MySql, run: Execute, *, by_token: bool) -> None:
    """What is missing of both tables. Asked before: to create a table waits for whoever uses it."""
    if not engine_of(run, sink.place, sink.seen_table):
        keys = {name.lower() for name in sink.key}
        columns = [c for c in columns_of(run, sink.place, sink.table) if c.name.lower() in keys]
        run(
            "CREATE TABLE IF NOT EXISTS {seen} ({columns}, semel_token bigint NOT NULL, PRIMARY KEY ({key})"
            "{index}) ENGINE = InnoDB COMMENT = 'ids that semel has written lately'",
            **sink.names,
            columns=", ".join(f"{quote(c.name)} {c.definition} NOT NULL" for c in columns),
            index=", KEY (semel_token)" if by_token else "",
        )
    if not engine_of(run, sink.place, sink.due_table):
        run(
            "CREATE TABLE IF NOT EXISTS {due} (semel_number bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY, "
            "semel_at datetime(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), semel_token bigint NOT NULL, "
            "semel_layout longtext CHARACTER SET utf8mb4 NULL, semel_keys longblob NULL, KEY (semel_at)"
            ") ENGINE = InnoDB COMMENT = 'when semel may forget ids'",
            **sink.names,
        )


def note(sink: MySql, run: Execute, token: int, packed: str = "") -> None:
    """Write down since when a stage is remembered. `packed` is the quoted name of one that has requests of its ids."""
    what = "SELECT %s, semel_layout, semel_keys FROM {packed}" if packed else "VALUES (%s, NULL, NULL)"
    into = "INSERT INTO {due} (semel_token, semel_layout, semel_keys) "
    run(into + what, (token,), **sink.names, packed=packed)


def forget_old(sink: MySql, session: Session) -> None:
    """Forget what is older than the retention. Requests wait for a connection that can send them."""
    old = session(
        "SELECT semel_number, semel_token, semel_keys IS NOT NULL FROM {due} "
        "WHERE semel_at < utc_timestamp(6) - INTERVAL %s MICROSECOND",
        (int(min(sink.retention_s, RETENTION_S_MAX) * MICROSECONDS),),
        **sink.names,
    )
    if not old:
        return
    by_token = {number: token for number, token, packed in old if not packed}
    by_request = {number: token for number, token, packed in old if packed}
    _delete_listed(sink, session, "{seen} WHERE semel_token", list(by_token.values()))
    if not session.connection.extensions & STMT_BULK_OPERATIONS:
        by_request = {}
    texts = {c.name.lower() for c in columns_of(session, sink.place, sink.seen_table) if c.charset}
    sent = [number for number, token in by_request.items() if _delete_packed(sink, session, number, token, texts)]
    _delete_listed(sink, session, "{due} WHERE semel_number", [*by_token, *sent])


def _delete_listed(sink: MySql, session: Session, where: str, numbers: list[int]) -> None:
    for first in range(0, len(numbers), LISTED_MAX):
        listed = numbers[first : first + LISTED_MAX]
        places = ", ".join(["%s"] * len(listed))
        session(f"DELETE FROM {where} IN ({places})", listed, **sink.names)  # noqa: S608 - our own words


def _delete_packed(sink: MySql, session: Session, number: int, token: int, texts: set[str]) -> bool:
    """Send a stored request; one that a newer semel has stored is left to it. Returns whether it was sent.

    `texts` are the columns of text, and compared as such: for bytes a server does not look into an index of text.
    """
    sql = "SELECT semel_layout, semel_keys FROM {due} WHERE semel_number = %s"
    ((layout, body),) = session(sql, (number,), **sink.names)
    described = json.loads(layout)
    if formats.is_newer(described.get("format", formats.FIRST), formats.REQUESTS):
        return False
    types = {name: (kind, flag) for name, kind, flag in described["columns"]}
    types |= {name: (VAR_STRING, 0) for name, (kind, _) in types.items() if kind == BLOB and name.lower() in texts}
    same = " AND ".join(f"{quote(name)} = ?" for name in described["key"])
    statement = Statement(
        session.connection,
        f"DELETE FROM {sink.names['seen']} WHERE {same} AND semel_token = {token:d}",  # noqa: S608 - quoted
    )
    try:
        statement.execute_bulk([statement.head([types[name] for name in described["key"]]), body])
    finally:
        statement.close()
    return True
