"""PostgreSQL with others in it, and PostgreSQL that goes away: locks, cut connections, power cuts, leftovers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.dev.postgres import PostgresServer, postgres
from semel.errors import Fenced, SinkUnavailable
from semel.ids import Attempt, Branch
from semel.protocol.events import Decided, Outcome
from semel.runtime.batch import Coordinator
from semel.runtime.hands import Written
from semel.runtime.phases import Limits, Only
from semel.sinks.base import StagedPart
from semel.sinks.postgres import Postgres
from semel.sinks.postgres.store import application_name
from semel.sinks.sql.sink import PIECE_ROWS
from semel.sinks.sql.store import stage_table
from semel.testing.harness import OTHERS, OURS, attempt, context, open_descriptors
from tests.planned import plans
from tests.sinks.participants import error_of, prepare, rows, stage_at_once, started
from tests.sinks.postgres_rig import MODES, Database, commit, db, eventually, quoted, write

__all__ = ["db"]
T = TypeVar("T")
TRIES_MAX = 5


def patiently(call: Callable[[], T]) -> T:
    """As the coordinator does: a store that is away is asked again."""
    for _ in range(TRIES_MAX - 1):
        try:
            return call()
        except SinkUnavailable:
            time.sleep(0.05)
    return call()


def staged_part(sink: Postgres, *batches: pa.RecordBatch, number: int = 0) -> StagedPart:
    writer = sink.writer(Branch(attempt(number), sink.name, 0, 0))
    for batch in batches:
        writer.write(batch)
    return writer.prepare()


def every_kind(database: Database) -> list[Postgres]:
    """A sink of each mode, and one whose driver leaves its promise prepared, each with a table of its own."""
    plain = [database.keyed(mode, f"t_{mode}", name=mode) for mode in MODES]
    firm = [database.keyed(mode, f"f_{mode}", name=f"firm_{mode}", firm=True) for mode in MODES if mode != "prepared"]
    return [*plain, *firm]


# Locks ------------------------------------------------------------------------------------------------------------


WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'semel-%'"
ISOLATIONS = ("serializable", "repeatable read")
DEADLOCK, CONCURRENT = "deadlock detected", "could not serialize access due to concurrent update"


def isolated(database: Database, isolation: str, mode: str = "upsert", **settings: Any) -> Postgres:
    """A sink whose user or database has another isolation by default."""
    value = isolation.replace(" ", "%5C%20")
    url = f"{database.url}?options=-c%20default_transaction_isolation%3D{value}"
    return database.keyed(mode, url=url, **settings)


@contextmanager
def met_by_another(database: Database, failure: str) -> Iterator[Callable[[], None]]:
    """Another session has changed row 2. What is yielded waits for who waits for it, and makes its move fail."""
    with database.session() as other:
        # Who waits longest before looking for deadlocks is not the one who finds it.
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("BEGIN")
        other.execute("UPDATE orders SET text = 'other' WHERE id = 2")

        def collide() -> None:
            assert eventually(lambda: bool(database.run(WAITING)))
            if failure == DEADLOCK:
                other.execute("UPDATE orders SET text = 'other' WHERE id = 1")
            other.execute("COMMIT")

        yield collide


def test_a_deadlock_is_no_outcome_and_works_when_tried_again(db: Database) -> None:
    sink = db.keyed("upsert")
    write(sink, rows((1, "a"), (2, "b")))
    with started(sink, context(2)) as participant, met_by_another(db, DEADLOCK) as collide:
        part = staged_part(sink, rows((1, "x"), (2, "y")), number=1)
        assert error_of(partial(participant.prepare, attempt(1), [part]), collide) == DEADLOCK
        assert commit(participant, participant.prepare(attempt(1), [part])) == {Outcome.COMMITTED}
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "x"), (2, "y")]
    assert db.staged() == []


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_serialization_failure_of_the_move_is_no_outcome_and_works_when_tried_again(
    db: Database, isolation: str, firm: bool
) -> None:
    sink = isolated(db, isolation, firm=firm)
    write(sink, rows((1, "a"), (2, "b")))
    with started(sink, context(2)) as participant, met_by_another(db, CONCURRENT) as collide:
        part = staged_part(sink, rows((1, "x"), (2, "y"), (3, "z")), number=1)
        assert error_of(partial(participant.prepare, attempt(1), [part]), collide) == CONCURRENT
        assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "a"), (2, "other")]
        assert commit(participant, participant.prepare(attempt(1), [part])) == {Outcome.COMMITTED}
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "x"), (2, "y"), (3, "z")]
    assert db.staged() == []


@pytest.mark.parametrize("failure", [DEADLOCK, CONCURRENT])
def test_a_failure_of_the_move_after_the_decision_is_no_outcome_and_works_when_tried_again(
    db: Database, failure: str
) -> None:
    """A driver that is started again has nothing but what is staged."""
    sink = db.keyed("upsert") if failure == DEADLOCK else isolated(db, "serializable")
    write(sink, rows((1, "a"), (2, "b")))
    with started(sink) as participant:
        (promise,) = prepare(participant, sink, attempt(1), rows((1, "x"), (2, "y"), (3, "z")))
    with started(sink, context(2)) as participant, met_by_another(db, failure) as collide:
        assert error_of(partial(participant.commit, promise), collide) == failure
        assert db.run("SELECT count(*) FROM orders") == [(2,)]
        assert participant.commit(promise) is Outcome.COMMITTED
        assert participant.commit(promise) is Outcome.ALREADY_COMMITTED
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "x"), (2, "y"), (3, "z")]
    assert db.staged() == []


def test_what_the_server_cannot_serialize_at_commit_is_committed_from_what_is_staged(db: Database) -> None:
    """The decision is made, and COMMIT itself is refused: another has read the table, and written to our ledger."""
    sink = isolated(db, "serializable", "ledger")
    write(sink, rows((0, "there")))
    with started(sink, context(2)) as participant, db.session() as other:
        other.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
        assert other.execute("SELECT count(*) FROM orders").fetchall() == [(1,)]
        (promise,) = prepare(participant, sink, attempt(1, 0, 2), rows((1, "a")), rows((2, "b")))
        other.execute("INSERT INTO semel_ledger VALUES ('theirs', 'x', 0, '', 0, 1, 0)")
        other.execute("COMMIT")
        with pytest.raises(SinkUnavailable, match="could not serialize access due to read/write dependencies"):
            participant.commit(promise)
        assert db.run("SELECT count(*) FROM orders") == [(1,)]
        assert participant.commit(promise) is Outcome.COMMITTED
        assert participant.commit(promise) is Outcome.ALREADY_COMMITTED
    assert db.run("SELECT id FROM orders ORDER BY 1") == [(0,), (1,), (2,)]
    assert db.staged() == []


@pytest.mark.parametrize("failure", [DEADLOCK, CONCURRENT])
def test_a_batch_whose_move_fails_for_a_moment_is_committed_once_by_itself(
    db: Database, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = db.keyed("upsert") if failure == DEADLOCK else isolated(db, "repeatable read")
    write(sink, rows((1, "a"), (2, "b")))
    tries: list[StagedPart] = []

    def stage(
        attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None
    ) -> dict[str, list[StagedPart]]:
        writer = sink.writer(Branch(attempt, sink.name, 0, len(tries)))
        writer.write(rows((1, "x"), (2, "y"), (3, "z")))
        tries.append(writer.prepare())
        return {sink.name: tries[-1:]}

    log = DecisionLog(MemoryStore())
    log.claim()
    with started(sink) as participant, met_by_another(db, failure) as collide, ThreadPoolExecutor(1) as drivers:
        coordinator = Coordinator(context(), {sink.name: participant}, log, plans(), Limits(stage_pause_s=0.01))
        running = drivers.submit(coordinator.exactly_once, 1, stage)
        collide()
        report = running.result(20)
        assert (report.how, report.rows, len(tries)) == ("committed", 3, 2)
        assert coordinator.exactly_once(1, stage).how == "forwarded"
    assert [failure in message for message in caplog.messages] == [True]
    assert [type(record) for record in log.journal(1)] == [Decided]
    assert db.run("SELECT * FROM orders ORDER BY 1") == [(1, "x"), (2, "y"), (3, "z")]
    assert db.staged() == []


@pytest.mark.parametrize("timeout_s", [0.3, 0.0004])
@pytest.mark.parametrize("mode", MODES)
def test_who_waits_for_a_lock_waits_no_longer_than_the_timeout(db: Database, mode: str, timeout_s: float) -> None:
    """Zero milliseconds would mean to wait forever."""
    sink = db.keyed(mode, timeout_s=timeout_s)
    write(db.keyed(mode), rows((1, "a")))
    with started(sink, context(2)) as participant, db.session() as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE orders IN EXCLUSIVE MODE")
        began = time.monotonic()
        with pytest.raises(SinkUnavailable, match="lock timeout"):
            prepare(participant, sink, attempt(1, 0, 2), rows((2, "b")))
        assert timeout_s * 0.9 < time.monotonic() - began < 4
        participant.abort(participant.recover().branches)
        other.execute("ROLLBACK")
        if timeout_s > 0.1:
            again = prepare(participant, sink, attempt(1, 1, 2), rows((2, "b")))
            assert commit(participant, again) == {Outcome.COMMITTED}
    assert db.staged() == []


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_limits_of_the_user_for_idle_or_long_work_do_not_end_a_batch(db: Database, mode: str) -> None:
    limits = {"statement_timeout": 300, "idle_in_transaction_session_timeout": 100, "idle_session_timeout": 100}
    options = "%20".join(f"-c%20{name}%3D{value}" for name, value in limits.items())
    sink = db.keyed(mode, url=f"{db.url}?options={options}")
    with started(sink) as participant:
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(rows((1, "a")))
        time.sleep(0.4)
        writer.write(rows((2, "b")))
        committables = participant.prepare(attempt(), [writer.prepare()])
        time.sleep(0.2)
        assert commit(participant, committables) == {Outcome.COMMITTED}
    assert db.run("SELECT count(*) FROM orders") == [(2,)]


# Cut connections --------------------------------------------------------------------------------------------------


def cut(database: Database, name: str) -> int:
    """End the sessions of this name, as an administrator does."""
    sql = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s"
    return len(database.run(sql, name))


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_a_connection_that_is_cut_in_the_middle_of_a_copy(db: Database, mode: str) -> None:
    sink = db.keyed(mode)
    write(sink, rows((0, "there")))
    with started(sink, context(2)) as participant:
        writer = sink.writer(Branch(attempt(1, 0, 2), sink.name, 0, 0))
        batch = rows(*((n, "text" * 10) for n in range(1000)))
        writer.write(batch)
        # Task and driver have sessions of the same name.
        assert cut(db, application_name(OURS, context(2).incarnation)) == 2

        def go_on() -> None:
            for _ in range(200):
                writer.write(batch)
            writer.prepare()

        with pytest.raises(SinkUnavailable):
            go_on()
        writer.abort()
        assert patiently(participant.recover).branches == ()
        assert db.staged() == []
        again = prepare(participant, sink, attempt(1, 1, 2), rows((1, "a")))
        assert commit(participant, again) == {Outcome.COMMITTED}
    assert db.run("SELECT id FROM orders ORDER BY 1") == [(0,), (1,)]
    assert db.sessions() == []


def test_an_administrator_ends_the_drivers_sessions_between_prepare_and_commit(db: Database) -> None:
    for sink in every_kind(db):
        with started(sink) as participant:
            promise = prepare(participant, sink, attempt(), rows((1, "a")), rows((2, "b")))
            assert cut(db, application_name(OURS, context().incarnation)) >= 1
            assert {patiently(partial(participant.commit, c)) for c in promise} == {Outcome.COMMITTED}
            assert commit(participant, promise) == {Outcome.ALREADY_COMMITTED}
        assert db.run(f"SELECT id FROM {sink.table} ORDER BY 1") == [(1,), (2,)]  # noqa: S608 - ours
    assert db.staged() == []


@pytest.mark.parametrize("mode", ["ledger", "prepared"])
def test_a_task_that_is_aborted_leaves_nothing(db: Database, mode: str) -> None:
    sink = db.keyed(mode)
    with started(sink):
        for steps in range(4):
            writer = sink.writer(Branch(attempt(steps), sink.name, 0, 0))
            if steps >= 1:
                writer.write(rows((1, "a")))
            if steps >= 2:
                writer.write(rows((2, "a")))
            if steps >= 3:
                writer.prepare()
            writer.abort()
            writer.abort()
    assert eventually(lambda: db.staged() == [] and db.sessions() == [])
    assert db.run("SELECT count(*) FROM orders") == [(0,)]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_commit_or_abort(db: Database, mode: str) -> None:
    sink = db.keyed(mode)
    write(sink, rows((0, "a")))
    before = open_descriptors()
    with started(sink, context(2)) as participant:
        for number in range(1, 7):
            promise = prepare(participant, sink, attempt(number, 0, 2), rows((number, "a")), rows((number + 100, "b")))
            if number % 2:
                assert commit(participant, promise) == {Outcome.COMMITTED}
            else:
                participant.abort(participant.recover().branches)
            assert participant.recover().branches == ()
            assert db.staged() == []
    assert eventually(lambda: db.sessions() == [])
    assert open_descriptors() == before
    assert db.run("SELECT id FROM orders ORDER BY 1") == [(n,) for n in (0, 1, 3, 5, 101, 103, 105)]


# Older and other pipelines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["upsert", "dedup", "versions"])
def test_a_sleeping_older_driver_is_ended_and_nobody_else(db: Database, mode: str) -> None:
    sink = db.keyed(mode)
    neighbours = [
        application_name(OTHERS, context().incarnation),
        application_name(OURS, context(2).incarnation),
        application_name(OURS, context(30).incarnation),
        f"semel-{OURS}-i",
        f"semel-{OURS}-i1x",
        f"semel-{OURS}",
        "psql",
    ]
    others = [psycopg.connect(db.url, autocommit=True, application_name=name) for name in neighbours]
    try:
        with started(sink) as sleeping:
            promise = prepare(sleeping, sink, attempt(), rows((1, "old")))
            with started(sink, context(2)) as participant:
                participant.abort(participant.recover().branches)
                # It would wait for the locks of the sleeping one.
                again = prepare(participant, sink, attempt(0, 1, 2), rows((1, "new")))
                assert commit(participant, again) == {Outcome.COMMITTED}
                assert {patiently(partial(sleeping.commit, c)) for c in promise} == {Outcome.ALREADY_COMMITTED}
                with pytest.raises(Fenced):
                    patiently(lambda: prepare(sleeping, sink, attempt(1), rows((2, "old"))))
                participant.abort(participant.recover().branches)
        assert [other.execute("SELECT 1").fetchall() for other in others] == [[(1,)]] * len(neighbours)
    finally:
        for other in others:
            other.close()
    assert db.run("SELECT id, text FROM orders") == [(1, "new")]


def test_what_belongs_to_others_is_neither_listed_nor_dropped(db: Database) -> None:
    ours, theirs = db.keyed("ledger"), db.keyed("prepared", "returns", name=db.keyed("ledger").name)
    write(ours, rows((1, "a")))
    write(theirs, rows((1, "a")), incarnation=2)
    which = attempt(7, pipeline=OTHERS)
    branch = Branch(which, ours.name, 0, 0)
    for sink in (ours, theirs):
        writer = sink.writer(branch)
        writer.write(rows((2, "b")))
        writer.prepare()
    copied = Branch(attempt(8), ours.name, 0, 0)
    with db.session() as connection:
        # Named as we name things, but not by us: no comment, another's comment, a name that is not a branch.
        connection.execute("CREATE TABLE semel_stage_notes (id int)")
        connection.execute(f"COMMENT ON TABLE semel_stage_notes IS '{copied}'")
        connection.execute(f"CREATE TABLE {stage_table('x')} (id int)")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE later (id int)")
        connection.execute(f"PREPARE TRANSACTION 'semel-nonsense-{db.schema}'")
    before = sorted(db.staged())
    assert len(before) == 5
    with started(ours, context(3)) as participant:
        assert participant.recover().branches == ()
        participant.abort([copied, Branch(attempt(9), ours.name, 0, 0)])
        participant.abort(participant.recover().branches)
    assert sorted(db.staged()) == before


# Power cuts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server of our own: it is killed."""
    with postgres(tmp_path_factory.mktemp("doomed"), say=print) as server:
        yield server


