"""The control topic: what it says, and how it is read.

Each task writes one *marker* into it, inside the very transaction that carries the task's rows. So the fate of the
marker is the fate of the rows, and whoever reads the topic raw, uncommitted records and ends of transactions included,
learns all that recovery must know:

    a marker, and no end after it            prepared: durable, invisible, still to be ended
    a marker, then the end "commit"          its rows are visible
    a marker, then the end "abort"           its rows are gone
    no marker                                never prepared; no decision can name it

The broker stamps each record with the producer id and the epoch that it accepted it from, which is what ending the
transaction takes. A *fence* tells which incarnation of a pipeline is the newest, and whose the transactional ids are.

The topic is compacted: the newest marker of each task and number of the attempt stays, and a fence per pipeline and
sink. A pipeline that is at batch N has committed everything before N, so older markers are not missed.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from semel.errors import SinkUnavailable
from semel.formats import CONTROL_TOPIC, is_newer, refuse_newer
from semel.ids import Branch, PipelineId, parse_branch
from semel.sinks.kafka.wire.requests import LogEnd, LogRecord, Slice, Transaction

#: How many partitions the control topic has. Writers and readers must agree, so it never changes.
PARTITIONS = 8
#: After an election a leader may hold records back for a moment. A read that brings nothing this often has failed.
EMPTY_READS_MAX = 50
EMPTY_READ_PAUSE_S = 0.1


class Fate(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Marker:
    """What a task left inside its transaction. `transaction` is None for a batch without rows: the driver marks it."""

    branch: Branch
    rows: int
    transaction: Transaction | None
    fate: Fate
    plan: str = ""


@dataclass(frozen=True)
class Fence:
    """The newest incarnation of a pipeline that writes through a sink, and the prefix of its transactional ids."""

    pipeline: PipelineId
    sink: str
    incarnation: int
    name: str
    target: str
    prefix: str


# Records ------------------------------------------------------------------------------------------------------------


def partition_of(sink: str) -> int:
    """Where a sink's records lie. By its name only: pipelines that could be in each other's way must see each other."""
    return zlib.crc32(sink.encode()) % PARTITIONS


def marker_record(branch: Branch, rows: int, transactional_id: str, plan: str = "") -> tuple[bytes, bytes]:
    """Key and value. The key is the task's, so that compaction keeps its newest marker.

    A mend has a key of its own: its task may have another number than the one whose rows it brings again, so that it
    must not take the place of a marker of the same batch.
    """
    who, attempt = branch.attempt.pipeline, branch.attempt.attempt
    task = f"{branch.task}.{attempt}" if attempt else str(branch.task)
    key = f"marker/{who}/{branch.sink}/{task if transactional_id else 'empty'}"
    value = {"format": CONTROL_TOPIC, "branch": str(branch), "rows": rows, "id": transactional_id, "plan": plan}
    return key.encode(), json.dumps(value).encode()


def fence_record(fence: Fence) -> tuple[bytes, bytes]:
    value = {
        "format": CONTROL_TOPIC,
        "incarnation": fence.incarnation,
        "name": fence.name,
        "target": fence.target,
        "prefix": fence.prefix,
    }
    return f"fence/{fence.pipeline}/{fence.sink}".encode(), json.dumps(value).encode()


# Reading ------------------------------------------------------------------------------------------------------------


class Readable(Protocol):
    def tail(self, topic: str, partition: int, offset: int) -> tuple[int, Slice]: ...
    def read(self, topic: str, partition: int, offset: int) -> Slice: ...


@dataclass
class MarkerLog:
    """One partition of the control topic, read as far as `position`. `catch_up` reads what has come since.

    `who` is the pipeline and the sink for which it is read: what a newer semel says of them is refused. Without it, of
    anybody.
    """

    topic: str
    partition: int
    who: tuple[PipelineId, str] | None = None
    position: int = 0
    markers: dict[str, Marker] = field(default_factory=dict)
    fences: dict[tuple[PipelineId, str], Fence] = field(default_factory=dict)
    #: producer id -> the branches whose transaction has not ended yet.
    _open: dict[int, list[str]] = field(default_factory=dict)
    _by_task: dict[tuple[PipelineId, str, int], deque[str]] = field(default_factory=dict)

    def catch_up(self, wire: Readable) -> None:
        """Read to where the log ended when we began to read, or further. What is not read is not known to be absent."""
        goal, found = wire.tail(self.topic, self.partition, self.position)
        empty_reads = 0
        while True:
            self.apply(found.entries)
            empty_reads = 0 if found.next_offset > self.position else empty_reads + 1
            self.position = max(self.position, found.next_offset)
            if self.position >= goal:
                return
            if empty_reads >= EMPTY_READS_MAX:
                raise SinkUnavailable(
                    f"The control topic {self.topic} cannot be read to its end: partition {self.partition} gives "
                    f"nothing at {self.position}, and ends at {goal}."
                )
            if empty_reads:
                time.sleep(EMPTY_READ_PAUSE_S)
            found = wire.read(self.topic, self.partition, self.position)

    def apply(self, entries: Iterable[LogRecord | LogEnd]) -> None:
        for entry in entries:
            if isinstance(entry, LogEnd):
                self._end(entry)
            elif entry.key is not None:
                self._record(entry, entry.key.decode(errors="replace"), entry.value)

    def _end(self, end: LogEnd) -> None:
        """Transactions of one producer follow each other: its next end is the end of what it has open."""
        fate = Fate.COMMITTED if end.committed else Fate.ABORTED
        for name in self._open.pop(end.producer_id, ()):
            self.markers[name] = replace(self.markers[name], fate=fate)

    def _record(self, record: LogRecord, key: str, value: bytes | None) -> None:
        kind, _, rest = key.partition("/")
        if kind not in ("fence", "marker"):
            return
        pipeline, _, rest = rest.partition("/")
        who = PipelineId(pipeline), rest.partition("/")[0]
        if value is not None:
            said = json.loads(value)
            if self.who not in (None, who) and is_newer(said["format"], CONTROL_TOPIC):
                # A pipeline that was upgraded before ours. What it does in the control topic is its own.
                return
            refuse_newer(f"The record {key} in Kafka's control topic", said["format"], CONTROL_TOPIC)
            if kind == "fence":
                self._fenced(who, said)
            else:
                self._marked(record, said)
        elif kind == "fence":
            self.fences.pop(who, None)

    def _fenced(self, who: tuple[PipelineId, str], said: Mapping[str, Any]) -> None:
        if who not in self.fences or said["incarnation"] >= self.fences[who].incarnation:
            self.fences[who] = Fence(*who, said["incarnation"], said["name"], said["target"], said["prefix"])

    def _marked(self, record: LogRecord, said: Mapping[str, Any]) -> None:
        branch = parse_branch(said["branch"])
        if branch is None:
            return
        if not said["id"]:
            self._remember(Marker(branch, said["rows"], None, Fate.COMMITTED, said.get("plan", "")))
            return
        transaction = Transaction(said["id"], record.producer_id, record.epoch)
        self._remember(Marker(branch, said["rows"], transaction, Fate.OPEN, said.get("plan", "")))
        self._open.setdefault(record.producer_id, []).append(str(branch))

    def _remember(self, marker: Marker) -> None:
        """As compaction does on the broker, a task's markers of batches long gone are forgotten here."""
        branch, name = marker.branch, str(marker.branch)
        of_task = self._by_task.setdefault((branch.attempt.pipeline, branch.sink, branch.task), deque())
        # The driver's own records may be there twice: what got no answer is written again.
        if name not in self.markers:
            of_task.append(name)
        self.markers[name] = marker
        while self._is_past(self.markers[of_task[0]], branch.attempt.batch):
            del self.markers[of_task.popleft()]

    @staticmethod
    def _is_past(old: Marker, batch: int) -> bool:
        return old.fate is not Fate.OPEN and old.branch.attempt.batch < batch - 1

    # What it says -----------------------------------------------------------------------------------------------------

    def of(self, pipeline: PipelineId, sink: str) -> Iterator[Marker]:
        return (m for m in self.markers.values() if (m.branch.attempt.pipeline, m.branch.sink) == (pipeline, sink))

    def newest_committed(self, pipeline: PipelineId, sink: str) -> int | None:
        return max((m.branch.attempt.batch for m in self.of(pipeline, sink) if m.fate is Fate.COMMITTED), default=None)


