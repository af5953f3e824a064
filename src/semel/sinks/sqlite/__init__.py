"""SQLite, the embedded default."""

from semel.sinks.sqlite.sink import Sqlite

__all__ = ["Sqlite"]
