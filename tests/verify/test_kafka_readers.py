"""The reader of Kafka, against records that plain clients have written: what it counts, misses and names."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from semel.dev.kafka import KafkaCluster, kafka
from semel.dev.kafka_settings import Security
from semel.dev.ports import free_port
from semel.sinks import Kafka
from semel.sources.plan import PlannedSource
from semel.testing.harness import OTHERS, OURS
from semel.verify.feeders import KafkaPlace, open_feeder
from semel.verify.kafka_feeder import create_topics
from semel.verify.readers import open_reader
from semel.verify.servers import start_servers
from semel.verify.workload import DEFAULT
from tests.kafka_world import KafkaWorld
from tests.processes import wait_until
from tests.verify.watching import SETTLE_S, names, reader_of, refused, running


@pytest.fixture
def world(kafka_cluster: KafkaCluster) -> Iterator[KafkaWorld]:
    made = KafkaWorld(kafka_cluster.bootstrap)
    yield made
    made.close()


@pytest.fixture
def topic(world: KafkaWorld) -> str:
    made = f"out-{uuid.uuid4().hex[:8]}"
    world.create_topics(made)
    return made


class Transaction:
    """A transaction of a plain client."""

    def __init__(self, world: KafkaWorld, topic: str, name: str = "") -> None:
        self.topic = topic
        settings = {"bootstrap.servers": world.servers, "transactional.id": name or uuid.uuid4().hex}
        self.producer = Producer(settings)
        self.producer.init_transactions(20)
        self.producer.begin_transaction()

    def send(self, partition: int, *values: Any, key: str | None = None) -> Transaction:
        for value in values:
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.producer.produce(self.topic, body, key, partition)
        assert self.producer.flush(20) == 0
        return self

    def commit(self) -> None:
        self.producer.commit_transaction(20)

    def abort(self) -> None:
        self.producer.abort_transaction(20)


def test_committed_records_are_counted_in_the_order_of_each_partition(world: KafkaWorld, topic: str) -> None:
    reader = reader_of(Kafka(world.servers, topic, name="out"))
    reader.check_ready()
    with running(reader):
        Transaction(world, topic).send(0, {"id": 1}, {"id": 3}).send(1, {"id": 2}).commit()
        Transaction(world, topic).send(0, {"id": 50}).abort()
        wait_until(lambda: reader.seen == 3)
        Transaction(world, topic).send(0, {"id": 0}, {"id": 3}).commit()
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.rows == Counter([0, 1, 2, 3, 3])
    assert found.in_order == {0: (1, 3, 0, 3), 1: (2,)}
    assert sorted(n for look in found.looks for n in look.added) == [0, 1, 2, 3, 3]
    assert (found.error, found.left, found.snapshots, found.strangers) == ("", (), False, ())


def test_the_identity_is_in_the_value_or_is_the_key_or_the_value(world: KafkaWorld, topic: str) -> None:
    producer = Producer({"bootstrap.servers": world.servers})
    for key, value in [("7", b"anything"), ("8", b'{"other": 1}'), ("x", b"9"), (None, b'{"id": "10"}')]:
        producer.produce(topic, value, key, 0)
    strange = [("7", b'{"id": 777}'), ("y", b"who?"), (None, None), ("z", b'{"id": null}'), ("8", b'{"id": [1]}')]
    for key, odd in strange:
        producer.produce(topic, odd, key, 1)
    assert producer.flush(20) == 0
    reader = reader_of(Kafka(world.servers, topic, name="out"))
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.in_order == {0: (7, 8, 9, 10)}
    assert sorted(found.strangers) == [
        "777",
        "[1]",
        "a record with key 'y' and value 'who?'",
        "a record with key none and value none",
        "a row without id",
    ]


def test_an_open_transaction_of_the_pipeline_is_left_and_hides_what_comes_after_it(
    world: KafkaWorld, topic: str
) -> None:
    sink = Kafka(world.servers, topic, name="out")
    Transaction(world, topic).send(0, {"id": 1}).commit()
    ours = Transaction(world, topic, f"semel-{OURS}-out-0123abcd-0-0").send(0, {"id": 2})
    others = [
        Transaction(world, topic, f"semel-{OTHERS}-out-0123abcd-0-0").send(1, {"id": 3}),
        Transaction(world, topic, f"semel-{OURS}-another-0123abcd-0-0").send(1, {"id": 4}),
    ]
    Transaction(world, topic).send(0, {"id": 5}).commit()
    reader = reader_of(sink)
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.rows == Counter([1])
    assert found.left == (f"open transaction semel-{OURS}-out-0123abcd-0-0 (ongoing)",)
    for transaction in (ours, *others):
        transaction.abort()
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert (found.rows, found.left, found.error) == (Counter([1, 5]), (), "")


def test_a_prefix_of_the_users_own_is_looked_for(world: KafkaWorld, topic: str) -> None:
    open_ = Transaction(world, topic, "billing-out-0123abcd-0-0").send(0, {"id": 2})
    reader = reader_of(Kafka(world.servers, topic, name="out", transactional_id_prefix="billing"))
    reader.settle(SETTLE_S)
    assert names(reader.sights(OURS).left) == ["(ongoing)"]
    open_.abort()


def test_partitions_that_are_added_are_read_from_their_beginning(
    world: KafkaWorld, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

    monkeypatch.setattr("semel.verify.readers.kafka.PARTITIONS_EVERY_S", 0.2)
    with running(reader_of(Kafka(world.servers, topic, name="out"))) as reader:
        Transaction(world, topic).send(0, {"id": 1}).commit()
        wait_until(lambda: reader.seen == 1)
        world._admin.create_partitions([NewPartitions(topic, 3)])[topic].result(20)
        wait_until(lambda: world.wire.partitions(topic) == 3)
        Transaction(world, topic).send(2, {"id": 2}).send(0, {"id": 3}).commit()
        wait_until(lambda: reader.seen == 3)
    assert reader.rows == Counter([1, 2, 3])


def test_a_topic_with_records_is_refused_but_not_one_with_aborted_ones(world: KafkaWorld, topic: str) -> None:
    reader = reader_of(Kafka(world.servers, topic, name="out"))
    Transaction(world, topic).send(0, {"id": 1}).abort()
    reader.check_ready()
    Transaction(world, topic).send(1, {"id": 1}).commit()
    assert "is not empty: there are records in partition 1" in refused(reader.check_ready).what


def test_a_missing_topic_is_refused_until_it_is_made(world: KafkaWorld) -> None:
    missing = f"out-{uuid.uuid4().hex[:8]}"
    reader = reader_of(Kafka(world.servers, missing, name="out"))
    assert f"There is no topic {missing}" in refused(reader.check_ready).what
    create_topics({"bootstrap.servers": world.servers}, [missing], 2)
    reader.check_ready()


def test_a_topic_that_shows_nothing_new_is_looked_at_all_the_same(world: KafkaWorld, topic: str) -> None:
    """How far looks are apart is told in the report, and rows do not come all the time."""
    reader = reader_of(Kafka(world.servers, topic, name="out"))
    with running(reader):
        wait_until(lambda: len(reader.looks) >= 3, 20)
    assert {tuple(look.added) for look in reader.looks} == {()}
    assert all(after.ended_s - before.ended_s < 3.0 for before, after in pairwise(reader.looks))
    before = len(reader.looks)
    reader.settle(10.0)
    assert reader.sights(OURS).last_looks == len(reader.looks) - before >= 0


def test_a_broker_that_is_away_is_missed_and_told_at_the_end() -> None:
    sink = Kafka(f"127.0.0.1:{free_port()}", "orders", name="out", timeout_s=1.0)
    reader = reader_of(sink)
    with running(reader):
        wait_until(lambda: reader.misses)
    reader.settle(0.1)
    found = reader.sights(OURS)
    assert found.error != ""
    assert found.looks == ()


def test_a_broker_that_dies_is_missed_and_read_on_from_where_the_reader_was(tmp_path: Path) -> None:
    with start_servers(["kafka"], tmp_path, print) as servers:
        broker = servers["kafka"]
        options = {"kafka.bootstrap.servers": broker.url, "subscribe": "rows", "startingoffsets": "earliest"}
        feeder = open_feeder([PlannedSource("kafka", options)], DEFAULT, 100)
        feeder.feed(500)
        reader = open_reader(Kafka(broker.url, "rows", name="out"), DEFAULT, feeder.number_of)
        with running(reader):
            wait_until(lambda: reader.seen == 500)
            broker.kill()
            wait_until(lambda: reader.misses)
            with ThreadPoolExecutor(1) as meanwhile:
                fed = meanwhile.submit(feeder.feed, 500)
                broker.start()
                fed.result(120)
            wait_until(lambda: reader.seen == 1000)
            broker.cut()
            misses = reader.misses
            wait_until(lambda: reader.misses > misses)
            broker.repair()
            feeder.feed(100)
            wait_until(lambda: reader.seen == 1100)
        reader.settle(60)
        found = reader.sights(OURS)
        feeder.close()
    assert (found.error, found.rows) == ("", Counter(range(1100)))
    placed: dict[int, list[int]] = {}
    for n, place in enumerate(feeder.places):
        assert isinstance(place, KafkaPlace)
        assert place.offset == len(placed.setdefault(place.partition, []))
        placed[place.partition].append(n)
    assert found.in_order == {partition: tuple(rows) for partition, rows in placed.items()}


def test_a_login_of_the_pipeline_is_used_by_feeder_and_reader(tmp_path: Path) -> None:
    with kafka(tmp_path, security=Security({"admin": "s3cr3t"}), quick=True, say=print) as cluster:
        login = {f"kafka.{name}": value for name, value in cluster.client_options("admin").items()}
        source = PlannedSource("kafka", {**login, "subscribe": "rows", "startingoffsets": "earliest"})
        feeder = open_feeder([source], DEFAULT, 10)
        feeder.check_empty()
        feeder.feed(100)
        feeder.close()
        reader = open_reader(Kafka(cluster.bootstrap, "rows", login, name="out"), DEFAULT, feeder.number_of)
        refused(reader.check_ready)
        reader.settle(SETTLE_S)
        found = reader.sights(OURS)
        assert (found.rows, found.error) == (Counter(range(100)), "")
        wrong = {**login, "kafka.sasl.password": "wrong"}
        locked_out = open_reader(Kafka(cluster.bootstrap, "rows", wrong, name="out"), DEFAULT, feeder.number_of)
        assert "login was refused" in refused(locked_out.check_ready).what


def test_a_sink_without_a_topic_of_its_own_cannot_be_watched() -> None:
    assert "topics that its rows name" in refused(lambda: reader_of(Kafka("127.0.0.1:1"))).what
