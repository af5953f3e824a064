"""Every sink that semel ships, by kind: the contract suite, the docs check and the CLI go through this table."""

from __future__ import annotations

from semel.sinks.base import Sink
from semel.sinks.files import Files
from semel.sinks.kafka import Kafka
from semel.sinks.memory import Memory
from semel.sinks.mysql import MySql
from semel.sinks.postgres import Postgres
from semel.sinks.sqlite import Sqlite

SINKS: dict[str, type[Sink]] = {sink.kind: sink for sink in (Memory, Sqlite, Files, Kafka, Postgres, MySql)}
