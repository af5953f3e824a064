"""Bugs that other exactly-once Kafka sinks have shipped, each as a test with its number. Those that need Spark are in
tests/e2e.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from semel.decisions.records import journal_entry, parse_journal_entry
from semel.errors import BatchFailed
from semel.ids import Branch
from semel.protocol.events import Committable, Decided, Outcome
from semel.sinks.base import Participant
from semel.sinks.kafka.delivery import DeliveryFailed, Failure
from semel.sinks.kafka.markers import Fate
from semel.sinks.kafka.participant import AMBIGUOUS
from semel.sinks.kafka.pool import release_all, settle_all
from semel.sinks.kafka.sink import Kafka
from semel.sinks.kafka.wire.producer import suits
from semel.sinks.kafka.wire.requests import Transaction
from semel.testing.harness import attempt, context
from tests.processes import wait_until
from tests.sinks.kafka_rig import Rig, prepare, prepare_one, records_of, stage, stage_one, started

TIMESTAMP = pa.array([None], pa.timestamp("us"))


# 1: failed sends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])
def test_a_send_that_the_broker_refuses_fails_the_batch(rig: Rig, by_row: bool) -> None:
    """FLINK-31305, FLINK-35749, seatunnel#11534: a failed asynchronous send was lost and the batch "succeeded".

    The client takes the row; only the delivery report, which comes with the flush, says that the broker did not.
    """
    topic = rig.topic(partitions=1, config={"max.message.bytes": "1000"})
    sink = rig.sink(topic)
    batch = pa.RecordBatch.from_pydict({"key": ["7"], "value": ["x" * 5000]})
    if by_row:
        batch = batch.append_column("timestamp", TIMESTAMP)
    with started(sink) as participant:
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(batch)
        with pytest.raises(BatchFailed) as caught:
            writer.prepare()
        writer.abort()
        assert str(caught.value) == (
            f"Kafka topic {topic} at {rig.servers} did not take a row (partition 0, key '7', 5000 bytes): "
            "Broker: Message size too large.\n"
            "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
            "  what to do: Raise max.message.bytes of the topic and kafka.max.request.size of the sink, or make the "
            "row smaller; the batch runs again from the same offsets."
        )
        assert rig.open_ids() == []
        assert participant.recover().newest_batch is None
    assert rig.visible(topic) == []


@pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])
def test_one_refused_row_among_many_fails_the_batch_and_none_is_visible(rig: Rig, by_row: bool) -> None:
    """The same, where the other rows were acknowledged long before."""
    topic = rig.topic(partitions=1, config={"max.message.bytes": "20000"})
    sink = rig.sink(topic, options={"batch.num.messages": "100"})
    rows = pa.RecordBatch.from_pydict(
        {"key": [str(i) for i in range(2000)], "value": ["x" * (50_000 if i == 700 else 50) for i in range(2000)]}
    )
    if by_row:
        rows = rows.append_column("timestamp", pa.nulls(2000, pa.timestamp("us")))
    with started(sink), pytest.raises(BatchFailed, match=r"key '700', 50000 bytes.*Message size too large"):
        stage(sink, attempt(), rows)
    arrived = [int(record.key or b"") for record in rig.raw(topic)[0]]
    assert arrived[:600] == list(range(600))
    assert 700 not in arrived
    assert rig.visible(topic) == []


def test_a_refused_row_is_named_by_whoever_writes_after_it(rig: Rig) -> None:
    """librdkafka refuses rows of a broken transaction, which says nothing about these."""
    sink = rig.sink(rig.topic(partitions=1, config={"max.message.bytes": "1000"}))
    rows = [pa.RecordBatch.from_pydict({"key": [key], "value": ["x" * n]}) for key, n in (("7", 5000), ("8", 5))]
    with started(sink):
        writer: Any = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(rows[0].append_column("timestamp", TIMESTAMP))
        producer = writer._ready.producer
        wait_until(producer._why_purged)
        with pytest.raises(BatchFailed, match=r"did not take a row \(partition 0, key '7', 5000 bytes\)"):
            writer.write(rows[1].append_column("timestamp", TIMESTAMP))
        writer.abort()


def test_rows_that_were_given_up_are_not_taken_for_the_cause(rig: Rig) -> None:
    """They may be reported before the row that the broker refused, and so may those that came with it."""
    sink = rig.sink(rig.topic())
    with started(sink):
        writer: Any = sink.writer(Branch(attempt(), sink.name, 0, 0))
        writer.write(records_of(1).append_column("timestamp", TIMESTAMP))
        producer = writer._ready.producer
        said = [("_PURGE_QUEUE", b"8", 5), ("MSG_SIZE_TOO_LARGE", b"6", 5), ("MSG_SIZE_TOO_LARGE", b"7", 5000)]
        producer._failures += [Failure(name, "too large", sink.topic, 0, key, size) for name, key, size in said]
        with pytest.raises(DeliveryFailed) as fatal:
            producer._call(Mock(side_effect=KafkaException(KafkaError(KafkaError._FATAL))))
        assert fatal.value.failures[0].key == b"7"
        with pytest.raises(BatchFailed, match=r"did not take a row \(partition 0, key '7', 5000 bytes\): too large"):
            writer.prepare()
        writer.abort()


# 2: empty transactions --------------------------------------------------------------------------------------------


def test_a_batch_without_rows_opens_no_transaction_and_is_known_to_be_committed(rig: Rig) -> None:
    """FLINK-31363: committing an empty transaction failed with INVALID_TXN_STATE, or was misread."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        parts = stage(sink, attempt(0), records_of(), records_of())
        assert [(part.rows, part.payload) for part in parts] == [(0, {}), (0, {})]
        assert rig.open_ids() == []
        outcomes = {c.key: participant.commit(c) for c in participant.prepare(attempt(0), parts)}
        assert outcomes[f"{sink.name}/empty"] is Outcome.COMMITTED
    with started(sink, context(2)) as participant:
        assert participant.recover().newest_batch == 0
        mixed = prepare(participant, sink, attempt(1, 0, 2), records_of(), records_of(5))
        assert sorted(participant.commit(c).name for c in mixed) == ["ALREADY_COMMITTED", "COMMITTED"]
    assert rig.visible(topic) == [5]


