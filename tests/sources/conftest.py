"""Topics of a real broker, and what is in them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from semel.dev.kafka import KafkaCluster


@dataclass(frozen=True)
class Topic:
    """A topic of the test's own."""

    name: str
    servers: str
    login: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.servers, **self.login}

    def create(self, partitions: int = 1) -> None:
        client = AdminClient(self.options)
        client.create_topics([NewTopic(self.name, partitions)])[self.name].result(30)

    def set_up(self, **config: str) -> None:
        """Settings of the topic."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name, config)
        # A client that nobody holds ends before its answer comes.
        client = AdminClient(self.options)
        client.alter_configs([resource])[resource].result(30)

    def put(self, values: Iterable[object], partition: int = 0) -> None:
        self._produce(Producer(self.options), values, partition)

    def put_in_transaction(self, values: Iterable[object], *, commit: bool, partition: int = 0) -> None:
        producer = self.open_transaction(values, partition)
        producer.commit_transaction() if commit else producer.abort_transaction()

    def open_transaction(self, values: Iterable[object], partition: int = 0) -> Producer:
        """Records that are in the log and not committed. The caller ends the transaction."""
        producer = Producer({**self.options, "transactional.id": f"t-{uuid.uuid4().hex}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        self._produce(producer, values, partition)
        return producer

    def _produce(self, producer: Producer, values: Iterable[object], partition: int) -> None:
        for value in values:
            producer.produce(self.name, str(value).encode(), partition=partition)
        assert producer.flush(30) == 0

    def delete_before(self, offset: int, partition: int = 0) -> None:
        """As retention does: the records before an offset are gone."""
        wanted = TopicPartition(self.name, partition, offset)
        client = AdminClient(self.options)
        client.delete_records([wanted])[wanted].result(30)

    def groups(self) -> set[str]:
        """Every group that the broker knows."""
        listed = AdminClient(self.options).list_consumer_groups().result(30)
        return {group.group_id for group in listed.valid}

    def group_is_at(self, group: str) -> dict[int, int]:
        """What the broker says a group has committed, by partition."""
        client = AdminClient(self.options)
        asked = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        return {p.partition: p.offset for p in asked[group].result(30).topic_partitions if p.topic == self.name}

    def set_group(self, group: str, offsets: dict[int, int]) -> None:
        client = AdminClient(self.options)
        wanted = [TopicPartition(self.name, partition, offset) for partition, offset in offsets.items()]
        client.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, wanted)])[group].result(30)


@pytest.fixture
def make_topic(kafka_cluster: KafkaCluster) -> Callable[..., Topic]:
    """A new topic: `make_topic(partitions=2, prefix="orders")`."""

    def make(partitions: int = 1, prefix: str = "orders") -> Topic:
        topic = Topic(f"{prefix}-{uuid.uuid4().hex[:8]}", kafka_cluster.bootstrap)
        topic.create(partitions)
        return topic

    return make


@pytest.fixture
def topic(make_topic: Callable[..., Topic]) -> Topic:
    return make_topic()
