"""Every contract test runs once per sink. What a sink cannot be asked is left out here, by its flag and its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.harness import HARNESSES, Harness

SURVIVORS = [kind for kind, harness in HARNESSES.items() if harness.survives_the_process]


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A fresh target of each sink."""
    with _made(request.param, request, tmp_path) as made:
        yield made


@pytest.fixture(params=SURVIVORS)
def durable_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A fresh target of each sink whose store outlives the process."""
    with _made(request.param, request, tmp_path) as made:
        yield made


@contextmanager
def _made(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    server = HARNESSES[kind].server
    made = HARNESSES[kind](folder, request.getfixturevalue(server).bootstrap if server else "")
    try:
        yield made
    finally:
        made.end()
