"""What the sinks for SQL databases have in common: modes, checks, and the two ways to promise a batch.

ledger, upsert,     tasks load staging tables; the driver moves the rows and writes the ledger row in one
dedup, versions     transaction, which it opens at prepare and ends at commit
prepared, xa        each task loads the target in a transaction that it leaves prepared; the driver commits it
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from semel.deadline import within
from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Branch, Incarnation, PipelineId
from semel.sinks.base import Capabilities, Context, Participant, Sink
from semel.sinks.evidence import Evidence
from semel.sinks.sql.store import Place, Session, Store

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.sinks.sql.moves import Mover

AUTO, LEDGER, UPSERT, DEDUP, VERSIONS = "auto", "ledger", "upsert", "dedup", "versions"
KEYED = (UPSERT, DEDUP, VERSIONS)
#: The column that numbers the versions of a key.
VERSION_COLUMN = "semel_version"
#: The table that says which version of a target is the latest.
VERSIONS_TABLE = "semel_versions"
#: What names of columns that we need beside those of the rows begin with.
RESERVED = "semel_"
#: At the least, for the questions of a check, a start or an audit about a database.
ASK_S_MIN = 60.0
RETENTION_S = 7 * 24 * 3600.0
#: A task stages so many rows in a table, then begins another: the driver moves the first ones meanwhile (`ahead`).
PIECE_ROWS = 50_000
#: The first one of a task is smaller, so that the driver need not wait for long.
FIRST_PIECE_ROWS = 10_000

#: Runs a statement in a transaction of the driver: text, values, quoted names -> rows.
Execute = Callable[..., "list[tuple[Any, ...]]"]


def in_order_of(key: Sequence[str], batch: pa.RecordBatch) -> pa.RecordBatch:
    """Neighbours in an index are written together, which is much less work. Rows of one key stay in their order.

    That holds for what a database keeps as it is. Which texts are one key only it can tell, and it may round moments.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    t = pa.types
    ordered = (t.is_integer, t.is_decimal, t.is_date)
    if not all(any(kind(batch.schema.field(name).type) for kind in ordered) for name in key):
        return batch
    places = pc.sort_indices(batch, sort_keys=[(name, "ascending") for name in key]).to_numpy()
    return batch if np.array_equal(places, np.arange(len(places))) else batch.take(pa.array(places))


