"""Rows into the source of a pipeline: Kafka topics (kafka_feeder), or a folder of files (file_feeder).

A feeder appends, and knows where it has put every row. Both need a source that holds nothing else: then the place of a
row is counted and not asked for, and whatever comes out of the pipeline was put in here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from semel.errors import ConfigError
from semel.sources.plan import PlannedSource
from semel.verify.workload import Workload

#: Formats of files that can be fed, and how such files are called.
FORMATS = {"json": "json", "csv": "csv", "text": "txt", "parquet": "parquet"}
KINDS = f"Kafka topics (subscribe or assign) and local folders of {', '.join(FORMATS)} files"


class KafkaPlace(NamedTuple):
    topic: str
    partition: int
    offset: int


class FilePlace(NamedTuple):
    """`path` is absolute, as the option of the source names the folder: links in it are not followed."""

    path: str


#: Where a row was put.
RowPlace = KafkaPlace | FilePlace


def open_feeder(sources: Sequence[PlannedSource], workload: Workload, rows_per_batch: int) -> Feeder:
    """The feeder of the one source that can be fed. Raises ConfigError when there is none, or more than one."""
    able = [source for source in sources if source.is_kafka or _format(source)]
    if not able:
        found = ", ".join(source.format for source in sources) or "it has none"
        raise ConfigError(
            f"No source of this pipeline can be fed: {found}.",
            remedy=f"What can be: {KINDS}. Or try the sinks alone, with a pipeline that comes with semel: --sinks.",
        )
    if len(able) > 1:
        raise ConfigError(
            f"This pipeline has {len(able)} sources that could be fed, and only one can be as yet.",
            remedy="Verify a pipeline with one of them.",
        )
    (source,) = able
    if source.is_kafka:
        from semel.verify.kafka_feeder import KafkaFeeder

        return KafkaFeeder(source.options, workload)
    from semel.verify.file_feeder import FileFeeder

    return FileFeeder(_format(source), source.options, workload, rows_per_batch)


def _format(source: PlannedSource) -> str:
    """The format of a file source; empty for any other. Spark may name the class instead."""
    name = source.format.rpartition(".")[2].lower().removesuffix("fileformat")
    return name if name in FORMATS else ""


class Feeder(ABC):
    """Row n is in the source at `places[n]`. `keeps_order` says that the source keeps rows of one key in order."""

    keeps_order = False

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.places: list[RowPlace] = []
        self._numbers: dict[str, int] = {}

    @property
    def fed(self) -> int:
        """How many rows are in the source."""
        return len(self.places)

    def number_of(self, identity: str) -> int | None:
        """The row of this identity. It is known before the row can be seen."""
        return self._numbers.get(identity)

    def feed(self, count: int) -> None:
        """Append the next rows. They are durable when this returns. With no rows, it makes the source exist."""
        coming = range(self.fed, self.fed + count)
        self._tell_apart(coming, self._numbers)
        self._put(coming)

    def check_rows(self, count: int) -> None:
        """Raise ConfigError if the first rows cannot be made or told apart. Feeds none of them."""
        self._tell_apart(range(count), {})
        for n in range(count):
            self.workload.encode(n)

    def _tell_apart(self, coming: range, numbers: dict[str, int]) -> None:
        for n in coming:
            identity = self.workload.identity_of(n)
            before = numbers.setdefault(identity, n)
            if before != n:
                raise ConfigError(
                    f"Rows {before} and {n} of the workload have the same {self.workload.identity}: {identity!r}.",
                    data_now=f"{self.fed} rows were fed",
                    remedy="Make it differ from row to row, of n alone.",
                )

    @abstractmethod
    def check_empty(self) -> None:
        """Raise ConfigError if the source holds rows of somebody else. Changes nothing."""

    @abstractmethod
    def _put(self, coming: range) -> None:
        """Append these rows, and note their places once they are durable."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""
