"""What the sinks for SQL databases have in common: modes, checks, and the two ways to promise a batch.

ledger, upsert,     tasks load staging tables; the driver moves the rows and writes the ledger row in one
dedup, versions     transaction, which it opens at prepare and ends at commit
prepared, xa        each task loads the target in a transaction that it leaves prepared; the driver commits it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from semel.errors import ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.sinks.base import Capabilities, Context, Participant, Sink
from semel.sinks.sql_store import Place, Store, stage_table

if TYPE_CHECKING:
    import pyarrow as pa

AUTO, LEDGER, UPSERT, DEDUP, VERSIONS = "auto", "ledger", "upsert", "dedup", "versions"
KEYED = (UPSERT, DEDUP, VERSIONS)
#: The column that numbers the versions of a key.
VERSION_COLUMN = "semel_version"
RETENTION_S = 7 * 24 * 3600.0

#: Runs a statement in a transaction of the driver: text, values, quoted names -> rows.
Run = Callable[..., "list[tuple[Any, ...]]"]


def move_all(
    mode: str, stages: Iterable[str], move_new: Callable[[str], int | None], move_one: Callable[[str], int]
) -> int:
    """Move the rows of every staging table. Returns how many were staged.

    Until a key is there already, we take it that all are new: to insert without asking takes half the time. `move_new`
    does so, and returns None when it had to undo it.
    """
    staged, all_new = 0, mode in KEYED
    for stage in stages:
        found = move_new(stage) if all_new else None
        all_new = found is not None
        staged += move_one(stage) if found is None else found
    return staged


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
        return replace(self, mode=mode, firm=len(sinks) > 1 if self.firm is None else self.firm)

    def default_name(self) -> str:
        return f"{self.kind}_{self.table}"

    def check_columns(self, schema: pa.Schema) -> None:
        """What can be said without asking the database."""
        missing = [k for k in (*self.key, *filter(None, [self.order_by])) if k not in schema.names]
        if missing:
            raise SchemaMismatch(f"{self.describe()}: the rows have no column {', '.join(missing)}.")
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            raise SchemaMismatch(f"{self.describe()}: the rows have several columns {', '.join(twice)}.")

    def participant(self, context: Context) -> Participant:
        from semel.sinks.sql_participant import SqlParticipant

        return SqlParticipant(self, context)

    @property
    @abstractmethod
    def place(self) -> Place: ...

    @property
    def target(self) -> str:
        return self.place.named(self.table)

    def stage_name(self, branch: str) -> str:
        """The staging table of a branch."""
        return stage_table(branch)

    @abstractmethod
    def translated(self, what: str, *, refused: type[SemelError] = SinkUnavailable) -> AbstractContextManager[None]:
        """Turn the client's errors into ours: SinkUnavailable where it was the connection, else `refused`."""

    @abstractmethod
    def store(self, context: Context) -> Store:
        """The database, shared by the sinks of one run."""

    @abstractmethod
    def move(self, run: Run, stages: Sequence[str]) -> int:
        """Move the rows of these staging tables into the target, as the mode says. Returns how many were staged.

        Raises StagedGone when a table is not there.
        """
