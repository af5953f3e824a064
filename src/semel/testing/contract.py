"""What every sink must do. One suite, a harness per sink.

The author of a sink has one test file of his own:

    from semel.testing.contract import *
    from semel.testing.fixtures import fixtures

    harness, durable_harness = fixtures({"jsonl": JsonLinesHarness})
"""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace

import pytest

from semel.decisions.records import committable_from_json, committable_to_json
from semel.errors import BatchFailed, Fenced
from semel.ids import Branch, parse_branch
from semel.protocol.events import Outcome
from semel.sinks.base import Participant, Remains, Sink
from semel.testing.harness import (
    OTHERS,
    Harness,
    Killed,
    Promise,
    Rows,
    arrow_for,
    attempt,
    commit,
    commit_in_fresh_process,
    context,
    open_descriptors,
    prepare,
    prepare_in_a_process_that_is_killed,
    rows_of,
    schema_of,
    stage,
    started,
)

# The way of a batch -----------------------------------------------------------------------------------------------


def test_check_accepts_rows_before_the_target_exists_and_after(harness: Harness) -> None:
    sink = harness.sink()
    sink.check(schema_of(sink))
    with started(sink) as participant:
        commit(participant, prepare(participant, sink, attempt(), rows_of(1)))
    sink.check(schema_of(sink))


def test_commit_makes_rows_visible_once(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1, 2, 3), rows_of(4))
        assert commit(participant, committable) is Outcome.COMMITTED
    assert committable.rows == 4
    assert [b.task for name in committable.branches if (b := parse_branch(name))] == [0, 1]
    assert harness.visible(sink) == rows_of(1, 2, 3, 4)
    assert harness.staged() == []


def test_batches_follow_each_other(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        for batch in range(5):
            commit(participant, prepare(participant, sink, attempt(batch), rows_of(batch)))
        assert participant.recover().newest_batch == 4
    assert harness.visible(sink) == rows_of(0, 1, 2, 3, 4)


def test_prepared_rows_are_invisible(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1)))
        stage(sink, attempt(1), [rows_of(2)])
        assert harness.visible(sink) == rows_of(1)
        prepare(participant, sink, attempt(1), rows_of(2))
        assert harness.visible(sink) == rows_of(1)


def test_empty_batch_commits(harness: Harness) -> None:
    """FLINK-31363: committing an empty transaction failed, or was taken for something else."""
    sink = harness.sink()
    with started(sink) as participant:
        no_rows = prepare(participant, sink, attempt(0), [], [])
        assert commit(participant, no_rows) is Outcome.COMMITTED
        assert commit(participant, no_rows) is Outcome.ALREADY_COMMITTED
        no_tasks = prepare(participant, sink, attempt(1))
        assert commit(participant, no_tasks) is Outcome.COMMITTED
        assert participant.recover().newest_batch == 1
        commit(participant, prepare(participant, sink, attempt(2), [], rows_of(7)))
    assert harness.visible(sink) == rows_of(7)


def test_rows_that_vanish_before_the_decision_fail_the_batch(durable_harness: Harness) -> None:
    sink = durable_harness.sink()
    with started(sink) as participant:
        parts = stage(sink, attempt(), [rows_of(1), rows_of(2)])
        durable_harness.lose(str(parts[1].branch))
        with pytest.raises(BatchFailed, match="vanished before the decision"):
            participant.prepare(attempt(), parts)
    assert durable_harness.visible(sink) == []


# Idempotence ------------------------------------------------------------------------------------------------------


def test_commit_is_idempotent_in_same_process(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1, 2))
        outcomes = [commit(participant, committable) for _ in range(3)]
    assert outcomes == [Outcome.COMMITTED, Outcome.ALREADY_COMMITTED, Outcome.ALREADY_COMMITTED]
    assert harness.visible(sink) == rows_of(1, 2)


def test_commit_is_idempotent_from_a_fresh_process(durable_harness: Harness) -> None:
    sink = durable_harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1, 2), rows_of(3))
    outcomes = [commit_in_fresh_process(sink, context(2), committable) for _ in range(2)]
    assert outcomes == [Outcome.COMMITTED, Outcome.ALREADY_COMMITTED]
    assert durable_harness.visible(sink) == rows_of(1, 2, 3)


