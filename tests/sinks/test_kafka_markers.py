"""The control topic as a reader takes it in: pure, one entry after the other, no broker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import NewerRecord, SinkUnavailable
from semel.formats import CONTROL_TOPIC
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.sinks.kafka import markers as kafka_markers
from semel.sinks.kafka.markers import (
    PARTITIONS,
    Fate,
    Fence,
    Marker,
    MarkerLog,
    fence_record,
    marker_record,
    partition_of,
)
from semel.sinks.kafka.wire.requests import LogEnd, LogRecord, Slice, Transaction
from semel.testing.harness import OTHERS, OURS

SINK = "orders"
Entry = LogRecord | LogEnd


def branch(batch: int = 0, task: int = 0, number: int = 0, *, retry: int = 0, pipeline: PipelineId = OURS) -> Branch:
    return Branch(Attempt(pipeline, batch, number, Incarnation(1)), SINK, task, retry)


def marked(which: Branch, producer: int = 1, epoch: int = 0, rows: int = 1, offset: int = 0) -> LogRecord:
    return LogRecord(offset, producer, epoch, *marker_record(which, rows, f"id-{producer}"))


def committed(producer: int = 1) -> LogEnd:
    return LogEnd(0, producer, committed=True)


def aborted(producer: int = 1) -> LogEnd:
    return LogEnd(0, producer, committed=False)


def fence(incarnation: int, pipeline: PipelineId = OURS, prefix: str = "p") -> Fence:
    return Fence(pipeline, SINK, incarnation, "shop", "Kafka topic orders", prefix)


def plain(key: bytes | None, value: bytes | None) -> LogRecord:
    """A record outside of any transaction."""
    return LogRecord(0, -1, -1, key, value)


def log_of(*entries: Entry) -> MarkerLog:
    log = MarkerLog("semel-control", 0)
    log.apply(entries)
    return log


def fates(log: MarkerLog) -> dict[Branch, Fate]:
    return {m.branch: m.fate for m in log.markers.values()}


# One transaction --------------------------------------------------------------------------------------------------


def test_a_marker_without_an_end_is_open_and_names_the_transaction_that_the_broker_saw() -> None:
    log = log_of(marked(branch(3, 2), producer=17, epoch=5, rows=42))
    expected = Marker(branch(3, 2), 42, Transaction("id-17", 17, 5), Fate.OPEN)
    assert log.markers == {str(branch(3, 2)): expected}
    assert log.newest_committed(OURS, SINK) is None


@pytest.mark.parametrize(("end", "fate", "newest"), [(committed(), Fate.COMMITTED, 3), (aborted(), Fate.ABORTED, None)])
def test_the_end_of_the_transaction_is_the_fate_of_the_marker(end: LogEnd, fate: Fate, newest: int | None) -> None:
    log = log_of(marked(branch(3)), end)
    assert fates(log) == {branch(3): fate}
    assert log.newest_committed(OURS, SINK) == newest


def test_the_end_of_another_producer_ends_nothing_of_ours() -> None:
    log = log_of(marked(branch(0, 0), producer=1), marked(branch(0, 1), producer=2), committed(2), aborted(3))
    assert fates(log) == {branch(0, 0): Fate.OPEN, branch(0, 1): Fate.COMMITTED}


def test_a_second_end_of_a_producer_changes_nothing() -> None:
    """Its transactions follow each other: the second one had no marker in this partition."""
    assert fates(log_of(marked(branch()), committed(), aborted())) == {branch(): Fate.COMMITTED}
    assert fates(log_of(aborted(), marked(branch()), committed())) == {branch(): Fate.COMMITTED}


def test_an_id_that_is_used_again_has_a_fate_for_each_use() -> None:
    log = log_of(
        marked(branch(0), epoch=0),
        aborted(),
        marked(branch(0, number=1), epoch=1),
        committed(),
        marked(branch(1), epoch=2),
    )
    assert fates(log) == {branch(0): Fate.ABORTED, branch(0, number=1): Fate.COMMITTED, branch(1): Fate.OPEN}


def test_a_mend_does_not_take_the_place_of_a_marker_of_its_batch_when_the_topic_is_compacted() -> None:
    """Its task has the number of one that is visible: without its marker that one would be taken for gone."""
    keys = [marker_record(which, 1, "id")[0] for which in (branch(3), branch(3, number=1), branch(4), branch(3, 1))]
    assert len(set(keys)) == 3
    assert keys[0] == keys[2]


def test_entries_may_come_in_any_portions() -> None:
    entries = [marked(branch(0, t), producer=t) for t in range(4)] + [committed(t) for t in range(3)]
    whole, by_one = log_of(*entries), log_of()
    for entry in entries:
        by_one.apply([entry])
    assert fates(by_one) == fates(whole)
    assert list(fates(whole).values()).count(Fate.COMMITTED) == 3


def test_a_batch_without_rows_is_committed_by_a_record_outside_of_a_transaction() -> None:
    which = branch(4)
    log = log_of(plain(*marker_record(which, 0, "")))
    assert log.markers[str(which)] == Marker(which, 0, None, Fate.COMMITTED)
    assert log.newest_committed(OURS, SINK) == 4


def test_the_marker_of_an_empty_batch_does_not_replace_that_of_a_task() -> None:
    """Compaction goes by the key, and task 0 may have a marker that is still wanted."""
    assert marker_record(branch(4), 0, "")[0] != marker_record(branch(3), 1, "id")[0]
    assert marker_record(branch(4), 1, "a")[0] == marker_record(branch(5), 9, "b")[0]
    assert marker_record(branch(4, 0), 1, "a")[0] != marker_record(branch(4, 1), 1, "a")[0]


# Fences -----------------------------------------------------------------------------------------------------------


def test_the_newest_fence_counts_whatever_the_order() -> None:
    for order in ((1, 2), (2, 1)):
        log = log_of(*(plain(*fence_record(fence(n))) for n in order))
        assert log.fences == {(OURS, SINK): fence(2)}


def test_pipelines_have_fences_of_their_own() -> None:
    log = log_of(plain(*fence_record(fence(7))), plain(*fence_record(fence(1, OTHERS, "q"))))
    assert log.fences == {(OURS, SINK): fence(7), (OTHERS, SINK): fence(1, OTHERS, "q")}


def test_a_tombstone_takes_a_fence_back() -> None:
    key, value = fence_record(fence(1))
    assert log_of(plain(key, value), plain(key, None)).fences == {}
    assert log_of(plain(key, None)).fences == {}


# What is not ours -------------------------------------------------------------------------------------------------

FOREIGN = [
    plain(None, b"no key"),
    plain(None, None),
    plain(b"", b"{}"),
    plain(b"something/else", b"not even JSON"),
    plain(b"\xff\xfe", b"\xff"),
    plain(b"marker/of/a/tombstone", None),
    plain(b"marker/x", json.dumps({"format": 1, "branch": "somebody's", "rows": 1, "id": "x"}).encode()),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=[str(record.key) for record in FOREIGN])
def test_records_of_others_are_passed_over(foreign: LogRecord) -> None:
    log = log_of(marked(branch()), foreign, committed())
    assert (fates(log), log.fences) == ({branch(): Fate.COMMITTED}, {})


def test_pipelines_and_sinks_are_kept_apart() -> None:
    log = log_of(
        marked(branch(9, pipeline=OTHERS), producer=1), committed(), marked(branch(2), producer=2), committed(2)
    )
    assert log.newest_committed(OURS, SINK) == 2
    assert log.newest_committed(OTHERS, SINK) == 9
    assert log.newest_committed(OURS, "returns") is None
    assert [m.branch for m in log.of(OURS, SINK)] == [branch(2)]


@pytest.mark.parametrize("record", [marker_record(branch(), 1, "id"), fence_record(fence(1))], ids=["marker", "fence"])
def test_a_record_of_a_newer_semel_stops_us(record: tuple[bytes, bytes]) -> None:
    newer = json.dumps({**json.loads(record[1]), "format": CONTROL_TOPIC + 1, "new": "field"}).encode()
    with pytest.raises(NewerRecord) as caught:
        log_of(plain(record[0], newer))
    assert str(caught.value) == (
        f"The record {record[0].decode()} in Kafka's control topic has format 2; this semel reads up to 1.\n"
        "  the data now: this start wrote nothing; what was visible before still is\n"
        "  what to do: Run this pipeline with the newer semel that wrote the record."
    )


@pytest.mark.parametrize("record", [marker_record(branch(), 1, "id"), fence_record(fence(1))], ids=["marker", "fence"])
def test_a_pipeline_that_was_upgraded_first_stops_no_other_one_of_its_control_topic(
    record: tuple[bytes, bytes],
) -> None:
    newer = plain(record[0], json.dumps({"format": CONTROL_TOPIC + 1, "all": "else is new"}).encode())
    for other in ((OTHERS, SINK), (OURS, "returns")):
        log = MarkerLog("semel-control", 0, other)
        log.apply([newer, plain(*fence_record(Fence(*other, 3, "shop", "Kafka topic orders", "p")))])
        assert list(log.fences) == [other]
        assert log.markers == {}
    with pytest.raises(NewerRecord, match="has format 2; this semel reads up to 1"):
        MarkerLog("semel-control", 0, (OURS, SINK)).apply([newer])


def test_sinks_of_a_name_share_a_partition_and_all_partitions_are_used() -> None:
    """Pipelines that could be in each other's way see each other's fences. Other numbers would lose what is written."""
    assert {partition_of(f"sink_{i}") for i in range(100)} == set(range(PARTITIONS))
    assert (PARTITIONS, partition_of("orders"), partition_of("kafka_orders")) == (8, 6, 1)


# Memory -----------------------------------------------------------------------------------------------------------


def test_markers_of_batches_long_gone_are_forgotten() -> None:
    log = log_of()
    for batch in range(500):
        log.apply([marked(branch(batch, task), producer=task) for task in range(3)])
        log.apply([committed(task) for task in range(3)])
        assert len(log.markers) <= 9
    assert sorted({m.branch.attempt.batch for m in log.markers.values()}) == [498, 499]
    assert log.newest_committed(OURS, SINK) == 499
    assert sum(map(len, log._by_task.values())) <= 9
    assert log._open == {}


@pytest.mark.parametrize("times", [2, 3])
def test_a_record_that_was_written_twice_says_what_one_says(times: int) -> None:
    """The driver marks empty batches without idempotence, and writes again what got no answer."""
    log = log_of()
    for batch in range(6):
        log.apply([plain(*marker_record(branch(batch), 0, ""))] * times)
    assert fates(log) == {branch(4): Fate.COMMITTED, branch(5): Fate.COMMITTED}


def test_an_open_marker_is_never_forgotten() -> None:
    """It is to be ended, however old it is."""
    log = log_of(marked(branch(0), producer=9))
    for batch in range(1, 50):
        log.apply([marked(branch(batch), producer=1), committed()])
    assert fates(log)[branch(0)] is Fate.OPEN
    log.apply([aborted(9)])
    assert fates(log)[branch(0)] is Fate.ABORTED


def test_a_batch_that_is_asked_for_again_is_still_known() -> None:
    """A start asks for the last decided batch while a task of a later one may have written already."""
    log = log_of(marked(branch(5)), committed(), marked(branch(6), producer=2), aborted(2))
    assert fates(log) == {branch(5): Fate.COMMITTED, branch(6): Fate.ABORTED}


# Against a simple model -------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Remembers everything, and looks through all of it."""

    history: list[tuple[str, int, Branch | None]] = field(default_factory=list)

    def fate(self, which: Branch) -> Fate:
        at = next(i for i, (_, _, b) in enumerate(self.history) if b == which)
        kind, producer, _ = self.history[at]
        if kind == "empty":
            return Fate.COMMITTED
        ends = (kind for kind, p, _ in self.history[at:] if kind != "marker" and p == producer)
        return {"commit": Fate.COMMITTED, "abort": Fate.ABORTED, "": Fate.OPEN}[next(ends, "")]


