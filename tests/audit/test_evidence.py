"""What every sink can prove of its batches: one suite, the harnesses of the contract, real servers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from semel.audit.journals import is_marked_by_the_sink, proves
from semel.errors import CorruptRecord, SinkUnavailable
from semel.ids import Incarnation
from semel.sinks.base import Sink
from semel.sinks.evidence import NOTHING_KNOWN, UNSAID
from semel.sinks.files import Files
from semel.sinks.memory import Memory
from semel.sinks.postgres import Postgres
from semel.sinks.sqlite import Sqlite
from semel.sinks.sqlite.database import LEDGER_ROWS_KEPT
from semel.testing.harness import OTHERS, OURS, Harness, Promise, attempt, commit, context, prepare, rows_of
from tests.sinks.participants import started


def committed(sink: Sink, batch: int, *tasks: list[tuple[int, str]]) -> Promise:
    with started(sink) as participant:
        promise = prepare(participant, sink, attempt(batch), *tasks)
        commit(participant, promise)
    return promise


# Every sink ---------------------------------------------------------------------------------------------------------


def test_what_is_committed_is_proven_by_its_markers(harness: Harness) -> None:
    sink = harness.sink()
    promises = [committed(sink, batch, rows_of(batch * 3, batch * 3 + 1), rows_of(batch * 3 + 2)) for batch in range(3)]
    evidence = sink.evidence(OURS, range(3))
    assert evidence.known_from == 0
    assert evidence.branches == ()
    for batch, promise in enumerate(promises):
        marks = [mark for mark in evidence.marks if mark.batch == batch]
        owed = [c for c in promise.committables if is_marked_by_the_sink(c)]
        assert owed
        assert all(any(proves(mark, c) for mark in marks) for c in owed), (marks, owed)
        if UNSAID not in {mark.rows for mark in marks}:
            assert sum(mark.rows for mark in marks) == promise.rows == 3
            assert {mark.incarnation for mark in marks} == {1}


def test_only_the_batches_that_are_asked_for_and_younger_ones_are_listed(harness: Harness) -> None:
    sink = harness.sink()
    for batch in range(3):
        committed(sink, batch, rows_of(batch))
    assert {mark.batch for mark in sink.evidence(OURS, range(1, 2)).marks} == {1, 2}


def test_a_batch_without_rows_is_marked_too(harness: Harness) -> None:
    sink = harness.sink()
    promise = committed(sink, 0, [], [])
    (mark,) = sink.evidence(OURS, range(1)).marks
    assert (mark.batch, mark.part, mark.rows) in ((0, "", 0), (0, "", UNSAID))
    assert any(proves(mark, c) for c in promise.committables if is_marked_by_the_sink(c))


def test_what_is_prepared_is_a_branch_and_no_marker(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        promise = prepare(participant, sink, attempt(0), rows_of(1), rows_of(2))
        evidence = sink.evidence(OURS, range(0))
        assert (evidence.marks, evidence.known_from) == ((), 0)
        assert sorted(map(str, evidence.branches)) == promise.branches
        commit(participant, promise)
    assert sink.evidence(OURS, range(1)).branches == ()


def test_a_sink_that_never_saw_the_pipeline_proves_nothing_and_is_left_as_it_is(harness: Harness) -> None:
    sink = harness.sink()
    before = sorted(harness.folder.rglob("*"))
    evidence = sink.evidence(OTHERS, range(5))
    assert (evidence.marks, evidence.branches, evidence.known_from) == ((), (), NOTHING_KNOWN)
    assert evidence.why
    assert not evidence.forgets
    assert sorted(harness.folder.rglob("*")) == before
    committed(sink, 0, rows_of(1))
    others = sink.evidence(OTHERS, range(5))
    assert (others.marks, others.known_from) == ((), NOTHING_KNOWN)


def test_to_look_changes_nothing_beside_a_driver_and_fences_nobody(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink, context(incarnation=Incarnation(7))) as participant:
        promise = prepare(participant, sink, attempt(0, incarnation=7), rows_of(1))
        markers, staged = harness.markers(), harness.staged()
        for _ in range(3):
            sink.evidence(OURS, range(1))
        assert (harness.markers(), harness.staged()) == (markers, staged)
        commit(participant, promise)
    assert len(harness.visible(sink)) == 1


# What is theirs alone -----------------------------------------------------------------------------------------------


def test_a_sink_of_somebody_else_need_not_list_its_markers(tmp_path: Path) -> None:
    evidence = Sink.evidence(Sqlite(str(tmp_path / "x.db"), "t"), OURS, range(1))
    assert evidence.known_from == NOTHING_KNOWN
    assert "does not list its markers" in evidence.why


def test_memory_of_another_process_proves_nothing() -> None:
    evidence = Memory("never written").evidence(OURS, range(1))
    assert (evidence.known_from, evidence.why) == (NOTHING_KNOWN, "memory ends with its process")


def test_sqlite_is_asked_without_a_trace_whether_or_not_somebody_has_it_open(tmp_path: Path) -> None:
    sink = Sqlite(str(tmp_path / "shop.db"), "orders", name="orders")
    committed(sink, 0, rows_of(1))
    before = sorted(tmp_path.iterdir())
    assert len(sink.evidence(OURS, range(1)).marks) == 1
    assert sorted(tmp_path.iterdir()) == before
    with closing(sqlite3.connect(sink.path)) as other:
        other.execute("UPDATE semel_ledger SET rows = 77")
        other.commit()
        # In the log only: whoever took the file for immutable would not see it.
        assert [mark.rows for mark in sink.evidence(OURS, range(1)).marks] == [77]


def test_a_ledger_row_that_was_deleted_is_missed_and_one_that_was_pruned_is_not(tmp_path: Path) -> None:
    sink = Sqlite(str(tmp_path / "shop.db"), "orders", name="orders")
    for batch in (0, 1, LEDGER_ROWS_KEPT + 1):
        committed(sink, batch, rows_of(batch))
    evidence = sink.evidence(OURS, range(LEDGER_ROWS_KEPT + 2))
    assert [mark.batch for mark in evidence.marks] == [1, LEDGER_ROWS_KEPT + 1]
    assert (evidence.known_from, evidence.forgets) == (1, True)


def test_a_database_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(SinkUnavailable, match="did not show its ledger"):
        Sqlite(str(tmp_path / "shop.db"), "orders").evidence(OURS, range(1))


def test_a_manifest_says_which_of_its_files_are_missing_and_which_manifests_are(tmp_path: Path) -> None:
    sink = Files(str(tmp_path / "lake"), name="orders")
    for batch in range(4):
        committed(sink, batch, rows_of(batch))
    manifests = sorted((tmp_path / "lake" / "_semel" / "manifests").rglob("*.json"))
    manifests[0].unlink()
    (lost,) = (tmp_path / "lake").glob("b0000000002-*")
    lost.unlink()
    evidence = sink.evidence(OURS, range(4))
    assert (evidence.known_from, evidence.forgets) == (1, False)
    assert [(mark.batch, lost.name in mark.damage) for mark in evidence.marks] == [(1, False), (2, True), (3, False)]
    manifests[1].write_text("{")
    with pytest.raises(CorruptRecord, match="is damaged"):
        sink.evidence(OURS, range(4))


def test_a_server_that_is_away_is_told() -> None:
    away = Postgres("postgresql://nobody@127.0.0.1:1/shop", "orders", timeout_s=2)
    with pytest.raises(SinkUnavailable, match="cannot be reached"):
        away.evidence(OURS, range(1))
