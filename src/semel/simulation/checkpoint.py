"""Spark's checkpoint: what Spark writes there, what of it is on disk, and what a driver sees of it.

    offsets/N      up to which row batch N goes, and the watermark that it begins with
    commits/N      batch N is done, and the watermark that it ends with
    sources/0/0    at which row the source began, as Kafka's keeps it

Spark syncs none of them. `semel` syncs what a decision presupposes, and what it puts back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from semel.decisions.base import RecordStore
from semel.runtime.offsets import commits_of, offsets_of
from semel.runtime.plans import SparkPlans
from semel.simulation.line import CHECKPOINT, Line

BEGINNING = "sources/0/0"


class ConcurrentQueries(Exception):
    """Spark itself found that another query writes the checkpoint ("Multiple streaming jobs detected")."""


class OffsetsMissing(Exception):
    """Spark itself found that a batch before the newest one was never planned ("batch N doesn't exist")."""


@dataclass(frozen=True)
class Planned:
    """A batch as Spark has it in memory: the rows from `start` up to `end`, which is None until it is planned."""

    batch: int
    start: int
    end: int | None
    watermark: int
    #: When it was planned: two plans over the same rows are not the same file.
    at_ms: int = 0

    @property
    def content(self) -> bytes:
        """What Spark writes into offsets/N."""
        about = f'{{"batchWatermarkMs":{self.watermark},"batchTimestampMs":{self.at_ms}}}'
        return f'v1\n{about}\n{{"rows":{self.end}}}'.encode()


@dataclass
class Checkpoint:
    """Spark creates files, and never writes one twice; a machine that fails forgets those that nobody has synced."""

    files: dict[str, bytes] = field(default_factory=dict)
    unsynced: set[str] = field(default_factory=set)
    #: What the folder held after each change: copies are taken of these. Before `epoch` something was forgotten.
    moments: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    epoch: int = 0
    #: What the folder held when an older copy took its place.
    newest: dict[str, bytes] | None = None
    #: That copy has commits of batches whose offsets it does not have.
    is_torn: bool = False

    def numbers(self, folder: str) -> list[int]:
        return _numbers(self.files, folder)

    @property
    def next_batch(self) -> int:
        return max(self.numbers("commits"), default=-1) + 1

    @property
    def at_hand_batch(self) -> int:
        """The batch that Spark goes on with."""
        newest = max(self.numbers("offsets"), default=0)
        return newest + (commits_of(newest) in self.files)

    # What Spark does ------------------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> None:
        if path in self.files:
            raise ConcurrentQueries(path)
        self.files[path] = content
        self.unsynced.add(path)
        self._changed()

    def at_hand(self) -> Planned:
        """Where Spark goes on when it starts. That commits are missing before the newest plan it only warns of."""
        newest = max(self.numbers("offsets"), default=None)
        if newest is None:
            return Planned(0, self._number(BEGINNING), None, 0)
        start = self._end_of(newest - 1) if newest else self._number(BEGINNING)
        if max(self.numbers("commits"), default=None) == newest:
            return Planned(newest + 1, self._end_of(newest), None, self._watermark(commits_of(newest)))
        at_ms = self._about(offsets_of(newest))["batchTimestampMs"]
        return Planned(newest, start, self._end_of(newest), self._watermark(offsets_of(newest)), at_ms)

    def end_of_all(self) -> int:
        """The first row that no batch which is done has, as the checkpoint says it."""
        return self._end_of(self.next_batch - 1) if self.next_batch else 0

    def _end_of(self, batch: int) -> int:
        if offsets_of(batch) not in self.files:
            raise OffsetsMissing(f"batch {batch} doesn't exist")
        return self._number(offsets_of(batch))

    def _number(self, path: str) -> int:
        """The last line of a file of Spark's is the offset of the source."""
        return int(json.loads(self.files[path].split(b"\n")[-1])["rows"])

    def _watermark(self, path: str) -> int:
        return self._about(path)["batchWatermarkMs" if path.startswith("offsets/") else "nextBatchWatermarkMs"]

    def _about(self, path: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.files[path].split(b"\n")[1])
        return found

    def behind(self, batch: int) -> dict[str, bytes]:
        """The plan behind which a batch begins."""
        path = offsets_of(batch - 1)
        return {path: self.files[path]} if path in self.files else {}

    # What semel does ------------------------------------------------------------------------------------------------

    def replace(self, path: str, content: bytes) -> None:
        """Whole and durable."""
        self.files[path] = content
        self.unsynced.discard(path)
        self._changed()

    def drop(self, path: str) -> None:
        """Durably."""
        self.files.pop(path, None)
        self.unsynced.discard(path)
        self._changed()

    def sync(self, batch: int) -> None:
        """All that the decision of this batch presupposes. Its rows begin where those of the batch before end, and
        without that plan Spark does not even start. Seed 1370 had planned it anew, over the same rows.
        """
        self.unsynced -= {BEGINNING, offsets_of(batch), offsets_of(batch - 1), commits_of(batch - 1)}

    # What goes wrong ------------------------------------------------------------------------------------------------

    def forget_unsynced(self, dice: random.Random) -> list[str]:
        """The power fails: all that nobody has synced is gone, or some of it."""
        some = dice.random() < 0.5
        gone = [path for path in sorted(self.unsynced) if not some or dice.random() < 0.5]
        for path in gone:
            del self.files[path]
        self.unsynced.clear()
        self._forgot()
        return gone

    def put_older_copy(self, dice: random.Random, age: int) -> None:
        """A copy takes the place of the folder. Some were taken while Spark wrote: not all in them is equally old."""
        if not self.is_older_than_newest:
            self.newest = dict(self.files)
        last = len(self.moments) - 1
        first = max(last - age, 0)
        commits = rest = self.moments[first]
        if first >= self.epoch and dice.random() < 0.5:
            later = self.moments[dice.randint(first, last)]
            commits, rest = (commits, later) if dice.random() < 0.7 else (later, rest)
        done = {path: content for path, content in commits.items() if path.startswith("commits/")}
        self._become(done | {path: content for path, content in rest.items() if not path.startswith("commits/")})
        self.is_torn = self.next_batch > max(self.numbers("offsets"), default=-1) + 1

    @property
    def is_older_than_newest(self) -> bool:
        return len(_numbers(self.newest or (), "commits")) > len(self.numbers("commits"))

    def put_newest_copy(self) -> None:
        """What a person does who is told that the checkpoint is older than the log."""
        self._become(self.newest or {})
        self.newest = None

    def _become(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.unsynced.clear()
        self._forgot()

    def _forgot(self) -> None:
        self._changed()
        self.epoch = len(self.moments) - 1

    def _changed(self) -> None:
        self.moments.append(dict(self.files))


def _numbers(files: Iterable[str], folder: str) -> list[int]:
    return [int(path.rpartition("/")[2]) for path in files if path.startswith(f"{folder}/")]


class CheckpointFolder(RecordStore):
    """The checkpoint at the end of a driver's line, for the real `SparkPlans`.

    `replaced` is told of what semel writes.
    """

    def __init__(self, checkpoint: Checkpoint, line: Line, replaced: Callable[[str], None]) -> None:
        self.checkpoint = checkpoint
        self.line = line
        self.replaced = replaced

    def create(self, path: str, content: bytes) -> bool:
        raise NotImplementedError(f"only Spark creates {path}")

    def delete(self, path: str) -> None:
        self.line.ask(CHECKPOINT, "drop", lambda: self.checkpoint.drop(path), path)
        self.line.world.counts["plans dropped"] += 1

    def replace(self, path: str, content: bytes) -> None:
        self.line.ask(CHECKPOINT, "put back", lambda: self._replace(path, content), path)

    def _replace(self, path: str, content: bytes) -> None:
        self.checkpoint.replace(path, content)
        self.replaced(path)

    def read(self, path: str) -> bytes | None:
        found = self.line.ask(CHECKPOINT, "read", lambda: self.checkpoint.files.get(path) or b"", path, changes=False)
        return found or None

    def exists(self, path: str) -> bool:
        return self.line.ask(CHECKPOINT, "exists", lambda: path in self.checkpoint.files, path, changes=False)

    def list(self, folder: str) -> list[str]:
        def names() -> list[str]:
            paths: Iterable[str] = self.checkpoint.files
            return sorted(path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/"))

        return self.line.ask(CHECKPOINT, "list", names, folder, changes=False)

    def folders(self, folder: str) -> Sequence[str]:  # noqa: ARG002 - the simulated Spark makes none
        return []

    def describe(self) -> str:
        return "the simulated checkpoint"


def plans_of(checkpoint: Checkpoint, line: Line, replaced: Callable[[str], None]) -> SparkPlans:
    """The real ones, over the simulated folder."""

    def make_durable(batch: int) -> None:
        line.ask(CHECKPOINT, "sync", lambda: checkpoint.sync(batch), batch)

    return SparkPlans(CheckpointFolder(checkpoint, line, replaced), make_durable)
