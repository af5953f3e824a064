"""Harnesses of the sinks that come with semel; those of the databases are in modules of their own."""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from semel.ids import Attempt
from semel.sinks.base import Sink
from semel.sinks.files import Files, committed_files
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.pool import release_all, settle_all
from semel.sinks.memory import Memory, memory_table
from semel.sinks.sqlite import Sqlite
from semel.testing.harness import Harness, Rows, context, open_descriptors, stage
from tests.kafka_world import KafkaWorld


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

    def put_foreign_things(self) -> None:
        self.spool.mkdir(exist_ok=True)
        (self.spool / "notes.txt").write_text("not ours")
        (self.spool / "semel-nonsense.arrow").write_text("not ours either")


class FilesHarness(Harness):
    kind = "files"
    neighbour_is_the_same = True
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

    def put_foreign_things(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        (self.staging / "notes.txt").write_text("not ours")
        (self.staging / "semel-nonsense.parquet").write_text("not ours either")


def _pairs(table: pa.Table) -> Rows:
    return list(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


class KafkaHarness(Harness):
    kind = "kafka"
    committed_failpoint = "kafka.committed"
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
