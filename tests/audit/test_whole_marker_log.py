"""How much of the control topic is known to be there: pure, with holes where compaction took something out."""

from __future__ import annotations

from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.sinks.kafka.markers import Fate, Fence, WholeMarkerLog, fence_record, marker_record
from semel.sinks.kafka.wire.requests import LogEnd, LogRecord
from semel.testing.harness import OTHERS, OURS

SINK = "orders"
Entry = LogRecord | LogEnd


def branch(batch: int, task: int = 0, incarnation: int = 1, pipeline: PipelineId = OURS) -> Branch:
    return Branch(Attempt(pipeline, batch, 0, Incarnation(incarnation)), SINK, task, 0)


def marker(offset: int, batch: int, incarnation: int = 1, pipeline: PipelineId = OURS) -> LogRecord:
    return LogRecord(offset, 1, 0, *marker_record(branch(batch, 0, incarnation, pipeline), 1, "id-1"))


def end(offset: int) -> LogEnd:
    return LogEnd(offset, 1, committed=True)


def fence(offset: int, incarnation: int) -> LogRecord:
    return LogRecord(offset, -1, -1, *fence_record(Fence(OURS, SINK, incarnation, "shop", "topic", "p")))


def log_of(*entries: Entry) -> WholeMarkerLog:
    log = WholeMarkerLog("semel-control", 0, who=(OURS, SINK))
    log.apply(entries)
    return log


def test_a_log_that_holds_the_first_start_holds_everything() -> None:
    log = log_of(fence(0, 1), marker(1, 0), end(2), marker(3, 1), end(4))
    assert log.known_from == 0
    assert [m.branch.attempt.batch for m in log.markers.values()] == [0, 1]
    assert {m.fate for m in log.markers.values()} == {Fate.COMMITTED}


def test_old_markers_are_not_forgotten_as_the_driver_does() -> None:
    entries: list[Entry] = [fence(0, 1)]
    for batch in range(20):
        entries += [marker(1 + 2 * batch, batch), end(2 + 2 * batch)]
    assert len(log_of(*entries).markers) == 20


def test_behind_a_hole_the_first_batch_is_known_in_part_only() -> None:
    log = log_of(fence(0, 1), marker(9, 7), end(10), marker(11, 8), end(12))
    assert log.known_from == 8
    assert len(log.markers) == 2


def test_without_markers_behind_the_last_hole_nothing_is_known() -> None:
    assert log_of(fence(0, 1), marker(1, 0), end(2), end(9)).known_from is None


def test_a_batch_that_an_older_incarnation_marked_late_does_not_count() -> None:
    log = log_of(fence(5, 3), marker(6, 2, incarnation=1), end(7), marker(8, 40, incarnation=3), end(9))
    assert log.known_from == 41


def test_markers_of_others_are_left_out_and_count_for_nothing() -> None:
    log = log_of(marker(5, 3, pipeline=OTHERS), end(6))
    assert (log.markers, log.known_from) == ({}, None)
