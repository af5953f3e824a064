"""XA transactions of MySQL and MariaDB: their names, what became of one, and how it ends."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from typing import Any

from semel.deadline import limited
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch
from semel.sinks.mysql.connection import MySqlPlace, execute, number_of, pymysql_
from semel.sinks.sql.sink import Execute

DETACH_PAUSE_S = 0.005
#: MariaDB takes a session off its list, frees its buffers, and only then does the storage engine let go of what it
#: prepared (`unlink_thd`). No statement tells when. If we are early, the transaction seems gone, see `end_prepared`.
LET_GO_S = 0.01
UNKNOWN_XID, RM_ERROR, ROLLED_BACK = 1397, 1401, frozenset({1402, 1613, 1614})
#: A row that somebody else holds, in MariaDB and in MySQL.
LOCKED = frozenset({1205, 3572})
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


def prepared_branches(run: Execute) -> set[Branch]:
    """The prepared transactions of this server that are named as we name them."""
    found = set()
    for format_id, gtrid_bytes, bqual_bytes, data in run("XA RECOVER"):
        content = data if isinstance(data, bytes) else str(data).encode()
        if format_id == 1 and len(content) == gtrid_bytes + bqual_bytes and content.isascii():
            text = content.decode()
            found.add(parse_xid(text[:gtrid_bytes], text[gtrid_bytes:]))
    return {branch for branch in found if branch is not None}


# The end of one -----------------------------------------------------------------------------------------------------

VISIBLE, FREE, HELD = "visible", "free", "held"


def fate(run: Execute, branch: Branch) -> str:
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


def _mark_of(run: Execute, branch: Branch, part: str) -> bool:
    """Whether a ledger row is visible. It is asked for by its whole key, so that no other row is touched."""
    a = branch.attempt
    sql = "SELECT 1 FROM {ledger} WHERE pipeline = %s AND sink = %s AND batch = %s AND part = %s FOR UPDATE NOWAIT"
    return bool(run(sql, (a.pipeline, branch.sink, a.batch, part)))


def leave_prepared(place: MySqlPlace, connection: Any, other: Execute, branch: Branch) -> None:
    """Prepare the XA transaction of a connection and close it: only then can another session end what it prepared.

    `other` runs statements on another connection.
    """
    execute(connection, f"XA END {xid(branch)}")
    execute(connection, f"XA PREPARE {xid(branch)}")
    session = connection.thread_id()
    connection.close()
    wait_for_session_end(place, other, session)
    time.sleep(LET_GO_S)


def end_prepared(place: MySqlPlace, run: Execute, verb: str, branch: Branch) -> bool:
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


def _ended(run: Execute, verb: str, branch: Branch) -> bool:
    try:
        run(f"XA {verb} {xid(branch)}")
    except pymysql_().Error as error:
        if number_of(error) != UNKNOWN_XID and number_of(error) not in ROLLED_BACK:
            raise
        return False
    return True


def _roll_back_nameless(place: MySqlPlace, run: Execute, branch: Branch) -> None:
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


def wait_for_session_end(place: MySqlPlace, run: Execute, session: int) -> None:
    """A connection that is closed ends a little later in the server, and with it what it held."""
    deadline = time.monotonic() + limited(place.timeout_s)
    while run("SELECT 1 FROM information_schema.processlist WHERE id = %s", (session,)):
        if time.monotonic() > deadline:
            raise SinkUnavailable(f"MySQL does not end session {session}, which was closed.")
        time.sleep(DETACH_PAUSE_S)