def test_the_broker_itself_does_not_commit_an_empty_transaction(rig: Rig) -> None:
    """What the sink must not rely on, so that the day it changes is noticed."""
    name = f"empty-{rig.suffix}"
    empty = rig.initialise(name)
    assert rig.world.wire.end(empty, commit=True) == "INVALID_TXN_STATE"
    assert "INVALID_TXN_STATE" in AMBIGUOUS


# 3: slower than the timeout ---------------------------------------------------------------------------------------


def test_a_transaction_that_ran_out_of_time_is_gone_and_is_written_again(rig: Rig) -> None:
    """Flink logs it, goes on, and the rows are lost. Here the marker proves that they are gone, and only they are."""
    topic = rig.topic()
    sink = rig.sink(topic, transaction_timeout_ms=2000)
    with started(sink) as participant:
        late = prepare_one(participant, sink, attempt(0), records_of(1, 2))
        wait_until(lambda: rig.marker(late.branches[0]).fate is Fate.ABORTED, 30)
        assert participant.commit(late) is Outcome.GONE
    with started(sink, context(2)) as participant:
        assert participant.commit(late) is Outcome.GONE
        again = prepare_one(participant, sink, attempt(0, 1, 2), records_of(1, 2))
        assert again.key == late.key
        assert participant.commit(again) is Outcome.COMMITTED
        assert participant.commit(late) is Outcome.GONE
    assert rig.visible(topic) == [1, 2]


