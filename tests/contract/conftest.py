"""Every contract test runs once per sink. What a sink cannot be asked is left out here, by its flag and its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.harness import HARNESSES, Harness

SURVIVORS = [kind for kind, harness in HARNESSES.items() if harness.survives_the_process]


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """A fresh target of each sink."""
    return HARNESSES[request.param](tmp_path)


@pytest.fixture(params=SURVIVORS)
def durable_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """A fresh target of each sink whose store outlives the process."""
    return HARNESSES[request.param](tmp_path)
