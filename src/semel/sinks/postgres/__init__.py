"""PostgreSQL."""

from semel.sinks.postgres.sink import Postgres

__all__ = ["Postgres"]
