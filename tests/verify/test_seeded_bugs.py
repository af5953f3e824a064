"""Bugs in the code of the runtime and of a sink, found by a run of `semel verify`. Those of the simulation are more."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.verify.run import verify
from semel.verify.settings import Settings

FILE = Path(__file__).parent / "pipelines" / "bugs.py"


@pytest.mark.parametrize(
    ("bug", "point", "anomalies"),
    [
        ("the_ledger_is_not_asked", "sqlite.committed", {"duplicated"}),
        pytest.param("prepare_commits", "batch.prepared", {"early", "duplicated"}, marks=pytest.mark.long),
        pytest.param("a_start_does_not_sweep", "batch.staged", {"orphans"}, marks=pytest.mark.long),
    ],
)
def test_a_bug_in_the_runtime_or_in_a_sink_is_found(
    bug: str, point: str, anomalies: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed where it matters: that a plan comes by every point is tested elsewhere."""
    monkeypatch.setenv("SEMEL_TEST_BUG", bug)
    monkeypatch.setattr("semel.verify.run.points_for", lambda *_: (point,))
    settings = Settings(
        seed=4, target=str(FILE), kills=1, rows=600, rows_per_batch=50, faults=("point",), output=tmp_path
    )
    found = verify(settings, print).as_json()
    assert found["verdict"] is False, found
    assert anomalies & {kind for kind in ("lost", "duplicated", "torn", "early", "orphans") if found[kind]}
    assert found["lost"] == 0
