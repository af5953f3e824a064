"""SQLite: the embedded default.

Tasks spool their rows into Arrow files beside the database. On the driver, *prepare* moves them into the table and
writes the ledger row inside one open transaction, so that a row that the table refuses is found before the decision.
*Commit* ends that transaction. If the driver dies in between, SQLite forgets the transaction, the spool is still there,
and commit in a fresh process does the move again; the ledger row tells it when it must not.

The database is put into WAL mode: a writer never blocks a reader (https://sqlite.org/wal.html).
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from semel import formats
from semel.deadline import progressed
from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SinkUnavailable, lasts
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import (
    Capabilities,
    Context,
    Participant,
    Remains,
    Sink,
    StagedPart,
    Writer,
    committable_for,
    refuse_another_plan,
)
from semel.sinks.evidence import NOTHING_KNOWN, Evidence, Mark
from semel.sinks.sqlite.database import LEDGER_ROWS_KEPT, Database, ledger_columns, may_pass, refuse_newer
from semel.sinks.sqlite.spool import SpoolDamaged, SpoolWriter, drop_spooled, spooled_batches, spooled_branches
from semel.sinks.sqlite.types import affinity_accepts, quote, sqlite_type, to_sqlite

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("semel")

MODES = ("append", "upsert", "replace")


@dataclass(frozen=True)
class Sqlite(Sink):
    """`Sqlite("shop.db", "orders")`: rows of the stream into a table, created if absent.

    `mode` is "append", "upsert" (needs `key`; the newest row of a key wins) or "replace" (each batch is the whole
    table: for `outputMode("complete")`). `timeout_s` is how long to wait for another writer of the same database.
    """

    path: str
    table: str
    mode: str = "append"
    key: Sequence[str] = ()
    timeout_s: float = 60.0

    kind: ClassVar[str] = "sqlite"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Executors may run in another folder than the driver.
        object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))
        # SQLite does not tell upper from lower case in names of tables.
        if not self.table or "\x00" in self.table or self.table.lower().startswith(("sqlite_", "semel_")):
            raise ConfigError(f"A Sqlite sink cannot write to a table named {self.table!r}.")
        if self.mode not in MODES:
            raise ConfigError(f"Sqlite has no mode {self.mode!r}; use one of {', '.join(MODES)}.")
        if (self.mode == "upsert") != bool(self.key):
            raise ConfigError(f"Sqlite table {self.table}: mode 'upsert' and `key` go together.")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(remote_executors=False)

    def default_name(self) -> str:
        return f"sqlite_{self.table}"

    def describe(self) -> str:
        return f"SQLite table {self.table} in {self.path}"

    @property
    def spool(self) -> Path:
        return Path(f"{self.path}-semel")

    def check(self, schema: pa.Schema) -> None:
        unsupported = [f"{f.name} ({f.type})" for f in schema if sqlite_type(f.type) is None]
        if unsupported:
            raise SchemaMismatch(
                f"SQLite cannot hold these columns: {', '.join(unsupported)}.",
                remedy="Turn them into text with to_json(), or leave them out with select=[...].",
            )
        missing_key = [k for k in self.key if k not in schema.names]
        if missing_key:
            raise SchemaMismatch(f"{self.describe()}: the rows have no key column {', '.join(missing_key)}.")
        folder = Path(self.path).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(f"{self.describe()}: the folder {folder} is missing or cannot be written.")
        if Path(self.path).exists():
            try:
                self._check_table(schema)
            except sqlite3.DatabaseError as error:
                raise ConfigError(f"{self.path} cannot be read as an SQLite database: {error}.") from None

    def _check_table(self, schema: pa.Schema) -> None:
        with Database.read_only(self.path) as reader:
            columns = {row[1]: row for row in reader.execute(f"PRAGMA table_info({quote(self.table)})")}
            unique = {
                frozenset(info[2] for info in reader.execute(f"PRAGMA index_info({quote(index[1])})"))
                for index in reader.execute(f"PRAGMA index_list({quote(self.table)})")
                if index[2]
            }
        if not columns:
            return
        problems = [f"no column {name}" for name in schema.names if name not in columns]
        problems += [
            f"column {f.name} is {columns[f.name][2]}, the rows have {f.type}"
            for f in schema
            if f.name in columns and not affinity_accepts(columns[f.name][2], f.type)
        ]
        problems += [
            f"column {name} is required and the rows do not have it"
            for name, (_, _, _, required, default, _) in columns.items()
            if required and default is None and name not in schema.names
        ]
        primary = frozenset(name for name, row in columns.items() if row[5])
        if self.key and frozenset(self.key) not in unique | {primary}:
            problems.append(f"no unique index on ({', '.join(self.key)}), which mode 'upsert' needs")
        if problems:
            raise SchemaMismatch(f"{self.describe()} does not match the rows: {'; '.join(problems)}.")

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:  # noqa: ARG002 - the driver marks
        return SpoolWriter(self.spool, branch, to_sqlite, durable=durable)

    def participant(self, context: Context) -> Participant:
        return _SqliteParticipant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        """Through a connection of its own that cannot write."""
        if not Path(self.path).is_file():
            return Evidence(why=f"there is no database {self.path}")
        branches = spooled_branches(self.spool, pipeline, self.name)
        try:
            found, newest, fenced = Database.look(self.path, lambda reader: self._ledger(reader, pipeline, batches))
        except sqlite3.Error as error:
            raise SinkUnavailable(f"{self.describe()} did not show its ledger: {error}.") from error
        marks = tuple(_mark(*row) for row in found)
        if newest is None:
            known_from = 0 if fenced else NOTHING_KNOWN
            return Evidence(marks, known_from, f"{self.path} knows nothing of this pipeline", branches=branches)
        why = f"its ledger keeps {LEDGER_ROWS_KEPT:,} batches"
        return Evidence(marks, max(0, newest - LEDGER_ROWS_KEPT), why, forgets=True, branches=branches)

    def _ledger(
        self, reader: sqlite3.Connection, pipeline: PipelineId, batches: range
    ) -> tuple[list[tuple[Any, ...]], int | None, bool]:
        """The ledger rows, the newest batch of all, and whether this pipeline was ever here."""
        own = "SELECT count(*) FROM sqlite_master WHERE name IN ('semel_ledger', 'semel_fence')"
        if reader.execute(own).fetchone()[0] < 2:
            return [], None, False
        refuse_newer(reader, self.describe(), pipeline, self.name)
        ours = "FROM semel_ledger WHERE pipeline = ? AND sink = ?"
        plan = "plan" if "plan" in ledger_columns(reader) else "''"
        rows = reader.execute(
            f"SELECT batch, attempt, incarnation, rows, {plan} {ours} AND batch >= ?",
            (pipeline, self.name, batches.start),
        ).fetchall()
        newest = reader.execute(f"SELECT max(batch) {ours}", (pipeline, self.name)).fetchone()[0]
        fenced = reader.execute("SELECT 1 FROM semel_fence WHERE pipeline = ?", (pipeline,)).fetchone()
        return rows, newest, fenced is not None

    def insert_statement(self, names: Sequence[str]) -> str:
        columns = ", ".join(map(quote, names))
        values = ", ".join("?" * len(names))
        insert = f"INSERT INTO {quote(self.table)} ({columns}) VALUES ({values})"  # noqa: S608 - quoted identifiers
        if self.mode != "upsert":
            return insert
        updates = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in names if n not in self.key)
        target = ", ".join(map(quote, self.key))
        return f"{insert} ON CONFLICT ({target}) DO " + (f"UPDATE SET {updates}" if updates else "NOTHING")

    def create_statement(self, schema: pa.Schema) -> str:
        # Unique and not primary: SQLite turns a NULL in an integer primary key into a number of its own choice.
        columns = [f"{quote(f.name)} {sqlite_type(f.type)}{' NOT NULL' * (f.name in self.key)}" for f in schema]
        if self.key:
            columns.append(f"UNIQUE ({', '.join(map(quote, self.key))})")
        return f"CREATE TABLE IF NOT EXISTS {quote(self.table)} ({', '.join(columns)})"


def _mark(batch: int, attempt: int, incarnation: int, rows: int, plan: str) -> Mark:
    return Mark(batch, "", attempt, incarnation, rows, plan=plan)


class _SqliteParticipant(Participant):
    def __init__(self, sink: Sqlite, context: Context) -> None:
        self.sink = sink
        self.context = context
        self.database = Database.shared(sink.path, context, sink.timeout_s)
        self._moved: Committable | None = None

    def fence(self) -> None:
        pipeline, mine = self.context.pipeline, self.context.incarnation
        with self.database.transaction("fence") as db:
            db.create_ledger()
            self._refuse_if_older()
            db.execute(
                "INSERT INTO semel_fence VALUES (?, ?) ON CONFLICT (pipeline) DO UPDATE SET incarnation = ?",
                (pipeline, mine, mine),
            )

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        committable = committable_for(self.sink.name, attempt, parts, {})
        try:
            self.database.keep_only(attempt)
            if self._is_marked(committable):
                return (committable,)
            with self.database.joined(attempt):
                if self.context.marked:
                    self._refuse_if_older()
                self._move(committable)
                self._moved = committable
                failpoint("sqlite.moved")
        except SpoolDamaged as error:
            raise BatchFailed(f"{self.sink.describe()}: staged rows vanished before the decision: {error}.") from None
        except sqlite3.Error as error:
            raise BatchFailed(f"{self.sink.describe()} refused the rows of batch {attempt.batch}: {error}.") from error
        return (committable,)

    def commit(self, committable: Committable) -> Outcome:
        try:
            with self.database.lock:
                if self.database.ends(committable.attempt):
                    self.database.commit()
                    outcome = Outcome.COMMITTED
                elif self._moved == committable and self.database.ended(committable.attempt):
                    # Another sink of this database has committed the transaction that both had joined.
                    outcome = Outcome.COMMITTED
                else:
                    outcome = self._commit_from_spool(committable)
            failpoint("sqlite.committed")
        except SpoolDamaged:
            return Outcome.GONE
        except (sqlite3.Error, OSError) as error:
            # Nothing is known to have happened; the next try looks at the ledger first.
            passes = not lasts(error) if isinstance(error, OSError) else may_pass(error)
            kind = SinkUnavailable if passes else ConfigError
            raise kind(f"{self.sink.describe()} did not let us commit: {error}.") from error
        self._moved = None
        try:
            drop_spooled(self.sink.spool, committable.branches)
        except OSError as error:
            # The batch is visible all the same, and what is left is dropped at another start.
            _LOG.warning("%s keeps what was staged of a batch that is committed: %s", self.sink.describe(), error)
        return outcome

    def _commit_from_spool(self, committable: Committable) -> Outcome:
        with self.database.transaction("commit"):
            if self._is_marked(committable):
                return Outcome.ALREADY_COMMITTED
            self._move(committable)
        return Outcome.COMMITTED

    def _move(self, committable: Committable) -> None:
        db = self.database
        insert = ""
        if self.sink.mode == "replace" and db.has_table(self.sink.table):
            db.execute(f"DELETE FROM {quote(self.sink.table)}")  # noqa: S608 - a quoted identifier
        staged = spooled_batches(self.sink.spool, committable.branches, committable.rows)
        for number, batch in enumerate(staged):
            if not insert:
                db.execute(self.sink.create_statement(batch.schema))
                insert = self.sink.insert_statement(batch.schema.names)
            db.executemany(insert, zip(*(column.to_pylist() for column in batch.columns), strict=True))
            progressed(number)
        if self.context.marked:
            self._write_marker(committable)

    def _write_marker(self, committable: Committable) -> None:
        c, context = committable, self.context
        self.database.execute(
            "INSERT INTO semel_ledger (pipeline, sink, batch, attempt, incarnation, rows, name, format, plan, target) "
            "VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                *(context.pipeline, c.sink, c.attempt.batch, c.attempt.attempt, c.attempt.incarnation),
                *(c.rows, context.name, formats.LEDGER, c.plan, self.sink.table),
            ),
        )
        self.database.execute(
            "DELETE FROM semel_ledger WHERE pipeline = ? AND sink = ? AND batch < ?",
            (context.pipeline, c.sink, c.attempt.batch - LEDGER_ROWS_KEPT),
        )

    def _is_marked(self, committable: Committable) -> bool:
        """Whether the batch is visible. Rows of another plan are not these."""
        if not self.context.marked:
            return False
        batch = committable.attempt.batch
        found = self.database.execute(
            "SELECT plan FROM semel_ledger WHERE pipeline = ? AND sink = ? AND batch = ?",
            (self.context.pipeline, self.sink.name, batch),
        ).fetchone()
        if found is not None:
            refuse_another_plan(self.sink, batch, found[0], committable.plan)
        return found is not None

    def abort(self, branches: Iterable[Branch]) -> None:
        named = list(branches)
        self.database.roll_back({b.attempt for b in named})
        drop_spooled(self.sink.spool, map(str, named))

    def recover(self) -> Remains:
        branches = self._staged_or_prepared()
        if not (self.context.marked and self.database.has_table("semel_ledger")):
            return Remains(branches)
        # Our own connection would also see the marker of a batch that is prepared and not committed.
        with Database.read_only(self.sink.path) as reader:
            refuse_newer(reader, self.sink.describe(), self.context.pipeline, self.sink.name)
            newest = reader.execute(
                "SELECT max(batch) FROM semel_ledger WHERE pipeline = ? AND sink = ?",
                (self.context.pipeline, self.sink.name),
            ).fetchone()[0]
            # A ledger of semel 0.1 does not say into which table: there the name of the sink tells.
            target = "target" if "target" in ledger_columns(reader) else "''"
            writers = reader.execute(
                f"SELECT DISTINCT name, pipeline FROM semel_ledger WHERE pipeline <> ? "  # noqa: S608 - ours
                f"AND ({target} = ? OR ({target} = '' AND sink = ?))",
                (self.context.pipeline, self.sink.table, self.sink.name),
            ).fetchall()
        return Remains.of(branches, newest, ((name, PipelineId(who)) for name, who in writers), self.context)

    def _staged_or_prepared(self) -> tuple[Branch, ...]:
        """A prepared batch without rows has no spool, but its open transaction must be found, too, to be aborted."""
        staged = spooled_branches(self.sink.spool, self.context.pipeline, self.sink.name)
        if self._moved is None or not self.database.ends(self._moved.attempt):
            return staged
        prepared = [branch for name in self._moved.branches if (branch := parse_branch(name))]
        # A batch of no tasks has no branch either: the first task's name stands for its transaction.
        return tuple(sorted({*staged, *(prepared or [Branch(self._moved.attempt, self.sink.name, 0, 0)])}))

    def close(self) -> None:
        self.database.release()

    def _refuse_if_older(self) -> None:
        newest = self.database.execute(
            "SELECT incarnation FROM semel_fence WHERE pipeline = ?", (self.context.pipeline,)
        ).fetchone()
        self.context.refuse_if_older(newest[0] if newest else 0, self.sink.describe())