def test_a_server_that_is_killed_between_all_steps_loses_nothing_and_doubles_nothing(doomed: PostgresServer) -> None:
    database = Database(doomed.url)
    sinks = every_kind(database)
    participants = [sink.participant(context()) for sink in sinks]
    for participant in participants:
        participant.fence()

    def power_cut() -> None:
        doomed.kill()
        doomed.start()

    parts = [staged_part(sink, rows((1, "a"), (2, "b"))) for sink in sinks]
    power_cut()
    promises = [patiently(partial(p.prepare, attempt(), [part])) for p, part in zip(participants, parts, strict=True)]
    for sink in sinks:
        assert database.run(f"SELECT * FROM {sink.table}") == []  # noqa: S608 - ours
    power_cut()
    for participant, promise in zip(participants, promises, strict=True):
        assert {patiently(partial(participant.commit, c)) for c in promise} == {Outcome.COMMITTED}
    power_cut()
    for participant, promise in zip(participants, promises, strict=True):
        assert {patiently(partial(participant.commit, c)) for c in promise} == {Outcome.ALREADY_COMMITTED}
        assert participant.recover().newest_batch == 0
        participant.close()
    for sink in sinks:
        found = database.run(f"SELECT id, text FROM {sink.table} ORDER BY 1")  # noqa: S608 - ours
        assert found == [(1, "a"), (2, "b")], sink.name
    assert database.staged() == []


