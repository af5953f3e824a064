"""Every contract test runs once per sink. What a sink cannot be asked is left out here, by its flag and its reason."""

from __future__ import annotations

import pytest

from semel.sinks.kinds import kinds
from semel.testing.fixtures import fixtures
from semel.testing.harness import Harness
from tests.contract.mysql_harness import MYSQL_HARNESSES
from tests.contract.our_harnesses import OWN_HARNESSES
from tests.contract.sql_harness import SQL_HARNESSES
from tests.servers import address_of

#: One for each sink, and where a sink has modes one for each of them.
HARNESSES: dict[str, type[Harness]] = {**OWN_HARNESSES, **SQL_HARNESSES, **MYSQL_HARNESSES}

SURVIVORS = [kind for kind, harness in HARNESSES.items() if harness.survives_the_process]


def address(harness: type[Harness], request: pytest.FixtureRequest) -> str:
    """Of the server that the kind needs."""
    return address_of(kinds()[harness.kind].server, request)


harness, durable_harness = fixtures(HARNESSES, address)
