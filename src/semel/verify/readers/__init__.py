"""Readers of what a pipeline has written, one thread for each sink. They look as any user of the store would.

base     what they share: looks, rows by number, strangers, the last look
kafka    a read_committed consumer
tables   PostgreSQL, MySQL and MariaDB, SQLite: one statement for each look
files    the manifests of a folder, and the Parquet files that they name
"""

from __future__ import annotations

from semel.errors import ConfigError
from semel.sinks import Files, Kafka, MySql, Postgres, Sink, Sqlite
from semel.verify.readers.base import NumberOf, Reader
from semel.verify.workload import Workload

__all__ = ["NumberOf", "Reader", "open_reader"]


def open_reader(sink: Sink, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> Reader:
    """The reader for a sink. `number_of` tells the number of a row by its identity, or None.

    `marked` is off below exactly-once: then no manifest says which files are committed.
    """
    # Whatever a pipeline of several sinks makes of its parts, a reader goes by where the rows are.
    if isinstance(sink, Kafka):
        from semel.verify.readers.kafka import KafkaReader

        return KafkaReader(sink, workload, number_of)
    if isinstance(sink, Files):
        from semel.verify.readers.files import FilesReader

        return FilesReader(sink, workload, number_of, marked=marked)
    if isinstance(sink, Postgres | MySql | Sqlite):
        from semel.verify.readers.tables import MySqlTable, PostgresTable, SqliteTable, TableReader

        if isinstance(sink, Postgres):
            return TableReader(sink, PostgresTable(sink), workload, number_of)
        table = MySqlTable(sink) if isinstance(sink, MySql) else SqliteTable(sink)
        return TableReader(sink, table, workload, number_of)
    raise ConfigError(
        f"The sink {sink.name} cannot be read by another process: {sink.describe()}.",
        remedy="Verify a pipeline into Kafka, PostgreSQL, MySQL, MariaDB, SQLite or files.",
    )
