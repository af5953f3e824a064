"""Files: Parquet in a local folder, or in one that every executor mounts.

    <path>/b0000000007-t00000-a0-<sink>-<pipeline>.parquet   rows that are visible
    <path>/_semel/staging/<branch>.parquet                   what tasks have staged
    <path>/_semel/manifests/<pipeline>/<sink>/0000000007.json  the marker: which files are batch 7
    <path>/_semel/fences/<pipeline>/0000000003               the newest incarnation

Spark and Arrow ignore names that start with `_`, so what is staged is invisible to them. *Commit* renames the staged
files to their final names and then creates the manifest. A driver that dies in between leaves names from which a fresh
process tells what is left to do.

What a reader sees. With `committed_files` or `read_committed` a batch appears at once, with its manifest. A plain
reader of the folder sees each file whole, once, and only after the decision, but the files of one batch one by one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from semel import formats
from semel.durable import create_file, make_folders, sync_file, sync_folder
from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SinkUnavailable, lasts
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, Incarnation, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import (
    Context,
    Participant,
    Remains,
    Sink,
    StagedPart,
    Writer,
    committable_for,
    refuse_another_plan,
)
from semel.sinks.evidence import NOTHING_KNOWN, Evidence, Mark
from semel.sinks.files.layout import (
    SUFFIX,
    Layout,
    check_types,
    damaged,
    differences,
    final_name,
    names,
    newest_schema,
    numbered,
    read_manifest,
    schema_text,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ROW_GROUP_ROWS_MAX = 131_072
ROW_GROUP_BYTES_MAX = 64 * 1024 * 1024
COMMIT = "commit"
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")

# Spark takes these characters in a path for a pattern, unless a backslash stands before them.
_GLOB = re.compile(r"([\[\]{}*?\\])")
_ESCAPED = r"\\\1"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class Files(Sink):
    """`Files("lake/orders")`: each task adds one Parquet file to the folder, which is created if absent."""

    path: str
    compression: str = "zstd"

    kind: ClassVar[str] = "files"

    def __post_init__(self) -> None:
        path = os.fspath(self.path)
        if not path or _URL.match(path):
            raise ConfigError(f"Files writes to a folder of a mounted file system, not to {path!r}.")
        # Executors may run in another folder than the driver.
        object.__setattr__(self, "path", os.path.abspath(path))
        super().__post_init__()
        if self.compression not in COMPRESSIONS:
            raise ConfigError(f"Files has no compression {self.compression!r}; use one of {', '.join(COMPRESSIONS)}.")

    def default_name(self) -> str:
        return f"files_{Path(self.path).name}"

    def describe(self) -> str:
        return f"Parquet files in {self.path}"

    def check(self, schema: pa.Schema) -> None:
        folder = Path(self.path)
        existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))
        if not existing.is_dir():
            raise ConfigError(f"{self.describe()}: {existing} is not a folder.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.describe()}: the folder {existing} cannot be written.")
        check_types(schema)
        known = newest_schema(Layout(folder))
        problems = differences(known, schema_text(schema)) if known is not None else []
        if problems:
            raise SchemaMismatch(f"{self.describe()} do not match the rows: {'; '.join(problems)}.")

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:  # noqa: ARG002 - the driver marks
        return _FilesWriter(Layout(Path(self.path)).staged(str(branch)), branch, self.compression, durable=durable)

    def participant(self, context: Context) -> Participant:
        return _FilesParticipant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        layout = Layout(Path(self.path))
        participant = _FilesParticipant(self, Context(pipeline, "", Incarnation(0), marked=False))
        branches = participant.recover().branches
        manifests = {int(path.stem): path for path in layout.manifests(pipeline, self.name)}
        with participant._reachable("read its manifests"):
            marks = tuple(_mark(layout, path) for batch, path in manifests.items() if batch >= batches.start)
        if not manifests:
            known_from = 0 if names(layout.fences(pipeline)) else NOTHING_KNOWN
            return Evidence(marks, known_from, f"{self.path} knows nothing of this pipeline", branches=branches)
        # Who drops old rows on purpose begins with the oldest. If one in between is missing, nobody meant that.
        why = "older manifests are not there: somebody has removed them"
        return Evidence(marks, min(manifests), why, branches=branches)


def _mark(layout: Layout, manifest: Path) -> Mark:
    """What a manifest proves, and whether the files that it names are there."""
    said = read_manifest(manifest)
    wrong = [file["name"] for file in said["files"] if _size(layout.root / file["name"]) != file["bytes"]]
    damage = f"its manifest names {', '.join(wrong[:3])}, missing or cut short" if wrong else ""
    return Mark(
        int(manifest.stem), "", said["attempt"], said["incarnation"], said["rows"], damage, said.get("plan", "")
    )


# Readers ----------------------------------------------------------------------------------------------------------


def committed_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that manifests name, batch after batch. A batch is in here with all of its files or not at all."""
    root = Path(os.path.abspath(path))
    files = []
    for manifest in (m for _, _, manifests in Layout(root).all_manifests() for m in manifests):
        for file in read_manifest(manifest)["files"]:
            found = root / file["name"]
            if not found.is_file():
                raise damaged(manifest, f"it names {found.name}, which is missing")
            files.append(found)
    return files


