"""What Spark has planned for a batch, as its checkpoint says it: read for a decision, put back as it was decided."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from semel.decisions.base import RecordStore
from semel.decisions.files import FileStore
from semel.durable import drop_checksum, drop_file, drop_stray_checksums
from semel.errors import CheckpointUnusable
from semel.protocol.plans import COMPACTED, Plan, PlannedFile, digest_of, next_batch_of
from semel.runtime.offsets import (
    NO_OFFSET,
    commits_of,
    is_list_of_files,
    logs_planned,
    number_of_list,
    offsets_in,
    offsets_of,
)
from semel.runtime.torn import agrees_with_checksum, drop_torn, drop_undecided_state

#: A decision carries files up to this many bytes in all; if they are larger, only their digests. Offsets of a thousand
#: Kafka partitions are 20 KB, a list of ten thousand input files is 1.5 MB; every tenth list has all files ever read.
CARRIED_BYTES_MAX = 4 * 1024 * 1024

#: A source that keeps a tree deeper than this is none that we know.
SOURCE_DEPTH_MAX = 8

_IS_COMPACTED = re.compile(rf"\d+{re.escape(COMPACTED)}")

MakeDurable = Callable[[int], None]
IsDecided = Callable[[int], bool]

_LOG = logging.getLogger("semel")


class Plans(Protocol):
    """The checkpoint as the coordinator sees it."""

    def clean(self, is_decided: IsDecided, under_way: int | None = None) -> None:
        """Remove what a power cut left that would keep Spark from planning. Older drivers are fenced by then.

        `under_way` is a batch that Spark runs already.
        """
        ...

    def drop_state(self, newest: int, *, may_be_in_use: bool) -> None:
        """Remove the state that no decision rests on, which is that behind version `newest`.

        `may_be_in_use` says that Spark runs the batch that makes the next version already.
        """
        ...

    def next_batch(self) -> int:
        """The first batch that Spark has not checkpointed."""
        ...

    def newest(self, log: str) -> int:
        """The newest batch that Spark has written of in "offsets" or "commits"; -1 when there is none."""
        ...

    def has_planned(self, batch: int) -> bool:
        """Whether Spark has planned a batch."""
        ...

    def is_over(self, batch: int) -> bool:
        """Whether Spark has written that a batch is done."""
        ...

    def read(self, batch: int) -> Plan:
        """The plan of a batch that Spark is running."""
        ...

    def text(self, path: str) -> bytes | None:
        """The content of a file of the checkpoint, or None when it is not there."""
        ...

    def missing_lists(self, offsets: bytes, without: Collection[str] = ()) -> list[str]:
        """What Spark would read of its sources' lists of files, to go on behind these offsets, and not find.

        Those `without` which it must do count as not there.
        """
        ...

    def lists_behind(self, offsets: bytes) -> list[str]:
        """The lists of files that are newer than these offsets."""
        ...

    def put_back(self, file: PlannedFile) -> None:
        """Write a file of a decided plan as it was."""
        ...

    def drop(self, path: str) -> None:
        """Remove, durably, what no decision rests on."""
        ...

    def drop_wrong_checksums(self, files: Iterable[PlannedFile]) -> None:
        """Some files say what was decided, and Spark still cannot read them: remove what keeps it from that."""
        ...

    def make_durable(self, batch: int) -> None:
        """Bring to disk all that the decision of this batch presupposes."""
        ...


class SparkPlans:
    """In the checkpoint folder, where Spark writes them."""

    def __init__(self, checkpoint: RecordStore, make_durable: MakeDurable = lambda _batch: None) -> None:
        self.checkpoint = checkpoint
        self.make_durable = make_durable

    def clean(self, is_decided: IsDecided, under_way: int | None = None) -> None:
        if not isinstance(self.checkpoint, FileStore):
            return
        root = self.checkpoint.root
        with _cleaning(root):
            dropped = drop_torn(root, is_decided, under_way)
            if dropped:
                _LOG.warning("What a power cut left half written, and nothing rests on, was dropped: %s.", dropped)
            for folder in (root, root / "offsets", root / "commits", *(root / "sources").glob("[0-9]*")):
                drop_stray_checksums(folder)

    def drop_state(self, newest: int, *, may_be_in_use: bool) -> None:
        if not isinstance(self.checkpoint, FileStore):
            return
        with _cleaning(self.checkpoint.root):
            count = drop_undecided_state(self.checkpoint.root, newest, may_be_in_use=may_be_in_use)
        if count:
            _LOG.info("State of batch %s, which was not decided, was dropped: %s files.", newest, count)

    def next_batch(self) -> int:
        return next_batch_of(self.newest("commits"), self.newest("offsets"))

    def newest(self, log: str) -> int:
        return max((int(name) for name in self.checkpoint.list(log) if name.isdigit()), default=-1)

    def has_planned(self, batch: int) -> bool:
        return self.checkpoint.exists(offsets_of(batch))

    def is_over(self, batch: int) -> bool:
        return self.checkpoint.exists(commits_of(batch))

    def read(self, batch: int) -> Plan:
        content = self.checkpoint.read(offsets_of(batch))
        if content is None:
            raise CheckpointUnusable(
                f"Spark runs batch {batch}, and the file {offsets_of(batch)} of its plan is not in "
                f"{self.checkpoint.describe()}.",
                remedy="Let nobody else write or clean the checkpoint folder, then start the pipeline again.",
            )
        logs = list(self._logs_of_sources(batch, content))
        before = self.checkpoint.read(commits_of(batch - 1)) if batch else None
        carry = _Carrier()
        # What is small and always needed comes first.
        offsets = carry(offsets_of(batch), content)
        done = () if before is None else (carry(commits_of(batch - 1), before),)
        return Plan((*(carry(path, text) for path, text in logs), offsets), done)

    def _logs_of_sources(self, batch: int, content: bytes) -> Iterator[tuple[str, bytes]]:
        earlier = self.checkpoint.read(offsets_of(batch - 1)) if batch else None
        for source, names in enumerate(logs_planned(content, earlier)):
            folder = f"sources/{source}"
            paths = self._below(folder) if names is None else (f"{folder}/{name}" for name in _with_compacted(names))
            for path in paths:
                found = self.checkpoint.read(path)
                if found is not None:
                    yield path, found

    def _below(self, folder: str, depth: int = 0) -> Iterator[str]:
        """All files of a source: some keep where they began in folders of their own (Iceberg in `offsets/0`)."""
        if depth > SOURCE_DEPTH_MAX:
            raise CheckpointUnusable(
                f"A source keeps folders more than {SOURCE_DEPTH_MAX} deep in {self.checkpoint.describe()}: {folder}.",
                remedy="What it keeps there would have to stand in the decision. Read from another kind of source.",
            )
        yield from (f"{folder}/{name}" for name in self.checkpoint.list(folder))
        for name in self.checkpoint.folders(folder):
            yield from self._below(f"{folder}/{name}", depth + 1)

    def text(self, path: str) -> bytes | None:
        return self.checkpoint.read(path)

    def missing_lists(self, offsets: bytes, without: Collection[str] = ()) -> list[str]:
        """It reads them from the newest one on that holds all before it."""
        missing: list[str] = []
        for source, offset in enumerate(offsets_in(offsets)):
            newest = number_of_list(offset)
            if newest is not None:
                folder = f"sources/{source}"
                there = {name for name in self.checkpoint.list(folder) if f"{folder}/{name}" not in without}
                compacted = [int(name.removesuffix(COMPACTED)) for name in there if _IS_COMPACTED.fullmatch(name)]
                wanted = range(max(compacted, default=-1) + 1, newest + 1)
                missing += [f"sources/{source}/{n}" for n in wanted if str(n) not in there]
        return missing

    def lists_behind(self, offsets: bytes) -> list[str]:
        found: list[str] = []
        for source, offset in enumerate(offsets_in(offsets)):
            newest, folder = number_of_list(offset), f"sources/{source}"
            if newest is None and offset != NO_OFFSET:
                continue  # a source that keeps where it began
            for name in self.checkpoint.list(folder):
                number, path = name.removesuffix(COMPACTED), f"{folder}/{name}"
                is_newer = number.isdigit() and int(number) > (-1 if newest is None else newest)
                if is_newer and (newest is not None or is_list_of_files(self.checkpoint.read(path) or b"")):
                    found.append(path)
        return found

    def drop(self, path: str) -> None:
        if isinstance(self.checkpoint, FileStore):
            with _cleaning(self.checkpoint.root):
                drop_file(self.checkpoint.root / path)
        else:
            self.checkpoint.delete(path)

    def put_back(self, file: PlannedFile) -> None:
        if file.content is None:
            raise ValueError(f"{file.path} was not carried and cannot be put back")
        self.checkpoint.replace(file.path, file.content.encode())

    def drop_wrong_checksums(self, files: Iterable[PlannedFile]) -> None:
        if not isinstance(self.checkpoint, FileStore):
            return
        for file in files:
            path, content = self.checkpoint.root / file.path, self.checkpoint.read(file.path)
            if content is not None and digest_of(content) == file.digest and not agrees_with_checksum(path, content):
                _LOG.warning("The file %s is as it was decided, and its checksum is another one's: dropped.", file.path)
                drop_checksum(path)


@contextmanager
def _cleaning(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointUnusable(
            f"What the last run left half done in the checkpoint {root} cannot be removed: {error}.",
            data_now="every batch that was decided is visible once, or will be; this start wrote no rows",
            remedy="Let this user read, write and list all of the checkpoint folder, then start again.",
        ) from error


class _Carrier:
    """Makes planned files, with their contents as long as there is room."""

    def __init__(self) -> None:
        self.room_bytes = CARRIED_BYTES_MAX

    def __call__(self, path: str, content: bytes) -> PlannedFile:
        digest = digest_of(content)
        if len(content) > self.room_bytes:
            return PlannedFile(path, digest)
        self.room_bytes -= len(content)
        try:
            return PlannedFile(path, digest, content.decode())
        except UnicodeDecodeError:  # a source of somebody's own, which keeps its log in bytes
            return PlannedFile(path, digest)


def _with_compacted(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield name
        yield f"{name}{COMPACTED}"
