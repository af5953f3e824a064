"""A folder of Parquet files: the manifests say which of them are committed, and show each batch at once.

Below exactly-once there are no manifests, and a file is there as soon as it has its name.
"""

from __future__ import annotations

import time
from pathlib import Path

from semel.errors import ConfigError, SchemaMismatch
from semel.ids import PipelineId
from semel.sinks.files import Files
from semel.sinks.files.layout import SUFFIX, Layout, names, read_manifest
from semel.verify.history import Look
from semel.verify.readers.base import NumberOf, Reader, names_ours
from semel.verify.workload import Workload


class FilesReader(Reader):
    sink: Files

    def __init__(self, sink: Files, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(sink, workload, number_of, marked=marked)
        self.snapshots = marked
        self._layout = Layout(Path(sink.path))
        #: The rows of each manifest that was read, or of each file where there are none.
        self._read: dict[Path, list[int]] = {}

    def check_ready(self) -> None:
        files = [name for name in names(self._layout.root) if name.endswith(SUFFIX)]
        there = files + [str(paths[-1]) for _, _, paths in self._layout.all_manifests()]
        if there:
            raise ConfigError(
                f"{self.sink.describe()}: the folder is not empty: {', '.join(there[:3])}.",
                remedy="Let the pipeline write to a new folder for this run: nobody else's rows can be compared.",
            )

    def look(self) -> None:
        """What was read once does not change, so that only new files are opened."""
        began_s = time.time()
        now = self._manifests() if self.marked else self._plain_files()
        new = {path: self._numbers_in(path) for path in now if path not in self._read}
        gone = {path: self._read[path] for path in self._read.keys() - set(now)}
        self._read = {path: rows for path, rows in {**self._read, **new}.items() if path not in gone}
        look = Look(
            began_s,
            time.time(),
            sorted(number for rows in new.values() for number in rows),
            sorted(number for rows in gone.values() for number in rows),
        )
        self.rows.update(look.added)
        self.rows.subtract(look.gone)
        if look.gone:
            self.rows = +self.rows
        self.add_look(look)

    def left_behind(self, pipeline: PipelineId) -> list[str]:
        staged = [name for name in names(self._layout.staging) if name.endswith(SUFFIX)]
        left = [
            f"staged file {name}" for name in staged if names_ours(name.removesuffix(SUFFIX), pipeline, self.sink.name)
        ]
        if self.marked:
            named = {file for manifest in self._manifests() for file in _named(manifest)}
            ours = f"-{self.sink.name}-{pipeline}{SUFFIX}"
            left += [
                f"file {path.name}, which is in no manifest"
                for path in self._plain_files()
                if path.name.endswith(ours) and path.name not in named
            ]
        return left

    def _manifests(self) -> list[Path]:
        """Those of this sink, batch after batch."""
        found = self._layout.all_manifests()
        return [path for _, sink, manifests in found if sink == self.sink.name for path in manifests]

    def _plain_files(self) -> list[Path]:
        """What a reader of the folder finds who knows nothing of manifests. Two sinks may share a folder."""
        root, ours = self._layout.root, f"-{self.sink.name}-"
        found = (name for name in names(root) if name.endswith(SUFFIX) and not name.startswith(("_", ".")))
        return [root / name for name in found if ours in name]

    def _numbers_in(self, path: Path) -> list[int]:
        files = [self._layout.root / name for name in _named(path)] if self.marked else [path]
        found = (self.number(value) for file in files for value in self._identities(file))
        return [number for number in found if number is not None]

    def _identities(self, file: Path) -> list[object]:
        import pyarrow.parquet as pq

        identity = self.workload.identity
        with pq.ParquetFile(file) as parquet:
            columns = parquet.schema_arrow.names
            if identity not in columns:
                raise SchemaMismatch(
                    f"{self.sink.describe()}: the rows have no column {identity}, only {', '.join(columns)}.",
                    remedy='Let it through to the sink, or name another: @semel.workload(identity="...").',
                )
            return list(parquet.read(columns=[identity])[identity].to_pylist())


def _named(manifest: Path) -> list[str]:
    return [str(file["name"]) for file in read_manifest(manifest)["files"]]