# 4: answers that do not say what happened -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "outcome"), [(True, Outcome.ALREADY_COMMITTED), (False, Outcome.GONE)], ids=["committed", "aborted"]
)
@pytest.mark.parametrize("fresh", [False, True], ids=["same-driver", "fresh-driver"])
def test_fenced_is_neither_success_nor_failure(rig: Rig, committed: bool, outcome: Outcome, fresh: bool) -> None:
    """FLINK-8086, seatunnel#11569: "fenced" was taken for "already committed", and the rows were lost.

    The broker gives the same answer for an id that was used again after a commit and after an abort.
    """
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), records_of(1, 2))
        transaction = rig.transaction(committable)
        assert rig.world.wire.end(transaction, commit=committed) == "NO_ERROR"
        used_again = rig.initialise(transaction.id)
        assert used_again.epoch > transaction.epoch
        assert rig.world.wire.end(transaction, commit=True) == "PRODUCER_FENCED"
        if not fresh:
            assert participant.commit(committable) is outcome
    if fresh:
        with started(sink, context(2)) as participant:
            assert participant.commit(committable) is outcome
    assert rig.visible(topic) == ([1, 2] if committed else [])


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "aborted"])
def test_an_id_that_the_broker_has_forgotten_is_neither(rig: Rig, committed: bool) -> None:
    """Seven days after its last use: INVALID_PRODUCER_ID_MAPPING, whatever became of it."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), records_of(1))
        rig.world.wire.end(rig.transaction(committable), commit=committed)
        rig.world.wait_until_ended()
        asked: list[str] = []

        def forgotten(transaction: Transaction, *, commit: bool) -> str:
            asked.append(f"{transaction.id} {commit}")
            return "INVALID_PRODUCER_ID_MAPPING"

        participant.wire.end = forgotten  # type: ignore[method-assign]
        assert participant.commit(committable) is (Outcome.ALREADY_COMMITTED if committed else Outcome.GONE)
        assert len(asked) == 1


def test_an_unknown_id_is_answered_in_a_way_that_the_sink_does_not_take_for_an_outcome(rig: Rig) -> None:
    answer = rig.world.wire.end(Transaction(f"never-{rig.suffix}", 4711, 0), commit=True)
    assert answer == "INVALID_PRODUCER_ID_MAPPING"
    assert answer in AMBIGUOUS


# 5: ids that are used again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_late_end_of_a_zombie_hits_nothing(rig: Rig, commit: bool) -> None:
    """KAFKA-17754, FLINK-40626: the late request of an old driver ended the next transaction under the same id."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        old = prepare_one(participant, sink, attempt(0), records_of(0))
        zombies = rig.transaction(old)
        assert participant.commit(old) is Outcome.COMMITTED
        newer = next_use(rig, participant, sink, zombies.id)
        assert rig.transaction(newer).id == zombies.id
        # The zombie wakes up, and its request arrives while another batch has its transaction open under the id.
        assert rig.world.wire.end(zombies, commit=commit) == "PRODUCER_FENCED"
        rig.world.wait_until_ended()
        assert rig.marker(newer.branches[0]).fate is Fate.OPEN
        before = rig.visible(topic)
        assert participant.commit(newer) is Outcome.COMMITTED
    assert rig.visible(topic) == [*before, newer.attempt.batch]


def next_use(rig: Rig, participant: Participant, sink: Kafka, name: str) -> Committable:
    """Run batches until the id is used again, and leave that one prepared."""
    for batch in range(1, 10):
        committable = prepare_one(participant, sink, attempt(batch), records_of(batch))
        if rig.transaction(committable).id == name:
            return committable
        assert participant.commit(committable) is Outcome.COMMITTED
    raise AssertionError(f"{name} was not used again")


# 6: the last epoch ------------------------------------------------------------------------------------------------

EPOCH_MAX = 32_766


