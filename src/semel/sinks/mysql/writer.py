"""One task: its rows into a staging table, or into the target in an XA transaction that is left prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.errors import BatchFailed
from semel.ids import Branch
from semel.sinks.base import StagedPart, Writer
from semel.sinks.mysql.connection import execute, pymysql_, runner
from semel.sinks.mysql.loaders.base import Field, Loader, turn_of
from semel.sinks.mysql.loaders.bulk import bulk_loader
from semel.sinks.mysql.loaders.packed import COLUMNS as PACKED_COLUMNS
from semel.sinks.mysql.loaders.packed import Packer, can_pack
from semel.sinks.mysql.loaders.text import Inserts, LoadData
from semel.sinks.mysql.moves import create_side_tables, create_target, stage_columns
from semel.sinks.mysql.store import columns_of, engine_of
from semel.sinks.mysql.types import Column, Unfit, encoder
from semel.sinks.mysql.xa import end_prepared, leave_prepared, prepared_branches, xid
from semel.sinks.sql.participant import write_mark
from semel.sinks.sql.sink import DEDUP, Execute
from semel.sinks.sql.store import piece_name, stage_table, stages_of

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.mysql import MySql


LIMITS = "SELECT @@GLOBAL.local_infile, @@SESSION.max_allowed_packet"


class MySqlWriter(Writer):
    """The connection is made with the first row: a task without rows needs none."""

    def __init__(self, sink: MySql, branch: Branch, *, durable: bool, plan: str = "") -> None:
        self.sink = sink
        self.branch = branch
        self.durable = durable
        self.plan = plan
        self.rows = 0
        #: The rows of each piece that was begun.
        self._pieces: list[int] = []
        self._connection: Any = None
        self._columns: list[Column] = []
        self._fields: list[Field] = []
        self._loader: Loader | None = None
        self._appends = False
        self._packs = False
        self._local: Any = 0
        self._packet_bytes_max: Any = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self.sink.refuse_nulls_in_the_key(batch, self.branch)
        with self._refusing_rows():
            for part in self.sink.cut(batch, tuple(self._pieces)):
                self._write(part)

    def _write(self, batch: pa.RecordBatch) -> None:
        loader = self._loader
        if loader is None:
            self._begin(batch.schema)
            loader = self._begin_piece()
        elif self._pieces[-1] >= self.sink.room(len(self._pieces) - 1) and not self.sink.is_native:
            loader = self._next_piece(loader)
        if isinstance(loader, Packer) and not loader.fits(batch):
            self._packs = False
            loader = self._next_piece(loader)
        self._loader = loader
        loader.add(batch)
        self.rows += batch.num_rows
        self._pieces[-1] += batch.num_rows

    def _next_piece(self, loader: Loader) -> Loader:
        """The driver may move what is committed."""
        loader.flush()
        self._run("COMMIT")
        return self._begin_piece()

    @contextmanager
    def _refusing_rows(self) -> Iterator[None]:
        with self.sink.translated(f"did not take rows of task {self.branch.task}", refused=BatchFailed):
            try:
                yield
            except Unfit as error:
                raise BatchFailed(f"{self.sink.describe()} cannot hold a value: {error}.") from None

    def _begin(self, schema: pa.Schema) -> None:
        self._connection = self.sink.place.connect()
        if self.sink.create:
            create_target(self.sink, self._run, schema)
        columns = columns_of(self._run, self.sink.place, self.sink.table)
        self._refuse(schema, columns)
        packs = not self.sink.is_native and can_pack(self._connection)
        create_side_tables(self.sink, self._run, packs=packs)
        drop_branch(self._run, self.sink, self.branch)
        known = {column.name.lower(): column for column in columns}
        self._columns = [known[name.lower()] for name in schema.names]
        self._fields = [
            Field(f.name, encoder(f.type, column), column)  # type: ignore[arg-type]
            for f, column in zip(schema, self._columns, strict=True)
        ]
        self._appends = self.sink.is_native and not self._bring_a_key(schema)
        # Which versions are too old is found out by a look at the keys, in SQL.
        self._packs = packs and not self.sink.versions_kept
        ((self._local, self._packet_bytes_max),) = self._run(LIMITS)

    def _bring_a_key(self, schema: pa.Schema) -> bool:
        """Whether it is the rows that say where in the table they lie."""
        from semel.sinks.mysql.sink import unique_keys

        brought = {name.lower() for name in schema.names}
        return any(names and brought.issuperset(names) for names in unique_keys(self._run, self.sink).values())

    def _begin_piece(self) -> Loader:
        """What costs the server least: many rows in a prepared statement, then LOAD DATA, then INSERT."""
        into = self._begin_transaction(piece_name(self.branch, len(self._pieces)))
        self._pieces.append(0)
        kind = LoadData if self._local else Inserts
        loader = kind(self._connection, into, self._fields, int(self._packet_bytes_max))
        if self._packs:
            return Packer(loader, self.sink.key if self.sink.mode == DEDUP else ())
        loader.turn = turn_of(into) if self._appends else ""
        return bulk_loader(loader)

    def _refuse(self, schema: pa.Schema, columns: list[Column]) -> None:
        engine = engine_of(self._run, self.sink.place, self.sink.table)
        problems = self.sink.problems(schema, columns, engine)
        if problems:
            raise BatchFailed(f"{self.sink.describe()} does not match the rows: {'; '.join(problems)}.")

    def _begin_transaction(self, piece: str) -> str:
        """Returns where the rows go. Below exactly-once they go into the target without waiting for anybody."""
        if not self.sink.is_native:
            stage = self._create_stage(piece)
            self._run("BEGIN")
            return stage
        self._run(f"XA START {xid(self.branch)}" if self.durable else "BEGIN")
        return self.sink.target

    def _create_stage(self, piece: str) -> str:
        """Its name is in the comment, which takes no parameters; that of a piece has neither quotes nor backslashes."""
        stage = self.sink.place.named(stage_table(piece))
        self._run(
            "CREATE TABLE {stage} ({columns}) ENGINE = InnoDB COMMENT = '{piece}'",
            stage=stage,
            columns=PACKED_COLUMNS if self._packs else stage_columns(self._columns),
            piece=piece,
        )
        return stage

    def prepare(self) -> StagedPart:
        if self._loader is None:
            return StagedPart(self.branch, 0)
        with self._refusing_rows():
            self._loader.flush()
            payload = self._end()
        return StagedPart(self.branch, self.rows, payload)

    def _end(self) -> dict[str, Any]:
        """Staged rows are committed to a table of their own. Below exactly-once rows need not wait for anybody."""
        if not self.sink.is_native or not self.durable:
            self._run("COMMIT")
            self._close()
            return {} if self.sink.is_native else {"pieces": self._pieces}
        plan = self.plan if "plan" in self.sink.place.own_columns(self._run) else None
        write_mark(self._run, self.branch.sink, self.branch.attempt, str(self.branch), self.rows, plan)
        with self.sink.place.connect() as other:
            leave_prepared(self.sink.place, self._connection, runner(other, self.sink.place), self.branch)
        self._connection = None
        return {"prepared": True}

    def abort(self) -> None:
        """A transaction ends with its connection; what is staged or prepared already has a name."""
        begun, self._loader = self._loader is not None or self._connection is not None, None
        if self._connection is not None:
            with suppress(Exception):  # it is being dropped
                self._close()
        if begun:
            with suppress(Exception):  # the driver sweeps
                connection = self.sink.place.connect()
                with connection:
                    # The driver sweeps, too, when it has begun to move these rows and keeps the tables locked.
                    execute(connection, "SET SESSION lock_wait_timeout = 1")
                    drop_branch(runner(connection, self.sink.place), self.sink, self.branch)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        connection.close()

    def _run(self, sql: str, values: tuple[Any, ...] = (), **names: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise pymysql_().InterfaceError(0, "there is no connection")
        return runner(self._connection, self.sink.place)(sql, values, **names)


def drop_branch(run: Execute, sink: MySql, branch: Branch) -> None:
    """Drop what was staged or prepared under this name."""
    if not sink.is_native:
        stages = stages_of(sink.place, branch, partial(engine_of, run, sink.place))
        if stages:
            run("DROP TABLE IF EXISTS {stages}", stages=stages)
    elif branch in prepared_branches(run):
        end_prepared(sink.place, run, "ROLLBACK", branch)