def test_commit_after_lost_ack_answers_already_committed(durable_harness: Harness) -> None:
    """FLINK-8086: a commit whose answer was lost is proven by its marker, not by a guess."""
    sink = durable_harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1, 2), rows_of(3))
    last = f"{durable_harness.committed_failpoint}@{len(committable.committables)}"
    lost = commit_in_fresh_process(sink, context(2), committable, failpoint=last)
    assert lost == Killed()
    assert durable_harness.visible(sink) == rows_of(1, 2, 3)
    with started(sink, context(3)) as participant:
        assert commit(participant, committable) is Outcome.ALREADY_COMMITTED
    assert durable_harness.visible(sink) == rows_of(1, 2, 3)


def test_replayed_batch_adds_nothing(harness: Harness) -> None:
    """paimon#9666: a batch that runs again under another attempt and task layout is not committed twice."""
    sink = harness.sink()
    with started(sink) as participant:
        commit(participant, prepare(participant, sink, attempt(0), rows_of(1, 2), rows_of(3)))
    with started(sink, context(2)) as participant:
        replayed = prepare(participant, sink, attempt(0, 1, 2), rows_of(1, 2, 3))
        assert commit(participant, replayed) is Outcome.ALREADY_COMMITTED
    assert harness.visible(sink) == rows_of(1, 2, 3)
    assert harness.staged() == []


def test_server_restart_between_prepare_and_commit(durable_harness: Harness) -> None:
    """An embedded store restarts with its process: the one that prepared is killed, another one commits."""
    sink = durable_harness.sink()
    committable = prepare_in_a_process_that_is_killed(sink, context(), attempt(), rows_of(1, 2), rows_of(3))
    assert durable_harness.visible(sink) == []
    with started(sink, context(2)) as participant:
        assert [str(b) for b in participant.recover().branches] == list(committable.branches)
        assert commit(participant, committable) is Outcome.COMMITTED
    assert durable_harness.visible(sink) == rows_of(1, 2, 3)
    assert durable_harness.staged() == []


# Abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [False, True], ids=["staged", "prepared"])
def test_abort_leaves_nothing_visible(harness: Harness, prepared: bool) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        parts = stage(sink, attempt(), [rows_of(1), rows_of(2)])
        if prepared:
            participant.prepare(attempt(), parts)
        participant.abort(part.branch for part in parts)
        assert harness.visible(sink) == []
        assert harness.staged() == []
        assert participant.recover().branches == ()
        # The abort leaves no lock behind and does not stand in the way of the next attempt.
        assert commit(participant, prepare(participant, sink, attempt(0, 1), rows_of(1, 2))) is Outcome.COMMITTED
    assert harness.visible(sink) == rows_of(1, 2)


@pytest.mark.parametrize("tasks", [(), ([], [])], ids=["no-tasks", "empty-tasks"])
def test_abort_by_what_recover_lists_ends_a_prepared_batch_without_rows(
    harness: Harness, tasks: tuple[Rows, ...]
) -> None:
    """The coordinator rolls back what `recover` lists: a store that holds a lock for an empty batch must list it."""
    sink = harness.sink()
    with started(sink) as participant:
        prepare(participant, sink, attempt(), *tasks)
        participant.abort(b for b in participant.recover().branches if b.attempt == attempt())
        with started(sink, context(2)) as newer:
            assert newer.recover().branches == ()


def test_abort_is_idempotent(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1))
        branches = [Branch(attempt(), sink.name, 0, 0)]
        assert list(committable.branches) == [str(b) for b in branches]
        for _ in range(3):
            participant.abort(branches)
    assert harness.visible(sink) == []


