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

from semel.sinks.base import Sink
from semel.sinks.kinds import Venue, kind_of, kinds
from tests.kafka_world import KafkaWorld
from tests.servers import address_of

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
    sinks = {kind.extra for kind in kinds().values()} - {""}
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
    """An example of the kind, on a real server; one that commits task by task where there is one."""
    kind, target = kinds()[request.param], f"extras_{uuid.uuid4().hex[:8]}"
    address = address_of(kind.server, request)
    assert kind.example is not None
    examples = [kind.example(Venue(str(tmp_path), address, target, mode)) for mode in ("", *kind.modes)]
    if kind.server == "kafka":
        world = KafkaWorld(address)
        world.create_topics(target)
        world.close()
    return max(examples, key=lambda sink: sink.capabilities.commits_by_task)


def test_databases_are_looked_at_where_they_commit_task_by_task() -> None:
    for kind in kinds().values():
        assert kind.example is not None
        address = f"{kind.name}://u@localhost/d" if kind.modes else "localhost:1"
        examples = [kind.example(Venue("x", address, "t", mode)) for mode in ("", *kind.modes)]
        by_task = [sink.capabilities.commits_by_task for sink in examples]
        assert any(by_task) == (kind.name in ("kafka", "postgres", "mysql"))


@pytest.mark.parametrize("sink", kinds(), indirect=True)
def test_a_sink_is_imported_unpickled_and_writes_a_batch_with_its_extra_alone(sink: Sink) -> None:
    kind = kind_of(sink)
    extras = [kind.extra] if kind.extra else []
    rows = RECORDS if kind.takes_records else ROWS
    pickled = base64.b64encode(pickle.dumps(sink)).decode()
    order = {"sink": pickled, "rows": rows, "pipeline": str(uuid.uuid4())}
    assert child("write", *extras, modules=["semel"], **order) == ["COMMITTED"]