def test_a_server_that_is_away_is_unavailable_for_all_that_can_be_asked(doomed: PostgresServer) -> None:
    database = Database(doomed.url)
    sink = database.keyed("ledger", timeout_s=2)
    with started(sink) as participant:
        (promise,) = prepare(participant, sink, attempt(), rows((1, "a")))
        doomed.stop()
        try:
            branch = Branch(attempt(1), sink.name, 0, 0)
            calls: list[Callable[[], Any]] = [
                lambda: participant.commit(promise),
                lambda: participant.commit(promise),
                participant.recover,
                participant.fence,
                lambda: participant.abort([branch]),
                lambda: participant.prepare(attempt(1), []),
                lambda: sink.writer(branch).write(rows((2, "b"))),
                lambda: sink.check(rows().schema),
            ]
            for call in calls:
                with pytest.raises(SinkUnavailable) as caught:
                    call()
                assert len(str(caught.value).splitlines()) == 3
        finally:
            doomed.start()
        assert patiently(lambda: participant.commit(promise)) is Outcome.COMMITTED
    assert database.run("SELECT * FROM orders") == [(1, "a")]
    assert database.staged() == []


# Memory -----------------------------------------------------------------------------------------------------------

ROWS, BATCH_ROWS, RESIDENT_MB_MAX = 2_000_000, 10_000, 250
TASK = """
import sys
from functools import partial
from pathlib import Path
import pyarrow as pa
from semel.ids import Branch
from semel.sinks.postgres import Postgres
from semel.testing.harness import attempt
sink = Postgres(sys.argv[1], "orders", schema=sys.argv[2], mode="ledger", create=True)
batch = pa.RecordBatch.from_arrays(
    [pa.array(range(10_000)), pa.array([f"a text of row {n}" for n in range(10_000)]), pa.array([1.5] * 10_000)],
    ["id", "text", "price"],
)
writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
for _ in range(200):
    writer.write(batch)
part = writer.prepare()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
sys.stdout.write(f"{part.rows} {int(peak.split()[1]) // 1024}")
"""


def test_the_memory_of_a_task_does_not_grow_with_its_rows(db: Database) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TASK, db.url, db.schema],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written, peak_mb = map(int, done.stdout.split())
    assert written == ROWS
    assert 30 < peak_mb < RESIDENT_MB_MAX, peak_mb
    tables = db.run("SELECT relname FROM pg_class WHERE relname LIKE 'semel_stage_%'")
    counts = [db.run(f"SELECT count(*) FROM {quoted(table)}")[0][0] for (table,) in tables]  # noqa: S608 - ours
    assert (sum(counts), max(counts)) == (ROWS, PIECE_ROWS)


@pytest.mark.parametrize("mode", MODES)
def test_tasks_that_begin_at_the_same_moment_create_what_is_missing_once(db: Database, mode: str) -> None:
    """A session that has found a table missing goes on believing that for a while."""
    for number in range(3):
        sink = db.keyed(mode, f"orders_{number}")
        with started(sink) as participant:
            parts = stage_at_once(sink, attempt(), *(rows((task, "x")) for task in range(4)))
            commit(participant, participant.prepare(attempt(), parts))
        assert db.run(f"SELECT count(*) FROM {sink.table}") == [(4,)]  # noqa: S608 - our own name
