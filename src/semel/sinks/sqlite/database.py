"""One connection per database, pipeline and run, shared by the sinks that write to it.

Two sinks of a pipeline may write to two tables of one file. SQLite has one writer at a time, so both must work in the
same transaction: the second joins what the first has opened, and whoever commits first commits both.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from semel import formats
from semel.deadline import limited
from semel.errors import ConfigError, SinkUnavailable
from semel.ids import Attempt, PipelineId
from semel.sinks.base import Context

LEDGER_ROWS_KEPT = 1_000
#: What may be over in a moment, by result code (https://sqlite.org/rescode.html), with how SQLite says it: locks, a
#: disk that is full or in trouble, a file that cannot be opened, because a mount is away or too many are open. All else
#: stays as it is until somebody changes something: a table that is gone, a row in the way, rights, damage.
MAY_PASS = {
    5: "database is locked",
    6: "database table is locked",
    9: "interrupted",
    10: "disk I/O error",
    13: "database or disk is full",
    14: "unable to open database file",
    15: "locking protocol",
    17: "database schema has changed",
}
T = TypeVar("T")

#: What a ledger of semel 0.1 does not have. Its own statements name their columns, so it can go on beside us.
_ADDED = {
    "format": f"INTEGER NOT NULL DEFAULT {formats.FIRST}",
    "plan": "TEXT NOT NULL DEFAULT ''",
    "target": "TEXT NOT NULL DEFAULT '' COLLATE NOCASE",
}
_LEDGER = """
CREATE TABLE IF NOT EXISTS semel_ledger (
    pipeline TEXT NOT NULL, sink TEXT NOT NULL, batch INTEGER NOT NULL, attempt INTEGER NOT NULL,
    incarnation INTEGER NOT NULL, rows INTEGER NOT NULL, name TEXT NOT NULL, {more},
    committed_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    PRIMARY KEY (pipeline, sink, batch)
) WITHOUT ROWID
"""
_FENCE = (
    "CREATE TABLE IF NOT EXISTS semel_fence (pipeline TEXT PRIMARY KEY, incarnation INTEGER NOT NULL) WITHOUT ROWID"
)


def ledger_columns(connection: sqlite3.Connection) -> set[str]:
    return {row[1] for row in connection.execute("PRAGMA table_info(semel_ledger)")}


def refuse_newer(connection: sqlite3.Connection, where: str, pipeline: PipelineId, sink: str) -> None:
    """Raise NewerRecord when a newer semel has written ledger rows of this pipeline and sink."""
    if "format" not in ledger_columns(connection):
        return
    ours = "SELECT max(format) FROM semel_ledger WHERE pipeline = ? AND sink = ?"
    newest = connection.execute(ours, (pipeline, sink)).fetchone()[0]
    formats.refuse_newer(f"The ledger of sink {sink} ({where})", newest or formats.FIRST, formats.LEDGER)


def may_pass(error: sqlite3.Error) -> bool:
    """Whether it makes sense to try again. Python 3.10 does not tell the code."""
    code = getattr(error, "sqlite_errorcode", None)
    return str(error).startswith(tuple(MAY_PASS.values())) if code is None else code & 0xFF in MAY_PASS


class Database:
    """A connection, and the attempt whose prepared rows its open transaction holds."""

    _open: dict[tuple[str, Context], Database] = {}
    _open_lock = threading.Lock()

    def __init__(self, path: str, context: Context, timeout_s: float) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.users = 0
        self._key = (path, context)
        self._timeout_s = timeout_s
        self._held: Attempt | None = None
        self._ended: Attempt | None = None
        self._connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            mode = self.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            self.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            self._connection.close()
            raise SinkUnavailable(f"The SQLite database {path} cannot be opened: {error}.") from error
        if mode != "wal":
            self._connection.close()
            raise ConfigError(f"The SQLite database {path} cannot use WAL mode (it says {mode!r}); use a local disk.")

    @classmethod
    def shared(cls, path: str, context: Context, timeout_s: float) -> Database:
        with cls._open_lock:
            database = cls._open.get((path, context)) or cls(path, context, timeout_s)
            cls._open[path, context] = database
            database.users += 1
            return database

    @staticmethod
    @contextmanager
    def read_only(path: str) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)
        try:
            yield connection
        finally:
            connection.close()

    @classmethod
    def look(cls, path: str, ask: Callable[[sqlite3.Connection], T]) -> T:
        """Ask without leaving a trace.

        A reader of a database that nobody has open leaves files beside it, which another user could not write to. Taken
        for immutable it leaves none; a process that opens it meanwhile makes such a file, and then we look again.
        """
        wal = Path(f"{path}-wal")
        if not wal.exists():
            answer, failed = None, None
            with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
                try:
                    answer = ask(connection)
                except sqlite3.DatabaseError as error:
                    failed = error
            if answer is not None and not wal.exists():
                return answer
            if failed is not None and not wal.exists():
                raise failed
        with cls.read_only(path) as connection:
            return ask(connection)

    def release(self) -> None:
        """The last one closes the connection, and waits for a thread that is still at work on it."""
        with self._open_lock:
            self.users -= 1
            if self.users:
                return
            self._open.pop(self._key, None)
        with self.lock:
            self._connection.close()

    def execute(self, sql: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, tuple(values))

    def executemany(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self._connection.executemany(sql, rows)

    def has_table(self, name: str) -> bool:
        found = self.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE", (name,))
        return found.fetchone() is not None

    def create_ledger(self) -> None:
        """Create what is missing, also what a ledger of semel 0.1 has not. To add a column rewrites no row."""
        added = {name: f"{name} {kind}" for name, kind in _ADDED.items()}
        self.execute(_LEDGER.format(more=", ".join(added.values())))
        self.execute(_FENCE)
        for column in added.keys() - ledger_columns(self._connection):
            self.execute(f"ALTER TABLE semel_ledger ADD COLUMN {added[column]}")

    # Transactions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, purpose: str) -> Iterator[Database]:
        """A transaction of its own: committed at the end, rolled back on any error."""
        with self.lock:
            self._roll_back()
            self._begin(purpose)
            try:
                yield self
                self._connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    @contextmanager
    def joined(self, attempt: Attempt) -> Iterator[None]:
        """Work inside the transaction that holds this attempt's prepared rows; it stays open until `commit`."""
        with self.lock:
            self.keep_only(attempt)
            if self._held is None:
                self._begin("prepare")
                self._held = attempt
            try:
                yield
            except BaseException:
                self._roll_back()
                raise

    def keep_only(self, attempt: Attempt) -> None:
        """Forget what any other attempt prepared: its rows and markers must not be taken for committed ones."""
        with self.lock:
            if self._held != attempt:
                self._roll_back()

    def ends(self, attempt: Attempt) -> bool:
        """Whether the open transaction is the one that this attempt prepared."""
        return self._held == attempt

    def ended(self, attempt: Attempt) -> bool:
        """Whether the transaction committed last was the one that this attempt prepared."""
        return self._ended == attempt

    def _wait_no_longer_than(self, seconds: float) -> None:
        """For a lock that another connection holds."""
        self._connection.execute(f"PRAGMA busy_timeout = {min(int(seconds * 1000), 2**31 - 1)}")

    def commit(self) -> None:
        try:
            self._wait_no_longer_than(limited(self._timeout_s))
            self._connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self._held, self._ended = None, self._held

    def roll_back(self, attempts: set[Attempt]) -> None:
        """Forget what these attempts prepared."""
        with self.lock:
            if self._held in attempts:
                self._roll_back()

    def _roll_back(self) -> None:
        self._held = None
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _begin(self, purpose: str) -> None:
        try:
            self._wait_no_longer_than(limited(self._timeout_s))
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not may_pass(error):
                raise ConfigError(
                    f"The SQLite database {self.path} did not let us {purpose}: {error}.",
                    data_now="nothing was changed by this call",
                    remedy="Mend what it names, then start again.",
                ) from error
            raise SinkUnavailable(
                f"The SQLite database {self.path} did not let us {purpose}: {error}.",
                remedy="End the process that holds a write transaction on it (`fuser` names it), then start again.",
            ) from error
