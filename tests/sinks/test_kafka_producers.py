"""Transactional ids are few and never shared: slots by file lock, producers made ahead, no epoch used twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import BatchFailed
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.kafka import Kafka
from semel.sinks.kafka import pool as pools
from semel.sinks.kafka.delivery import DeliveryFailed, Failure
from semel.sinks.kafka.ids import Lease, Use, id_pattern
from semel.sinks.kafka.markers import Fate
from semel.sinks.kafka.pool import WARM_MAX, Pool, Ready
from semel.sinks.kafka.wire.requests import LogRecord
from semel.testing.harness import OTHERS, OURS, attempt
from tests.sinks.kafka_rig import Rig, prepare, records_of, stage_one, started

HOLDER = """
import sys, time
from pathlib import Path
from semel.sinks.kafka.pool import Lease

lease = Lease("p", Path(sys.argv[1]))
lease.note(0, (3, 0))
lease.note(1, (3, 0))
print(lease.slot, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process with a lease, which has used two ids in batch 3; and the slot that it got."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


# Leases -----------------------------------------------------------------------------------------------------------


def test_two_processes_get_different_slots(tmp_path: Path, holder: tuple[subprocess.Popen[str], int]) -> None:
    leases = [Lease("p", tmp_path) for _ in range(2)]
    assert (holder[1], [lease.slot for lease in leases]) == (0, [1, 2])
    ids = {lease.transactional_id(n) for lease in leases for n in range(3)}
    assert len(ids) == 6
    for lease in leases:
        lease.release()


def test_a_killed_process_leaves_its_slot_and_what_it_used_the_ids_for(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], int]
) -> None:
    process, slot = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    lease = Lease("p", tmp_path)
    assert (lease.slot, lease.uses) == (slot, {0: (3, 0), 1: (3, 0)})
    # What was prepared under them in batch 3 may be decided: they are free in batch 4, and in the next attempt.
    assert [lease.is_free(n, (3, 0)) for n in range(3)] == [False, False, True]
    assert [lease.is_free(n, (3, 1)) for n in range(3)] == [True, True, True]
    lease.release()


def test_a_slot_that_is_released_is_leased_again(tmp_path: Path) -> None:
    first = Lease("p", tmp_path)
    kept = Lease("p", tmp_path)
    first.note(0, (7, 2))
    name = first.transactional_id(0)
    first.release()
    again = Lease("p", tmp_path)
    assert (again.slot, again.uses, again.transactional_id(0)) == (0, {0: (7, 2)}, name)
    for lease in (again, kept):
        lease.release()


@pytest.mark.parametrize("content", [b'{"0": [3', b'{"0": [5, 0]}9]}', b'{"0": 3}', b"\xff\x00"])
def test_a_slot_file_that_was_cut_short_is_taken_for_an_empty_one(tmp_path: Path, content: bytes) -> None:
    """An id that is taken too early aborts a branch, which is then proven gone and written again."""
    (tmp_path / "slot-0").write_bytes(content)
    lease = Lease("p", tmp_path)
    assert (lease.slot, lease.uses) == (0, {})
    lease.note(0, (4, 0))
    lease.release()
    again = Lease("p", tmp_path)
    assert again.uses == {0: (4, 0)}
    again.release()


def test_a_shorter_note_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    lease = Lease("p", tmp_path)
    lease.note(0, (123_456_789, 10))
    lease.note(0, (5, 0))
    assert (tmp_path / "slot-0").read_text() == '{"0": [5, 0]}'
    lease.release()


def test_the_folder_of_the_slots_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp a name can be taken by anybody."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lease = Lease("p")
    lease.release()
    (top,) = tmp_path.iterdir()
    assert (top.name, top.stat().st_mode & 0o777) == (f"semel-{os.getuid()}", 0o700)
    elsewhere = top.rename(tmp_path / "elsewhere")
    top.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        Lease("p")


def test_ids_are_recognised_by_their_own_prefix_and_by_no_other(tmp_path: Path) -> None:
    """The beginning of one prefix may be another prefix."""
    prefixes = ["orders", "orders-eu", "orders-eu-1", "orders-eu-00000000-0", "o.ders", "orders-0"]
    leases = {prefix: Lease(prefix, tmp_path / prefix) for prefix in prefixes}
    for prefix in prefixes:
        pattern = id_pattern(prefix)
        assert [p for p, lease in leases.items() if pattern.fullmatch(lease.transactional_id(12))] == [prefix]
        assert not pattern.fullmatch(f"{prefix}-probe")
    for lease in leases.values():
        lease.release()


# The pool, with producers that do nothing -------------------------------------------------------------------------


