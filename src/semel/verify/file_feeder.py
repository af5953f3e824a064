"""Rows into a local folder, as files of the format that the source reads.

There is a file for every batch of rows, and it is whole when it gets its name: before, it has one that begins with a
dot, which Spark passes over.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from semel.durable import make_folders, sync_file, sync_folder
from semel.errors import ConfigError, SourceUnavailable
from semel.verify.feeders import FORMATS, Feeder, FilePlace
from semel.verify.workload import Workload


class FileFeeder(Feeder):
    """One file for every `rows_per_batch` rows.

    The columns of a CSV file are the fields of its first row, in their order; in a text file a row is its JSON. A row
    of bytes or text is a line as it is. `options` are those of Spark's source, with names in lower case.
    """

    def __init__(self, kind: str, options: Mapping[str, str], workload: Workload, rows_per_batch: int) -> None:
        super().__init__(workload)
        self.kind = kind
        self.options = options
        self.rows_per_file = max(1, rows_per_batch)
        self.folder, pattern = _folder(options.get("path", ""))
        self._patterns = [p for p in (pattern, options.get("pathglobfilter", "")) if p]
        self._files = 0
        self._newest_ms = 0
        if self._is_read(self._temporary().name, hidden=False) and pattern:
            raise ConfigError(
                f"The pattern {pattern!r} of the source also matches files that are being written.",
                remedy=f"Name the folder itself: {self.folder}.",
            )
        if not self._is_read(self._next().name):
            raise ConfigError(
                f"The source does not read a file named {self._next().name}: its pattern is {self._patterns}.",
                remedy=f"Name the folder itself: {self.folder}.",
            )
        _refuse_whole_files(kind, options)

    def check_empty(self) -> None:
        there = sorted(p.name for p in self.folder.rglob("*") if p.is_file() and self._is_read(p.name))
        if there:
            raise ConfigError(
                f"The folder {self.folder} is not empty: {', '.join(there[:3])}{' ...' if there[3:] else ''}.",
                remedy="Let the pipeline read a new folder for this run: nobody else's rows can be compared.",
            )

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, coming: range) -> None:
        try:
            make_folders(self.folder)
            for first in range(coming.start, coming.stop, self.rows_per_file):
                self._write(range(first, min(first + self.rows_per_file, coming.stop)))
        except OSError as error:
            raise SourceUnavailable(
                f"The folder {self.folder} did not take a file: {error}.", data_now=f"{self.fed} rows were fed"
            ) from error

    def _write(self, rows: range) -> None:
        temporary, target = self._temporary(), self._next()
        temporary.write_bytes(self._content(rows))
        # Spark takes files by their age, so no two are of the same millisecond.
        self._newest_ms = max(self._newest_ms + 1, time.time_ns() // 1_000_000)
        os.utime(temporary, ns=(self._newest_ms * 1_000_000,) * 2)
        sync_file(temporary)
        os.rename(temporary, target)
        sync_folder(self.folder)
        self._files += 1
        self.places += [FilePlace(str(target))] * len(rows)

    def _content(self, rows: range) -> bytes:
        if self.kind == "parquet":
            return _parquet([self._fields(n) for n in rows])
        if self.kind == "csv" and isinstance(self.workload.made(rows[0]), Mapping):
            return _csv([self._fields(n) for n in rows], self.options)
        separator = self.options.get("linesep", "\n").encode()
        lines = [self.workload.encode(n) for n in rows]
        torn = next((n for n, line in zip(rows, lines, strict=True) if separator in line), None)
        if torn is not None:
            raise ConfigError(f"Row {torn} of the workload has a line break in it, and a row is a line.")
        return b"".join(line + separator for line in lines)

    def _fields(self, n: int) -> Mapping[str, Any]:
        row = self.workload.made(n)
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"Row {n} of the workload is {type(row).__name__}, and {self.kind} files are made of fields.",
                remedy="Return a dict: a name and a value for each column.",
            )
        return row

    def _next(self) -> Path:
        return self.folder / f"verify-{self._files:07d}.{FORMATS[self.kind]}"

    def _temporary(self) -> Path:
        return self.folder / ".verify.tmp"

    def _is_read(self, name: str, *, hidden: bool = True) -> bool:
        """Spark passes over names that begin with a dot or an underscore, except for what a pattern matches."""
        return not (hidden and name.startswith((".", "_"))) and all(
            fnmatch.fnmatchcase(name, p) for p in self._patterns
        )


_WILD = re.compile(r"[*?\[{]")


def _folder(path: str) -> tuple[Path, str]:
    """The local folder of a path, and the pattern of its files where it has one."""
    parts = urlsplit(path)
    if not path or parts.scheme not in ("", "file"):
        raise ConfigError(
            f"The folder of the source cannot be fed: {path or 'it has no path'}.",
            remedy="Let the pipeline read a local folder for this run.",
        )
    found = Path(os.path.abspath(unquote(parts.path) if parts.scheme else path))
    pattern = found.name if _WILD.search(found.name) else ""
    folder = found.parent if pattern else found
    if _WILD.search(str(folder)) or "{" in pattern:
        raise ConfigError(
            f"The path {path} of the source names many folders, and none to feed.", remedy="Name one folder."
        )
    return folder, pattern


def _refuse_whole_files(kind: str, options: Mapping[str, str]) -> None:
    for option in {"text": ("wholetext",), "json": ("multiline",)}.get(kind, ()):
        if options.get(option, "").lower() == "true":
            raise ConfigError(
                f"With the option {option} a file is one row, which cannot be fed.",
                remedy=f"Leave {option} out for this run.",
            )


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = pa.BufferOutputStream()
    # Spark reads no timestamps of nanoseconds.
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), target, coerce_timestamps="us")
    return bytes(target.getvalue().to_pybytes())


def _csv(rows: Sequence[Mapping[str, Any]], options: Mapping[str, str]) -> bytes:
    """As Spark reads it: a quote within quotes is escaped by a backslash, and not doubled."""
    text, quote = io.StringIO(), options.get("quote", '"')
    writer = csv.writer(
        text,
        delimiter=options.get("sep", options.get("delimiter", ",")),
        quotechar=quote or None,
        quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
        escapechar=options.get("escape", "\\") or None,
        doublequote=False,
        lineterminator="\n",
    )
    header = [list(rows[0])] if options.get("header", "").lower() == "true" else []
    lines: list[list[Any]] = [*header, *([row.get(name) for name in rows[0]] for row in rows)]
    writer.writerows(lines)
    if text.getvalue().count("\n") != len(lines):
        raise ConfigError("A row of the workload has a line break in it, and a row is a line.")
    return text.getvalue().encode()
