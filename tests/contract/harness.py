"""One harness per sink: how to make a target, and how to look at it the way a user would.

The suite in `test_sink_contract.py` says what a sink must do; nothing in here does.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from semel.decisions.records import committable_from_json, committable_to_json
from semel.failpoints import VARIABLE
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Sink, StagedPart
from semel.sinks.files import Files, committed_files
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.pool import release_all, settle_all
from semel.sinks.memory import Memory, memory_table
from semel.sinks.sqlite import Sqlite
from tests.kafka_world import KafkaWorld

OURS = PipelineId("00000000-0000-4000-8000-000000000001")
OTHERS = PipelineId("00000000-0000-4000-8000-000000000002")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
FRESH_PROCESS = Path(__file__).with_name("fresh_process.py")
PROCESS_TIMEOUT_S = 30

Row = tuple[int, str]
Rows = list[Row]


def rows_of(*ids: int) -> Rows:
    return [(i, f"row {i}") for i in ids]


def context(incarnation: int = 1, *, pipeline: PipelineId = OURS, name: str = "shop", marked: bool = True) -> Context:
    return Context(pipeline, name, Incarnation(incarnation), marked)


def attempt(batch: int = 0, number: int = 0, incarnation: int = 1, pipeline: PipelineId = OURS) -> Attempt:
    return Attempt(pipeline, batch, number, Incarnation(incarnation))


def stage(sink: Sink, which: Attempt, tasks: Sequence[Rows], *, durable: bool = True) -> list[StagedPart]:
    """Write rows through the sink's own writer, one writer per task, as executors do."""
    parts = []
    for task, rows in enumerate(tasks):
        writer = sink.writer(Branch(which, sink.name, task, 0), durable=durable)
        for start in range(0, len(rows), 2):
            writer.write(arrow_for(sink, rows[start : start + 2]))
        parts.append(writer.prepare())
    return parts


def schema_of(sink: Sink) -> pa.Schema:
    """Most sinks take any columns; Kafka takes those of a record."""
    return pa.schema([("key", pa.string()), ("value", pa.string())]) if sink.kind == "kafka" else SCHEMA


def records(sink: Sink, rows: Rows) -> list[dict[str, Any]]:
    if sink.kind == "kafka":
        return [{"key": str(i), "value": text} for i, text in rows]
    return [{"id": i, "text": text} for i, text in rows]