def read_committed(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """The rows of all committed batches, and of no other, as a DataFrame."""
    files = committed_files(path)
    if not files:
        raise ConfigError(
            f"No rows are committed in {os.path.abspath(path)} yet.",
            data_now="nothing was read",
            remedy="Wait for the first batch, or check the path.",
        )
    return spark.read.parquet(*(f"file://{_GLOB.sub(_ESCAPED, str(file))}" for file in files))


# Writer -----------------------------------------------------------------------------------------------------------


class _FilesWriter(Writer):
    """Gathers Arrow batches into row groups, so memory is bounded by one row group. No rows, no file."""

    def __init__(self, path: Path, branch: Branch, compression: str, *, durable: bool) -> None:
        self.path = path
        self.branch = branch
        self.compression = compression
        self.durable = durable
        self.rows = 0
        self._gathered: list[pa.RecordBatch] = []
        self._file: pa.NativeFile | None = None
        self._parquet: Any = None
        self._schema: dict[str, str] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        for piece in _pieces(batch):
            if self._gathered and not _fits_one_row_group([*self._gathered, piece]):
                self._flush()
            self._gathered.append(piece)
            self.rows += piece.num_rows

    def prepare(self) -> StagedPart:
        if self.rows == 0:
            return StagedPart(self.branch, 0)
        self._flush()
        self._close()
        if self.durable:
            sync_file(self.path)
            sync_folder(self.path.parent)
        return StagedPart(self.branch, self.rows, {"bytes": self.path.stat().st_size, "schema": self._schema})

    def abort(self) -> None:
        self._gathered.clear()
        with suppress(OSError, ValueError):
            self._close()
        self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        import pyarrow as pa

        if self._parquet is None:
            self._open(self._gathered[0].schema)
        self._parquet.write_table(pa.Table.from_batches(self._gathered), row_group_size=ROW_GROUP_ROWS_MAX)
        self._gathered.clear()

    def _open(self, schema: pa.Schema) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        make_folders(self.path.parent)
        self._schema = schema_text(schema)
        self._file = pa.OSFile(str(self.path), "wb")
        # Without Arrow's copy of the schema every reader sees the same types, whatever the session's time zone was.
        self._parquet = pq.ParquetWriter(self._file, schema, compression=self.compression, store_schema=False)

    def _close(self) -> None:
        try:
            if self._parquet is not None:
                self._parquet.close()
        finally:
            if self._file is not None:
                self._file.close()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in pieces that fit into one row group each; a row that is larger than that stays whole."""
    if batch.num_rows <= 1 or _fits_one_row_group([batch]):
        yield from [batch] if batch.num_rows else []
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _fits_one_row_group(batches: Sequence[pa.RecordBatch]) -> bool:
    rows: int = sum(b.num_rows for b in batches)
    size: int = sum(b.nbytes for b in batches)
    return rows <= ROW_GROUP_ROWS_MAX and size <= ROW_GROUP_BYTES_MAX


# Participant ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """One file of a committable. The size tells a whole file from one that was cut short."""

    branch: str
    name: str
    rows: int
    bytes: int


class _FilesParticipant(Participant):
    def __init__(self, sink: Files, context: Context) -> None:
        self.sink = sink
        self.context = context
        self.layout = Layout(Path(sink.path))

    def fence(self) -> None:
        if not self.context.marked:
            return
        folder, mine = self.layout.fences(self.context.pipeline), self.context.incarnation
        with self._reachable("fence"):
            self._refuse_if_older()
            create_file(folder / f"{mine:010d}", b"")
            # A driver that came in between is found by our second look, and finds our fence by its own second look.
            self._refuse_if_older()
            for fence in numbered(folder):
                if int(fence.name) < mine:
                    fence.unlink(missing_ok=True)

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        files = [_File(str(p.branch), final_name(p.branch), p.rows, p.payload["bytes"]) for p in parts if p.rows]
        schema = next((p.payload["schema"] for p in parts if p.rows), None)
        with self._reachable("prepare"):
            if self.context.marked:
                self._refuse_if_older()
            missing = [file.branch for file in files if not self._is_staged(file)]
        if missing:
            raise BatchFailed(
                f"{self.sink.describe()}: staged rows vanished before the decision: {', '.join(missing)}.",
                remedy="Make sure that every executor sees this folder under this path, and start the pipeline again.",
            )
        payload = {"files": [asdict(file) for file in files], "schema": schema}
        return (committable_for(self.sink.name, attempt, parts, payload),)

    def commit(self, committable: Committable) -> Outcome:
        files = [_File(**file) for file in committable.payload["files"]]
        # An error says nothing of what has happened; the next try looks at the manifest first.
        with self._reachable(COMMIT):
            if self.context.marked and self._manifest(committable).exists():
                return self._committed_before(committable, files)
            if not all(self._is_staged(file) or self._is_final(file) for file in files):
                return self._withdraw(files)
            self._rename(files)
            failpoint("files.renamed")
            if self.context.marked and not self._create_manifest(committable, files):
                return self._committed_before(committable, files)
            failpoint("files.committed")
        return Outcome.COMMITTED

    def _committed_before(self, committable: Committable, files: Sequence[_File]) -> Outcome:
        """The batch is committed. What another attempt at it has left here is in no manifest, and goes.

        Whoever created the manifest may have died before its name was on the disk.
        """
        sync_folder(self._manifest(committable).parent)
        said = read_manifest(self._manifest(committable))
        refuse_another_plan(self.sink, committable.attempt.batch, said.get("plan", ""), committable.plan)
        named = {file["name"] for file in said["files"]}
        for file in files:
            self.layout.staged(file.branch).unlink(missing_ok=True)
            if file.name not in named:
                self._final(file).unlink(missing_ok=True)
        return Outcome.ALREADY_COMMITTED

    def _withdraw(self, files: Sequence[_File]) -> Outcome:
        """Some files are gone. Those that were renamed are in no manifest: they go, so that a mend doubles no row."""
        if not self.layout.own.is_dir():
            # Without our folder nothing proves that the batch is not committed: most likely it is not mounted.
            raise FileNotFoundError(f"no folder {self.layout.own}")
        if self.context.marked:
            for file in files:
                self._final(file).unlink(missing_ok=True)
            sync_folder(self.layout.root)
        return Outcome.GONE

    def _rename(self, files: Sequence[_File]) -> None:
        pending = [file for file in files if self._is_staged(file)]
        for index, file in enumerate(pending):
            if index == 1 or len(pending) == 1:
                failpoint("files.half_renamed")
            os.rename(self.layout.staged(file.branch), self._final(file))
        if files:
            sync_folder(self.layout.root)

    def _create_manifest(self, committable: Committable, files: Sequence[_File]) -> bool:
        a = committable.attempt
        body = {
            "version": formats.MANIFEST,
            "name": self.context.name,
            "pipeline": a.pipeline,
            "sink": committable.sink,
            "batch": a.batch,
            "attempt": a.attempt,
            "incarnation": a.incarnation,
            "rows": committable.rows,
            "plan": committable.plan,
            "files": [{"name": file.name, "rows": file.rows, "bytes": file.bytes} for file in files],
            "schema": self._schema(committable.payload),
            "committed_at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        }
        content = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
        return create_file(self._manifest(committable), content.encode())

    def _schema(self, payload: Mapping[str, Any]) -> Any:
        """An empty batch hands on the schema before it, so that the newest manifest always knows it."""
        if payload["schema"] is not None:
            return payload["schema"]
        before = self.layout.manifests(self.context.pipeline, self.sink.name)
        return read_manifest(before[-1])["schema"] if before else None

    def abort(self, branches: Iterable[Branch]) -> None:
        with self._reachable("abort"):
            for branch in branches:
                self.layout.staged(str(branch)).unlink(missing_ok=True)

    def recover(self) -> Remains:
        pipeline, sink = self.context.pipeline, self.sink.name
        with self._reachable("recover"):
            parsed = (parse_branch(n.removesuffix(SUFFIX)) for n in names(self.layout.staging) if n.endswith(SUFFIX))
            branches = tuple(b for b in parsed if b and b.attempt.pipeline == pipeline and b.sink == sink)
            if not self.context.marked:
                return Remains(branches)
            manifests = self.layout.manifests(pipeline, sink)
            newest = int(manifests[-1].stem) if manifests else None
            return Remains.of(branches, newest, self._writers(), self.context)

    def _writers(self) -> Iterator[tuple[str, PipelineId]]:
        """Other pipelines with manifests in this folder, by the name in the newest of them, whatever the sink's is."""
        for pipeline, _, manifests in self.layout.all_manifests():
            if pipeline != self.context.pipeline:
                yield str(read_manifest(manifests[-1]).get("name", "")), pipeline

    def close(self) -> None:
        """Nothing is open."""

    # Leaves -----------------------------------------------------------------------------------------------------------

    def _manifest(self, committable: Committable) -> Path:
        return self.layout.manifest(self.context.pipeline, self.sink.name, committable.attempt.batch)

    def _final(self, file: _File) -> Path:
        return self.layout.root / file.name

    def _is_staged(self, file: _File) -> bool:
        return _size(self.layout.staged(file.branch)) == file.bytes

    def _is_final(self, file: _File) -> bool:
        return _size(self._final(file)) == file.bytes

    def _refuse_if_older(self) -> None:
        fences = numbered(self.layout.fences(self.context.pipeline))
        self.context.refuse_if_older(int(fences[-1].name) if fences else 0, self.sink.describe())

    @contextmanager
    def _reachable(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = ConfigError if purpose == COMMIT and lasts(error) else SinkUnavailable
            raise kind(f"{self.sink.describe()} did not let us {purpose}: {error}.") from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
