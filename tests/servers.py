"""Which fixture has a server of each kind: the records of sinks name servers as `semel dev` does."""

from __future__ import annotations

import pytest

#: The server -> its fixture, and what of it clients connect with.
FIXTURES = {
    "kafka": ("kafka_cluster", "bootstrap"),
    "postgres": ("postgres_server", "url"),
    "mariadb": ("mariadb_server", "url"),
}


def address_of(server: str, request: pytest.FixtureRequest) -> str:
    """Where a server is, which starts now if it does not run; empty where none is needed."""
    if not server:
        return ""
    fixture, address = FIXTURES[server]
    return str(getattr(request.getfixturevalue(fixture), address))
