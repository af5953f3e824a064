"""The fixtures of the contract suite, made of harnesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from semel.testing.harness import Harness

Address = Callable[[type[Harness], pytest.FixtureRequest], str]


def _no_server(harness: type[Harness], request: pytest.FixtureRequest) -> str:  # noqa: ARG001 - most need none
    return ""


def fixtures(harnesses: Mapping[str, type[Harness]], address: Address = _no_server) -> tuple[Any, Any]:
    """The two fixtures of the suite, `harness` and `durable_harness`: a fresh target for each test, of each harness.

    Tests that need another process get the second, which leaves out a store that lives inside one. `address` tells
    where the server of a harness is, and may ask for a fixture that starts it.
    """

    def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
        wanted = harnesses[request.param]
        opened = wanted(tmp_path, address(wanted, request))
        try:
            yield opened
        finally:
            opened.end()

    survivors = [name for name, harness in harnesses.items() if harness.survives_the_process]
    return pytest.fixture(params=list(harnesses))(made), pytest.fixture(params=survivors)(made)