def test_abort_of_unknown_transaction_is_harmless(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        kept = prepare(participant, sink, attempt(3), rows_of(1))
        participant.abort([Branch(attempt(9), sink.name, 4, 2), Branch(attempt(3, pipeline=OTHERS), sink.name, 0, 0)])
        assert commit(participant, kept) is Outcome.COMMITTED
    assert harness.visible(sink) == rows_of(1)


def test_a_writer_that_aborts_leaves_nothing(harness: Harness) -> None:
    sink = harness.sink()
    for rows in ([], rows_of(1, 2, 3)):
        writer = sink.writer(Branch(attempt(), sink.name, 0, 0))
        if rows:
            writer.write(arrow_for(sink, rows))
        for _ in range(2):
            writer.abort()
        assert harness.staged() == []


# Gone -------------------------------------------------------------------------------------------------------------


def test_vanished_branch_is_reported_gone_not_committed(harness: Harness) -> None:
    """seatunnel#11569: what a store does not know is not what it has committed."""
    sink = harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1), rows_of(2))
    with started(sink, context(2)) as participant:
        harness.lose(committable.branches[1])
        assert commit(participant, committable) is Outcome.GONE
        assert commit(participant, committable) is Outcome.GONE
    # A sink with a committable per task has made the other task's rows visible; none of the lost ones are.
    assert harness.visible(sink) == (rows_of(1) if len(committable.committables) > 1 else [])


