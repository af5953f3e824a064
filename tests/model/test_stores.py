"""The stores of the model keep the contract that every sink keeps."""

from __future__ import annotations

import pytest

from semel.model.stores import Stores
from semel.model.world import KINDS, CommittableCode, Store, pack
from semel.protocol.events import Outcome

STORES = Stores(tasks=1)
BRANCH = pack(0, 0, 1, 0, 0)


def empty(kind: str) -> Store:
    return Store(kind, 0, (), (0,), (), ())


def prepared(kind: str) -> tuple[Store, CommittableCode]:
    answer = STORES.prepare(STORES.stage(empty(kind), (BRANCH,)), 0, (BRANCH,))
    assert answer is not None
    store, (committable,) = answer
    return store, committable


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_rows_are_invisible_and_commit_shows_them_once(kind: str) -> None:
    store, committable = prepared(kind)
    assert (store.visible, store.branches) == ((0,), (BRANCH,))
    store, outcome = STORES.commit(store, committable, 1)
    assert (outcome, store.visible, store.branches, store.held) == (Outcome.COMMITTED, (1,), (), ())
    again, outcome = STORES.commit(store, committable, 2)
    assert (outcome, again) == (Outcome.ALREADY_COMMITTED, store)


@pytest.mark.parametrize("kind", KINDS)
def test_what_vanished_is_gone_and_what_is_committed_is_not(kind: str) -> None:
    store, committable = prepared(kind)
    assert STORES.commit(STORES.drop(store, (BRANCH,)), committable, 1)[1] is Outcome.GONE


@pytest.mark.parametrize("kind", KINDS)
def test_abort_leaves_nothing_and_is_harmless_for_what_is_unknown(kind: str) -> None:
    store, _ = prepared(kind)
    assert STORES.drop(STORES.drop(store, (BRANCH,)), (BRANCH,)) == empty(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_commit_shows_rows_once_or_does_nothing(kind: str) -> None:
    store, committable = prepared(kind)
    late = STORES.deliver(store, committable, 1)
    assert late.visible == (1,)
    assert STORES.deliver(late, committable, 1) == late
    dropped = STORES.drop(store, (BRANCH,))
    assert STORES.deliver(dropped, committable, 1) == dropped


@pytest.mark.parametrize("kind", ["prepared", "ledger"])
def test_an_older_incarnation_is_refused(kind: str) -> None:
    fenced = STORES.fence(STORES.stage(empty(kind), (BRANCH,)), 2)
    assert fenced is not None
    assert STORES.fence(fenced, 1) is None
    assert STORES.prepare(fenced, 0, (BRANCH,)) is None


def test_a_ledger_commits_from_what_is_staged_after_a_restart() -> None:
    store, committable = prepared("ledger")
    assert store.held == (1, 0, 0)
    restarted = store._replace(held=())
    assert not STORES.can_be_late(restarted, committable, 1)
    assert STORES.commit(restarted, committable, 1)[1] is Outcome.COMMITTED


def test_a_fence_ends_the_transaction_of_an_older_driver() -> None:
    store, committable = prepared("ledger")
    fenced = STORES.fence(store, 2)
    assert fenced is not None
    assert fenced.held == ()
    assert STORES.deliver(fenced, committable, 1) == fenced


def test_a_replay_of_what_an_earlier_attempt_committed_is_dropped() -> None:
    store, first = prepared("prepared")
    store, _ = STORES.commit(store, first, 1)
    later = pack(0, 1, 2, 0, 0)
    answer = STORES.prepare(STORES.stage(store, (later,)), 0, (later,))
    assert answer is not None
    store, outcome = STORES.commit(answer[0], answer[1][0], 2)
    assert (outcome, store.visible, store.branches) == (Outcome.ALREADY_COMMITTED, (1,), ())
