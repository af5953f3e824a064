"""One task: its rows by binary COPY, into a staging table or into the target in a transaction that is left prepared."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.deadline import within
from semel.errors import BatchFailed
from semel.ids import Branch
from semel.sinks.base import StagedPart, Writer
from semel.sinks.postgres.connection import execute, literal, quote
from semel.sinks.postgres.copy import HEADER, TRAILER, Encode, Unfit, encode_rows
from semel.sinks.postgres.moves import exists, is_set_up, set_up
from semel.sinks.postgres.store import CREATE_LOCK, application_name, columns_of
from semel.sinks.postgres.types import encoder
from semel.sinks.sql.participant import write_mark
from semel.sinks.sql.sink import Execute
from semel.sinks.sql.store import piece_name, stage_table, stages_of

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from semel.sinks.postgres import Postgres

#: How long a task that failed waits for its tables.
DROP_WAIT_MS_MAX = 500
DROP_S_MAX = 5.0


class PostgresWriter(Writer):
    """The connection is made with the first row: a task without rows needs none."""

    def __init__(self, sink: Postgres, branch: Branch, *, durable: bool, plan: str = "") -> None:
        self.sink = sink
        self.branch = branch
        self.durable = durable
        self.plan = plan
        self.rows = 0
        #: The rows of each piece that was begun.
        self._pieces: list[int] = []
        self._connection: psycopg.Connection[Any] | None = None
        self._names = ""
        self._copying: Any = None
        self._copy: Any = None
        self._encoders: list[Encode] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self.sink.refuse_nulls_in_the_key(batch, self.branch)
        with self.sink.translated(f"did not take rows of task {self.branch.task}", refused=BatchFailed):
            for part in self.sink.cut(batch, tuple(self._pieces)):
                self._write(part)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._connection is None:
            self._begin(batch.schema)
        elif self._pieces[-1] >= self.sink.room(len(self._pieces) - 1) and not self.sink.is_native:
            self._next_piece()
        for rows in self._encoded(batch):
            self._copy.write(memoryview(rows))
        self.rows += batch.num_rows
        self._pieces[-1] += batch.num_rows

    def _encoded(self, batch: pa.RecordBatch) -> list[pa.Buffer]:
        import pyarrow as pa

        try:
            return encode_rows(batch, self._encoders)
        except (pa.ArrowInvalid, Unfit) as error:
            raise BatchFailed(f"{self.sink.describe()} cannot hold a value: {error}.") from None

    def _begin(self, schema: pa.Schema) -> None:
        attempt, place = self.branch.attempt, self.sink.place
        connection = place.connect(application_name(attempt.pipeline, attempt.incarnation))
        self._connection = connection
        self._set_up(schema)
        columns = {c.name: c for c in columns_of(connection, self.sink.target)}
        problems = self.sink.mismatches(schema, list(columns.values()))
        if problems:
            raise BatchFailed(f"{self.sink.describe()} does not match the rows: {'; '.join(problems)}.")
        self._encoders = [encoder(f.type, columns[f.name]) for f in schema]  # type: ignore[misc]
        drop_branch(connection, self.sink, self.branch)
        self._names = ", ".join(map(quote, schema.names))
        self._begin_copy(connection)

    def _begin_copy(self, connection: psycopg.Connection[Any]) -> None:
        """A staging table is made in the transaction that fills it: then COPY keeps the order of rows, because it does
        not look for room in earlier pages."""
        self._run("BEGIN")
        piece = piece_name(self.branch, len(self._pieces))
        into = self.sink.target if self.sink.is_native else create_stage(self.sink, self._run, piece, self._names)
        self._copying = connection.cursor().copy(f"COPY {into} ({self._names}) FROM STDIN (FORMAT binary)")
        self._copy = self._copying.__enter__()
        self._copy.write(HEADER)
        self._pieces.append(0)

    def _next_piece(self) -> None:
        """The driver may move what is committed. It is on disk when the last piece is, whose commit waits for all."""
        if self._connection is None:
            raise RuntimeError("there is no connection")
        self._end_copy()
        self._run("SET LOCAL synchronous_commit = off")
        self._run("COMMIT")
        self._begin_copy(self._connection)

    def _end_copy(self) -> None:
        self._copy.write(TRAILER)
        copying, self._copying = self._copying, None
        copying.__exit__(None, None, None)

    def _set_up(self, schema: pa.Schema) -> None:
        """Create what is missing, unless another task has done so meanwhile."""
        if is_set_up(self.sink, self._run, schema):
            return
        self._run("BEGIN")
        self._run("SELECT pg_advisory_xact_lock(%s)", (CREATE_LOCK,))
        # A session remembers which names it found missing. Only when it opens a table it hears what others have made.
        self._run("SELECT FROM pg_class LIMIT 0")
        set_up(self.sink, self._run, schema)
        self._promise("COMMIT")

    def prepare(self) -> StagedPart:
        if self._connection is None:
            return StagedPart(self.branch, 0)
        with self.sink.translated(f"did not take rows of task {self.branch.task}", refused=BatchFailed):
            self._end_copy()
            payload = self._end()
            self._connection.close()
        self._connection = None
        return StagedPart(self.branch, self.rows, payload)

    def _end(self) -> dict[str, Any]:
        """Staged rows are committed to a table of their own. Below exactly-once rows need not wait for anybody."""
        if not self.sink.is_native:
            self._promise("COMMIT")
            return {"pieces": self._pieces}
        if not self.durable:
            self._promise("COMMIT")
            return {}
        plan = self.plan if "plan" in self.sink.place.own_columns(self._run) else None
        write_mark(self._run, self.branch.sink, self.branch.attempt, str(self.branch), self.rows, plan)
        self._promise("PREPARE TRANSACTION {gid}", gid=literal(self.branch))
        return {"prepared": True}

    def _promise(self, sql: str, gid: str = "") -> None:
        """What makes rows durable may wait for a standby that is away: not for ever. Nothing is decided yet."""
        with within(self.sink.timeout_s):
            self._run(sql, gid=gid)

    def abort(self) -> None:
        """A transaction ends with its connection; what is staged or prepared already has a name."""
        connection, self._connection = self._connection, None
        copying, self._copying = self._copying, None
        # An answer that was lost may have been that the rows are safe.
        may_be_safe = self._copy is not None and (copying is None or len(self._pieces) > 1)
        if connection is not None:
            with suppress(Exception):  # it is being dropped
                connection.close()
        if copying is not None:
            # With the connection gone it can do no more than complain; left alone, it would do so on stderr.
            with suppress(Exception):
                copying.__exit__(None, None, None)
        if may_be_safe:
            limit = within(DROP_S_MAX)
            with suppress(Exception), limit, self.sink.place.connect("semel") as other:  # the driver sweeps
                # It does so, too, when it has begun to move these rows and keeps the tables locked.
                execute(other, "SET lock_timeout = {ms}", ms=str(DROP_WAIT_MS_MAX))
                drop_branch(other, self.sink, self.branch)
        self._copy = None

    def _run(self, sql: str, values: tuple[Any, ...] = (), **names: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise RuntimeError("there is no connection")
        return execute(self._connection, sql, values, **self.sink.place.names, **names)


def create_stage(sink: Postgres, run: Execute, piece: str, names: str) -> str:
    """A table for some rows of a branch, of the same types as the target."""
    stage = sink.place.named(stage_table(piece))
    run(
        "CREATE TABLE {stage} AS SELECT {names} FROM {target} WITH NO DATA",
        stage=stage,
        names=names,
        target=sink.target,
    )
    run("COMMENT ON TABLE {stage} IS {piece}", stage=stage, piece=literal(piece))
    return stage


def drop_branch(connection: psycopg.Connection[Any], sink: Postgres, branch: Branch) -> None:
    """Drop what was staged or prepared under this name."""
    if not sink.is_native:
        run = partial(execute, connection)
        stages = stages_of(sink.place, branch, lambda table: exists(run, sink.place.named(table)))
        if stages:
            run("DROP TABLE IF EXISTS {stages}", stages=stages)
    elif execute(connection, "SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", (str(branch),)):
        execute(connection, "ROLLBACK PREPARED {gid}", gid=literal(branch))