def arrow(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": i, "text": text} for i, text in rows], schema=SCHEMA)


def arrow_for(sink: Sink, rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(records(sink, rows), schema=schema_of(sink))


@dataclass(frozen=True)
class Promise:
    """What a participant prepared for one batch: one committable for all tasks, or one for each."""

    committables: tuple[Committable, ...]

    @property
    def rows(self) -> int:
        return sum(c.rows for c in self.committables)

    @property
    def keys(self) -> list[str]:
        return sorted(c.key for c in self.committables)

    @property
    def branches(self) -> list[str]:
        return sorted(branch for c in self.committables for branch in c.branches)


def prepare(participant: Participant, sink: Sink, which: Attempt, *tasks: Rows) -> Promise:
    return Promise(participant.prepare(which, stage(sink, which, tasks)))


def prepare_one(participant: Participant, sink: Sink, which: Attempt, *tasks: Rows) -> Committable:
    """The same for a sink that gives one committable per batch."""
    (committable,) = prepare(participant, sink, which, *tasks).committables
    return committable


def commit(participant: Participant, promise: Promise) -> Outcome:
    return together([participant.commit(c) for c in promise.committables])


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Of several answers the one that matters most for the batch as a whole."""
    order = (Outcome.IN_DOUBT, Outcome.RETRY, Outcome.GONE, Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)
    return next(outcome for outcome in order if outcome in outcomes)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Other processes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """The process was killed before it could answer."""


def commit_in_fresh_process(sink: Sink, who: Context, promise: Promise, *, failpoint: str = "") -> Outcome | Killed:
    """Commit in a process that has never seen the batch and gets nothing but the committables, as JSON bytes."""
    order = _order(sink, who) | {"committables": [committable_to_json(c) for c in promise.committables]}
    done = subprocess.run(
        [sys.executable, FRESH_PROCESS, "commit"],
        input=json.dumps(order).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, VARIABLE: failpoint},
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return Killed()
    if done.returncode:
        raise RuntimeError(f"the committing process failed with {done.returncode}")
    return together([Outcome[name] for name in json.loads(done.stdout)])


def prepare_in_a_process_that_is_killed(sink: Sink, who: Context, which: Attempt, *tasks: Rows) -> Promise:
    """Stage and prepare in another process, which is killed with SIGKILL while it holds what it prepared."""
    rows = [records(sink, task) for task in tasks]
    order = _order(sink, who) | {"batch": which.batch, "attempt": which.attempt, "tasks": rows}
    with subprocess.Popen(
        [sys.executable, FRESH_PROCESS, "prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process has no pipes")
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            process.kill()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the preparing process ended by itself with {process.returncode}")
    return Promise(tuple(committable_from_json(c) for c in json.loads(answer)))


def _order(sink: Sink, who: Context) -> dict[str, Any]:
    settings = {field.name: getattr(sink, field.name) for field in fields(sink)}
    return {
        "kind": sink.kind,
        "settings": settings,
        "context": [who.pipeline, who.name, who.incarnation, who.marked],
    }


# Harnesses --------------------------------------------------------------------------------------------------------


class Harness(ABC):
    """A fresh target of one sink."""

    kind: ClassVar[str]
    #: A process that has never seen the batch can commit it. Off only for a store that lives inside one process.
    survives_the_process: ClassVar[bool] = True
    #: The failpoint that the sink passes once its store has committed, before it answers.
    committed_failpoint: ClassVar[str] = ""
    #: The fixture that gives the address of the server.
    server: ClassVar[str] = ""
    address_of_server: ClassVar[str] = "bootstrap"
    #: How many batches the search for leaks takes, and by how many descriptors connections come and go meanwhile: ours,
    #: and those that other tests left to this process. What leaks leaks with every batch, or with each of ten starts.
    leak_batches: ClassVar[int] = 200
    descriptor_jitter: ClassVar[int] = 8

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.address = address

    def settled_descriptors(self) -> int:
        """How many descriptors are open while nothing is under way."""
        return open_descriptors()

    def let_go(self) -> None:  # noqa: B027 - most sinks keep nothing
        """Drop what this process keeps between batches."""

    def end(self) -> None:  # noqa: B027
        """The test is over."""

    @abstractmethod
    def sink(self, name: str = "") -> Sink:
        """The sink on its target; with another name on the same target."""

    @abstractmethod
    def neighbour(self) -> Sink:
        """Another sink in the same store: another table of the database, another name in the folder."""

    @abstractmethod
    def visible(self, sink: Sink) -> Rows:
        """What a reader sees, sorted."""

    def visible_without_marks(self, sink: Sink) -> Rows:
        """The same below exactly-once, where no marker can be asked."""
        return self.visible(sink)

    @abstractmethod
    def staged(self) -> list[str]:
        """The names of whatever is staged in the store, of anybody."""

    @abstractmethod
    def lose(self, branch: str) -> None:
        """Make what is staged under this name vanish."""

    @abstractmethod
    def markers(self) -> int:
        """How many markers and fences the store holds."""

    @abstractmethod
    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        """Leave rows staged in the store, as a task does whose driver died."""

    @abstractmethod
    def put_foreign_things(self) -> None:
        """Leave things among the staged ones that are not ours."""


class MemoryHarness(Harness):
    kind = "memory"
    survives_the_process = False

    def __init__(self, folder: Path, address: str = "") -> None:
        super().__init__(folder, address)
        self.table = uuid.uuid4().hex

    def sink(self, name: str = "") -> Sink:
        return Memory(self.table, name=name or "orders")

    def neighbour(self) -> Sink:
        return Memory(f"{self.table}_returns", name="returns")

    def visible(self, sink: Sink) -> Rows:
        if not isinstance(sink, Memory):
            raise TypeError(sink)
        return sorted((row["id"], row["text"]) for row in sink.rows())

    def staged(self) -> list[str]:
        tables = (memory_table(self.table), memory_table(f"{self.table}_returns"))
        return sorted(str(branch) for table in tables for branch in table.staged)

    def lose(self, branch: str) -> None:
        staged = memory_table(self.table).staged
        for found in [b for b in staged if str(b) == branch]:
            del staged[found]

    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        """Rows reach this store with the driver's prepare, not before."""
        sink.participant(context(pipeline=which.pipeline)).prepare(which, stage(sink, which, [rows]))

    def put_foreign_things(self) -> None:
        """Nothing but rows can get into this store."""

    def markers(self) -> int:
        table = memory_table(self.table)
        return len(table.markers) + len(table.fences)


class SqliteHarness(Harness):
    kind = "sqlite"
    committed_failpoint = "sqlite.committed"

    @property
    def path(self) -> Path:
        return self.folder / "shop.db"

    @property
    def spool(self) -> Path:
        return self.folder / "shop.db-semel"

    def sink(self, name: str = "") -> Sink:
        return Sqlite(str(self.path), "orders", name=name or "orders", timeout_s=2.0)

    def neighbour(self) -> Sink:
        return Sqlite(str(self.path), "returns", name="returns", timeout_s=2.0)

    def visible(self, sink: Sink) -> Rows:
        if not isinstance(sink, Sqlite):
            raise TypeError(sink)
        # A timeout of zero: a reader that had to wait for a writer would fail here.
        with closing(sqlite3.connect(self.path, timeout=0)) as reader:
            if not reader.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (sink.table,)).fetchone():
                return []
            return reader.execute(f'SELECT id, text FROM "{sink.table}" ORDER BY 1, 2').fetchall()  # noqa: S608 - ours

    def staged(self) -> list[str]:
        return sorted(path.stem for path in self.spool.glob("semel-*"))

    def lose(self, branch: str) -> None:
        (self.spool / f"{branch}.arrow").unlink()

    def markers(self) -> int:
        with closing(sqlite3.connect(self.path, timeout=0)) as reader:
            tables = reader.execute("SELECT name FROM sqlite_master WHERE name LIKE 'semel_%'").fetchall()
            counts = (reader.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for (name,) in tables)  # noqa: S608 - ours
            return sum(counts)

    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        stage(sink, which, [rows])

    def put_foreign_things(self) -> None:
        self.spool.mkdir(exist_ok=True)
        (self.spool / "notes.txt").write_text("not ours")
        (self.spool / "semel-nonsense.arrow").write_text("not ours either")


class FilesHarness(Harness):
    kind = "files"
    committed_failpoint = "files.committed"

    @property
    def path(self) -> Path:
        return self.folder / "lake"

    @property
    def staging(self) -> Path:
        return self.path / "_semel" / "staging"

    def sink(self, name: str = "") -> Sink:
        return Files(str(self.path), name=name or "orders")

    def neighbour(self) -> Sink:
        return Files(str(self.path), name="returns")

    def visible(self, sink: Sink) -> Rows:
        """Both kinds of readers must agree: the one that follows the manifests and the one that reads the folder."""
        plain = self.visible_without_marks(sink)
        of_sink = [file for file in committed_files(self.path) if f"-{sink.name}-" in file.name]
        helped = sorted(_pairs(pa.concat_tables([pq.read_table(file) for file in of_sink]))) if of_sink else []
        if helped != plain:
            raise AssertionError(f"the manifests say {helped}, the folder {plain}")
        return plain

    def visible_without_marks(self, sink: Sink) -> Rows:
        if not self.path.is_dir():
            return []
        found = ds.dataset(self.path, format="parquet")
        ours = [file for file in found.files if f"-{sink.name}-" in file]
        return sorted(_pairs(ds.dataset(ours, format="parquet").to_table())) if ours else []

    def staged(self) -> list[str]:
        return sorted(path.stem for path in self.staging.glob("semel-*"))

    def lose(self, branch: str) -> None:
        (self.staging / f"{branch}.parquet").unlink()

    def markers(self) -> int:
        own = self.path / "_semel"
        return sum(path.is_file() for top in ("manifests", "fences") for path in (own / top).rglob("*"))

    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        stage(sink, which, [rows])

    def put_foreign_things(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        (self.staging / "notes.txt").write_text("not ours")
        (self.staging / "semel-nonsense.parquet").write_text("not ours either")


def _pairs(table: pa.Table) -> Rows:
    return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


class KafkaHarness(Harness):
    kind = "kafka"
    committed_failpoint = "kafka.committed"
    server = "kafka_cluster"
    leak_batches = 60
    producer = "auto"

    def __init__(self, folder: Path, address: str = "") -> None:
        super().__init__(folder, address)
        # Tests share a broker, so each has topics and sink names of its own.
        self.suffix = uuid.uuid4().hex[:8]
        self.world = KafkaWorld(address)
        self.world.create_topics(f"orders_{self.suffix}", f"returns_{self.suffix}")
        self.foreign: list[Any] = []

    def sink(self, name: str = "") -> Sink:
        return self._kafka("orders", name or "orders")

    def neighbour(self) -> Sink:
        return self._kafka("returns", "returns")

    def _kafka(self, topic: str, name: str) -> Sink:
        full = f"{topic}_{self.suffix}"
        return Kafka(self.address, full, name=f"{name}_{self.suffix}", producer=self.producer)

    def visible(self, sink: Sink) -> Rows:
        if not isinstance(sink, Kafka):
            raise TypeError(sink)
        return sorted((int(r.key), r.value.decode()) for r in self.world.committed(sink.topic))

    def staged(self) -> list[str]:
        return [name for name in self.world.open_transactions() if self.suffix in name]

    def lose(self, branch: str) -> None:
        self.world.end_by_branch(branch)

    def markers(self) -> int:
        return self.world.count_markers(self.suffix)

    def leave_staged(self, sink: Sink, which: Attempt, rows: Rows) -> None:
        stage(sink, which, [rows])

    def put_foreign_things(self) -> None:
        self.foreign.append(self.world.leave_open(f"semel-nonsense-{self.suffix}", f"orders_{self.suffix}"))

    def settled_descriptors(self) -> int:
        settle_all()
        return open_descriptors()

    def let_go(self) -> None:
        release_all()

    def end(self) -> None:
        self.foreign.clear()
        release_all()
        self.world.close()


class LibrdkafkaHarness(KafkaHarness):
    """Every row by librdkafka, in place of semel's own producer."""

    producer = "librdkafka"


OWN_HARNESSES: dict[str, type[Harness]] = {
    **{h.kind: h for h in (MemoryHarness, SqliteHarness, FilesHarness, KafkaHarness)},
    "librdkafka": LibrdkafkaHarness,
}
