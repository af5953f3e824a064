"""A sink tells by its markers that somebody has decided a batch for other rows than its journal says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from semel.ids import Attempt, Incarnation
from semel.protocol.events import Aborted, Committable, Decided, Journal
from semel.runtime.startup import strange_marks
from semel.sinks.base import Sink
from semel.sinks.evidence import UNSAID, Evidence, Mark
from semel.sinks.files import Files
from semel.sinks.sqlite import Sqlite
from semel.testing.harness import OTHERS, OURS, arrow, attempt, context, rows_of
from tests.sinks.participants import prepare, started

if TYPE_CHECKING:
    from tests.sinks.kafka_rig import Rig

BATCH = 5


@pytest.fixture(params=["sqlite", "files", "kafka"])
def commit(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Sink, Callable[..., tuple[Committable, ...]]]:
    """A sink, and a function that commits rows there as one attempt at a batch."""
    if request.param == "kafka":
        from tests.sinks.kafka_rig import records_of

        rig: Rig = request.getfixturevalue("rig")
        sink: Sink = rig.sink(rig.topic())
        rows = records_of(1, 2)
    else:
        local = {"sqlite": Sqlite(str(tmp_path / "shop.db"), "orders"), "files": Files(str(tmp_path / "lake"))}
        sink, rows = local[request.param], arrow(rows_of(1, 2))

    def committed(batch: int, number: int, incarnation: int = 1, *, by: int = 1) -> tuple[Committable, ...]:
        """`by` is the incarnation that commits: another one when it finds the batch decided."""
        with started(sink) as participant:
            made = prepare(participant, sink, attempt(batch, number, incarnation), rows)
            if by == incarnation:
                for committable in made:
                    participant.commit(committable)
        if by != incarnation:
            with started(sink, context(by)) as participant:
                for committable in made:
                    participant.commit(committable)
        return made

    return sink, committed


def test_markers_of_the_decision_are_not_strange_and_those_of_another_attempt_are(
    commit: tuple[Sink, Callable[..., tuple[Committable, ...]]],
) -> None:
    sink, committed = commit
    committed(BATCH - 1, 3)
    found = committed(BATCH, 2)
    ours: Journal = (Aborted(attempt(BATCH, 0)), Aborted(attempt(BATCH, 1)), Decided(attempt(BATCH, 2), found))
    assert strange_marks([sink], OURS, BATCH, ours) == ""
    of_another = tuple(replace(c, attempt=attempt(BATCH, 1)) for c in found)
    theirs: Journal = (Aborted(attempt(BATCH, 0)), Decided(attempt(BATCH, 1), of_another))
    assert strange_marks([sink], OURS, BATCH, theirs) == f"sink {sink.name} shows attempt 2 of incarnation 1"
    # The number of the attempt alone does not tell: each incarnation begins anew behind what it finds.
    of_newer = tuple(replace(c, attempt=replace(c.attempt, incarnation=Incarnation(9))) for c in found)
    assert strange_marks([sink], OURS, BATCH, (*ours[:2], Decided(of_newer[0].attempt, of_newer))) != ""


def test_a_batch_that_a_later_incarnation_has_committed_is_the_one_that_was_decided(
    commit: tuple[Sink, Callable[..., tuple[Committable, ...]]],
) -> None:
    """Found by a review: after each restart within a commit the marker was taken for a stranger's."""
    sink, committed = commit
    found = committed(BATCH, 0, by=2)
    assert strange_marks([sink], OURS, BATCH, (Decided(attempt(BATCH, 0), found),)) == ""


OURS_PLANNED, THEIRS_PLANNED = "sha256:ours", "sha256:theirs"


@pytest.mark.parametrize("by", [(2, 1), (2, 7), (UNSAID, UNSAID)], ids=["the same attempt", "another", "unsaid"])
@pytest.mark.parametrize(
    ("planned", "plan", "is_strange"),
    [(OURS_PLANNED, OURS_PLANNED, False), (THEIRS_PLANNED, OURS_PLANNED, True)],
)
def test_where_a_marker_says_its_plan_the_plan_tells(
    monkeypatch: pytest.MonkeyPatch, by: tuple[int, int], planned: str, plan: str, is_strange: bool
) -> None:
    """Two drivers on two copies of a checkpoint count alike."""
    journal = decided(plan, attempt(BATCH, 2))
    assert bool(of_marks(monkeypatch, Mark(BATCH, "", *by, rows=1, plan=planned), journal)) is is_strange


@pytest.mark.parametrize(("planned", "plan"), [("", OURS_PLANNED), (THEIRS_PLANNED, ""), ("", "")])
@pytest.mark.parametrize(("by", "is_strange"), [((2, 1), False), ((2, 7), True), ((UNSAID, UNSAID), False)])
def test_where_one_of_the_two_does_not_say_the_plan_the_numbers_tell(
    monkeypatch: pytest.MonkeyPatch, by: tuple[int, int], planned: str, plan: str, is_strange: bool
) -> None:
    journal = decided(plan, attempt(BATCH, 2))
    assert bool(of_marks(monkeypatch, Mark(BATCH, "", *by, rows=1, plan=planned), journal)) is is_strange


def decided(plan: str, which: Attempt) -> Journal:
    before = tuple(Aborted(attempt(BATCH, slot)) for slot in range(which.attempt))
    return (*before, Decided(which, (Committable("orders", "orders", which, 1, plan=plan),)))


def of_marks(monkeypatch: pytest.MonkeyPatch, mark: Mark, journal: Journal) -> str:
    monkeypatch.setattr(Sqlite, "evidence", lambda *_: Evidence((mark,)))
    return strange_marks([Sqlite("shop.db", "orders")], OURS, BATCH, journal)


def test_what_is_not_of_this_batch_or_this_pipeline_says_nothing(
    commit: tuple[Sink, Callable[..., tuple[Committable, ...]]],
) -> None:
    sink, committed = commit
    committed(BATCH, 2)
    assert strange_marks([sink], OTHERS, BATCH, ()) == ""
    assert strange_marks([sink], OURS, BATCH + 1, ()) == ""
    assert strange_marks([sink], OURS, BATCH, ()) != ""


@pytest.mark.parametrize(("number", "incarnation"), [(UNSAID, 1), (2, UNSAID), (UNSAID, UNSAID)])
def test_a_store_that_does_not_say_whose_a_marker_is_says_nothing(
    number: int, incarnation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sqlite("shop.db", "orders")
    mark = Mark(BATCH, "", number, incarnation, rows=1)
    monkeypatch.setattr(type(sink), "evidence", lambda *_: Evidence((mark,)))
    assert strange_marks([sink], OURS, BATCH, ()) == ""