class FakeProducer:
    """Counts who initialised what; fails or waits when told to."""

    made: list[str]
    dropped: list[str]
    fail = False
    gate: threading.Event

    def __init__(self, conf: Mapping[str, str]) -> None:
        self.id = conf["transactional.id"]

    def learn(self, topics: Sequence[str]) -> None:
        assert topics == ("control", "orders")

    def init_transactions(self) -> None:
        assert self.gate.wait(10)
        if self.fail:
            raise DeliveryFailed("no", (Failure("_FAIL", "no"),))
        self.made.append(self.id)

    def drop(self) -> None:
        self.dropped.append(self.id)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeProducer]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    use_fakes(monkeypatch)
    return FakeProducer


def use_fakes(patch: pytest.MonkeyPatch) -> None:
    def make(conf: Mapping[str, str], *, by_row: bool) -> FakeProducer:
        assert not by_row
        return FakeProducer(conf)

    patch.setattr(pools, "make_producer", make)
    FakeProducer.made, FakeProducer.dropped, FakeProducer.fail = [], [], False
    FakeProducer.gate = threading.Event()
    FakeProducer.gate.set()


@pytest.fixture
def pool(fake: type[FakeProducer]) -> Iterator[Pool]:
    made = new_pool()
    yield made
    made.release()


def new_pool() -> Pool:
    return Pool("p", {"a": "b"}, topics=("control", "orders"), by_row=False)


def test_the_producer_that_was_made_ahead_is_used(pool: Pool, fake: type[FakeProducer]) -> None:
    first = pool.take((0, 0))
    pool.warm_up((0, 0))
    pool.settle()
    assert len(fake.made) == 2
    second = pool.take((1, 0))
    assert (len(fake.made), second.id) == (2, fake.made[1])
    assert first.id != second.id
    assert fake.dropped == []


def test_one_that_is_still_being_made_is_waited_for(pool: Pool, fake: type[FakeProducer]) -> None:
    """Made twice at a time, one of the two would fence the other."""
    pool.take((0, 0))
    fake.gate.clear()
    pool.warm_up((0, 0))
    opener = threading.Timer(0.2, fake.gate.set)
    opener.start()
    ready = pool.take((1, 0))
    opener.join()
    assert fake.made[1:] == [ready.id]


def test_when_it_could_not_be_made_ahead_the_next_task_makes_its_own(pool: Pool, fake: type[FakeProducer]) -> None:
    pool.take((0, 0))
    fake.fail = True
    pool.warm_up((0, 0))
    pool.settle()
    assert len(fake.dropped) == 1
    with pytest.raises(DeliveryFailed, match="no"):
        pool.take((1, 0))
    fake.fail = False
    assert pool.take((1, 0)).id in fake.made
    assert len(fake.dropped) == 2


def test_an_id_is_not_used_twice_in_one_attempt_even_by_the_next_process(fake: type[FakeProducer]) -> None:
    """Spark may retry a task in another process on the same machine, while the first branch is still wanted."""
    first = new_pool()
    ids = {first.take((5, 0)).id for _ in range(3)}
    first.warm_up((5, 0))
    first.release()
    second = new_pool()
    again = {second.take((5, 0)).id for _ in range(3)}
    assert (len(ids), len(again), ids & again) == (3, 3, set())
    # In the next attempt everything before is settled, and the first ids are free.
    assert second.take((5, 1)).id in ids
    second.release()


def test_one_made_ahead_for_a_batch_that_has_used_its_id_since_is_dropped(pool: Pool, fake: type[FakeProducer]) -> None:
    pool.take((4, 0))
    pool.warm_up((4, 0))
    pool.settle()
    warm = fake.made[-1]
    pool.lease.note(1, (9, 0))
    assert pool.take((5, 0)).id != warm
    assert fake.dropped == [warm]


def test_what_was_made_ahead_is_let_go_at_the_end(fake: type[FakeProducer]) -> None:
    pool = new_pool()
    pool.take((0, 0))
    pool.warm_up((0, 0))
    pool.release()
    assert fake.dropped == fake.made[1:]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), min_size=1, max_size=25))
