"""The simulated stores: what each keeps and loses, which the faults rely on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from semel.errors import Fenced, SinkUnavailable
from semel.ids import Attempt, Branch, Incarnation
from semel.simulation.audit import Witness
from semel.simulation.checkpoint import BEGINNING, Checkpoint, ConcurrentQueries, OffsetsMissing, Planned
from semel.simulation.spark import PIPELINE
from semel.simulation.stores import FilesStore, LedgerStore, PreparedStore, StagedGone


def branch(sink: str, batch: int = 0, incarnation: int = 1, task: int = 0) -> Branch:
    return Branch(Attempt(PIPELINE, batch, 0, Incarnation(incarnation)), sink, task, 0)


def unseen(store: str, batch: int, branches: Sequence[str]) -> None:
    """Nobody looks."""


def test_a_prepared_transaction_survives_a_restart_and_expires_in_time() -> None:
    store = PreparedStore("p", unseen)
    store.stage(branch("p"), (1, 2), now=0.0)
    store.stage(branch("p", task=1), (3,), now=50.0)
    store.restart()
    assert store.expire(now=60.0, timeout_s=60.0) == 1
    assert not store.commit_prepared(branch("p"))
    assert store.commit_prepared(branch("p", task=1))
    assert store.marked(0) == [str(branch("p", task=1))]
    assert dict(store.visible()) == {3: 1}
    assert store.orphans() == []


def test_an_open_transaction_is_lost_with_its_server_its_driver_and_its_claim() -> None:
    store = LedgerStore("l", unseen)
    store.stage(branch("l"), (1,), now=0.0)
    for lose in (store.restart, lambda: store.bury(7), lambda: store.fence(2)):
        move = store.begin_move(7, 1, 0, [branch("l")])
        assert move is not None
        assert store.orphans() == [str(branch("l")), "open transaction of batch 0"]
        lose()
        assert not store.commit_move(move)
    assert dict(store.visible()) == {}
    assert store.move_at_once(2, 0, [branch("l")])
    assert not store.move_at_once(2, 0, [branch("l")])
    assert dict(store.visible()) == {1: 1}


def test_the_ledger_locks_a_batch_and_misses_what_is_not_staged() -> None:
    store = LedgerStore("l", unseen)
    store.stage(branch("l"), (1,), now=0.0)
    assert store.begin_move(7, 1, 0, [branch("l")]) is not None
    with pytest.raises(SinkUnavailable):
        store.move_at_once(2, 0, [branch("l")])
    with pytest.raises(StagedGone):
        store.move_at_once(1, 0, [branch("l", task=9)])


def test_files_are_visible_with_their_manifest_only() -> None:
    store = FilesStore("f", unseen)
    store.stage(branch("f"), (1,), now=0.0)
    store.rename(branch("f"))
    assert dict(store.visible()) == {}
    assert store.orphans() == [str(branch("f"))]
    assert store.create_manifest(0, [branch("f")])
    assert not store.create_manifest(0, [])
    assert dict(store.visible()) == {1: 1}
    assert store.orphans() == []


def test_a_fence_refuses_older_incarnations() -> None:
    store = FilesStore("f", unseen)
    store.fence(3)
    store.refuse_if_older(3)
    with pytest.raises(Fenced):
        store.fence(2)


def test_what_becomes_visible_before_its_decision_is_seen_at_once() -> None:
    witness = Witness()
    store = FilesStore("f", witness.saw)
    store.create_manifest(0, [branch("f")])
    assert [anomaly.name for anomaly in witness.anomalies] == ["early"]


# Spark's checkpoint ---------------------------------------------------------------------------------------------------


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a game, not a secret


def checkpoint_of(batches: int) -> Checkpoint:
    """With this many batches that are done, all of them decided, of two rows each."""
    checkpoint = Checkpoint()
    checkpoint.create(BEGINNING, b'v1\n{"rows":1}')
    for batch in range(batches):
        plan(checkpoint, batch)
        checkpoint.sync(batch)
        finish(checkpoint, batch)
    return checkpoint


def plan(checkpoint: Checkpoint, batch: int) -> None:
    checkpoint.create(f"offsets/{batch}", Planned(batch, 0, 3 + batch * 2, batch).content)


def finish(checkpoint: Checkpoint, batch: int) -> None:
    checkpoint.create(f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":7}')


def test_spark_refuses_two_queries_on_one_checkpoint() -> None:
    checkpoint = checkpoint_of(1)
    assert checkpoint.next_batch == 1
    for write in (plan, finish):
        with pytest.raises(ConcurrentQueries):
            write(checkpoint, 0)


def test_spark_goes_on_with_the_newest_plan_and_plans_anew_when_that_is_done() -> None:
    checkpoint = Checkpoint()
    checkpoint.create(BEGINNING, b'v1\n{"rows":1}')
    assert checkpoint.at_hand() == Planned(0, 1, None, 0)
    plan(checkpoint, 0)
    assert checkpoint.at_hand() == Planned(0, 1, 3, 0)
    finish(checkpoint, 0)
    assert checkpoint.at_hand() == Planned(1, 3, None, 7)
    assert checkpoint.at_hand_batch == 1
    plan(checkpoint, 1)
    del checkpoint.files["commits/0"]
    assert checkpoint.at_hand() == Planned(1, 3, 5, 1)
    del checkpoint.files["offsets/0"]
    with pytest.raises(OffsetsMissing):
        checkpoint.at_hand()


def test_power_takes_only_what_no_decision_presupposes() -> None:
    gone = set()
    for seed in range(20):
        checkpoint = checkpoint_of(2)
        plan(checkpoint, 2)
        lost = checkpoint.forget_unsynced(dice(seed))
        assert set(lost) <= {"commits/1", "offsets/2"}
        assert {"offsets/0", "commits/0", "offsets/1", BEGINNING} <= set(checkpoint.files)
        gone.add(tuple(lost))
    assert len(gone) == 4  # all, some, none
    assert checkpoint.forget_unsynced(dice(0)) == []


def test_an_older_copy_takes_decided_plans_along_and_the_newest_can_be_restored() -> None:
    shapes = set()
    for seed in range(20):
        checkpoint = checkpoint_of(4)
        checkpoint.put_older_copy(dice(seed), age=5)
        shapes.add((len(checkpoint.numbers("offsets")), len(checkpoint.numbers("commits"))))
        assert checkpoint.is_older_than_newest or checkpoint.is_torn
        checkpoint.put_newest_copy()
        assert (checkpoint.next_batch, len(checkpoint.numbers("offsets"))) == (4, 4)
        assert not checkpoint.is_older_than_newest
    assert (2, 1) in shapes
    assert len(shapes) > 3  # copies that were taken while Spark wrote
