"""A database that answers nothing any more, while its kernel acknowledges all: TCP notices nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.dev.ports import free_ports
from semel.errors import SemelError, SinkUnavailable
from semel.ids import Branch
from semel.runtime import phases
from semel.runtime.batch import Coordinator
from semel.sinks.base import Sight
from semel.sinks.sql import sink as sql_sink
from semel.sinks.sql.sink import SqlSink
from semel.testing.harness import OURS, arrow, attempt, context, rows_of
from semel.verify.proxy import Proxy
from tests.planned import plans
from tests.sinks import mysql_rig, postgres_rig
from tests.sinks.participants import prepare, started

SECONDS = 1.0
#: How much longer it may take on a busy machine.
SLACK_S = 20.0


@dataclass
class World:
    sink: SqlSink
    proxy: Proxy

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.proxy.cut(silent=True)
        try:
            yield
        finally:
            self.proxy.repair()

    def gives_up(self, ask: Callable[[], object], why: str) -> SemelError:
        began = time.monotonic()
        with self.frozen(), pytest.raises(SinkUnavailable, match=why) as caught:
            ask()
        assert time.monotonic() - began < SECONDS + SLACK_S
        return caught.value


@pytest.fixture(params=["postgres", "mysql"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(sql_sink, "ASK_S_MIN", SECONDS)
    server = request.getfixturevalue("postgres_server" if request.param == "postgres" else "mariadb_server")
    database: Any = (postgres_rig if request.param == "postgres" else mysql_rig).Database(server.url)
    make: Callable[..., SqlSink] = database.keyed if request.param == "postgres" else database.sink
    (port,) = free_ports(1)
    direct = make("ledger", timeout_s=SECONDS)
    with started(direct) as participant:
        for committable in prepare(participant, direct, attempt(0), arrow(rows_of(1))):
            participant.commit(committable)
    host, _, behind = server.url.rpartition(":")
    own, _, rest = behind.partition("/")
    proxy = Proxy(port, int(own))
    try:
        yield World(replace(direct, url=f"{host}:{port}/{rest}"), proxy)
    finally:
        proxy.close()
        database.end()


def test_a_start_does_not_wait_for_ever_for_what_is_left_in_it(world: World) -> None:
    with closing(world.sink.participant(context(2))) as participant:
        assert participant.recover().newest_batch == 0
        world.gives_up(participant.recover, "cannot be reached|did not say what is left in it")
        assert participant.recover().newest_batch == 0


def test_nor_does_an_audit_or_a_check(world: World) -> None:
    world.gives_up(lambda: world.sink.evidence(OURS, range(9)), "cannot be reached|did not show its ledger")
    world.gives_up(lambda: world.sink.check(arrow(rows_of(1)).schema), "cannot be reached|cannot be checked")
    assert [mark.batch for mark in world.sink.evidence(OURS, range(9)).marks] == [0]
    world.sink.check(arrow(rows_of(1)).schema)


def test_a_roll_back_is_given_up_while_rows_are_being_moved_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves goes with the next transaction, and the batch that failed is told of in its own words."""
    monkeypatch.setattr(phases, "TIDY_S_MAX", SECONDS)
    sink = replace(world.sink, piece_rows=1)
    which = attempt(1, 0, 2)
    with started(sink, context(2)) as participant:
        coordinator = Coordinator(context(2), {sink.name: participant}, DecisionLog(MemoryStore()), plans())
        participant.expect(which)
        writer = sink.writer(Branch(which, sink.name, 0, 0))
        for number in range(2, 6):
            writer.write(arrow(rows_of(number)))
        moved = participant._ahead.moved  # type: ignore[attr-defined]
        give_up_at = time.monotonic() + SLACK_S
        while not moved and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert moved
        in_sight = participant.in_sight

        def then_freezes() -> Sight:
            sight = in_sight()
            world.proxy.cut(silent=True)
            # The next look for pieces is under way.
            time.sleep(SECONDS / 2)
            return sight

        monkeypatch.setattr(participant, "in_sight", then_freezes)
        began = time.monotonic()
        coordinator.roll_back(which)
        assert time.monotonic() - began < SECONDS + SLACK_S
        world.proxy.repair()
        assert coordinator.had_trouble
        writer.abort()
        participant.abort(participant.recover().branches)
        made = prepare(participant, sink, attempt(1, 1, 2), arrow(rows_of(7)))
        assert [participant.commit(committable).name for committable in made] == ["COMMITTED"]
    assert [(m.batch, m.attempt) for m in world.sink.evidence(OURS, range(9)).marks] == [(0, 0), (1, 1)]
