"""Fixtures of the audit's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import HARNESSES, _made
from tests.contract.harness import Harness


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A fresh target of each sink, as for the contract."""
    with _made(request.param, request, tmp_path) as made:
        yield made
