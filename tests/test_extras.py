"""Each extra brings what it needs: with nothing else installed its sink is imported, pickled, and writes a batch."""

from __future__ import annotations

import base64
import json
import pickle
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from semel.dev.kafka import KafkaCluster
from semel.dev.mariadb import MariaDbServer
from semel.dev.postgres import PostgresServer
from semel.sinks.base import Sink
from semel.sinks.files import Files
from semel.sinks.kafka import Kafka
from semel.sinks.kinds import SINKS
from semel.sinks.memory import Memory
from semel.sinks.mysql import MySql
from semel.sinks.postgres import Postgres
from semel.sinks.sqlite import Sqlite
from tests.kafka_world import KafkaWorld

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: What an extra is for, beside sinks.
MODULES = {
    "cli": ["semel.cli.run", "semel.cli.dev", "semel.cli.model", "semel.cli.display"],
    "spark": ["pyspark.sql", "pandas", "semel.run.session", "semel.runtime.foreach_batch"],
}
#: What makes more of another extra. Their own tests look at what is said where they are missing.
NOT_ALONE = ("kafka-kerberos", "kafka-msk", "verify-power")
ROWS = [{"id": 1, "text": "one"}, {"id": 2, "text": None}]
RECORDS = [{"key": "1", "value": "one"}, {"key": None, "value": "two"}]
TIMEOUT_S = 120
#: What the setuptools of a fresh environment loads whenever Python starts.
LOADED_ANYHOW = "_distutils_hack"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought_by(*extras: str) -> set[str]:
    """The distributions that pip would install for these extras, as far as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in (*PROJECT["dependencies"], *(r for e in extras for r in EXTRAS[e]))]
    while waiting:
        wanted = waiting.pop()
        name = canonical(wanted.name)
        found.add(name)
        waiting += [r for r in _needs(name, wanted.extras) if canonical(r.name) not in found]
    return found


def _needs(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield needed


def blocked_without(*extras: str) -> list[str]:
    """The modules of everything else that is installed here."""
    present = brought_by(*extras)
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not {canonical(owner) for owner in owners} & {*present, "semel"} and module != LOADED_ANYHOW
    )


def child(verb: str, *extras: str, modules: Iterable[str], **order: Any) -> Any:
    blocked = blocked_without(*extras)
    assert "pytest" in blocked
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "extras_child.py"), verb],
        input=json.dumps({"blocked": blocked, "modules": [*modules], **order}),
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["present"] == []
    return said["answer"]


def test_every_extra_is_looked_at() -> None:
    sinks = {kind for kind in SINKS if kind != "memory"}
    assert set(EXTRAS) == {*sinks, *MODULES, *NOT_ALONE, "all", "dev"}


@pytest.mark.parametrize("extra", [*MODULES, "nothing"])
def test_what_an_extra_is_for_can_be_imported_with_it_alone(extra: str) -> None:
    child("import", *([extra] if extra in EXTRAS else []), modules=["semel", *MODULES.get(extra, [])])


def test_what_an_extra_does_not_bring_is_missed() -> None:
    """So that the other tests can fail."""
    with pytest.raises(AssertionError, match="No module named 'psycopg'"):
        child("import", "mysql", modules=["psycopg"])


@pytest.fixture
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    """One that commits task by task where there is one, on a real server."""
    name = f"extras_{uuid.uuid4().hex[:8]}"
    if request.param == "memory":
        return Memory(name)
    if request.param == "sqlite":
        return Sqlite(str(tmp_path / "shop.db"), "orders")
    if request.param == "files":
        return Files(str(tmp_path / "lake"))
    if request.param == "postgres":
        postgres: PostgresServer = request.getfixturevalue("postgres_server")
        return Postgres(postgres.url, name, mode="prepared", create=True)
    if request.param == "mysql":
        mysql: MariaDbServer = request.getfixturevalue("mariadb_server")
        return MySql(mysql.url, name, mode="xa", create=True)
    cluster: KafkaCluster = request.getfixturevalue("kafka_cluster")
    world = KafkaWorld(cluster.bootstrap)
    world.create_topics(name)
    world.close()
    return Kafka(cluster.bootstrap, name)


@pytest.mark.parametrize("sink", SINKS, indirect=True)
def test_a_sink_is_imported_unpickled_and_writes_a_batch_with_its_extra_alone(sink: Sink) -> None:
    extras = [sink.kind] if sink.kind in EXTRAS else []
    rows = RECORDS if sink.kind == "kafka" else ROWS
    pickled = base64.b64encode(pickle.dumps(sink)).decode()
    order = {"sink": pickled, "rows": rows, "pipeline": str(uuid.uuid4())}
    assert child("write", *extras, modules=["semel"], **order) == ["COMMITTED"]
