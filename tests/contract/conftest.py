"""Every contract test runs once per sink. What a sink cannot be asked is left out here, by its flag and its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semel.sinks.kinds import kinds
from tests.contract.harness import Harness
from tests.contract.mysql_harness import MYSQL_HARNESSES
from tests.contract.our_harnesses import OWN_HARNESSES
from tests.contract.sql_harness import SQL_HARNESSES
from tests.servers import address_of

#: One for each sink, and where a sink has modes one for each of them.
HARNESSES: dict[str, type[Harness]] = {**OWN_HARNESSES, **SQL_HARNESSES, **MYSQL_HARNESSES}

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
    wanted = HARNESSES[kind]
    made = wanted(folder, address_of(kinds()[wanted.kind].server, request))
    try:
        yield made
    finally:
        made.end()
