"""Each named property holds where it should, and says what is wrong where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Aborted, Committable, Decided
from semel.protocol.invariants import (
    decision_covers_every_sink,
    decision_names_one_attempt,
    decision_takes_the_next_slot,
    nothing_duplicated,
    nothing_early,
    nothing_lost,
    nothing_torn,
    require,
)
from semel.protocol.step import ProtocolError

PIPELINE = PipelineId("00000000-0000-0000-0000-000000000001")


def attempt(slot: int) -> Attempt:
    return Attempt(PIPELINE, 42, slot, Incarnation(2))


def decision(slot: int, *committables: Committable) -> Decided:
    return Decided(attempt(slot), committables)


def committable(sink: str, key: str = "", slot: int = 1) -> Committable:
    return Committable(sink, key or sink, attempt(slot), rows=1)


def rows(text: str) -> Counter[Hashable]:
    return Counter(text)


def test_a_decision_covers_every_sink() -> None:
    decided = decision(1, committable("orders"), committable("audit"))
    assert decision_covers_every_sink(decided, ["audit", "orders"]) == []
    assert decision_covers_every_sink(decided, ["lake", "audit", "kafka", "orders"]) == [
        "sink kafka has not prepared",
        "sink lake has not prepared",
    ]


def test_a_decision_names_one_attempt() -> None:
    assert decision_names_one_attempt(decision(1, committable("orders"), committable("audit"))) == []
    assert decision_names_one_attempt(decision(1, committable("orders", slot=0))) == [
        "orders was prepared under batch 42 attempt 0 (incarnation 2), not batch 42 attempt 1 (incarnation 2)"
    ]


def test_no_two_committables_of_a_decision_share_a_key() -> None:
    twins = decision(1, committable("orders", "same"), committable("audit", "same"))
    assert decision_names_one_attempt(twins) == ["two committables share the key same"]


def test_a_decision_takes_the_next_slot() -> None:
    assert decision_takes_the_next_slot(decision(1), (Aborted(attempt(0)),)) == []
    assert decision_takes_the_next_slot(decision(1), ()) == ["attempt 1 cannot be decided in slot 0"]


def test_nothing_is_lost() -> None:
    assert nothing_lost(rows("aab"), rows("aabbc")) == []
    assert nothing_lost(rows("aab"), rows("ac")) == ["'a' is missing 1 time(s)", "'b' is missing 1 time(s)"]


def test_nothing_is_duplicated() -> None:
    assert nothing_duplicated(rows("aab"), rows("a")) == []
    assert nothing_duplicated(rows("ab"), rows("aaab")) == ["'a' is visible 2 time(s) too often"]


def test_nothing_is_torn() -> None:
    assert nothing_torn([(1, 5, 5), (2, 5, 0), (3, 0, 0)]) == []
    assert nothing_torn([(1, 5, 4), (2, 5, 6)]) == [
        "batch 1: 4 of 5 rows are visible",
        "batch 2: 6 of 5 rows are visible",
    ]


def test_nothing_is_early() -> None:
    assert nothing_early([1, 2], [1, 2, 3]) == []
    assert nothing_early([4, 3, 1], [1]) == [
        "batch 3 is visible and was not decided",
        "batch 4 is visible and was not decided",
    ]


def test_a_violation_raises_before_the_write_and_its_absence_does_not() -> None:
    require([])
    with pytest.raises(ProtocolError) as raised:
        require(["one thing", "another"])
    assert str(raised.value) == "one thing; another"
