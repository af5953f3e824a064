"""What of the way in which a cluster keeps topics breaks the proof, and what weakens it."""

from __future__ import annotations

import pytest

from semel.sinks.kafka.topics import IN_SYNC, Judgement, Kept, judge

SAFE = Kept("safe", 3, 2, unclean=False)


def test_three_copies_of_which_two_must_be_there_are_safe() -> None:
    assert judge([SAFE, Kept("four", 4, 3, unclean=False)], 3) == Judgement()


@pytest.mark.parametrize(("copies", "in_sync"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_an_unclean_election_breaks_it_whatever_else_is_set(copies: int, in_sync: int) -> None:
    assert judge([SAFE, Kept("orders", copies, in_sync, unclean=True)], 3).unclean == ("orders",)


@pytest.mark.parametrize("in_sync", [1, 2])
def test_one_copy_on_several_brokers_is_weak_and_told_once(in_sync: int) -> None:
    found = judge([Kept("orders", 1, in_sync, unclean=False)], 3)
    assert found == Judgement(weak=("orders has 1 copy on 3 brokers",))


def test_one_copy_is_all_that_a_single_broker_can_have() -> None:
    assert judge([Kept("orders", 1, 1, unclean=False)], 1) == Judgement()


def test_that_one_copy_is_enough_to_acknowledge_is_weak() -> None:
    found = judge([SAFE, Kept("orders", 2, 1, unclean=False)], 3)
    assert found == Judgement(weak=(f"orders has {IN_SYNC}=1 with 2 copies",))


@pytest.mark.parametrize(
    "kept",
    [
        Kept("orders", why="TOPIC_AUTHORIZATION_FAILED"),
        Kept("orders", 3, why="TOPIC_AUTHORIZATION_FAILED"),
        Kept("orders", 3, 2, None, why="TOPIC_AUTHORIZATION_FAILED"),
        Kept("orders", 3, None, unclean=False, why="TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_what_nobody_told_us_is_neither_safe_nor_broken(kept: Kept) -> None:
    assert judge([SAFE, kept], 3) == Judgement(unknown=("orders (TOPIC_AUTHORIZATION_FAILED)",))


def test_what_is_known_counts_beside_what_is_not() -> None:
    found = judge([Kept("a", 1, why="it is a secret"), Kept("b", 3, None, unclean=True, why="it is a secret")], 3)
    assert found.unclean == ("b",)
    assert found.weak == ("a has 1 copy on 3 brokers",)
    assert found.unknown == ("a (it is a secret)", "b (it is a secret)")
