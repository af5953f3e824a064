"""The contract that every sink keeps (semel.testing.contract), for those that come with semel."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from semel.checksum import crc32c
from semel.errors import MissingExtra
from semel.runtime.fingerprint import Checksum
from semel.sinks.base import Sink
from semel.sinks.kinds import kinds
from semel.testing.contract import *  # noqa: F403 - every test of it
from semel.testing.harness import SCHEMA, context, schema_of
from tests.contract.conftest import HARNESSES, SURVIVORS


def test_every_registered_sink_has_a_harness() -> None:
    assert set(kinds()) == {harness.kind for harness in HARNESSES.values()}


def test_only_a_store_inside_the_process_is_spared_the_tests_with_other_processes() -> None:
    assert set(HARNESSES) - set(SURVIVORS) == {"memory"}


#: The library -> what it is called where it is installed from, what needs it, and what is run until it is missed.
CLIENTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "confluent_kafka": ("confluent-kafka", "kafka", lambda: _sink_of("kafka").check(schema_of(_sink_of("kafka")))),
    "kafka": ("kafka-python", "kafka", lambda: _sink_of("kafka").participant(context())),
    "psycopg": ("psycopg", "postgres", lambda: _sink_of("postgres").check(SCHEMA)),
    "pymysql": ("PyMySQL", "mysql", lambda: _sink_of("mysql").check(SCHEMA)),
}


def _sink_of(kind: str) -> Sink:
    place = "127.0.0.1:1" if kind == "kafka" else f"{kind}://nobody@127.0.0.1:1/semel"
    made: Callable[[str, str], Sink] = kinds()[kind].sink
    return made(place, "orders")


@pytest.mark.parametrize("client", CLIENTS)
def test_missing_client_names_the_extra(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m == client or m.startswith(f"{client}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, client, None)
    library, extra, call = CLIENTS[client]
    with pytest.raises(MissingExtra) as raised:
        call()
    (sink,) = (kind.sink.__name__ for kind in kinds().values() if kind.extra == extra)
    expected = (
        f"The {sink} sink needs {library}, which is not installed.\n"
        "  the data now: nothing was started and no row was written\n"
        f"  what to do: Install it: pip install 'semel[{extra}]'"
    )
    assert str(raised.value) == expected
    assert str(pickle.loads(pickle.dumps(raised.value))) == expected  # noqa: S301 - our own bytes


def test_a_missing_checksum_names_the_extras_that_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    crc32c.cache_clear()
    rows = pa.RecordBatch.from_pydict({"id": [1]})
    try:
        with pytest.raises(
            MissingExtra, match=r"need crc32c(.|\n)*'semel\[kafka\]', 'semel\[postgres\]' or 'semel\[mysql\]'"
        ):
            Checksum().add(rows)
    finally:
        crc32c.cache_clear()
