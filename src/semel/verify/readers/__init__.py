"""Readers of what a pipeline has written, one thread for each sink. They look as any user of the store would.

base     what they share: looks, rows by number, strangers, the last look
kafka    a read_committed consumer
tables   what readers of tables share: one statement for each look; postgres, mysql (and MariaDB), sqlite
files    the manifests of a folder, and the Parquet files that they name

The record of a kind of sink (sinks/kinds.py) names its reader.
"""

from __future__ import annotations

from semel.errors import ConfigError
from semel.sinks.base import Sink
from semel.sinks.kinds import kind_of, kinds
from semel.verify.readers.base import NumberOf, Reader
from semel.verify.workload import Workload

__all__ = ["NumberOf", "Reader", "open_reader"]


def open_reader(sink: Sink, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> Reader:
    """The reader for a sink. `number_of` tells the number of a row by its identity, or None.

    `marked` is off below exactly-once: then no marker says what is committed.
    """
    kind = kind_of(sink)
    if not kind.reader:
        able = ", ".join(kind.name for kind in kinds().values() if kind.reader)
        raise ConfigError(
            f"The sink {sink.name} cannot be read by another process: {sink.describe()}.",
            remedy=f"Verify a pipeline into sinks of these kinds: {able}.",
        )
    reader = kind.open_reader(sink, workload, number_of, marked=marked)
    if not isinstance(reader, Reader):
        raise ConfigError(f"{kind.reader} is no reader, and the kind {kind.name!r} of sink names it.")
    return reader
