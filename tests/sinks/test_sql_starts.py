"""Starts of pipelines that write to PostgreSQL or MariaDB: who meets whom, and connections that do not come about."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pymysql
import pytest

from semel import formats
from semel.errors import ConfigError, Fenced, NewerRecord, SinkUnavailable
from semel.protocol.events import Outcome
from semel.sinks.kafka import Kafka
from semel.sinks.mysql import MySql
from semel.sinks.mysql import connection as mysql_connection
from semel.sinks.mysql import store as mysql_store
from semel.sinks.postgres import Postgres
from semel.sinks.postgres import connection as postgres_connection
from semel.sinks.sql.sink import SqlSink
from semel.testing.harness import OTHERS, attempt, context
from tests.sinks import mysql_rig, postgres_rig
from tests.sinks.participants import prepare, rows, started
from tests.sinks.postgres_rig import eventually

URLS = {"postgres": "postgresql://u@h/shop", "mysql": "mysql://u@h/shop"}
KINDS: dict[str, type[SqlSink]] = {"postgres": Postgres, "mysql": MySql}


@dataclass
class World:
    kind: str
    database: Any
    sink: SqlSink

    def sessions(self) -> set[Any]:
        """Everybody's but our own."""
        others = {
            "postgres": "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename IS NOT NULL",
            "mysql": "SELECT id FROM information_schema.processlist WHERE id <> connection_id()",
        }
        return set(self.database.run(others[self.kind]))


