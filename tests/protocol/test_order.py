"""The order in which sinks promise and commit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Committable
from semel.protocol.order import order_to_commit, order_to_prepare

ATTEMPT = Attempt(PipelineId("00000000-0000-0000-0000-000000000001"), 7, 0, Incarnation(1))


def committable(sink: str, key: str = "") -> Committable:
    return Committable(sink, key or sink, ATTEMPT, 1)


def keys(committables: list[Committable]) -> list[str]:
    return [c.key for c in committables]


def test_what_expires_prepares_last_and_the_others_keep_their_order() -> None:
    assert order_to_prepare([("kafka", True), ("b", False), ("a", False)]) == ["b", "a", "kafka"]
    assert order_to_prepare([]) == []


def test_what_prepared_last_commits_first() -> None:
    found = order_to_commit([committable("a"), committable("b"), committable("kafka")], ["b", "a", "kafka"])
    assert keys(found) == ["kafka", "a", "b"]


def test_the_committables_of_a_sink_stay_together_in_the_order_of_their_keys() -> None:
    given_ = [committable("kafka", "kafka/1"), committable("a"), committable("kafka", "kafka/0")]
    assert keys(order_to_commit(given_, ["a", "kafka"])) == ["kafka/0", "kafka/1", "a"]


@given(st.lists(st.sampled_from("abcd"), unique=True), st.sets(st.sampled_from("abcd")))
def test_nothing_that_expires_waits_for_what_does_not(names: list[str], expiring: set[str]) -> None:
    prepared = order_to_prepare((name, name in expiring) for name in names)
    assert sorted(prepared) == sorted(names)
    expires = [name in expiring for name in prepared]
    assert expires == sorted(expires)
    assert keys(order_to_commit(map(committable, names), prepared)) == prepared[::-1]