@dataclass(frozen=True)
class SqlSink(Sink):
    """`url` may hold a password, so it is shown nowhere. The rest is explained where a user looks: at the sinks."""

    url: str = field(repr=False)
    table: str
    mode: str = AUTO
    key: Sequence[str] = ()
    order_by: str = ""
    retention_s: float = RETENTION_S
    versions_kept: int = 0
    create: bool = False
    schema: str = ""
    timeout_s: float = 60.0
    firm: bool | None = None
    piece_rows: int = PIECE_ROWS

    #: What this database calls a transaction that is prepared and committed by somebody else.
    native: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))
        schema, dot, table = self.table.rpartition(".")
        if dot and not self.schema and schema and table and "." not in schema:
            object.__setattr__(self, "schema", schema)
            object.__setattr__(self, "table", table)
        super().__post_init__()
        modes = (AUTO, LEDGER, self.native, *KEYED)
        if self.mode not in modes:
            raise ConfigError(f"{self.kind} has no mode {self.mode!r}.", remedy=f"Use one of {', '.join(modes)}.")
        if (self.mode in KEYED) != bool(self.key):
            raise ConfigError(
                f"{self.describe()}: the modes {', '.join(KEYED)} need a `key`, and the others take none.",
                remedy="Name the columns that tell rows apart: key=['id'].",
            )
        if self.order_by and self.mode not in (UPSERT, VERSIONS):
            raise ConfigError(f"{self.describe()}: `order_by` says which row of a key is the newest: for mode upsert.")
        if not self.table or "\0" in self.table + self.schema or self.table.lower().startswith("semel_"):
            raise ConfigError(f"{self.kind} cannot write to a table named {self.table!r}.")
        if self.retention_s <= 0 or self.timeout_s <= 0 or self.versions_kept < 0:
            raise ConfigError(f"{self.describe()}: retention_s and timeout_s are above zero, versions_kept not below.")
        if self.piece_rows < 1:
            raise ConfigError(f"{self.describe()}: piece_rows is at least 1, not {self.piece_rows}.")

    @property
    def is_native(self) -> bool:
        """Whether each task leaves a prepared transaction of the database's own."""
        return self.mode == self.native

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(native_prepare=self.is_native, commits_by_task=self.is_native)

    def among(self, sinks: Sequence[Sink]) -> Sink:
        """Beside other sinks the promise must outlive the driver: they may show the batch when it dies."""
        mode = LEDGER if self.mode == AUTO else self.mode
        firm = self._is_firm_among(sinks)
        for other in sinks:
            if isinstance(other, SqlSink) and self._shares_transactions(other):
                self._refuse_to_mix(other, firm, other._is_firm_among(sinks))
        return replace(self, mode=mode, firm=firm)

    def _is_firm_among(self, sinks: Sequence[Sink]) -> bool:
        return len(sinks) > 1 if self.firm is None else self.firm

    def _shares_transactions(self, other: SqlSink) -> bool:
        """Whether the driver moves the rows of both in one transaction, as long as neither is firm."""
        same = (self.kind, self.url, self.schema) == (other.kind, other.url, other.schema)
        return same and not self.is_native and not other.is_native

    def _refuse_to_mix(self, other: SqlSink, ours: bool, theirs: bool) -> None:
        """A firm sink ends the transaction in which the others hold their rows."""
        if ours != theirs:
            firm, loose = (self, other) if ours else (other, self)
            raise ConfigError(
                f"{firm.describe()} is firm, and {loose.describe()} in the same database is not.",
                remedy="Give firm=False to all sinks of that database, or to none.",
            )

    def default_name(self) -> str:
        return f"{self.kind}_{self.table}"

    def check_columns(self, schema: pa.Schema) -> None:
        """What can be said without asking the database."""
        missing = [k for k in (*self.key, *filter(None, [self.order_by])) if k not in schema.names]
        if missing:
            raise SchemaMismatch(f"{self.describe()}: the rows have no column {', '.join(missing)}.")
        ours = [name for name in schema.names if self._is_ours(name.lower())]
        if ours:
            raise SchemaMismatch(
                f"{self.describe()}: a column cannot be named {', '.join(ours)}: such names are semel's own.",
                remedy="Give it another name in select=[...].",
            )
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            raise SchemaMismatch(f"{self.describe()}: the rows have several columns {', '.join(twice)}.")

    def mismatches(self, schema: pa.Schema, columns: Sequence[Any]) -> list[str]:
        """What keeps rows of this schema out of a table of these columns. The number of a version is not theirs to
        bring."""
        if not schema.names:
            return ["the rows have no columns"]
        own = VERSION_COLUMN if self.mode == VERSIONS else ""
        known = {self.folded(column.name): column for column in columns if column.name != own}
        names = [self.folded(name) for name in schema.names]
        problems = [f"several columns {name}" for name in sorted({n for n in names if names.count(n) > 1})]
        pairs = list(zip(schema, names, strict=True))
        problems += [f"no column {one.name}" for one, name in pairs if name not in known]
        for one, column in [(one, known[name]) for one, name in pairs if name in known]:
            if column.generated:
                problems.append(f"column {one.name} is computed by the server")
            elif self.encoder(one.type, column) is None:
                problems.append(f"column {one.name} is {column.shown or column.type}, the rows have {one.type}")
        return problems + [
            f"column {column.name} is required and the rows do not have it"
            for name, column in known.items()
            if column.required and name not in names
        ]

    def folded(self, name: str) -> str:
        """What the database makes of a name before it compares it with another."""
        return name

    @abstractmethod
    def encoder(self, arrow: Any, column: Any) -> object | None:
        """How values of an Arrow type are written into a column; None where they do not fit."""

    def _is_ours(self, column: str) -> bool:
        """Whether a statement of ours may need this name itself. Versions may be copied as what they are: numbers."""
        return column.startswith(RESERVED) and (column != VERSION_COLUMN or self.mode == VERSIONS)

    def participant(self, context: Context) -> Participant:
        from semel.sinks.sql.participant import SqlParticipant

        return SqlParticipant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        from semel.sinks.sql.participant import SqlParticipant

        # As nobody's incarnation: the driver may end our sessions when it starts, and takes none of them for its own.
        participant = SqlParticipant(self, Context(pipeline, "", Incarnation(0)))
        try:
            return participant.evidence(batches)
        finally:
            participant.close()

    @property
    @abstractmethod
    def place(self) -> Place: ...

    @property
    def target(self) -> str:
        return self.place.named(self.table)

    @property
    def view(self) -> str:
        """The view of mode "versions" that shows the newest of each key."""
        return f"{self.table}_latest"

    @property
    def unique(self) -> tuple[str, ...]:
        """The columns that tell rows of the table apart, where there are keys."""
        return (*self.key, *([VERSION_COLUMN] if self.mode == VERSIONS else []))

    @property
    def seen_table(self) -> str:
        """Where mode "dedup" remembers ids. With another key they are other ids."""
        return f"semel_seen_{self._suffix_of_ids}"

    @property
    def due_table(self) -> str:
        """Where it is written down when they may be forgotten."""
        return f"semel_due_{self._suffix_of_ids}"

    @property
    def _suffix_of_ids(self) -> str:
        return hashlib.sha256("\0".join([self.table, *self.key]).encode()).hexdigest()[:16]

    @property
    def names(self) -> dict[str, str]:
        """What stands in statements for names and lists of names, quoted."""
        place = self.place
        return {
            "target": self.target,
            "key": place.listed(self.key),
            "unique": place.listed(self.unique),
            "version": place.quoted(VERSION_COLUMN),
            "versions": place.named(VERSIONS_TABLE),
            "seen": place.named(self.seen_table),
            "due": place.named(self.due_table),
        }

    @property
    def own_definitions(self) -> list[str]:
        """What a table needs beside the columns of the rows, when it is created."""
        version = [f"{self.place.quoted(VERSION_COLUMN)} bigint NOT NULL"] if self.mode == VERSIONS else []
        return [*version, f"PRIMARY KEY ({self.names['unique']})"] if self.mode in (UPSERT, VERSIONS) else []

    @abstractmethod
    def translated(
        self, what: str, *, refused: type[SemelError] = SinkUnavailable, lasting: type[SemelError] | None = None
    ) -> AbstractContextManager[None]:
        """Turn the client's errors into ours: SinkUnavailable where it was the connection, else `refused`.

        `lasting` is for what no second try can mend: a right that is missing, a table that is gone, a row in the way.
        """

    def in_time(self) -> AbstractContextManager[None]:
        """For questions about the database, which are quick: of a server that is frozen nobody waits for the answer."""
        return within(max(ASK_S_MIN, self.timeout_s))

    @abstractmethod
    def store(self, context: Context) -> Store:
        """The database, shared by the sinks of one run."""

    @abstractmethod
    def mover(self, run: Session) -> Mover:
        """What moves the rows of one batch into the target, as the mode says."""

    def room(self, piece: int) -> int:
        """How many rows go into a piece of this number."""
        return self.piece_rows if piece else min(self.piece_rows, FIRST_PIECE_ROWS)

    def cut(self, batch: pa.RecordBatch, pieces: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """The rows of a batch, by their keys if they have any, cut where a piece is full.

        `pieces` are the rows of those that a task has begun.
        """
        batch = in_order_of(self.key, batch) if self.key else batch
        if self.is_native:
            yield batch
            return
        number, filled, at = max(0, len(pieces) - 1), pieces[-1] if pieces else 0, 0
        while at < batch.num_rows:
            if filled >= self.room(number):
                number, filled = number + 1, 0
            part = batch.slice(at, self.room(number) - filled)
            yield part
            at, filled = at + part.num_rows, filled + part.num_rows

    def refuse_nulls_in_the_key(self, batch: pa.RecordBatch, branch: Branch) -> None:
        """A null is equal to nothing: such rows could be neither replaced nor found again."""
        without = [name for name in self.key if batch.column(name).null_count]
        if without:
            raise BatchFailed(
                f"{self.describe()}: rows of task {branch.task} have null in column {', '.join(without)}, "
                "which is part of the key.",
                remedy="Give every row a key, or leave such rows out with where='... IS NOT NULL'.",
            )
