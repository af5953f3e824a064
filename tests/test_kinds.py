"""The records of the kinds of sinks: what they name is there, nobody else keeps a list, and strangers add theirs."""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from semel.dev import servers
from semel.errors import ConfigError
from semel.failpoints import PROTOCOL, Failpoint, all_failpoints, parse
from semel.sinks import kinds as kinds_module
from semel.sinks.kinds import SHIPPED, SinkKind, collected, kind_of, kinds
from semel.sinks.memory import Memory
from semel.verify.readers import Reader
from semel.verify.settings import Settings, built_in
from tests.contract.conftest import HARNESSES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "semel"
RECORD = "src/semel/sinks/kinds.py"
CLASSES = {kind.sink.__name__ for kind in SHIPPED}
NAMES = {name for kind in SHIPPED for name in kind.names}
#: What re-exports them, and pipelines of the demo.
MAY_NAME = ("__init__.py", "sinks/__init__.py", "sinks/kinds.py", "demo/pipelines.py", "demo/kafka_pipelines.py")


# What a record names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: str(kind.name))
def test_a_kind_has_a_page_that_the_readme_links_and_that_says_what_every_page_says(kind: SinkKind) -> None:
    page = (ROOT / kind.page).read_text()
    readme = (ROOT / "README.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{kind.sink.__name__}`"))
    assert f"]({kind.page})" in row
    for heading in ("Use", "How it commits", "Guarantee", "Settings", "What can go wrong and what to do"):
        assert f"\n## {heading}" in page
    assert f"{kind.sink.__name__}(" in page


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: str(kind.name))
def test_what_a_kind_names_is_there(kind: SinkKind) -> None:
    assert kind.server in ("", *servers.KINDS)
    assert kind.example is not None
    assert kind.name in {harness.kind for harness in HARNESSES.values()}
    if kind.reader:
        module, _, name = kind.reader.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), Reader)


def test_only_a_store_inside_the_process_has_no_reader() -> None:
    assert {kind.name for kind in SHIPPED if not kind.reader} == {"memory"}
    assert list(built_in()) == ["sqlite", "files", "kafka", "postgres", "mariadb"]


def test_the_points_of_the_sinks_stand_between_the_decision_and_the_end_of_a_batch() -> None:
    names = list(all_failpoints())
    *before, last = (point.name for point in PROTOCOL)
    assert names[: len(before)] == before
    assert names[-1] == last
    of_sinks = names[len(before) : -1]
    assert of_sinks == [point.name for kind in SHIPPED for point in kind.failpoints]
    assert len(set(of_sinks)) == len(of_sinks) == 13
    # Who kills at a point of the sink itself needs at least the moment between the commit and its answer.
    assert {f"{kind.name}.committed" for kind in SHIPPED if kind.reader} <= set(of_sinks)


def test_a_point_is_one_of_its_own_sink() -> None:
    with pytest.raises(ConfigError, match=r"The failpoint files.committed is not one of the sink memory."):
        SinkKind(Memory, failpoints=(Failpoint("files.committed", "nothing"),))


# Light ----------------------------------------------------------------------------------------------------------------