@pytest.fixture(params=list(KINDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind = request.param
    server = request.getfixturevalue("postgres_server" if kind == "postgres" else "mariadb_server")
    database: Any = (postgres_rig if kind == "postgres" else mysql_rig).Database(server.url)
    make: Callable[..., SqlSink] = database.keyed if kind == "postgres" else database.sink
    yield World(kind, database, make("ledger"))
    database.end()


# Two first starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["DELETE FROM {fence}", "INSERT INTO {fence}"])
@pytest.mark.parametrize("other", [1, 3], ids=["older", "newer"])
def test_of_two_first_starts_at_once_the_newer_one_wins(
    world: World, moment: str, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has found a row of the other. The other one's comes between our looking for it and our writing."""
    fence = world.sink.place.names["fence"]
    participant: Any = world.sink.participant(context(2))
    plain = participant.store.run
    met: list[int] = []

    def run(connection: Any, sql: str, values: Any = (), **names: str) -> Any:
        if sql.startswith(moment) and not met:
            met.append(other)
            row = (context().pipeline, world.sink.name, other, "orders")
            columns = "pipeline, sink, incarnation, name"
            world.database.run(f"INSERT INTO {fence} ({columns}) VALUES (%s, %s, %s, %s)", *row)  # noqa: S608 - ours
        return plain(connection, sql, values, **names)

    monkeypatch.setattr(participant.store, "run", run)
    with closing(participant):
        if other > 2:
            with pytest.raises(Fenced, match="Incarnation 2 is older than 3"):
                participant.fence()
        else:
            participant.fence()
    assert met == [other]
    found = world.database.run(f"SELECT incarnation FROM {fence} WHERE sink = %s", world.sink.name)  # noqa: S608 - ours
    assert found == [(max(2, other),)]


# Who else has written here --------------------------------------------------------------------------------------------


def test_a_fence_of_semel_0_1_gets_the_table_and_counts_for_all_tables_until_then(world: World) -> None:
    names, sink = world.sink.place.names, world.sink
    with closing(sink.participant(context(1))) as participant:
        participant.fence()
    world.database.run(f"ALTER TABLE {names['fence']} DROP COLUMN target")
    ledger = "pipeline, sink, batch, part, attempt, incarnation, row_count"
    statement = f"INSERT INTO {names['ledger']} ({ledger}) VALUES (%s, %s, 0, '', 0, 1, 3)"  # noqa: S608 - ours
    world.database.run(statement, OTHERS, sink.name)
    statement = f"INSERT INTO {names['fence']} (pipeline, sink, incarnation, name) VALUES (%s, %s, 1, 'shop')"  # noqa: S608 - ours
    world.database.run(statement, OTHERS, sink.name)

    with closing(sink.participant(context(2))) as participant:
        assert participant.recover().namesakes == (OTHERS,)
        participant.fence()
        assert participant.recover().namesakes == (OTHERS,)
    found = world.database.run(f"SELECT pipeline, target FROM {names['fence']} WHERE sink = %s", sink.name)  # noqa: S608 - ours
    assert sorted(found) == sorted([(context().pipeline, sink.table), (OTHERS, "")])


# Ledgers of other releases --------------------------------------------------------------------------------------------


def columns_of_ledger(world: World) -> set[str]:
    schema = world.sink.schema or "semel"
    found = world.database.run(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = 'semel_ledger'",
        schema,
    )
    return {str(name).lower() for (name,) in found}


def commits(world: World, incarnation: int, batch: int) -> None:
    sink, which = world.sink, attempt(batch, 0, incarnation)
    with started(sink, context(incarnation)) as participant:
        for committable in prepare(participant, sink, which, rows((batch, "a"))):
            assert participant.commit(committable) is Outcome.COMMITTED


def made_by_semel_0_1(world: World) -> None:
    """Its ledger, with one batch in it."""
    commits(world, 1, 0)
    ledger = world.sink.place.names["ledger"]
    world.database.run(f"ALTER TABLE {ledger} DROP COLUMN format, DROP COLUMN plan")


def marked(world: World) -> list[int]:
    return sorted(mark.batch for mark in world.sink.evidence(context().pipeline, range(9)).marks)


def test_a_ledger_of_semel_0_1_is_read_and_gets_what_it_lacks(world: World) -> None:
    made_by_semel_0_1(world)
    assert marked(world) == [0]
    with closing(world.sink.participant(context(2))) as participant:
        assert participant.recover().newest_batch == 0
    commits(world, 2, 1)
    assert {"format", "plan"} <= columns_of_ledger(world)
    assert marked(world) == [0, 1]
    ledger = world.sink.place.names["ledger"]
    found = world.database.run(f"SELECT batch, format FROM {ledger} WHERE sink = %s ORDER BY 1", world.sink.name)  # noqa: S608 - ours
    assert found == [(0, formats.FIRST), (1, formats.LEDGER)]


def test_a_ledger_of_semel_0_1_that_somebody_reads_stays_as_it_is_and_holds_up_no_start(world: World) -> None:
    made_by_semel_0_1(world)
    ledger = world.sink.place.names["ledger"]
    with world.database.session() as other:
        other.execute("BEGIN")
        other.execute(f"SELECT count(*) FROM {ledger}")  # noqa: S608 - ours
        commits(world, 2, 1)
        other.execute("ROLLBACK")
    assert not {"format", "plan"} & columns_of_ledger(world)
    assert marked(world) == [0, 1]
    commits(world, 3, 2)
    assert {"format", "plan"} <= columns_of_ledger(world)
    assert marked(world) == [0, 1, 2]


def test_a_ledger_of_a_newer_semel_is_refused_to_who_writes_and_to_who_looks(world: World) -> None:
    commits(world, 1, 0)
    ledger = world.sink.place.names["ledger"]
    world.database.run(f"UPDATE {ledger} SET format = format + 1 WHERE sink = %s", world.sink.name)  # noqa: S608 - ours
    told = f"The ledger of sink {world.sink.name} ({world.sink.describe()}) has format 2; this semel reads up to 1."
    with closing(world.sink.participant(context(2))) as participant, pytest.raises(NewerRecord) as caught:
        participant.recover()
    assert caught.value.what == told
    with pytest.raises(NewerRecord) as caught:
        world.sink.evidence(context().pipeline, range(9))
    assert caught.value.what == told


# Sinks of one pipeline in one database --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_firm_and_not_firm_do_not_share_a_database(kind: str) -> None:
    """A firm one ends the transaction in which the other holds its rows."""
    make = KINDS[kind]
    parent, child = make(URLS[kind], "parents", firm=False), make(URLS[kind], "children")
    for sink in (parent, child):
        with pytest.raises(ConfigError) as caught:
            sink.among([parent, child])
        assert "parents" in str(caught.value)
        assert "children" in str(caught.value)
        assert "firm=False" in caught.value.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_share_a_transaction_may_differ(kind: str) -> None:
    make = KINDS[kind]
    loose = make(URLS[kind], "orders", firm=False)
    topic = Kafka("127.0.0.1:1", "billed")
    native = make(URLS[kind], "others", mode=make.native)
    for other in (topic, native, make(URLS[kind], "elsewhere.orders", name="b"), make(URLS[kind] + "2", "c")):
        assert loose.among([loose, other]) == make(URLS[kind], "orders", mode="ledger", firm=False)
    both = [loose, make(URLS[kind], "others", firm=False)]
    assert [sink.among([*both, topic]).firm for sink in both] == [False, False]  # type: ignore[attr-defined]


# Connections ----------------------------------------------------------------------------------------------------------


def test_a_session_that_cannot_be_set_up_is_closed_and_is_no_fault_of_the_url(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = postgres_connection if world.kind == "postgres" else mysql_connection
    # As many parameters as there are, and nothing that a server knows.
    monkeypatch.setattr(
        module, "SESSION", "SELECT nonsense(%s, %s)" if world.kind == "postgres" else "SET nonsense = %s, %s, %s"
    )
    before = world.sessions()
    with pytest.raises((ConfigError, SinkUnavailable)) as caught, started(world.sink):
        pytest.fail("it started")
    assert "url" not in str(caught.value)
    expected = {
        "postgres": "PostgreSQL does not take the settings of a session: function nonsense",
        "mysql": "MySQL did not set up a session: Unknown system variable 'nonsense'",
    }
    assert str(caught.value).startswith(expected[world.kind])
    # The error, which we still hold, holds on to the frames in which it came about, and to the connection in them.
    assert eventually(lambda: world.sessions() <= before)


def test_a_connection_that_breaks_while_it_is_set_up_is_to_be_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.sessions()

    def broken(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("gone") if world.kind == "postgres" else OSError("gone")

    if world.kind == "postgres":
        monkeypatch.setattr(psycopg.Connection, "execute", broken)
    else:
        monkeypatch.setattr(mysql_connection.MySqlPlace, "_set_up", broken)
    with pytest.raises(SinkUnavailable, match=r"cannot be reached: gone") as caught, started(world.sink):
        pytest.fail("it started")
    assert caught.value
    monkeypatch.undo()
    assert eventually(lambda: world.sessions() <= before)


def test_a_connection_whose_lock_fails_is_closed(mariadb_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    database = mysql_rig.Database(mariadb_server.url)
    world = World("mysql", database, database.sink())
    before = world.sessions()
    plain = mysql_connection.execute

    def refused(connection: Any, sql: str, *rest: Any, **names: str) -> Any:
        if "GET_LOCK" in sql:
            raise pymysql.err.OperationalError(1205, "no")
        return plain(connection, sql, *rest, **names)

    monkeypatch.setattr(mysql_store, "execute", refused)
    with pytest.raises(SinkUnavailable) as caught, started(world.sink):
        pytest.fail("it started")
    assert caught.value
    assert eventually(lambda: world.sessions() <= before)


def test_a_machine_that_vanished_is_noticed(world: World) -> None:
    """A statement may take an hour, so it is the system that has to ask whether the server's is there."""
    sink = world.sink
    with started(sink) as participant:
        side: Any = participant.store._side  # type: ignore[attr-defined]
        if world.kind == "postgres":
            with socket.socket(fileno=socket.dup(side.fileno())) as copy:
                found = _keepalive(copy)
        else:
            found = _keepalive(side._sock)
    # A twelfth of a minute here: half of it until the first question, then three questions.
    assert found == (1, 2, 1, 3, 5000)


def _keepalive(connection: socket.socket) -> tuple[int, ...]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    options = [(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    return tuple(connection.getsockopt(*option) for option in [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *options])
