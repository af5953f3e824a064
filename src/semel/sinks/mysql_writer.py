"""One task: its rows into a staging table, or into the target in an XA transaction that is left prepared."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from semel.errors import BatchFailed
from semel.ids import Branch
from semel.sinks.base import StagedPart, Writer
from semel.sinks.mysql_load import Field, Loader, pymysql_, quote
from semel.sinks.mysql_moves import create_side_tables, create_target
from semel.sinks.mysql_store import (
    ORDER_COLUMN,
    columns_of,
    end_prepared,
    engine_of,
    leave_prepared,
    prepared_branches,
    runner,
    xid,
)
from semel.sinks.mysql_types import Column, Unfit, encoder
from semel.sinks.sql import Run
from semel.sinks.sql_participant import write_mark
from semel.sinks.sql_store import stage_table

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.mysql import MySql


class MySqlWriter(Writer):
    """The connection is made with the first row: a task without rows needs none."""

    def __init__(self, sink: MySql, branch: Branch, *, durable: bool) -> None:
        self.sink = sink
        self.branch = branch
        self.durable = durable
        self.rows = 0
        self._connection: Any = None
        self._loader: Loader | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self._refuse_nulls_in_the_key(batch)
        with self.sink.translated(f"did not take rows of task {self.branch.task}", refused=BatchFailed):
            loader = self._loader or self._begin(batch.schema)
            self._loader = loader
            try:
                loader.add(batch)
            except Unfit as error:
                raise self._unfit(error) from None
        self.rows += batch.num_rows

    def _refuse_nulls_in_the_key(self, batch: pa.RecordBatch) -> None:
        """A null is equal to nothing: such rows could be neither replaced nor found again."""
        without = [name for name in self.sink.key if batch.column(name).null_count]
        if without:
            raise BatchFailed(
                f"{self.sink.describe()}: rows of task {self.branch.task} have null in column {', '.join(without)}, "
                "which is part of the key.",
                remedy="Give every row a key, or leave such rows out with where='... IS NOT NULL'.",
            )

    def _unfit(self, error: Unfit) -> BatchFailed:
        return BatchFailed(f"{self.sink.describe()} cannot hold a value: {error}.")

    def _begin(self, schema: pa.Schema) -> Loader:
        self._connection = self.sink.place.connect()
        if self.sink.create:
            create_target(self.sink, self._run, schema)
        columns = columns_of(self._run, self.sink.place, self.sink.table)
        self._refuse(schema, columns)
        create_side_tables(self.sink, self._run)
        drop_branch(self._run, self.sink, self.branch)
        known = {column.name.lower(): column for column in columns}
        into = self._begin_transaction([known[name.lower()] for name in schema.names])
        fields = [
            Field(f.name, encoder(f.type, known[f.name.lower()]), known[f.name.lower()].nullable)  # type: ignore[arg-type]
            for f in schema
        ]
        ((local, packet_bytes_max),) = self._run("SELECT @@GLOBAL.local_infile, @@SESSION.max_allowed_packet")
        return Loader(self._connection, into, fields, local=bool(local), packet_bytes_max=int(packet_bytes_max))

    def _refuse(self, schema: pa.Schema, columns: list[Column]) -> None:
        engine = engine_of(self._run, self.sink.place, self.sink.table)
        problems = self.sink.problems(schema, columns, engine)
        if problems:
            raise BatchFailed(f"{self.sink.describe()} does not match the rows: {'; '.join(problems)}.")

    def _begin_transaction(self, columns: list[Column]) -> str:
        """Returns where the rows go. Below exactly-once they go into the target without waiting for anybody."""
        if not self.sink.is_native:
            stage = self._create_stage(columns)
            self._run("BEGIN")
            return stage
        self._run(f"XA START {xid(self.branch)}" if self.durable else "BEGIN")
        return self.sink.target

    def _create_stage(self, columns: list[Column]) -> str:
        """The columns of the target without its keys. What breaks one of them does so when the driver moves the rows.

        Its name is in the comment, which takes no parameters; the name of a branch has neither quotes nor backslashes.
        """
        stage = self.sink.place.named(stage_table(str(self.branch)))
        self._run(
            "CREATE TABLE {stage} ({columns}, {order} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY) "
            "ENGINE = InnoDB COMMENT = '{branch}'",
            stage=stage,
            columns=", ".join(f"{quote(c.name)} {c.definition} NULL" for c in columns),
            order=quote(ORDER_COLUMN),
            branch=str(self.branch),
        )
        return stage

    def prepare(self) -> StagedPart:
        if self._loader is None:
            return StagedPart(self.branch, 0)
        with self.sink.translated(f"did not take rows of task {self.branch.task}", refused=BatchFailed):
            try:
                self._loader.flush()
            except Unfit as error:
                raise self._unfit(error) from None
            payload = self._end()
        return StagedPart(self.branch, self.rows, payload)

    def _end(self) -> dict[str, Any]:
        """Staged rows are committed to a table of their own. Below exactly-once rows need not wait for anybody."""
        if not self.sink.is_native or not self.durable:
            self._run("COMMIT")
            self._close()
            return {} if self.sink.is_native else {"staged": True}
        write_mark(self._run, self.branch.sink, self.branch.attempt, str(self.branch), self.rows)
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
                    drop_branch(runner(connection, self.sink.place), self.sink, self.branch)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        connection.close()

    def _run(self, sql: str, values: tuple[Any, ...] = (), **names: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise pymysql_().InterfaceError(0, "there is no connection")
        return runner(self._connection, self.sink.place)(sql, values, **names)


def drop_branch(run: Run, sink: MySql, branch: Branch) -> None:
    """Drop what was staged or prepared under this name."""
    if not sink.is_native:
        run("DROP TABLE IF EXISTS {stage}", stage=sink.place.named(stage_table(str(branch))))
    elif branch in prepared_branches(run):
        end_prepared(sink.place, run, "ROLLBACK", branch)
