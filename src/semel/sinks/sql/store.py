"""A database as the driver sees it: one connection that holds what is prepared, one for everything else.

A database without prepared transactions of its own prepares by moving staged rows inside a transaction that stays open
until commit (docs/adr/0002). Sinks of one pipeline that write to one database join in the same transaction: two that
wait for each other's locks inside one driver would wait forever.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, takewhile
from typing import Any, ClassVar, TypeVar

from semel.deadline import seconds_left, within_half
from semel.errors import SinkUnavailable
from semel.ids import Attempt, Branch, parse_branch
from semel.sinks.base import Context

T = TypeVar("T", bound="Store")


#: What names of staging tables begin with.
STAGE_PREFIX = "semel_stage_"
SESSION_END_S_MAX = 10.0
SESSION_END_PAUSE_S = 0.02


def stage_table(piece: str) -> str:
    """Names of tables are short, so the name of the piece stands in the table's comment."""
    return STAGE_PREFIX + hashlib.sha256(piece.encode()).hexdigest()[:32]


def piece_name(branch: Branch, number: int) -> str:
    """The first piece has the name of the branch, and most branches have no other."""
    return f"{branch}+{number}" if number else str(branch)


def parse_piece(text: str) -> tuple[Branch, int] | None:
    """Branch and number, or None when the name is not one of ours."""
    name, _, number = text.partition("+")
    branch = parse_branch(name)
    if branch is None or not (number or "0").isdecimal():
        return None
    found = branch, int(number or 0)
    return found if piece_name(*found) == text else None


def with_names(sql: str, values: Sequence[Any], names: Mapping[str, str]) -> str:
    """A statement with its quoted names. With values, clients take a percent sign in a name for the place of one."""
    return sql.format(**({name: text.replace("%", "%%") for name, text in names.items()} if values else names))


@dataclass(frozen=True)
class Place(ABC):
    """A server, a schema in it, and how long to wait for either."""

    url: str = field(repr=False)
    schema: str
    timeout_s: float

    @abstractmethod
    def quoted(self, identifier: str) -> str: ...

    def named(self, table: str) -> str:
        return f"{self.quoted(self.schema)}.{self.quoted(table)}" if self.schema else self.quoted(table)

    def listed(self, names: Iterable[str], of: str = "") -> str:
        return ", ".join(f"{of}{self.quoted(name)}" for name in names)

    def equal(self, names: Iterable[str], left: str, right: str) -> str:
        return " AND ".join(f"{left}.{self.quoted(name)} = {right}.{self.quoted(name)}" for name in names)

    @abstractmethod
    def columns(self, run: Callable[..., list[tuple[Any, ...]]], table: str) -> list[str]:
        """The names of the columns of a table, in their order; none when it does not exist."""

    def own_columns(self, run: Callable[..., list[tuple[Any, ...]]], table: str = "ledger") -> set[str]:
        """The columns of the ledger or of the fence."""
        return {name.lower() for name in self.columns(run, f"semel_{table}")}

    @property
    def names(self) -> dict[str, str]:
        return {"ledger": self.named("semel_ledger"), "fence": self.named("semel_fence")}


def stages_of(place: Place, branch: Branch, exists: Callable[[str], object]) -> str:
    """The staging tables that a branch has, quoted, as a list for DROP. They are made in their order."""
    tables = (stage_table(piece_name(branch, number)) for number in count())
    return ", ".join(place.named(table) for table in takewhile(exists, tables))


