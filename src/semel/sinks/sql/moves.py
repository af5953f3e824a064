"""How staged rows get into the target, as far as that is the same in every database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from semel.sinks.sql.sink import DEDUP, KEYED, UPSERT, VERSIONS, Execute, SqlSink
from semel.sinks.sql.store import StagedGone

INSERT = "INSERT INTO {target} ({names}{column}) SELECT {names}{value} FROM {stage}{in_order}"
#: Versions of the keys that got a new one, numbered from the newest.
NUMBERED = (
    "(SELECT {key}, {version}, row_number() OVER (PARTITION BY {key} ORDER BY {version} DESC) AS semel_place "
    "FROM {target} WHERE ({key}) IN (SELECT {key} FROM {stage})) AS old"
)


class Mover(ABC):
    """Moves the staged rows of one batch into the target, table by table, in one transaction of the driver.

    Until a key is there already, we take it that all are new: to insert without asking takes half the time.
    """

    #: Deletes from {target} the versions of `NUMBERED` whose place is above a number. {same} says which row is which.
    delete_old: ClassVar[str]
    #: The order of staged rows, where they have to be asked for in it.
    as_staged: ClassVar[str] = ""

    def __init__(self, sink: SqlSink, run: Execute) -> None:
        self.sink = sink
        self.run = run
        #: The number of this batch, in mode versions.
        self.version = 0
        self._all_new = sink.mode in KEYED
        self._begun = False

    def move(self, table: str) -> int:
        """Move the rows of one staging table. Returns how many were staged; raises StagedGone when it is not there."""
        if not self._begun:
            self._begin()
        found = self.move_new(table) if self._all_new else None
        self._all_new = found is not None
        return self.move_one(table) if found is None else found

    def _begin(self) -> None:
        self._begun = True
        if self.sink.mode == VERSIONS:
            self.version = self.next_version()
        if self.sink.mode == DEDUP:
            self.forget_old_ids()

    @abstractmethod
    def move_new(self, table: str) -> int | None:
        """Move rows whose keys are all new and different; else move nothing and return None."""

    def move_one(self, table: str) -> int:
        """Move rows whatever their keys are."""
        return self.insert(table, self.columns(table))

    def finish(self) -> None:  # noqa: B027 - most databases say it at once
        """What the rows can do wrong only when they are all there, they must do now."""

    def columns(self, table: str) -> list[str]:
        """The columns of a staging table that are the rows'."""
        found = self.sink.place.columns(self.run, table)
        if not found:
            raise StagedGone(f"table {table}")
        return found

    def insert_new(self, table: str, columns: Sequence[str], *, is_sorted: bool = False) -> int | None:
        """In the order of the keys, so that neighbours in an index are written together: of rows, or of their ids."""
        named, remembers = self.named(table, columns), self.sink.mode == DEDUP
        by_key = "" if is_sorted else f" ORDER BY {named['key']}"

        def insert() -> int:
            if remembers:
                self.remember_new({**named, "in_order": by_key})
            return self.changed(INSERT, **{**named, "in_order": self.as_staged if remembers else by_key})

        staged = self.if_new(insert)
        if staged is not None:
            self._drop_old_versions(named)
        return staged

    def if_new(self, insert: Callable[[], int]) -> int | None:
        """What `insert` returns, or None, and nothing is done, where a key is there already."""
        self.run("SAVEPOINT semel_new")
        try:
            done = insert()
        except Exception as error:
            if not self.is_known_key(error):
                raise
            self.run("ROLLBACK TO SAVEPOINT semel_new")
            return None
        self.run("RELEASE SAVEPOINT semel_new")
        return done

    def insert(self, table: str, columns: Sequence[str]) -> int:
        """The rows of one table, as the mode says. Returns how many were staged."""
        named = self.named(table, columns)
        if self.sink.mode in (UPSERT, VERSIONS):
            self.upsert(named, columns)
            self._drop_old_versions(named)
        elif self.sink.mode == DEDUP:
            self.dedup(named, columns)
        else:
            return self.changed(INSERT, **named)
        return self.changed("SELECT count(*) FROM {stage}", **named)

    def named(self, table: str, columns: Sequence[str]) -> dict[str, str]:
        """What stands in statements for names and lists of names, quoted. `value` is that of the version."""
        place, names, versioned = self.sink.place, self.sink.names, self.sink.mode == VERSIONS
        return {
            **names,
            "stage": place.named(table),
            "names": place.listed(columns),
            "in_order": "",
            "column": f", {names['version']}" if versioned else "",
            "value": f", {self.version}" if versioned else "",
        }

    def changed(self, sql: str, **names: str) -> int:
        return int(self.run(sql, **names)[0][0])

    def _drop_old_versions(self, named: dict[str, str]) -> None:
        if self.sink.mode == VERSIONS and self.sink.versions_kept:
            same = self.sink.place.equal(self.sink.unique, "t", "old")
            self.run(self.delete_old, (self.sink.versions_kept,), **named, same=same)

    @abstractmethod
    def is_known_key(self, error: Exception) -> bool:
        """Whether the server refused a row because its key is there already."""

    @abstractmethod
    def next_version(self) -> int:
        """Versions grow in the order of commits: a batch that asks for the next one waits for the batch before."""

    @abstractmethod
    def upsert(self, named: dict[str, str], columns: Sequence[str]) -> None:
        """The newest row of a key wins: by `order_by`, else by their order in the task that brought them.

        A row that does not say when it was made is older than all that do.
        """

    @abstractmethod
    def dedup(self, named: dict[str, str], columns: Sequence[str]) -> None:
        """The first row of an id is written, and the id is remembered in the same transaction."""

    @abstractmethod
    def remember_new(self, named: dict[str, str]) -> None:
        """Remember the ids of a stage, which are all new and different."""

    @abstractmethod
    def forget_old_ids(self) -> None: ...