def test_mended_committable_replaces_the_gone_one(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        gone = prepare(participant, sink, attempt(), rows_of(1), rows_of(2))
    with started(sink, context(2)) as participant:
        harness.lose(gone.branches[0])
        assert commit(participant, gone) is Outcome.GONE
        mended = mend(participant, sink, gone)
        assert commit(participant, mended) is Outcome.COMMITTED
        # Where each task is committed by itself, the gone one stays gone: the decision says what took its place.
        again = Outcome.GONE if sink.capabilities.commits_by_task else Outcome.ALREADY_COMMITTED
        assert [commit(participant, gone), commit(participant, mended)] == [again, Outcome.ALREADY_COMMITTED]
    with started(sink, context(3)) as participant:
        assert [commit(participant, gone), commit(participant, mended)] == [again, Outcome.ALREADY_COMMITTED]
    assert harness.visible(sink) == rows_of(1, 2)
    assert harness.staged() == []


def mend(participant: Participant, sink: Sink, gone: Promise) -> Promise:
    """As the coordinator does it: the tasks of the replay have other numbers, and the first one's rows are wanted."""
    parts = stage(sink, attempt(0, 1, 2), [rows_of(2), rows_of(1)])
    if not sink.capabilities.commits_by_task:
        (whole,) = participant.prepare(attempt(0, 1, 2), parts)
        assert [whole.key] == gone.keys
        return Promise((replace(whole, mends=True),))
    participant.abort([parts[0].branch])
    (wanted,) = participant.prepare(attempt(0, 1, 2), parts[1:])
    return Promise((replace(wanted, key=gone.keys[0], mends=True),))


# Who may write ----------------------------------------------------------------------------------------------------


def test_older_incarnation_is_refused(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink, context(1)) as older:
        parts = stage(sink, attempt(), [rows_of(1)])
        with started(sink, context(2)):
            with pytest.raises(Fenced, match="Incarnation 1 is older than 2"):
                older.prepare(attempt(), parts)
            with pytest.raises(Fenced, match="Incarnation 1 is older than 2"):
                older.fence()
    assert harness.visible(sink) == []


def test_another_pipeline_is_not_fenced_by_ours(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink, context(7)), started(sink, context(1, pipeline=OTHERS)) as other:
        theirs = prepare(other, sink, attempt(0, 0, 1, OTHERS), rows_of(1))
        assert commit(other, theirs) is Outcome.COMMITTED
    assert harness.visible(sink) == rows_of(1)


def test_recover_lists_only_ours(harness: Harness) -> None:
    """Another pipeline, another sink and somebody's own files stay out of sight, and therefore out of danger."""
    sink, renamed = harness.sink(), harness.sink("backup")
    other = context(pipeline=OTHERS, name="other")
    with started(sink, other) as others:
        commit(others, prepare(others, sink, attempt(5, pipeline=OTHERS), rows_of(5)))
    with started(sink) as ours:
        commit(ours, prepare(ours, sink, attempt(0), rows_of(1)))
        harness.leave_staged(renamed, attempt(1), rows_of(4))
        harness.leave_staged(sink, attempt(6, pipeline=OTHERS), rows_of(6))
        harness.put_foreign_things()
        not_ours = harness.staged()
        expected = prepare(ours, sink, attempt(1), rows_of(2), rows_of(3))
        remains = ours.recover()
        assert [str(b) for b in remains.branches] == list(expected.branches)
        assert (remains.newest_batch, remains.namesakes) == (0, ())
        ours.abort(remains.branches)
    assert harness.staged() == not_ours
    assert len(not_ours) >= 2
    assert harness.visible(sink) == rows_of(1, 5)


def test_recover_names_pipelines_that_left_markers_under_our_name(harness: Harness) -> None:
    """delta#1813: a deleted checkpoint makes a new pipeline that would write everything again.

    It would do so under another name of the sink, too: the target is the same.
    """
    sink, renamed = harness.sink(), harness.sink("backup")
    with started(sink, context(pipeline=OTHERS)) as before:
        commit(before, prepare(before, sink, attempt(0, pipeline=OTHERS), rows_of(1)))
    for found in (sink, renamed):
        with started(found) as participant:
            assert participant.recover().namesakes == (OTHERS,)
            assert participant.recover().newest_batch is None
    with started(sink, context(name="another shop")) as participant:
        assert participant.recover().namesakes == ()


def test_recover_does_not_take_rows_in_another_target_for_rows_in_ours(harness: Harness) -> None:
    """Not under the same sink name either: one pipeline may run for several tenants, each with a table of its own."""
    sink = harness.sink()
    elsewhere = replace(harness.neighbour(), name=sink.name)
    is_the_same = harness.neighbour_is_the_same
    assert is_the_same == (elsewhere.describe() == sink.describe())
    with started(elsewhere, context(pipeline=OTHERS)) as other:
        commit(other, prepare(other, elsewhere, attempt(0, pipeline=OTHERS), rows_of(1)))
    with started(sink) as participant:
        assert bool(participant.recover().namesakes) == is_the_same
    with started(sink, context(name="another shop")) as participant:
        assert bool(participant.recover().others) == is_the_same


def test_recover_names_pipelines_that_left_markers_under_other_names(harness: Harness) -> None:
    """Rows of both mix: that may be meant, and somebody should know it."""
    sink, renamed = harness.sink(), harness.sink("backup")
    other = context(pipeline=OTHERS, name="other")
    with started(sink, other) as others:
        with started(sink) as participant:
            assert participant.recover().others == ()
        commit(others, prepare(others, sink, attempt(0, pipeline=OTHERS), rows_of(1)))
    for found in (sink, renamed):
        with started(found) as participant:
            assert (participant.recover().others, participant.recover().namesakes) == ((("other", OTHERS),), ())


def test_sinks_of_one_pipeline_may_share_a_target(harness: Harness) -> None:
    """Each with rows of its own: what one of them has written is no other pipeline's."""
    sink, second = harness.sink(), harness.sink("backup")
    with started(sink) as first:
        commit(first, prepare(first, sink, attempt(0), rows_of(1)))
    with started(second) as participant:
        remains = participant.recover()
        assert (remains.namesakes, remains.others, remains.newest_batch) == ((), (), None)


# Two sinks, no marks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "without-marks"])
def test_two_sinks_on_one_store_commit_both(harness: Harness, marked: bool) -> None:
    """Both prepare before either commits, and they commit in parallel, as in a batch."""
    orders, returns = harness.sink(), harness.neighbour()
    who = context(marked=marked)
    with started(orders, who) as first, started(returns, who) as second, ThreadPoolExecutor(2) as pool:
        for batch in range(3):
            which = attempt(batch)
            one = Promise(first.prepare(which, stage(orders, which, [rows_of(batch)], durable=marked)))
            two = Promise(second.prepare(which, stage(returns, which, [rows_of(100 + batch)], durable=marked)))
            answers = [pool.submit(commit, first, one), pool.submit(commit, second, two)]
            assert {a.result(timeout=10) for a in answers} <= {Outcome.COMMITTED, Outcome.ALREADY_COMMITTED}
    seen = harness.visible if marked else harness.visible_without_marks
    assert seen(orders) == rows_of(0, 1, 2)
    assert seen(returns) == rows_of(100, 101, 102)
    assert harness.staged() == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "second-first"])
