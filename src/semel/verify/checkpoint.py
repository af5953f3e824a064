"""What Spark planned and what was decided, read from a local checkpoint folder while the pipeline runs.

    metadata       the id of the query
    offsets/N      a version, a line about Spark itself, then per source where batch N ends: for Kafka
                   {topic: {partition: offset}}, for files {"logOffset": k}, "-" while a source has nothing
    commits/N      batch N is checkpointed
    sources/I/0    of a Kafka source: where its first batch begins (a zero byte, a version, then the offsets)
    sources/I/K    of a file source: a version, then the files of log offset K, one per line; K.compact has all before
    semel/decisions/   the decision log

Others write here all the time, and are killed while they do. What is being written has a name that begins with a dot,
and what was written is never changed, so it is read once.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.errors import SemelError
from semel.ids import PipelineId, pipeline_id
from semel.protocol.events import Decided
from semel.verify.feeders import KafkaPlace, RowPlace
from semel.verify.history import NO_BATCH, BatchSeen

LOOK_EVERY_S = 0.2
STOP_S_MAX = 30.0
#: Files of a source are compacted while they are listed: so often the list is made again.
LIST_TRIES_MAX = 5

#: So many rows are looked up under one lock.
ROWS_AT_ONCE = 2_000

#: A partition of a topic in one source, or (source, "", 0) for the files of one.
Lane = tuple[int, str, int]


class CheckpointWatcher(threading.Thread):
    """Looks all the time, because the pipeline prunes the journals of old batches. Reading never stops it.

    `error` is what the last look could not make sense of, in words, or empty: then what this says may have holes.
    """

    def __init__(self, folder: Path, source_count: int) -> None:
        super().__init__(name="checkpoint-watcher", daemon=True)
        self.folder = folder
        self.source_count = source_count
        self.error = ""
        self._decided_s: dict[int, float] = {}
        self._ends: dict[int, list[Any]] = {}
        self._checkpointed: set[int] = set()
        #: For each source the files that it has taken up, and the entries of its log that were read for that.
        self._logged: list[dict[str, int]] = [{} for _ in range(source_count)]
        self._entries: list[set[str]] = [set() for _ in range(source_count)]
        self._rows_read = 0
        #: Whether a look was taken since rows were counted: it is asked for far more often.
        self._is_new = True
        self._looking = threading.Lock()
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            self.look()

    def stop(self) -> None:
        """End the thread, after one more look."""
        self._stopping.set()
        if self.is_alive():
            self.join(STOP_S_MAX)
        self.look()

    def look(self) -> None:
        """Read what is new. Whatever is wrong with the folder is kept in `error`, and looked at again the next time."""
        with self._looking:
            wrong: list[str] = []
            for read in (self._read_decisions, self._read_offsets, self._read_commits):
                try:
                    wrong += read()
                except OSError as error:
                    wrong.append(f"the checkpoint cannot be read: {error}")
            self.error = "; ".join(wrong)
            self._is_new = True

    def forget_what_is_not_decided(self) -> None:
        """The power of its disk was cut: what was planned and not decided may be planned otherwise now.

        Call it while no pipeline runs: before the power is cut, so that every decision is seen, and again afterwards.
        """
        self.look()
        with self._looking:
            last = max(self._decided_s, default=NO_BATCH)
            self._ends = {n: ends for n, ends in self._ends.items() if n <= last}
            self._checkpointed = {n for n in self._checkpointed if n <= last}
            self._logged = [{} for _ in range(self.source_count)]
            self._entries = [set() for _ in range(self.source_count)]

    @property
    def pipeline(self) -> PipelineId:
        """The id that Spark gave the query, which is in all of its names; empty before its first start."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return pipeline_id(json.loads((self.folder / "metadata").read_text())["id"])
        return PipelineId("")

    def batches(self) -> dict[int, BatchSeen]:
        """Every batch that was planned or decided, by number."""
        with self._looking:
            numbers = sorted({*self._ends, *self._decided_s, *self._checkpointed})
            return {n: BatchSeen(n, self._decided_s.get(n, 0.0), n in self._checkpointed) for n in numbers}

    def batch_of(self, places: Sequence[RowPlace]) -> list[int]:
        """The batch that reads each place; NO_BATCH where none does yet, where nobody can tell, or where two do."""
        with self._looking:
            lanes = _lanes(self._ends, [self._starts(i) for i in range(self.source_count)])
        files = _Files(lanes, [self._logged_files(i) for i in range(self.source_count)])
        topics = {lane[1:]: [lanes[other] for other in lanes if other[1:] == lane[1:]] for lane in lanes}
        return [
            _one_of({lane.batch_at(place.offset) for lane in topics.get((place.topic, place.partition), ())})
            if isinstance(place, KafkaPlace)
            else files.batch_of(place.path)
            for place in places
        ]

    def rows_read(self, places: Sequence[RowPlace]) -> int:
        """How many rows, from the first one on without a gap, checkpointed batches have read."""
        known = self._rows_read
        if not self._is_new:
            return known
        self._is_new = False
        while ahead := places[known : known + ROWS_AT_ONCE]:
            batches = self.batch_of(ahead)
            done = next((n for n, batch in enumerate(batches) if batch not in self._checkpointed), len(ahead))
            known += done
            if done < len(ahead):
                break
        self._rows_read = max(self._rows_read, known)
        return known

    # One kind of file each --------------------------------------------------------------------------------------------

    def _read_decisions(self) -> list[str]:
        """The time of a decision is that of the file, the first one in which the batch is decided."""
        wrong = []
        log = DecisionLog(FileStore(self.folder / "semel"))
        for batch in log.batches():
            if batch in self._decided_s:
                continue
            try:
                slots = [slot for slot, record in enumerate(log.journal(batch)) if isinstance(record, Decided)]
            except SemelError as error:
                wrong.append(error.what)
                continue
            # A journal that is pruned meanwhile has no time any more.
            with suppress(FileNotFoundError):
                for slot in slots[:1]:
                    path = self.folder / "semel" / "decisions" / f"{batch:010d}.{slot}.json"
                    self._decided_s[batch] = path.stat().st_mtime
        return wrong

    def _read_offsets(self) -> list[str]:
        wrong = []
        for number in _numbers(self.folder / "offsets"):
            if number in self._ends:
                continue
            with suppress(FileNotFoundError):
                content = (self.folder / "offsets" / str(number)).read_bytes()
                try:
                    text = content.decode()
                    ends = [None if line == "-" else json.loads(line) for line in text.splitlines()[2:]]
                except ValueError:
                    wrong.append(f"offsets/{number} of the checkpoint is damaged")
                    continue
                if len(ends) == self.source_count:
                    self._ends[number] = ends
                else:
                    wrong.append(f"offsets/{number} has {len(ends)} sources, and the pipeline {self.source_count}")
        return wrong

    def _read_commits(self) -> list[str]:
        self._checkpointed.update(_numbers(self.folder / "commits"))
        return []

    def _starts(self, source: int) -> Mapping[str, Any]:
        """Where the first batch of a Kafka source begins. Other sources have no such file, or other things in it."""
        with suppress(OSError, ValueError):
            content = (self.folder / "sources" / str(source) / "0").read_bytes()
            if content.startswith(b"\0"):
                return dict(json.loads(content.split(b"\n", 1)[1]))
        return {}

    def _logged_files(self, source: int) -> dict[str, int]:
        """The files that a file source has taken up, each with its log offset."""
        folder = self.folder / "sources" / str(source)
        for _ in range(LIST_TRIES_MAX):
            with suppress(OSError):
                for name in _names(folder):
                    self._read_entry(source, folder / name)
                break
        return self._logged[source]

    def _read_entry(self, source: int, path: Path) -> None:
        """One entry of the log of a file source, once. What cannot be made sense of is looked at again."""
        if path.name in self._entries[source]:
            return
        text = path.read_bytes()
        lines = [] if text.startswith(b"\0") else text.splitlines()[1:]
        with suppress(ValueError, KeyError, TypeError):
            found = [json.loads(line) for line in lines]
            self._logged[source].update({_local_path(entry["path"]): int(entry["batchId"]) for entry in found})
            self._entries[source].add(path.name)


