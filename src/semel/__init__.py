"""Exactly-once from source to sink for PySpark Structured Streaming."""

from typing import TYPE_CHECKING

from semel.errors import SemelError
from semel.late import names_in

if TYPE_CHECKING:
    from semel.runtime.phases import Limits
    from semel.runtime.pipeline import Pipeline, StreamWriter, pipeline, sink, write
    from semel.session.configure import configure
    from semel.sinks import Files, Kafka, Memory, MySql, Postgres, Sink, Sqlite
    from semel.sinks.files import committed_files, read_committed
    from semel.sources import read_kafka
    from semel.verify.workload import workload

__all__ = [
    "Files",
    "Kafka",
    "Limits",
    "Memory",
    "MySql",
    "Pipeline",
    "Postgres",
    "SemelError",
    "Sink",
    "Sqlite",
    "StreamWriter",
    "committed_files",
    "configure",
    "pipeline",
    "read_committed",
    "read_kafka",
    "sink",
    "workload",
    "write",
]
__version__ = "0.2.0"

__getattr__ = names_in(
    __name__,
    {
        **dict.fromkeys(("Pipeline", "StreamWriter", "pipeline", "sink", "write"), "semel.runtime.pipeline"),
        **dict.fromkeys(("Files", "Kafka", "Memory", "MySql", "Postgres", "Sink", "Sqlite"), "semel.sinks"),
        **dict.fromkeys(("committed_files", "read_committed"), "semel.sinks.files"),
        "Limits": "semel.runtime.phases",
        "configure": "semel.session.configure",
        "read_kafka": "semel.sources",
        "workload": "semel.verify.workload",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