def test_two_sinks_on_one_store_abort_both(harness: Harness, order: tuple[int, int]) -> None:
    orders, returns = harness.sink(), harness.neighbour()
    with started(orders) as first, started(returns) as second:
        prepare(first, orders, attempt(), rows_of(1))
        prepare(second, returns, attempt(), rows_of(2))
        for participant in (first, second)[order[0]], (first, second)[order[1]]:
            participant.abort(participant.recover().branches)
            assert (harness.visible(orders), harness.visible(returns)) == ([], [])
        assert harness.staged() == []
        with started(orders, context(2)) as newer:
            assert commit(newer, prepare(newer, orders, attempt(0, 1, 2), rows_of(1))) is Outcome.COMMITTED
    assert harness.visible(orders) == rows_of(1)
    assert harness.visible(returns) == []


def test_without_marks_no_marker_is_written(harness: Harness) -> None:
    """Below exactly-once nothing is promised, so nothing is kept: a replayed batch is written again."""
    sink = harness.sink()
    with started(sink, context(marked=False)) as participant:
        parts = stage(sink, attempt(), [rows_of(1, 2)], durable=False)
        assert commit(participant, Promise(participant.prepare(attempt(), parts))) is Outcome.COMMITTED
        assert participant.recover() == Remains()
    assert harness.visible_without_marks(sink) == rows_of(1, 2)
    assert harness.markers() == 0


def test_with_marks_a_marker_is_written(harness: Harness) -> None:
    """The counterpart of the test above: the harness can see markers."""
    sink = harness.sink()
    with started(sink) as participant:
        fences = harness.markers()
        commit(participant, prepare(participant, sink, attempt(), rows_of(1)))
    assert (fences, harness.markers()) == (1, 2)


# What travels -----------------------------------------------------------------------------------------------------


def test_committable_round_trips_through_bytes(harness: Harness) -> None:
    sink = harness.sink()
    with started(sink) as participant:
        committable = prepare(participant, sink, attempt(), rows_of(1), [], rows_of(2))
        content = [json.dumps(committable_to_json(c)).encode() for c in committable.committables]
        copy = Promise(tuple(committable_from_json(json.loads(c)) for c in content))
        assert copy == committable
        assert commit(participant, copy) is Outcome.COMMITTED
    assert harness.visible(sink) == rows_of(1, 2)


def test_staged_part_round_trips_through_bytes(harness: Harness) -> None:
    """Tasks hand their parts to the driver as JSON."""
    sink = harness.sink()
    with started(sink) as participant:
        parts = stage(sink, attempt(), [rows_of(1), [], rows_of(2)])
        copies = [replace(part, payload=json.loads(json.dumps(part.payload).encode())) for part in parts]
        assert copies == parts
        assert commit(participant, Promise(participant.prepare(attempt(), copies))) is Outcome.COMMITTED
    assert harness.visible(sink) == rows_of(1, 2)


def test_config_pickles(harness: Harness) -> None:
    for sink in (harness.sink(), harness.neighbour(), replace(harness.sink(), select=("id",), where="id > 0")):
        copy = pickle.loads(pickle.dumps(sink))  # noqa: S301 - our own bytes
        assert copy == sink
        assert (copy.name, copy.select, copy.where) == (sink.name, sink.select, sink.where)
        assert copy.describe() == sink.describe()
        with pytest.raises(FrozenInstanceError):
            copy.name = "another"


def test_no_connection_leaks(harness: Harness) -> None:
    """FLINK-28250: connections leaked with every batch until memory ran out."""
    sink = harness.sink()
    before = open_descriptors()
    with started(sink) as participant:
        counts = set()
        for batch in range(harness.leak_batches):
            committable = prepare(participant, sink, attempt(batch), rows_of(batch))
            if batch % 10 == 9:
                participant.abort(participant.recover().branches)
                committable = prepare(participant, sink, attempt(batch, 1), rows_of(batch))
            commit(participant, committable)
            if batch >= harness.leak_batches // 10:
                counts.add(harness.settled_descriptors())
        assert max(counts) - min(counts) <= harness.descriptor_jitter
    for incarnation in range(2, 12):
        with started(sink, context(incarnation)):
            pass
    harness.let_go()
    assert open_descriptors() <= before + harness.descriptor_jitter  # ten starts would leak more than that
    assert len(harness.visible(sink)) == harness.leak_batches