@dataclass
class WholeMarkerLog(MarkerLog):
    """All markers of one pipeline and sink that the topic still has, for audits.

    Compaction leaves holes in the offsets. Behind the last hole everything is there that was ever written, so a marker
    that is not there was not written.
    """

    _next: int = 0
    #: Behind the last hole: incarnation -> the batch of its first marker. -1 where the first incarnation's fence is
    #: there as well, which comes before all markers.
    _firsts: dict[int, int] = field(default_factory=dict)

    @property
    def known_from(self) -> int | None:
        """The oldest batch whose markers would all be here, had there been any. None when nobody can say.

        An older incarnation may have woken up late and marked a batch of long ago, so the newest one tells; the very
        first tells all there is.
        """
        if self._firsts.get(1) == -1:
            return 0
        fence = self.fences.get(self.who) if self.who is not None else None
        newest = fence.incarnation if fence is not None else 0
        first = self._firsts.get(newest, -1)
        return first + 1 if first >= 0 else None

    def apply(self, entries: Iterable[LogRecord | LogEnd]) -> None:
        for entry in entries:
            if entry.offset != self._next:
                self._firsts.clear()
            self._next = entry.offset + 1
            super().apply([entry])

    def _fenced(self, who: tuple[PipelineId, str], said: Mapping[str, Any]) -> None:
        super()._fenced(who, said)
        if who == self.who and said["incarnation"] == 1:
            self._firsts.setdefault(1, -1)

    def _marked(self, record: LogRecord, said: Mapping[str, Any]) -> None:
        branch = parse_branch(said["branch"])
        if branch is not None and (branch.attempt.pipeline, branch.sink) == self.who:
            self._firsts.setdefault(branch.attempt.incarnation, branch.attempt.batch)
            super()._marked(record, said)

    @staticmethod
    def _is_past(old: Marker, batch: int) -> bool:  # noqa: ARG004 - nothing is
        return False
