"""Readers of every kind of sink, against rows that plain clients have written: what they count, miss and name."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from confluent_kafka import Producer

from semel.dev.kafka import KafkaCluster, kafka
from semel.dev.kafka_settings import Security
from semel.dev.mariadb import MariaDbServer
from semel.dev.ports import free_port
from semel.dev.postgres import PostgresServer
from semel.errors import ConfigError, SinkUnavailable
from semel.sinks import Files, Kafka, Memory, MySql, Postgres, Sink, Sqlite
from semel.sinks.mysql.url import settings_of
from semel.sources.plan import PlannedSource
from semel.testing.harness import OTHERS, OURS, attempt, commit, context, prepare, rows_of, stage
from semel.verify.feeders import KafkaPlace, open_feeder
from semel.verify.kafka_feeder import create_topics
from semel.verify.proxy import Proxy
from semel.verify.readers import Reader, open_reader
from semel.verify.servers import start_servers
from semel.verify.workload import DEFAULT, Workload
from tests.kafka_world import KafkaWorld
from tests.processes import wait_until
from tests.sinks.participants import started

ROWS = 100
SETTLE_S = 20.0


def number_of(identity: str) -> int | None:
    return int(identity) if identity.isdigit() and int(identity) < ROWS else None


def reader_of(sink: Sink, workload: Workload = DEFAULT, **settings: Any) -> Reader:
    return open_reader(sink, workload, number_of, **settings)


def refused(make: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value


@contextmanager
def running(reader: Reader) -> Iterator[Reader]:
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# Tables: three databases, one set of tests --------------------------------------------------------------------------


class Shop:
    """A table of one kind of database, and a plain client for it."""

    def __init__(self, kind: str, address: str, folder: Path) -> None:
        self.kind = kind
        self.address = address
        self.folder = folder
        self.table = f'Ta"b`le%s;{{x}} {uuid.uuid4().hex[:8]}' if kind != "mysql" else f"Ta%s;{uuid.uuid4().hex[:8]}`"
        self.column = 'I"d %s'

    def sink(self, address: str = "", **settings: Any) -> Sink:
        if self.kind == "sqlite":
            return Sqlite(address or f"{self.folder}/a db?.db", self.table, name="out")
        make = Postgres if self.kind == "postgres" else MySql
        return make(address or self.address, self.table, name="out", **settings)

    def workload(self) -> Workload:
        return Workload(lambda n: {self.column: n}, identity=self.column)

    def reader(self, address: str = "", **settings: Any) -> Reader:
        return reader_of(self.sink(address, **settings), self.workload())

    @contextmanager
    def session(self) -> Iterator[Any]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(f"{self.folder}/a db?.db", isolation_level=None)) as connection:
                yield connection
        elif self.kind == "postgres":
            with psycopg.connect(self.address, autocommit=True) as connection:
                yield connection.cursor()
        else:
            with pymysql.connect(**settings_of(self.address), autocommit=True) as connection:
                yield connection.cursor()

    def name(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`" if self.kind == "mysql" else quoted(name)

    def run(self, *statements: str) -> None:
        """With {table} and {column} for the quoted names."""
        names = {"table": self.name(self.table), "column": self.name(self.column)}
        with self.session() as session:
            for statement in statements:
                session.execute(statement.format(**names))

    def create(self) -> Shop:
        self.run("CREATE TABLE {table} ({column} bigint, other bigint)")
        return self

    def insert(self, *numbers: int) -> None:
        values = ", ".join(f"({n}, 0)" for n in numbers)
        self.run("INSERT INTO {table} VALUES " + values)  # noqa: S608 - ours


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    servers = {"postgres": "postgres_server", "mysql": "mariadb_server"}
    name = servers.get(request.param)
    return Shop(request.param, request.getfixturevalue(name).url if name else "", tmp_path)


def test_rows_of_a_table_are_counted_and_looks_hold_what_changed(shop: Shop) -> None:
    shop.create().insert(*range(10))
    reader = shop.reader()
    reader.look()
    shop.insert(3, 3, 11)
    reader.look()
    shop.run("DELETE FROM {table} WHERE {column} = 5")
    reader.look()
    reader.look()
    assert [(list(look.added), list(look.gone)) for look in reader.looks] == [
        (list(range(10)), []),
        ([3, 3, 11], []),
        ([], [5]),
        ([], []),
    ]
    assert all(
        before.ended_s <= look.began_s <= look.ended_s
        for before, look in zip(reader.looks, reader.looks[1:], strict=False)
    )
    assert reader.seen == 11
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.rows == Counter({**dict.fromkeys((0, 1, 2, 4, 6, 7, 8, 9, 11), 1), 3: 3})
    assert (found.error, found.left, found.strangers, found.snapshots) == ("", (), (), True)


def test_rows_that_nobody_fed_are_named(shop: Shop) -> None:
    shop.create().insert(1, 12345, 12345)
    shop.run("INSERT INTO {table} ({column}, other) VALUES (NULL, 1)")
    reader = shop.reader()
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.rows == Counter({1: 1})
    assert sorted(found.strangers) == ["12345", f"a row without {shop.column}"]


def test_of_very_many_strangers_the_rest_is_counted_once(tmp_path: Path) -> None:
    reader = reader_of(Sqlite(str(tmp_path / "shop.db"), "t"))
    for _ in range(3):
        reader.show(0.0, range(ROWS, ROWS + 1500))
    found = reader.sights(OURS).strangers
    assert (len(found), found[0], found[-1]) == (1001, "100", "and 500 more")


def test_a_thread_sees_rows_as_they_come(shop: Shop) -> None:
    shop.create()
    with running(shop.reader()) as reader:
        wait_until(lambda: reader.looks)
        shop.insert(*range(5))
        wait_until(lambda: reader.seen == 5)
        shop.insert(*range(5, 8))
        wait_until(lambda: reader.seen == 8)
    assert [look.added for look in reader.looks if look.added] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert reader.misses == 0


def test_a_table_that_the_sink_will_make_is_empty_until_then(shop: Shop) -> None:
    reader = shop.reader() if shop.kind == "sqlite" else shop.reader(create=True)
    reader.check_ready()
    reader.look()
    assert [look.added for look in reader.looks] == [()]
    shop.create().insert(1)
    reader.look()
    assert reader.rows == Counter({1: 1})
    reader.stop()


def test_a_table_with_rows_is_refused(shop: Shop) -> None:
    reader = shop.create().reader()
    reader.check_ready()
    shop.insert(1)
    assert "is not empty" in refused(reader.check_ready).what


def test_a_table_without_the_identity_is_refused_with_the_columns_that_it_has(shop: Shop) -> None:
    reader = reader_of(shop.create().sink(), Workload(DEFAULT.row, identity="order_id"))
    error = refused(reader.check_ready)
    assert f"has no column order_id, by which rows could be told apart. It has: {shop.column}, other." in error.what
    assert "@semel.workload(identity=" in error.remedy
    # A quoted name without a column is a text for SQLite: it would be found in every row.
    shop.insert(1)
    with pytest.raises(Exception, match="order_id"):
        reader.look()
    reader.stop()


def test_more_rows_than_one_fetch_are_all_counted(shop: Shop) -> None:
    shop.create()
    doubled = ["INSERT INTO {table} SELECT {column} + 1, 0 FROM {table}"] * 15
    shop.run("INSERT INTO {table} VALUES (1, 0)", *doubled)
    reader = shop.reader()
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert found.rows.total() == 2**15
    assert found.rows[16] == 1


@pytest.fixture(params=["postgres", "mysql"])
def server_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    server = request.getfixturevalue("postgres_server" if request.param == "postgres" else "mariadb_server")
    return Shop(request.param, server.url, tmp_path)


def test_a_table_that_nobody_makes_is_refused_and_missed(server_shop: Shop) -> None:
    reader = server_shop.reader()
    assert "does not exist" in refused(reader.check_ready).what
    with running(reader):
        wait_until(lambda: reader.misses)
    assert reader.looks == []
    reader.settle(0.1)
    assert server_shop.table in reader.sights(OURS).error


def test_a_server_that_is_away_is_missed_and_found_again(server_shop: Shop) -> None:
    shop = server_shop.create()
    port = free_port()
    proxy = Proxy(port, port_of(shop.address))
    reader = shop.reader(shop.address.replace(f":{port_of(shop.address)}", f":{port}"))
    try:
        with running(reader):
            shop.insert(1)
            wait_until(lambda: reader.seen == 1)
            proxy.cut()
            wait_until(lambda: reader.misses >= 2)
            shop.insert(2)
            assert reader.seen == 1
            proxy.repair()
            wait_until(lambda: reader.seen == 2)
        proxy.cut()
        reader.settle(0.5)
        found = reader.sights(OURS)
        assert found.error != ""
        assert found.misses == reader.misses >= 2
        proxy.repair()
        reader.settle(SETTLE_S)
        assert reader.sights(OURS).error == ""
        proxy.cut()
        # The last look was taken, but what is left behind cannot be listed.
        assert "left behind" in reader.sights(OURS).error
    finally:
        proxy.close()


def test_a_server_that_is_away_before_the_run_is_told_so(server_shop: Shop) -> None:
    closed = server_shop.address.replace(f":{port_of(server_shop.address)}", f":{free_port()}")
    with pytest.raises(SinkUnavailable, match="cannot be read"):
        server_shop.reader(closed).check_ready()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("this is not a database, whatever its name says" * 100)
    assert "cannot be read" in refused(reader_of(Sqlite(str(tmp_path / "x.db"), "t")).check_ready).what


# What sinks leave behind --------------------------------------------------------------------------------------------


def names(found: Any) -> list[str]:
    """The branches or files among words, without the words."""
    return sorted(words.split()[-1] for words in found)


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_what_a_postgres_sink_leaves_is_listed(postgres_server: PostgresServer, mode: str) -> None:
    check_left_behind(Postgres(postgres_server.url, f"left_{uuid.uuid4().hex[:8]}", mode=mode, create=True))


@pytest.mark.parametrize("mode", ["ledger", "xa"])
def test_what_a_mysql_sink_leaves_is_listed(mariadb_server: MariaDbServer, mode: str) -> None:
    check_left_behind(MySql(mariadb_server.url, f"left_{uuid.uuid4().hex[:8]}", mode=mode, create=True))


def test_what_a_sqlite_sink_leaves_is_listed(tmp_path: Path) -> None:
    check_left_behind(Sqlite(str(tmp_path / "shop.db"), "left", name="out"))


def test_what_a_files_sink_leaves_is_listed(tmp_path: Path) -> None:
    check_left_behind(Files(str(tmp_path / "lake"), name="out"))


def check_left_behind(sink: Sink) -> None:
    """Staged rows of this pipeline and sink are listed, and those of others are not; after the end nothing is."""
    reader, theirs = reader_of(sink), context(pipeline=OTHERS)
    reader.check_ready()
    with started(sink) as participant, started(sink, theirs) as other:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1, 2)))
        commit(other, prepare(other, sink, attempt(0, pipeline=OTHERS), rows_of(3)))
        parts = stage(sink, attempt(1), [rows_of(4), rows_of(5)])
        stage(sink, attempt(1, pipeline=OTHERS), [rows_of(6)])
        reader.settle(SETTLE_S)
        found = reader.sights(OURS)
        assert found.rows == Counter([1, 2, 3])
        assert len(found.left) == len(parts) == 2
        assert all(OURS.replace("-", "") in words.replace("-", "") for words in found.left), found.left
        assert reader.snapshots == (not sink.capabilities.commits_by_task)
        participant.abort(participant.recover().branches)
        other.abort(other.recover().branches)
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert (found.left, found.error) == ((), "")
    assert found.rows == Counter([1, 2, 3])


def test_a_pipeline_that_never_started_left_nothing(tmp_path: Path) -> None:
    sink = Sqlite(str(tmp_path / "shop.db"), "left", name="out")
    stage(sink, attempt(0), [rows_of(1)])
    reader = reader_of(sink)
    reader.settle(SETTLE_S)
    assert reader.sights(type(OURS)("")).left == ()
    assert len(reader.sights(OURS).left) == 1


def test_versions_are_read_by_the_view_of_the_newest(
    postgres_server: PostgresServer, mariadb_server: MariaDbServer
) -> None:
    for make, url in ((Postgres, postgres_server.url), (MySql, mariadb_server.url)):
        sink = make(url, f"v_{uuid.uuid4().hex[:8]}", mode="versions", key="text", create=True)
        reader = reader_of(sink)
        reader.check_ready()
        reader.look()
        with started(sink) as participant:
            commit(participant, prepare(participant, sink, attempt(0), [(1, "a"), (2, "b")]))
            reader.look()
            commit(participant, prepare(participant, sink, attempt(1), [(3, "a")]))
        reader.look()
        assert [(list(look.added), list(look.gone)) for look in reader.looks] == [([], []), ([1, 2], []), ([3], [1])]
        reader.stop()


# Files --------------------------------------------------------------------------------------------------------------


def test_files_are_read_batch_by_batch_and_gone_with_their_manifest(tmp_path: Path) -> None:
    sink = Files(str(tmp_path / "lake"), name="out")
    reader = reader_of(sink)
    reader.look()
    with started(sink) as participant:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1, 2), rows_of(2, 555)))
        reader.look()
        prepare(participant, sink, attempt(1), rows_of(3))
        reader.look()
        participant.abort(participant.recover().branches)
    next((tmp_path / "lake/_semel/manifests").rglob("*.json")).unlink()
    reader.look()
    assert [(list(look.added), list(look.gone)) for look in reader.looks] == [
        ([], []),
        ([1, 2, 2], []),
        ([], []),
        ([], [1, 2, 2]),
    ]
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert (found.rows, found.strangers) == (Counter(), ("555",))
    # Whoever reads the folder without manifests still sees them.
    assert [words.split(", ")[1] for words in found.left] == ["which is in no manifest"] * 2


def test_files_without_manifests_are_read_as_they_are(tmp_path: Path) -> None:
    sink = Files(str(tmp_path / "lake"), name="out")
    below = context(marked=False)
    reader = reader_of(sink, marked=False)
    with started(sink, below) as participant:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1, 2)))
    reader.settle(SETTLE_S)
    found = reader.sights(OURS)
    assert (found.rows, found.snapshots, found.left) == (Counter([1, 2]), False, ())
    assert reader_of(sink).rows == Counter()


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    reader = reader_of(Files(str(tmp_path), name="out"))
    reader.check_ready()
    (tmp_path / "x.parquet").write_bytes(b"")
    assert "x.parquet" in refused(reader.check_ready).what


def test_files_without_the_identity_say_so_at_the_end(tmp_path: Path) -> None:
    sink = Files(str(tmp_path / "lake"), name="out")
    with started(sink) as participant:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1)))
    reader = reader_of(sink, Workload(DEFAULT.row, identity="order_id"))
    with running(reader):
        wait_until(lambda: reader.misses)
    reader.settle(0.1)
    assert "the rows have no column order_id, only id, text" in reader.sights(OURS).error


# Kafka --------------------------------------------------------------------------------------------------------------


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


def test_a_sink_in_the_memory_of_another_process_cannot_be_read() -> None:
    assert "cannot be read by another process" in refused(lambda: reader_of(Memory("orders"))).what
