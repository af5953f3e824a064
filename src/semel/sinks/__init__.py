"""The sinks. A new one is one package here, one record in `kinds.py`, one harness in tests/contract and one page."""

from typing import TYPE_CHECKING

from semel.late import names_in

if TYPE_CHECKING:
    from semel.sinks.base import Sink
    from semel.sinks.files import Files
    from semel.sinks.kafka import Kafka
    from semel.sinks.memory import Memory
    from semel.sinks.mysql import MySql
    from semel.sinks.postgres import Postgres
    from semel.sinks.sqlite import Sqlite

__all__ = ["Files", "Kafka", "Memory", "MySql", "Postgres", "Sink", "Sqlite"]

__getattr__ = names_in(
    __name__, {name: f"semel.sinks.{name.lower()}" if name != "Sink" else "semel.sinks.base" for name in __all__}
)
