"""Topics that live as long as one run of an engine."""

from __future__ import annotations

import uuid
from typing import Any

PARTITIONS = 4
#: The broker writes down when it appended a record, whatever its producer says.
APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}


class Topics:
    def __init__(self, servers: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.servers = servers
        self._admin: Any = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def make(self, what: str) -> str:
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        name = f"{what}-{uuid.uuid4().hex[:8]}"
        self._admin.create_topics([NewTopic(name, PARTITIONS, 1, config=APPEND_TIME)])[name].result()
        return name

    def drop(self, *names: str) -> None:
        for future in self._admin.delete_topics(list(names)).values():
            future.result()

    def appended(self, name: str) -> int:
        """Records in it, those of transactions that are open and their markers included."""
        from confluent_kafka import Consumer, TopicPartition

        asking: Any = Consumer({"bootstrap.servers": self.servers, "group.id": "bench-ends"})
        try:
            ends = (asking.get_watermark_offsets(TopicPartition(name, p), timeout=30) for p in range(PARTITIONS))
            return sum(high for _, high in ends)
        finally:
            asking.close()
