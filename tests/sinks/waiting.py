"""What makes a decided batch wait: one driver with few seconds for a commit, and a standby that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import psycopg
import pyarrow as pa
import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.dev.postgres import PostgresServer
from semel.errors import CommitStalled
from semel.ids import Attempt, Branch
from semel.protocol.events import Committable, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.commits import Waiting
from semel.runtime.hands import Written
from semel.runtime.phases import Limits, Only, Report
from semel.sinks.base import Participant, Sink, StagedPart
from semel.testing.harness import context
from tests.planned import plans
from tests.sinks.participants import rows
from tests.sinks.postgres_rig import eventually

#: What a batch has for its commit, and when it says that it waits.
PATIENCE_S, TELL_AFTER_S = 3.0, 1.0
#: By how much later an answer may come on a machine that is busy with other tests.
SLACK_S = 15.0
ROWS = rows((1, "a"), (2, "b"), (3, "c"))


class Life:
    """One driver: what it is asked to commit, and what it told while it waited."""

    def __init__(self, sink: Sink, log: MemoryStore, incarnation: int, batch: pa.RecordBatch = ROWS) -> None:
        self.sink = sink
        self.batch = batch
        self.participant: Participant = sink.participant(context(incarnation))
        self.told: list[Waiting] = []
        self.seconds = 0.0
        self.tries = count()
        claims = DecisionLog(log)
        while claims.newest_claim() < incarnation:
            claims.claim()
        limits = Limits(commit_patience_s=PATIENCE_S, commit_pause_s=0.1, tell_after_s=TELL_AFTER_S)
        participants = {sink.name: self.participant}
        self.coordinator = Coordinator(context(incarnation), participants, claims, plans(), limits)
        self.coordinator.tell = self.told.append

    def run(self) -> Report:
        began = time.monotonic()
        try:
            return self.coordinator.exactly_once(1, self._stage)
        finally:
            self.seconds = time.monotonic() - began

    def _stage(
        self, attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None
    ) -> dict[str, list[StagedPart]]:
        assert (only, again) == (None, None)
        # Each try of Spark has a name of its own.
        writer = self.sink.writer(Branch(attempt, self.sink.name, 0, next(self.tries)), plan=plan)
        writer.write(self.batch)
        return {self.sink.name: [writer.prepare()]}

    def before_each_commit(self, act: Callable[[], object]) -> None:
        real = self.participant.commit

        def commit(committable: Committable) -> Outcome:
            act()
            return real(committable)

        self.participant.commit = commit  # type: ignore[method-assign]

    def stalls(self) -> CommitStalled:
        with pytest.raises(CommitStalled) as caught:
            self.run()
        assert self.seconds < PATIENCE_S + SLACK_S
        name = self.sink.name
        assert caught.value.data_now == f"batch 1 is decided; visible in: no sink yet; still to commit: {name}"
        assert self.told != []
        assert {(w.batch, w.sinks, w.visible) for w in self.told} == {(1, (name,), ())}
        return caught.value


@contextmanager
def living(sink: Sink, log: MemoryStore, incarnation: int, batch: pa.RecordBatch = ROWS) -> Iterator[Life]:
    life = Life(sink, log, incarnation, batch)
    try:
        life.participant.fence()
        yield life
    finally:
        life.coordinator.close()


# A standby that is away -----------------------------------------------------------------------------------------------


@contextmanager
def standby_away(server: PostgresServer) -> Iterator[Callable[[], None]]:
    """What is yielded asks the server to wait for a standby that does not exist; after the block it does not."""
    with psycopg.connect(server.url, autocommit=True) as connection:

        def wait_for_one() -> None:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'away'")
            connection.execute("SELECT pg_reload_conf()")
            assert eventually(lambda: _standby(server) == "away" and _waits(server))

        try:
            yield wait_for_one
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
            assert eventually(lambda: _standby(server) == "")


def _waits(server: PostgresServer) -> bool:
    """Whether commits wait by now: it is the checkpointer that tells all others, when it has read the settings, too."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        # It ends the wait of a COMMIT, which becomes visible without the standby.
        canceller = threading.Timer(0.3, connection.cancel)
        canceller.start()
        try:
            connection.execute("SELECT pg_logical_emit_message(true, 'semel', 'probe')")
        except psycopg.errors.QueryCanceled:
            return False
        finally:
            waited = not canceller.is_alive()
            canceller.cancel()
        return waited


def _standby(server: PostgresServer) -> str:
    with psycopg.connect(server.url, autocommit=True) as connection:
        found = connection.execute("SHOW synchronous_standby_names").fetchone()
        return found[0] if found else ""
