"""Bugs in the runtime and in sinks are found, each by its name: a simulation that finds nothing proves nothing."""

from __future__ import annotations

import pytest

from semel.simulation.run import simulate
from tests.simulation.mutants import MUTANTS, Patch


@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.__name__)
def test_a_bug_is_caught_by_name(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    anomaly, seeds = MUTANTS[bug]
    bug(monkeypatch)
    found = next((s for s in seeds if anomaly in {a.name for a in simulate(s).anomalies}), None)
    assert found is not None, f"{len(seeds)} seeds showed nothing {anomaly}"


def test_every_anomaly_that_a_reader_could_see_is_caught_in_some_bug() -> None:
    named = {anomaly for anomaly, _ in MUTANTS.values()}
    assert {"early", "lost", "duplicated", "torn", "split", "orphan"} <= named
