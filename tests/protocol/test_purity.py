"""The protocol has no clock, no I/O and no dependency: the model checker runs the very same functions."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import semel.protocol

FOLDER = Path(semel.protocol.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
OURS = {"semel.formats", "semel.ids", "semel.protocol"}
IMPURE = {"asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "signal"}
IMPURE |= {"socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid"}
# The diagram is a tool beside the protocol: it prints, and writes one page. Nothing in the protocol imports it.
TOOLS = {"diagram.py": {"sys", "pathlib"}}


def imports_of(source: str) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def is_allowed(module: str) -> bool:
    ours = any(module == name or module.startswith(f"{name}.") for name in OURS)
    return ours or module.partition(".")[0] in sys.stdlib_module_names


def test_there_is_something_to_check() -> None:
    names = {path.name for path in MODULES}
    assert names >= {"__init__.py", "events.py", "states.py", "step.py", "recovery.py", "invariants.py", "diagram.py"}


def test_the_check_sees_imports_in_every_place() -> None:
    source = "import a.b\ndef f():\n    from c.d import e\n    import os\nif True:\n    from . import g\n"
    assert imports_of(source) == {"a.b", "c.d", "os", "."}
    assert [name for name in ("a.b", "c.d", ".", "semel.sinks", "semel.idsx") if is_allowed(name)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_protocol_imports_only_the_standard_library_and_itself(path: Path) -> None:
    assert sorted(filter(lambda name: not is_allowed(name), imports_of(path.read_text()))) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_protocol_has_no_clock_no_chance_and_no_io(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(path.read_text())}
    assert sorted(tops & IMPURE - TOOLS.get(path.name, set())) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_protocol_does_not_import_its_tools(path: Path) -> None:
    assert "semel.protocol.diagram" not in imports_of(path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_protocol_opens_and_prints_nothing(path: Path) -> None:
    calls = {
        n.func.id
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert sorted(calls & {"open", "print", "input", "__import__", "exec", "eval"}) == []