def test_the_ids_stay_few_and_none_is_shared(batches: list[tuple[int, bool, bool]]) -> None:
    """Batches of some tasks, some of them tried twice, some after a restart of the process."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        use_fakes(patch)
        pool, ids, producers = new_pool(), set[str](), list[Any]()
        for batch, (tasks, twice, restart) in enumerate(batches):
            for number in range(1 + twice):
                taken = run_tasks(pool, (batch, number), tasks)
                assert len({ready.id for ready in taken}) == tasks
                ids |= {ready.id for ready in taken}
                producers += [ready.producer for ready in taken]
                assert len(pool._warm) <= WARM_MAX
            if restart:
                pool.release()
                pool = new_pool()
        pool.release()
        # One that has served is never taken again, so no transaction shares its epoch with another.
        assert len(set(map(id, producers))) == len(producers)
        # While a batch is open the ids of the one before may be busy, and some are being made ready for the next.
        assert len(ids | set(FakeProducer.made)) <= 2 * max(tasks for tasks, _, _ in batches) + WARM_MAX


def run_tasks(pool: Pool, use: Use, tasks: int) -> list[Ready]:
    taken = []
    for _ in range(tasks):
        taken.append(pool.take(use))
        pool.warm_up(use)
    return taken


# With a broker ----------------------------------------------------------------------------------------------------


def test_no_two_transactions_share_a_producer_id_and_epoch(rig: Rig) -> None:
    """KAFKA-17754: a late EndTxn of the old protocol hits the next transaction of the same producer id and epoch."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        for batch in range(20):
            number = 0
            if batch % 4 == 3:
                prepare(participant, sink, attempt(batch), records_of(1000 + batch))
                participant.abort(participant.recover().branches)
                number = 1
            for committable in prepare(
                participant, sink, attempt(batch, number), records_of(2 * batch), records_of(2 * batch + 1)
            ):
                assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(topic) == list(range(40))
    log = rig.world.marker_log(sink.name)
    markers = [r for r in _control_records(rig, log.partition) if sink.name.encode() in (r.key or b"")]
    in_transactions = [r for r in markers if r.producer_id >= 0 and r.key and r.key.startswith(b"marker/")]
    assert len(in_transactions) == 45
    assert len({(r.producer_id, r.epoch) for r in in_transactions}) == 45
    # Two tasks, and those that are made ready for the next batch: however many batches there are.
    assert len({r.producer_id for r in in_transactions}) <= 6


def _control_records(rig: Rig, partition: int) -> list[LogRecord]:
    return rig.raw(rig.world.control_topic)[partition]


def test_producers_made_ahead_hold_nothing_open(rig: Rig) -> None:
    """A transaction that is open without rows would hold up readers for nothing."""
    sink = rig.sink(rig.topic())
    with started(sink) as participant:
        for batch in range(3):
            for committable in prepare(participant, sink, attempt(batch), records_of(batch)):
                participant.commit(committable)
        pools.settle_all()
        assert rig.open_ids() == []


def test_a_producer_that_was_fenced_while_it_waited_fails_its_batch_and_not_the_next(rig: Rig) -> None:
    """A start of the pipeline may fence an id that a task has made ready."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        for committable in prepare(participant, sink, attempt(0), records_of(0)):
            participant.commit(committable)
        pools.settle_all()
        (pool,) = pools._POOLS.values()
        for warm in pool._warm:
            made = warm.result()
            assert made is not None
            assert rig.world.wire.raise_epoch(made.id, 60_000) == "NO_ERROR"
        with pytest.raises(BatchFailed, match=r"did not (take a row|let a task write)"):
            prepare(participant, sink, attempt(1), records_of(1))
        for committable in prepare(participant, sink, attempt(1, 1), records_of(1)):
            assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(topic) == [0, 1]


def test_a_branch_is_left_open_by_its_task_and_ended_by_the_driver(rig: Rig) -> None:
    """`drop` sends nothing: confluent-kafka's `close` would abort what was prepared."""
    topic = rig.topic()
    for by_row in (False, True):
        sink = rig.sink(topic, name=f"orders_{rig.suffix}_{by_row}".lower())
        batch = records_of(1 + by_row)
        if by_row:
            batch = batch.append_column("timestamp", pa.array([None], pa.timestamp("us")))
        with started(sink) as participant:
            part = stage_one(sink, Branch(attempt(), sink.name, 0, 0), batch)
            pools.release_all()
            assert rig.marker(str(part.branch)).fate is Fate.OPEN
            (committable,) = participant.prepare(attempt(), [part])
            assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(topic) == [1, 2]


@pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])
@pytest.mark.parametrize("rows", [1, 5000])
def test_a_task_that_gives_up_ends_its_transaction_at_once(rig: Rig, by_row: bool, rows: int) -> None:
    """librdkafka waits until every row that it gives up is reported: who does not listen waits for the time limit."""
    sink = rig.sink(rig.topic())
    batch = records_of(*range(rows))
    if by_row:
        batch = batch.append_column("timestamp", pa.array([None] * rows, pa.timestamp("us")))
    writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
    writer.write(batch)
    began = time.monotonic()
    writer.abort()
    assert time.monotonic() - began < 3.0
    assert rig.open_ids() == []
    assert rig.visible(sink.topic) == []


def test_by_default_no_two_pipelines_and_no_two_sinks_share_ids() -> None:
    one, two = Kafka("127.0.0.1:1", "orders"), Kafka("127.0.0.1:1", "returns")
    assert one.prefix(OURS) == f"semel-{OURS}-kafka_orders"
    assert len({one.prefix(OURS), one.prefix(OTHERS), two.prefix(OURS), two.prefix(OTHERS)}) == 4
