"""MySQL and MariaDB."""

from semel.sinks.mysql.sink import MySql

__all__ = ["MySql"]