def test_a_pipeline_survives_the_last_epoch_of_a_producer_id(rig: Rig) -> None:
    """FLINK-40689: an epoch has 15 bits. After the last one the broker gives the id another producer id."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        first = prepare_one(participant, sink, attempt(0), records_of(0))
        used = rig.transaction(first)
        assert participant.commit(first) is Outcome.COMMITTED
        release_all()
        rig.world.wait_until_ended()
        worn_out = rig.initialise(used.id, times=EPOCH_MAX - 2 - used.epoch)
        assert worn_out == Transaction(used.id, used.producer_id, EPOCH_MAX - 2)
        seen = []
        for batch in range(1, 9):
            committable = prepare_one(participant, sink, attempt(batch), records_of(batch))
            seen.append(rig.transaction(committable))
            # Each from a driver that knows nothing but the committable.
            with started(sink, context(1)) as fresh:
                assert fresh.commit(committable) is Outcome.COMMITTED
                assert fresh.commit(committable) is Outcome.ALREADY_COMMITTED
    epochs = [(t.producer_id, t.epoch) for t in seen if t.id == used.id]
    assert epochs[:2] == [(used.producer_id, EPOCH_MAX - 1), (used.producer_id, EPOCH_MAX)]
    assert epochs[2][0] != used.producer_id
    assert rig.world.wire.end(Transaction(used.id, used.producer_id, EPOCH_MAX), commit=True) in AMBIGUOUS
    assert rig.visible(topic) == list(range(9))


# 7: orphans -------------------------------------------------------------------------------------------------------


def test_the_next_start_ends_what_a_dead_driver_and_a_dead_task_left_open(rig: Rig) -> None:
    """FLINK-34554, franz-go#581: orphaned transactions held up read_committed readers until they timed out."""
    topic = rig.topic(partitions=1)
    sink = rig.sink(topic, options={"batch.size": "100"})
    with started(sink) as participant:
        for committable in prepare(participant, sink, attempt(0), records_of(0)):
            participant.commit(committable)
        prepared = stage_one(sink, Branch(attempt(1), sink.name, 0, 0), records_of(1))
        cut_short = sink.writer(Branch(attempt(1), sink.name, 1, 0))
        cut_short.write(records_of(*range(1000)))
        wait_until(lambda: len(rig.open_ids()) == 2, 20)
    with started(sink, context(2)) as participant:
        remains = participant.recover()
        assert remains.branches == (prepared.branch,)
        participant.abort(remains.branches)
        assert rig.open_ids() == []
        for committable in prepare(participant, sink, attempt(1, 1, 2), records_of(1)):
            assert participant.commit(committable) is Outcome.COMMITTED
    # The task that was cut short is shut out: what it still had to say is not heard.
    with pytest.raises(BatchFailed):
        cut_short.prepare()
    cut_short.abort()
    assert rig.visible(topic) == [0, 1]


# 8: leaks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])
def test_threads_and_descriptors_do_not_grow_with_batches(rig: Rig, by_row: bool) -> None:
    """FLINK-28250, FLINK-36441: a producer was left behind with every batch until memory ran out."""
    topic = rig.topic()
    sink = rig.sink(topic, options={"sticky.partitioning.linger.ms": "7"} if by_row else {})
    assert suits(sink.producer_settings()) != by_row
    release_all()
    before = threads()
    with started(sink) as participant:
        counts, descriptors = [], []
        for batch in range(60):
            for committable in prepare(participant, sink, attempt(batch), records_of(batch), records_of(100 + batch)):
                participant.commit(committable)
            if batch >= 10:
                settle_all()
                counts.append(threads())
                descriptors.append(len(os.listdir("/proc/self/fd")))
        assert max(descriptors[-10:]) <= max(descriptors[:10]) + 2
        python, native = ([count[i] for count in counts] for i in (0, 1))
        assert max(python) == min(python)
        # Connections of producers that were made ahead come and go.
        assert max(native) - min(native) <= 6
        assert max(native[-10:]) <= max(native[:10]) + 2
    release_all()
    wait_until(lambda: threads()[1] <= before[1] + 2, 20)
    assert threads()[0] <= before[0]
    assert len(rig.visible(topic)) == 120


def threads() -> tuple[int, int]:
    """Of Python, and of the process as a whole."""
    return threading.active_count(), len(os.listdir("/proc/self/task"))


# 10: a commit that is cut short -----------------------------------------------------------------------------------


def test_a_commit_that_was_cut_short_is_finished_by_a_driver_that_has_only_the_decision(rig: Rig) -> None:
    """Arroyo's Kafka sink cannot restore its commit phase: after a crash what was prepared is lost.

    Two of three tasks are committed when the driver dies; the next one knows what the decision says, and no more.
    """
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        prepared = prepare(participant, sink, attempt(), records_of(0), records_of(1), records_of(2))
        assert [participant.commit(c) for c in prepared[:2]] == [Outcome.COMMITTED] * 2
    release_all()
    decision = parse_journal_entry(journal_entry(Decided(attempt(), prepared), "now"), "the log")
    assert isinstance(decision, Decided)
    with started(sink, context(2)) as participant:
        outcomes = [participant.commit(c) for c in decision.committables]
        assert outcomes == [Outcome.ALREADY_COMMITTED, Outcome.ALREADY_COMMITTED, Outcome.COMMITTED]
        assert rig.open_ids() == []
    assert rig.visible(topic) == [0, 1, 2]