def definitions(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


class StagedGone(Exception):
    """Staged rows are not there any more, or not all of them."""


@dataclass(frozen=True, eq=False)
class Held:
    """A transaction that is open on the connection for prepared rows. Each is another.

    With a branch it is to be left prepared under that name.
    """

    attempt: Attempt
    branch: Branch | None = None


@dataclass(frozen=True)
class Session:
    """Runs statements on one connection of a store.

    `beside` runs them on another one, outside of the transaction, also while this one waits for an answer.
    """

    store: Store
    connection: Any
    beside: Callable[..., list[tuple[Any, ...]]] | None = None

    def __call__(self, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        return self.store.run(self.connection, sql, values, **names)


class Store(ABC):
    """Shared by the sinks of one run that write to one database."""

    #: A table that is made in a transaction is seen by others when that is committed, and not before.
    hides_new_tables: ClassVar[bool]
    #: What ledger and fence of semel 0.1 do not have.
    added: ClassVar[Mapping[str, Mapping[str, str]]]
    #: What the database calls sessions, in a sentence, and by what they can be ended.
    sessions_are: ClassVar[str]
    sessions_end_by: ClassVar[str]

    _shared: dict[tuple[str, Context], Store] = {}
    _shared_lock = threading.Lock()

    def __init__(self, place: Place, context: Context) -> None:
        self.place = place
        self.context = context
        self.lock = threading.RLock()
        self.users = 0
        self._key = ("", context)
        self._held: Held | None = None
        self._ended: Held | None = None
        self._holder: Any = None
        self._side: Any = None

    @classmethod
    def shared(cls, address: str, context: Context, make: Callable[[], T]) -> T:
        with cls._shared_lock:
            store: Any = cls._shared.get((address, context)) or make()
            store._key = (address, context)
            cls._shared[address, context] = store
            store.users += 1
            return store  # type: ignore[no-any-return]

    def release(self) -> None:
        """Let go of the connections with the last sink. What is staged or natively prepared stays."""
        with self._shared_lock:
            self.users -= 1
            if self.users:
                return
            self._shared.pop(self._key, None)
        with self.lock:
            self._drop(held=True)
            self._drop(held=False)

    # What differs from database to database ---------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Any:
        """A connection in autocommit. Raises SinkUnavailable."""

    @abstractmethod
    def is_broken(self, connection: Any) -> bool: ...

    @abstractmethod
    def run(self, connection: Any, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        """Run one statement. In its text {ledger}, {fence} and the names given here stand for quoted identifiers."""

    def begin(self, connection: Any, branch: Branch | None) -> None:  # noqa: ARG002 - most need no name so early
        """Begin a transaction; with a name, one that `prepare_natively` will prepare under it."""
        self.run(connection, "BEGIN")

    def roll_back(self, connection: Any, branch: Branch | None) -> None:  # noqa: ARG002 - as above
        """End such a transaction, and undo it."""
        self.run(connection, "ROLLBACK")

    @abstractmethod
    def prepare_natively(self, connection: Any, branch: Branch) -> None:
        """End the open transaction of a connection so that it is prepared. The connection is usable afterwards, or
        broken."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One sink at a time. It may wait for the server; others give up when their time ends."""
        left = seconds_left()
        if not self.lock.acquire(timeout=-1 if left is None else left):
            raise SinkUnavailable(f"Another sink of this database waits for the server, for more than {left:.0f} s.")
        try:
            yield
        finally:
            self.lock.release()

    # Two connections --------------------------------------------------------------------------------------------------

    def query(self, sql: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        """A statement of its own, outside of what is prepared: one that may be asked twice.

        A connection that was idle for long may be found dead; then there is another one.
        """
        with self.locked():
            connection = self._side_connection()
            try:
                with within_half():
                    return self.run(connection, sql, values, **names)
            except Exception:
                if not self.is_broken(connection):
                    raise
            return self.run(self._side_connection(), sql, values, **names)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A transaction of its own: committed at the end, rolled back on any error."""
        with self.locked():
            # Nothing is done yet: a connection that is found dead is made anew.
            self.query("BEGIN")
            connection = self._side
            try:
                yield Session(self, connection)
                self.run(connection, "COMMIT")
            except BaseException:
                self._roll_back(connection, held=False)
                raise

    @contextmanager
    def joined(self, attempt: Attempt, branch: Branch | None = None) -> Iterator[tuple[Held, Session]]:
        """Work inside the transaction that holds this attempt's prepared rows; it stays open until `commit`.

        With a name it is a transaction of its own, to be left prepared under that name.
        """
        with self.lock:
            if self._held is None or (self._held.attempt, self._held.branch) != (attempt, branch):
                self.forget()
                self._held = self._begin(attempt, branch)
            held, connection = self._held, self._holder
            try:
                yield held, Session(self, connection, self.query)
            except BaseException:
                self.forget()
                raise

    def _begin(self, attempt: Attempt, branch: Branch | None) -> Held:
        if self._holder is not None and not self.is_broken(self._holder):
            try:
                self.begin(self._holder, branch)
                return Held(attempt, branch)
            except Exception:
                # One that was idle while the server died is found dead only now. Nothing was done on it yet.
                if not self.is_broken(self._holder):
                    raise
        self._drop(held=True)
        self._holder = self.connect()
        self.begin(self._holder, branch)
        return Held(attempt, branch)

    def holds(self, held: Held | None) -> bool:
        return held is not None and self._held is held

    def commit(self, held: Held | None) -> bool:
        """Commit what is held; also true when another sink has done so. False when it is not there any more."""
        with self.locked():
            if held is None or self._held is not held:
                return held is not None and self._ended is held
            try:
                with within_half():
                    self.run(self._holder, "COMMIT")
            except BaseException:
                # Whether it came to pass only the ledger can say.
                self._held = None
                self._drop(held=True)
                raise
            self._held, self._ended = None, held
            return True

    def leave_prepared(self, held: Held, branch: Branch) -> None:
        """Leave what is held in a native prepared transaction of this name: it outlives this process."""
        with self.lock:
            if self._held is not held:
                raise RuntimeError("what is to be prepared is not held any more")
            self.prepare_natively(self._holder, branch)
            self._held = None

    def forget(self, attempts: Iterable[Attempt] | None = None) -> None:
        """Roll back what is held, whatever it is or where it is of one of these attempts."""
        with self.locked():
            held = self._held
            if held is not None and (attempts is None or held.attempt in set(attempts)):
                self._held = None
                self._roll_back(self._holder, held.branch, held=True)

    def _roll_back(self, connection: Any, branch: Branch | None = None, *, held: bool) -> None:
        try:
            self.roll_back(connection, branch)
        except Exception:  # noqa: BLE001 - a connection that cannot even roll back is closed, which does it
            self._drop(held=held)

    def _side_connection(self) -> Any:
        if self._side is None or self.is_broken(self._side):
            self._drop(held=False)
            self._side = self.connect()
        return self._side

    def _drop(self, *, held: bool) -> None:
        connection = self._holder if held else self._side
        if held:
            self._holder, self._held = None, None
        else:
            self._side = None
        if connection is not None:
            with suppress(Exception):  # it is closed, one way or the other
                connection.close()

    # What a participant asks for --------------------------------------------------------------------------------------

    @abstractmethod
    def commented_tables(self) -> list[tuple[Any, ...]]:
        """The tables of the schema whose names begin as those of staging tables do, each with its comment."""

    def staged(self) -> dict[Branch, list[str]]:
        """What is staged here by anybody who names it as we do: branch -> the names of its pieces, in their order."""
        ours = [c for table, c in self.commented_tables() if c and table == stage_table(c)]
        found: dict[Branch, list[str]] = {}
        for branch, number in sorted(piece for comment in ours if (piece := parse_piece(comment))):
            found.setdefault(branch, []).append(piece_name(branch, number))
        return found

    def drop_staged(self, pieces: Iterable[str]) -> None:
        tables = (stage_table(piece) for piece in pieces)
        quoted = ", ".join(self.place.named(table) for table in tables)
        if quoted:
            self.query("DROP TABLE IF EXISTS {tables}", tables=quoted)

    @abstractmethod
    def prepared(self) -> set[Branch]:
        """The native prepared transactions here that are named as we name them."""

    @abstractmethod
    def commit_prepared(self, branch: Branch) -> bool:
        """False when there is no such prepared transaction."""

    @abstractmethod
    def roll_back_prepared(self, branch: Branch) -> None:
        """Harmless when there is none."""

    def end_older_sessions(self) -> None:
        """End what older incarnations of this pipeline still hold open: a driver that sleeps holds its locks."""
        deadline = time.monotonic() + SESSION_END_S_MAX
        while older := self.older_sessions():
            for session in older:
                self.end_session(session)
            if time.monotonic() > deadline:
                raise self.does_not_end(older)
            time.sleep(SESSION_END_PAUSE_S)

    def does_not_end(self, sessions: Sequence[int]) -> SinkUnavailable:
        return SinkUnavailable(
            "Sessions of an older incarnation of this pipeline do not end: "
            f"{self.sessions_are.format(list(sessions))}.",
            remedy=f"End them with {self.sessions_end_by}, then start the pipeline again.",
        )

    @abstractmethod
    def older_sessions(self) -> list[int]: ...

    @abstractmethod
    def end_session(self, session: int) -> None: ...

    def create_bookkeeping(self) -> None:
        """Create ledger and fence; to those of semel 0.1 add the columns that they lack, unless that has to wait.

        It has to while a prepared transaction has marked the ledger, and another start will find it free. semel 0.1
        names the columns that it writes, so that it can go on beside us.
        """
        found = {"ledger": self.ledger_columns(), "fence": self.fence_columns()}
        if not all(found.values()):
            self.create_ledger_and_fence()
            return
        for table, columns in found.items():
            missing = sorted(self.added[table].keys() - columns)
            if missing:
                self.add_columns(table, [f"{name} {self.added[table][name]}" for name in missing])

    @abstractmethod
    def create_ledger_and_fence(self) -> None: ...

    @abstractmethod
    def add_columns(self, table: str, columns: Sequence[str]) -> None:
        """To the ledger or the fence, unless that has to wait."""

    def ledger_columns(self) -> set[str]:
        return self.place.own_columns(self.query, "ledger")

    def fence_columns(self) -> set[str]:
        return self.place.own_columns(self.query, "fence")

    @cached_property
    def keeps_plans(self) -> bool:
        """Whether the ledger has the columns that semel 0.1 did not know. Asked once, when it has its final form."""
        return "plan" in self.ledger_columns()

    def has_bookkeeping(self) -> bool:
        return bool(self.ledger_columns()) and bool(self.fence_columns())
