"""Readers of every kind of sink, against rows that plain clients have written: what they count, miss and name."""

from __future__ import annotations

import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from semel.dev.mariadb import MariaDbServer
from semel.dev.ports import free_port
from semel.dev.postgres import PostgresServer
from semel.errors import SinkUnavailable
from semel.sinks import Files, Memory, MySql, Postgres, Sink, Sqlite
from semel.sinks.mysql.url import settings_of
from semel.testing.harness import OTHERS, OURS, attempt, commit, context, prepare, rows_of, stage
from semel.verify.proxy import Proxy
from semel.verify.readers import Reader
from semel.verify.workload import DEFAULT, Workload
from tests.processes import wait_until
from tests.sinks.participants import started
from tests.verify.watching import ROWS, SETTLE_S, reader_of, refused, running


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


def test_a_sink_in_the_memory_of_another_process_cannot_be_read() -> None:
    assert "cannot be read by another process" in refused(lambda: reader_of(Memory("orders"))).what
