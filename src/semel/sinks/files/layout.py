"""Where the Files sink keeps things, what a manifest says, and how schemas are compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel import formats
from semel.errors import CorruptRecord, SchemaMismatch
from semel.ids import Branch, PipelineId

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"

# Layout -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where things are under the folder."""

    root: Path

    @property
    def own(self) -> Path:
        return self.root / "_semel"

    @property
    def staging(self) -> Path:
        return self.own / "staging"

    def staged(self, branch: str) -> Path:
        return self.staging / f"{branch}{SUFFIX}"

    def fences(self, pipeline: PipelineId) -> Path:
        return self.own / "fences" / pipeline

    def manifest(self, pipeline: PipelineId, sink: str, batch: int) -> Path:
        return self.own / "manifests" / pipeline / sink / f"{batch:010d}.json"

    def manifests(self, pipeline: PipelineId, sink: str) -> list[Path]:
        """The manifests of one pipeline and sink in batch order."""
        return numbered(self.own / "manifests" / pipeline / sink, ".json")

    def all_manifests(self) -> Iterator[tuple[PipelineId, str, list[Path]]]:
        """The same for every pipeline and sink that has committed here."""
        for pipeline in map(PipelineId, names(self.own / "manifests")):
            for sink in names(self.own / "manifests" / pipeline):
                if manifests := self.manifests(pipeline, sink):
                    yield pipeline, sink, manifests


def final_name(branch: Branch) -> str:
    """What a file is called once it is visible. The attempt keeps a mended batch apart from what it replaces."""
    a = branch.attempt
    return f"b{a.batch:010d}-t{branch.task:05d}-a{a.attempt}-{branch.sink}-{a.pipeline}{SUFFIX}"


def names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def numbered(folder: Path, suffix: str = "") -> list[Path]:
    """The files that have a number for a name, in the order of the numbers; temporary ones are left out."""
    named = [name for name in names(folder) if name.endswith(suffix) and name.removesuffix(suffix).isdigit()]
    return [folder / name for name in sorted(named, key=lambda name: int(name.removesuffix(suffix)))]


# Manifests --------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest, or an error that names the file: a damaged one is never guessed at."""
    try:
        manifest = json.loads(path.read_bytes())
        version, _ = manifest["version"], manifest["files"]
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "it is not a manifest") from None
    sink = path.parent.name
    formats.refuse_newer(
        f"The manifest {path} of sink {sink}",
        version,
        formats.MANIFEST,
        data_now="nothing was read or changed by this call",
        remedy="Use the newer semel that wrote it.",
    )
    return dict(manifest)


def damaged(manifest: Path, what: str) -> CorruptRecord:
    return CorruptRecord(
        f"The manifest {manifest} is damaged: {what}.",
        data_now="nothing was read or changed by this call; the batch was committed once",
        remedy="Restore the file from a backup. If its rows were dropped on purpose, remove the manifest, too, "
        "unless it is the newest of its folder.",
    )


def newest_schema(layout: Layout) -> dict[str, str] | None:
    """The columns of the newest manifest in the folder, whoever wrote it; None when no row is committed."""
    newest = [read_manifest(manifests[-1]) for _, _, manifests in layout.all_manifests()]
    known = sorted((str(m["committed_at"]), m["schema"]) for m in newest if m["schema"] is not None)
    return known[-1][1] if known else None


# Schemas ----------------------------------------------------------------------------------------------------------


def schema_text(schema: pa.Schema) -> dict[str, str]:
    """The type of each column as text, without what Parquet does not keep or Spark may change at will.

    That is nullability, the session's time zone (instants are stored as UTC) and the 64-bit twins of string and binary.
    """
    return {field.name: _type_text(field.type) for field in schema}


def _type_text(kind: pa.DataType) -> str:
    text = str(kind).replace(" not null", "").replace("large_", "")
    return re.sub(r"tz=[^\]]+", "tz=UTC", text)


def check_types(schema: pa.Schema) -> None:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SchemaMismatch(f"Two columns of the rows have the same name: {', '.join(twice)}.")
    unsupported = [f"{field.name} ({field.type})" for field in schema if not _fits_parquet(field)]
    if unsupported:
        raise SchemaMismatch(
            f"Parquet cannot hold these columns: {', '.join(unsupported)}.",
            remedy="Cast them to another type, or leave them out with select=[...].",
        )


def _fits_parquet(field: pa.Field) -> bool:
    """Ask Parquet itself; but a duration would come back as a bare number, and Spark reads no column of nulls only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if re.search(r"\b(duration|null)\b", _type_text(field.type)):
        return False
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field]), store_schema=False).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False
    return True


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    problems = [f"the files have no column {name}" for name in here if name not in there]
    problems += [f"the rows have no column {name}" for name in there if name not in here]
    return problems + [
        f"column {name} is {there[name]} in the files and {kind} in the rows"
        for name, kind in here.items()
        if there.get(name, kind) != kind
    ]
