"""A spool: the rows of one task in one Arrow file, for sinks that move staged rows in one transaction."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from semel.durable import make_folders, sync_file, sync_folder
from semel.ids import Branch, PipelineId, parse_branch
from semel.sinks.base import StagedPart, Writer

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".arrow"


class SpoolDamaged(Exception):
    """A staged file is missing, cut short, or holds another number of rows than its part says."""


class SpoolWriter(Writer):
    """Writes each Arrow batch as it comes, so memory is bounded by the batch. No rows, no file."""

    def __init__(
        self, folder: Path, branch: Branch, convert: Callable[[pa.RecordBatch], pa.RecordBatch], *, durable: bool
    ) -> None:
        self.path = folder / f"{branch}{SUFFIX}"
        self.branch = branch
        self.convert = convert
        self.durable = durable
        self.rows = 0
        self._file: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        if batch.num_rows == 0:
            return
        batch = self.convert(batch)
        if self._file is None:
            make_folders(self.path.parent)
            self._file = pa.ipc.new_file(str(self.path), batch.schema)
        self._file.write_batch(batch)
        self.rows += batch.num_rows

    def prepare(self) -> StagedPart:
        if self._file is not None:
            self._file.close()
            if self.durable:
                sync_file(self.path)
                sync_folder(self.path.parent)
        return StagedPart(self.branch, self.rows)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)


def spooled_batches(folder: Path, branches: Iterable[str], rows: int) -> Iterator[pa.RecordBatch]:
    """The staged rows of these branches, batch by batch. Raises SpoolDamaged unless there are just `rows` of them.

    Raises OSError when the system does not let us read them.
    """
    import pyarrow as pa

    found = 0
    for name in branches:
        path = folder / f"{name}{SUFFIX}"
        if not path.exists():
            continue
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for index in range(reader.num_record_batches):
                    batch = reader.get_batch(index)
                    found += batch.num_rows
                    yield batch
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None) not in (None, errno.ENOENT):
                raise  # what cannot be read at present, or by us, is not gone
            raise SpoolDamaged(f"{path}: {error}") from error
    if found != rows:
        raise SpoolDamaged(f"{folder} holds {found} of {rows} staged rows")


def spooled_branches(folder: Path, pipeline: PipelineId, sink: str) -> tuple[Branch, ...]:
    """The branches of one pipeline and sink that have a file here."""
    names: Sequence[str] = []
    with suppress(FileNotFoundError):
        names = sorted(os.listdir(folder))
    branches = (parse_branch(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX))
    return tuple(b for b in branches if b and b.attempt.pipeline == pipeline and b.sink == sink)


def drop_spooled(folder: Path, names: Iterable[str]) -> None:
    """Remove staged files. The folder stays: a task of another pipeline may be about to open a file in it."""
    for name in names:
        (folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
