"""The unchanged protocol: every order of events within the small scope, with the exact number of worlds."""

from __future__ import annotations

import pytest

from semel.model.adversary import Model
from semel.model.checker import Search, check, way_to_step
from semel.model.properties import everything, expected
from semel.model.report import explore
from semel.model.scopes import FULL, SCOPES, SMALL
from semel.model.trace import VERBS
from semel.model.world import Bounds, first_world

CALM = Bounds(("prepared",), batches=1, crashes=0, zombies=0, lost=0, expiries=0, restarts=0)
#: Of each bounds of the small scope. A change of the protocol or of the model changes them: look at it, then pin anew.
STATES_OF_THE_FULL_SCOPE = 8_000_851
STATES_AND_DEPTH = (
    *((12022, 82), (10708, 71), (11071, 59), (7670, 68), (30602, 50), (11550, 81)),
    *((2482, 65), (5197, 75), (19587, 74), (38492, 84), (66473, 88)),
)


@pytest.mark.parametrize(("bounds", "pinned"), list(zip(SMALL, STATES_AND_DEPTH, strict=True)))
def test_the_protocol_holds_in_every_world_of_the_small_scope(bounds: Bounds, pinned: tuple[int, int]) -> None:
    search = Search(Model(bounds))
    result = search.run()
    assert (result.violations, result.missing) == ((), ())
    assert result.holds
    assert search.verbs <= set(VERBS)
    assert (result.states, result.depth) == pinned


@pytest.mark.long
def test_the_protocol_holds_in_every_world_of_the_full_scope() -> None:
    report = explore(FULL, print)
    assert report.as_json()["violations"] == []
    assert report.holds
    assert report.states == STATES_OF_THE_FULL_SCOPE


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_must_meet_every_state_outcome_resolution_fate_and_branch_of_recovery(scope: str) -> None:
    assert set[tuple[str, str]]().union(*(expected(bounds) for bounds in SCOPES[scope])) == everything()


def test_a_calm_batch_has_one_order_of_events() -> None:
    result = check(Model(CALM))
    assert (result.states, result.transitions, result.depth) == (17, 16, 16)


def test_two_searches_find_the_same() -> None:
    bounds = Bounds(("prepared",), batches=1, crashes=1, zombies=0, lost=0, expiries=1, restarts=0)
    first, second = Search(Model(bounds)), Search(Model(bounds))
    first.run()
    second.run()
    assert list(first.numbers) == list(second.numbers)


def test_what_was_not_reached_is_a_failure() -> None:
    class NobodyCrashes(Model):
        def crashes(self, *_: object) -> list[object]:  # type: ignore[override]
            return []

    result = check(NobodyCrashes(Bounds(("prepared",), batches=1, crashes=1, zombies=0, lost=0, expiries=0)))
    assert ("step", "crash") in result.missing
    assert not result.holds


def test_a_search_that_was_cut_short_proves_nothing() -> None:
    result = check(Model(CALM), states_max=5)
    assert not result.complete
    assert not result.holds
    assert result.violations == ()


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.model.checker.TELL_EVERY_S", 0.0)
    told: list[tuple[int, int, int]] = []
    check(Model(CALM), lambda *counts: told.append(counts))
    assert told[0] == (1, 0, 1)
    assert told[-1] == (17, 16, 1)


def test_the_way_to_a_step_is_the_shortest() -> None:
    way = way_to_step(Model(CALM), "decide")
    assert [label[0] for label in way] == [
        *("start", "claim", "list", "fence", "read", "sweep"),
        *("read", "resolve", "stage", "prepare", "decide"),
    ]
    assert way_to_step(Model(CALM), "crash") == ()


def test_nothing_follows_a_violation() -> None:
    assert Model(CALM).successors(first_world(CALM)._replace(broken="no_loss: a row")) == []