def test_a_record_imports_nothing_of_what_it_names() -> None:
    """Workers import semel, and a failpoint in one of them may ask for the records."""
    code = (
        "import sys; from semel.sinks import kinds; kinds.kinds(); "
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.split('.')[0] in "
        "('semel', 'typer', 'rich', 'pytest', 'pyspark', 'psycopg', 'pymysql', 'confluent_kafka')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    below = {path.stem for path in SOURCE.iterdir()} - {"audit", "cli", "decisions", "demo", "dev", "model", "run"}
    below -= {"runtime", "simulation", "sources", "testing", "timeline", "verify"}
    assert {name.removeprefix("semel.") for name in done.stdout.split()} <= below | {"semel"}


# Nobody else keeps a list ---------------------------------------------------------------------------------------------


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """All of src but the sinks themselves and their readers."""
    found = []
    own = {f"sinks/{kind.name}" for kind in SHIPPED} | {f"verify/readers/{kind.name}" for kind in SHIPPED}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.removesuffix(".py").startswith(tuple(own)) and name not in MAY_NAME:
            found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def names_a_class(node: ast.AST) -> bool:
    """`Sqlite`, `semel.Sqlite`, or an import of it."""
    if isinstance(node, ast.Name):
        return node.id in CLASSES
    if isinstance(node, ast.Attribute):
        return node.attr in CLASSES
    return isinstance(node, ast.alias) and node.name in CLASSES


def asks_for_a_kind(node: ast.AST) -> bool:
    """`sink.kind == "kafka"`, `kind in ("postgres", "mysql")`."""
    if not isinstance(node, ast.Compare):
        return False
    asked = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
    values = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return "kind" in asked and bool(values & NAMES)


def lists_kinds(node: ast.AST) -> bool:
    """A list, a tuple, a set or the keys of a dict with the names of two kinds or more."""
    if isinstance(node, ast.Dict):
        items: list[ast.expr | None] = list(node.keys)
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = list(node.elts)
    else:
        return False
    return len({item.value for item in items if isinstance(item, ast.Constant)} & NAMES) > 1


def test_the_search_finds_what_it_looks_for() -> None:
    found = ast.parse(
        'from a import Kafka\nisinstance(s, semel.Files)\ns.kind == "kafka"\nx = {"kafka": 1, "files": 2}\n'
    )
    nodes = list(ast.walk(found))
    assert [sum(map(test, nodes)) for test in (names_a_class, asks_for_a_kind, lists_kinds)] == [2, 1, 1]
    assert len(modules()) > 100


def test_nobody_but_a_sink_and_its_reader_names_its_class() -> None:
    found = {name for name, tree in modules() for node in ast.walk(tree) if names_a_class(node)}
    assert found == set()


def test_nobody_asks_a_sink_for_its_kind_or_lists_the_kinds() -> None:
    found = {name for name, tree in modules() for node in ast.walk(tree) if asks_for_a_kind(node) or lists_kinds(node)}
    # These are servers, which sources need as well.
    assert found == {"dev/servers.py"}


# Strangers ------------------------------------------------------------------------------------------------------------


class Ledger(Memory):
    kind = "ledger"


LEDGER = SinkKind(Ledger, failpoints=(Failpoint("ledger.committed", "the rows are visible"),))
NOT_A_KIND = "a word"


def raises() -> None:
    raise RuntimeError("no luck")


class Package(Distribution):
    """A distribution with a name, a version and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        return f"Name: {self._name}\nVersion: 1.0\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


def point(name: str, value: str, package: str = "semel-ledger") -> EntryPoint:
    made = EntryPoint(name, value, "semel.sinks")
    vars(made).update(dist=Package(package))
    return made


GOOD = point("ledger", f"{__name__}:LEDGER")


def test_a_kind_of_another_package_is_one_like_ours() -> None:
    found, without = collected(SHIPPED, [GOOD])
    assert (found["ledger"], without) == (LEDGER, {})
    assert list(found) == [*(kind.name for kind in SHIPPED), "ledger"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (point("gone", "no_such_module:KIND"), "semel-ledger 1.0 fails with ModuleNotFoundError: No module named"),
        (point("gone", f"{__name__}:GONE"), "fails with AttributeError: module"),
        (point("gone", f"{__name__}:NOT_A_KIND"), "is no SinkKind but 'a word'"),
        (point("gone", f"{__name__}:LEDGER"), "the entry point is called gone and the kind ledger"),
        (point("sqlite", f"{__name__}:raises"), "is no SinkKind but <function raises"),
    ],
)
def test_a_kind_that_cannot_be_loaded_is_told_by_name_and_spoils_no_other(bad: EntryPoint, why: str) -> None:
    found, without = collected(SHIPPED, [bad, GOOD])
    assert set(found) == {*(kind.name for kind in SHIPPED), "ledger"}
    assert list(without) == [bad.name]
    assert why in without[bad.name]


def test_a_name_that_is_taken_is_refused_and_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sqlite", "mariadb"):
        monkeypatch.setattr(Ledger, "kind", name)
        monkeypatch.setattr(sys.modules[__name__], "LEDGER", SinkKind(Ledger))
        found, without = collected(SHIPPED, [point(name, f"{__name__}:LEDGER")])
        assert found == {kind.name: kind for kind in SHIPPED}
        assert without == {name: "semel-ledger 1.0 brings it, and there is one of this name already"}


def test_two_packages_with_one_name_are_both_refused_by_name() -> None:
    found, without = collected(SHIPPED, [GOOD, point("ledger", f"{__name__}:LEDGER", "another-ledger")])
    assert "ledger" not in found
    assert without["ledger"].startswith("several packages bring it (another-ledger 1.0, semel-ledger 1.0)")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """What is found by the real functions in this process."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(kinds_module, "entry_points", lambda group: points if group == "semel.sinks" else [])
    kinds_module._found.cache_clear()
    yield points
    kinds_module._found.cache_clear()


def test_a_broken_kind_is_told_once_and_whoever_needs_it_learns_why(
    installed: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    installed += [point("ledger", "no_such_module:KIND")]
    with caplog.at_level(logging.WARNING, "semel"):
        assert "ledger" not in kinds()
        assert list(kinds()) == [kind.name for kind in SHIPPED]
    assert [r.getMessage().partition(" fails")[0] for r in caplog.records] == [
        "The kind of sink ledger is not known to semel: semel-ledger 1.0"
    ]
    with pytest.raises(
        ConfigError, match=r"The kind 'ledger' of sink memory_t is not known: semel-ledger 1.0 fails with"
    ):
        kind_of(Ledger("t"))


def test_verify_refuses_a_sink_that_is_broken_or_needs_an_unknown_server(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed += [point("ledger", "no_such_module:KIND")]
    with pytest.raises(
        ConfigError, match=r"The sink ledger cannot be used: semel-ledger 1\.0 fails with ModuleNotFound"
    ):
        Settings(seed=1, sinks=("ledger",))
    kind = SinkKind(Ledger, reader="semel.verify.readers.base:Reader", example=lambda at: Ledger(at.target), server="x")
    monkeypatch.setattr(sys.modules[__name__], "LEDGER", kind)
    installed[:] = [GOOD]
    kinds_module._found.cache_clear()
    with pytest.raises(ConfigError, match="There is no server for the sink ledger named x"):
        Settings(seed=1, sinks=("ledger",))


def test_a_sink_that_nobody_registered_is_told_what_is_missing(installed: list[EntryPoint]) -> None:
    with pytest.raises(ConfigError, match=r"no package has an entry point of this name in the group semel\.sinks"):
        kind_of(Ledger("t"))


def test_a_point_of_a_stranger_can_be_named(installed: list[EntryPoint]) -> None:
    with pytest.raises(ValueError, match=r"unknown failpoint 'ledger\.committed'"):
        parse("ledger.committed@2")
    installed += [GOOD]
    kinds_module._found.cache_clear()
    assert parse("ledger.committed@2") == {"ledger.committed": (2, "kill")}
