"""One record for each kind of sink: what others have to know of it beside the sink itself.

`semel verify`, the contract suite, the failpoints and the tests of extras and docs ask here, so a new sink is one
package, one record in this file, one harness in tests/contract and one page in docs/sinks.

A sink of somebody else's needs no change here. Its package names a record as an entry point, under the sink's kind:

    [project.entry-points."semel.sinks"]
    jsonl = "semel_jsonl:KIND"
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from semel.errors import ConfigError
from semel.failpoints import Failpoint
from semel.sinks.base import Sink
from semel.sinks.files import Files
from semel.sinks.kafka import Kafka
from semel.sinks.memory import Memory
from semel.sinks.mysql import MySql
from semel.sinks.postgres import Postgres
from semel.sinks.sql.sink import KEYED, LEDGER
from semel.sinks.sqlite import Sqlite

_LOG = logging.getLogger("semel")

GROUP = "semel.sinks"
#: So few that batches of `semel verify` have several.
PIECE_ROWS = 100


@dataclass(frozen=True)
class Venue:
    """Where an example of a sink writes to: a folder, the address of the server that it needs, a name of its own."""

    folder: str
    address: str = ""
    target: str = "verify_out"
    mode: str = ""

    @property
    def table(self) -> dict[str, Any]:
        """The settings of a table of a database server."""
        key = ["id"] if self.mode in KEYED else []
        return {"mode": self.mode or "auto", "key": key, "create": True, "piece_rows": PIECE_ROWS}


@dataclass(frozen=True)
class SinkKind:
    """What is looked up by kind. Its name is the `kind` of the class.

    Nothing of `semel verify` is imported with a record: `reader` is spelled "module:name" and imported when it is used.
    """

    sink: type[Sink]
    #: The page about it: a path in this repository, or an address.
    page: str = ""
    #: The extra of semel that brings its client; empty where there is nothing to bring.
    extra: str = ""
    #: Its own steps at which a test can kill, in the order of a batch. Their names begin with its kind.
    failpoints: tuple[Failpoint, ...] = ()
    #: It takes a record's columns, `key` and `value`, and not any columns: those of a row are in the value, as JSON.
    takes_records: bool = False
    #: What `semel verify` watches it with, a subclass of verify.readers.Reader; empty where no other process can look.
    reader: str = ""
    #: Makes one, for the pipeline that comes with `semel verify`. The DataFrame has id, key, amount and at.
    example: Callable[[Venue], Sink] | None = None
    #: What `semel verify --sinks` calls it, where that is not its kind.
    called: str = ""
    #: The server of `semel dev` that the example needs.
    server: str = ""
    #: The modes that the example can have.
    modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        strange = [point.name for point in self.failpoints if not point.name.startswith(f"{self.name}.")]
        if strange:
            raise ConfigError(
                f"The failpoint {strange[0]} is not one of the sink {self.name}.", remedy=f"Call it {self.name}.<step>."
            )

    @property
    def name(self) -> str:
        return self.sink.kind

    @property
    def names(self) -> set[str]:
        """All that it is called, anywhere."""
        return {self.name, self.called} - {""}

    def open_reader(self, *arguments: Any, **settings: Any) -> Any:
        module, _, name = self.reader.partition(":")
        return getattr(importlib.import_module(module), name)(*arguments, **settings)


# Those that come with semel -----------------------------------------------------------------------------------------


def _moves(kind: str, store: str) -> tuple[Failpoint, ...]:
    """The failpoints of a database whose driver moves rows in a transaction of its own."""
    return (
        Failpoint(f"{kind}.ahead", "some rows are in the driver's open transaction, tasks stage others", seldom=True),
        Failpoint(f"{kind}.moved", "rows and ledger row are in the driver's open transaction", moves=True),
        Failpoint(f"{kind}.committed", f"{store} has committed, the coordinator does not know yet"),
    )


SHIPPED: tuple[SinkKind, ...] = (
    SinkKind(Memory, "docs/sinks/memory.md", example=lambda at: Memory(at.target)),
    SinkKind(
        Sqlite,
        "docs/sinks/sqlite.md",
        extra="sqlite",
        failpoints=(
            Failpoint("sqlite.moved", "rows and ledger row are in the open transaction", moves=True, locks=True),
            Failpoint("sqlite.committed", "the rows are visible, the coordinator does not know yet"),
        ),
        reader="semel.verify.readers.sqlite:SqliteReader",
        example=lambda at: Sqlite(f"{at.folder}/out.db", at.target),
    ),
    SinkKind(
        Files,
        "docs/sinks/files.md",
        extra="files",
        failpoints=(
            Failpoint("files.half_renamed", "some files of the batch carry their final names"),
            Failpoint("files.renamed", "every file has its final name, the manifest is missing"),
            Failpoint("files.committed", "the manifest is written, the coordinator does not know yet"),
        ),
        reader="semel.verify.readers.files:FilesReader",
        example=lambda at: Files(f"{at.folder}/out"),
    ),
    SinkKind(
        Kafka,
        "docs/sinks/kafka.md",
        extra="kafka",
        # Below exactly-once records are sent without a transaction.
        failpoints=(
            Failpoint(
                "kafka.marked",
                "a task queued its marker behind its rows, nothing is flushed yet",
                in_a_task=True,
                exactly_once=True,
            ),
            Failpoint(
                "kafka.committed",
                "the broker ended a transaction, the coordinator does not know yet",
                exactly_once=True,
            ),
        ),
        takes_records=True,
        reader="semel.verify.readers.kafka:KafkaReader",
        example=lambda at: Kafka(
            at.address, at.target, name="kafka", select=("key", "to_json(struct(id, key, amount)) AS value")
        ),
        server="kafka",
    ),
    SinkKind(
        Postgres,
        "docs/sinks/postgres.md",
        extra="postgres",
        failpoints=_moves("postgres", "PostgreSQL"),
        reader="semel.verify.readers.postgres:PostgresReader",
        example=lambda at: Postgres(at.address, at.target, **at.table),
        server="postgres",
        modes=(LEDGER, "prepared", *KEYED),
    ),
    SinkKind(
        MySql,
        "docs/sinks/mysql.md",
        extra="mysql",
        failpoints=_moves("mysql", "MySQL"),
        reader="semel.verify.readers.mysql:MySqlReader",
        example=lambda at: MySql(at.address, at.target, **at.table),
        called="mariadb",
        server="mariadb",
        modes=(LEDGER, "xa", *KEYED),
    ),
)


# All that are installed ---------------------------------------------------------------------------------------------


def kinds() -> Mapping[str, SinkKind]:
    """Every kind of sink by its name: those that come with semel first."""
    return _found()[0]


def refused() -> Mapping[str, str]:
    """The entry points that give no kind, each with the reason."""
    return _found()[1]


def kind_of(sink: Sink) -> SinkKind:
    """The record of a sink; a ConfigError tells why there is none."""
    found, without = _found()
    if sink.kind in found:
        return found[sink.kind]
    why = without.get(sink.kind, f"no package has an entry point of this name in the group {GROUP}")
    raise ConfigError(
        f"The kind {sink.kind!r} of sink {sink.name} is not known: {why}.",
        remedy="Mend the package that brings the sink, or install it: docs/how-to/a-sink-of-your-own.md.",
    )


@functools.cache
def _found() -> tuple[dict[str, SinkKind], dict[str, str]]:
    found, without = collected(SHIPPED, entry_points(group=GROUP))
    for name, why in without.items():
        _LOG.warning("The kind of sink %s is not known to semel: %s.", name, why)
    return found, without


def collected(shipped: Sequence[SinkKind], points: Sequence[EntryPoint]) -> tuple[dict[str, SinkKind], dict[str, str]]:
    """The kinds by name, and the entry points that give none. One that is broken does not spoil the others."""
    found, without = {kind.name: kind for kind in shipped}, dict[str, str]()
    taken = {name for kind in shipped for name in kind.names}
    often = Counter(point.name for point in points)
    for point in points:
        if often[point.name] > 1:
            others = ", ".join(sorted(_whose(other) for other in points if other.name == point.name))
            without[point.name] = f"several packages bring it ({others}), and which of them is meant cannot be told"
            continue
        try:
            kind = _loaded(point)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's module raises
            without[point.name] = f"{_whose(point)} fails with {type(error).__name__}: {error}"
            continue
        if kind.names & taken:
            without[point.name] = f"{_whose(point)} brings it, and there is one of this name already"
            continue
        taken |= kind.names
        found[kind.name] = kind
    return found, without


def _loaded(point: EntryPoint) -> SinkKind:
    kind = point.load()
    if not isinstance(kind, SinkKind):
        raise TypeError(f"{point.value} is no SinkKind but {kind!r}")
    if kind.name != point.name:
        raise ValueError(f"the entry point is called {point.name} and the kind {kind.name}: give both one name")
    return kind


def _whose(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
