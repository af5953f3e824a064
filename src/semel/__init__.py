"""Exactly-once from source to sink for PySpark Structured Streaming."""

from semel.errors import SemelError
from semel.runtime.pipeline import Pipeline, StreamWriter, pipeline, sink, write
from semel.sinks import Files, Kafka, Memory, MySql, Postgres, Sink, Sqlite
from semel.sinks.files import committed_files, read_committed
from semel.sources import read_kafka
from semel.verify.workload import workload

__all__ = [
    "Files",
    "Kafka",
    "Memory",
    "MySql",
    "Pipeline",
    "Postgres",
    "SemelError",
    "Sink",
    "Sqlite",
    "StreamWriter",
    "committed_files",
    "pipeline",
    "read_committed",
    "read_kafka",
    "sink",
    "workload",
    "write",
]
__version__ = "0.2.0"