steps = st.lists(
    st.tuples(
        st.sampled_from(["marker", "marker", "commit", "abort", "empty", "again", "foreign"]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 1]),
    ),
    max_size=60,
)


@given(steps, st.data())
def test_whatever_the_order_the_fates_are_those_of_the_history(
    taken: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Four producers, each a task of its own; a marker is followed by the end of its transaction, sooner or later.

    Batches without rows have markers outside of transactions. Any of those may be there again, and so may a marker
    while its transaction is open.
    """
    model, entries = Model(), list[Entry]()
    batch, attempts, open_now, repeatable = 0, 0, set[int](), list[Entry]()
    for kind, producer, forward in taken:
        if kind == "foreign":
            entries.append(data.draw(st.sampled_from(FOREIGN)))
        elif kind == "empty":
            batch, attempts = batch + forward, attempts + 1
            which = branch(batch, 0, attempts)
            entries.append(plain(*marker_record(which, 0, "")))
            repeatable.append(entries[-1])
            model.history.append((kind, -1, which))
        elif kind == "again" and producer in open_now:
            entries.append(next(e for e in reversed(entries) if e.producer_id == producer))
        elif kind == "again" and repeatable:
            entries.append(repeatable[-1])
        elif kind == "marker" and producer not in open_now:
            batch, attempts = batch + forward, attempts + 1
            which = branch(batch, producer, attempts)
            entries.append(marked(which, producer, epoch=attempts))
            model.history.append((kind, producer, which))
            open_now.add(producer)
        elif kind in ("commit", "abort"):
            entries.append(LogEnd(0, producer, committed=kind == "commit"))
            model.history.append((kind, producer, None))
            open_now.discard(producer)
    log = log_of(*entries)
    written = [b for _, _, b in model.history if b is not None]
    expected = {b: model.fate(b) for b in written}
    kept = fates(log)
    assert kept == {b: expected[b] for b in kept}
    # Forgotten is only what the same task has left two batches behind, and never what is open.
    newest = {b.task: b.attempt.batch for b in written}
    assert {b for b, fate in expected.items() if fate is Fate.OPEN or b.attempt.batch >= newest[b.task] - 1} <= set(
        kept
    )
    empty = {b for kind, _, b in model.history if kind == "empty"}
    assert {b: log.markers[str(b)].transaction for b in kept} == {
        b: None if b in empty else Transaction(f"id-{b.task}", b.task, b.attempt.attempt) for b in kept
    }


# Reading to the end -----------------------------------------------------------------------------------------------


class FakeLog:
    """A leader that may hold its last records back for some reads, and gives one entry at a time."""

    def __init__(self, entries: Sequence[Entry], *, first: int = 0, held_back: int = 0) -> None:
        self.entries = entries
        self.first = first
        self.held_back = held_back
        self.reads = 0

    def tail(self, topic: str, partition: int, offset: int) -> tuple[int, Slice]:
        return self.first + len(self.entries), self.read(topic, partition, offset)

    def read(self, topic: str, partition: int, offset: int) -> Slice:
        assert (topic, partition) == ("semel-control", 0)
        self.reads += 1
        if offset < self.first:
            return Slice((), self.first, 0)
        if self.reads <= self.held_back:
            return Slice((), offset, offset)
        return Slice(self.entries[offset - self.first :][:1], offset + 1, 0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_markers, "EMPTY_READ_PAUSE_S", 0)


def test_it_reads_to_the_end_and_asks_for_no_more() -> None:
    wire, log = FakeLog([marked(branch()), committed()]), log_of()
    log.catch_up(wire)
    assert (log.position, wire.reads, fates(log)) == (2, 2, {branch(): Fate.COMMITTED})
    log.catch_up(wire)
    assert wire.reads == 3


def test_it_goes_on_where_the_log_begins_when_its_beginning_was_deleted() -> None:
    log = log_of()
    log.catch_up(FakeLog([marked(branch())], first=700))
    assert (log.position, len(log.markers)) == (701, 1)


def test_a_leader_that_holds_records_back_after_its_election_is_waited_for() -> None:
    """What is not read yet is not known to be absent: a marker that is missed would be taken for gone (KIP-207)."""
    wire, log = FakeLog([marked(branch()), committed()], held_back=5), log_of()
    log.catch_up(wire)
    assert fates(log) == {branch(): Fate.COMMITTED}


def test_a_log_that_cannot_be_read_to_its_end_is_no_answer() -> None:
    wire, log = FakeLog([marked(branch()), committed()], held_back=10_000), log_of()
    with pytest.raises(SinkUnavailable) as caught:
        log.catch_up(wire)
    assert wire.reads == kafka_markers.EMPTY_READS_MAX
    assert str(caught.value) == (
        "The control topic semel-control cannot be read to its end: partition 0 gives nothing at 0, and ends at 2.\n"
        "  the data now: nothing was changed by this call\n"
        "  what to do: Bring the store back, or end what holds it, and start the pipeline again."
    )