# Places to batches ----------------------------------------------------------------------------------------------------


@dataclass
class _Lane:
    """One partition: where it begins, and where each batch that moved on ends."""

    begins: int
    ends: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def batch_at(self, position: int) -> int:
        place = bisect_right(self.ends, position)
        return self.batches[place] if self.begins <= position and place < len(self.ends) else NO_BATCH


def _lanes(ends: Mapping[int, Sequence[Any]], starts: Sequence[Mapping[str, Any]]) -> dict[Lane, _Lane]:
    """The lanes of all sources. What was read by a batch whose offsets are not known belongs to no batch."""
    lanes: dict[Lane, _Lane] = {}
    known_until = NO_BATCH
    for batch in sorted(ends):
        for source, position in enumerate(ends[batch]):
            for lane, end in _positions(source, position):
                if lane not in lanes:
                    _, topic, partition = lane
                    begins = int(starts[source].get(topic, {}).get(str(partition), 0))
                    lanes[lane] = _Lane(begins)
                at = lanes[lane]
                if end > (at.ends[-1] if at.ends else at.begins):
                    at.ends.append(end)
                    at.batches.append(batch if batch == known_until + 1 else NO_BATCH)
        known_until = batch
    return lanes


def _positions(source: int, position: Any) -> list[tuple[Lane, int]]:
    """Where one source stands after a batch. Nothing is known of sources that nobody feeds."""
    if not isinstance(position, dict):
        return []
    if "logOffset" in position:
        return [((source, "", 0), int(position["logOffset"]) + 1)]
    return [
        ((source, topic, int(partition)), int(end))
        for topic, partitions in position.items()
        if isinstance(partitions, dict)
        for partition, end in partitions.items()
    ]


@dataclass
class _Files:
    """Files of all sources, with their batches. A file may hold many rows, so each path is looked up once."""

    lanes: Mapping[Lane, _Lane]
    logged: Sequence[Mapping[str, int]]
    known: dict[str, int] = field(default_factory=dict)

    def batch_of(self, path: str) -> int:
        if path not in self.known:
            real = os.path.realpath(path)
            self.known[path] = _one_of(
                {
                    self.lanes[source, "", 0].batch_at(files[real])
                    for source, files in enumerate(self.logged)
                    if real in files and (source, "", 0) in self.lanes
                }
            )
        return self.known[path]


def _one_of(batches: set[int]) -> int:
    return batches.pop() if len(batches) == 1 else NO_BATCH


def _local_path(uri: str) -> str:
    return os.path.realpath(unquote(urlsplit(uri).path))


def _names(folder: Path) -> list[str]:
    """The files of a log: numbers, some of them compact. Empty when there is no such folder yet."""
    with suppress(FileNotFoundError):
        return [entry.name for entry in os.scandir(folder) if entry.name.split(".compact")[0].isdigit()]
    return []


def _numbers(folder: Path) -> list[int]:
    return sorted(int(name) for name in _names(folder) if name.isdigit())
