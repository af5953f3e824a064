"""The house is in order: every module is in the picture, imports point one way, no file is too long to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "semel"
MODULES = sorted(SOURCE.rglob("*.py"))
PICTURE = (SOURCE.parents[1] / "docs" / "ARCHITECTURE.md").read_text().partition("## Rooms")[2]
LINES_MAX = 500

#: A folder, and what it may import beside itself and what lies at the bottom. Tools over the rest may import anything.
BOTTOM = {"errors", "failpoints", "formats", "durable", "deadline", "checksum", "late", "process", "ids", "protocol"}
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "decisions": set(),
    "kafka": set(),
    "sinks": {"kafka", "sinks"},
    "sources": {"kafka", "sources"},
    "runtime": {"decisions", "kafka", "sinks", "sources"},
    "session": {"dev"},
    "run": {"decisions", "kafka", "sinks", "sources", "runtime", "session"},
}


def imports_of(path: Path) -> Iterator[str]:
    """The folders of semel that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "semel":
            names = [f"semel.{a.name}" for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.startswith("semel."):
                yield name.split(".")[1]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder: str) -> None:
    allowed = BOTTOM | ALLOWED[folder] | {folder} if folder != "protocol" else {"errors", "formats", "ids", "protocol"}
    wrong = {
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in (SOURCE / folder).rglob("*.py")
        for name in imports_of(path)
        if name not in allowed
    }
    assert wrong == set()


def test_every_room_is_in_the_picture() -> None:
    words = set(re.findall(r"\w+", PICTURE))
    packages = [path.parent.name for path in MODULES if path.name == "__init__.py" and path.parent != SOURCE]
    assert [name for name in packages if name not in words and name != "readers"] == []
    described = ("", "decisions", "protocol", "sinks", "runtime", "session", "run")
    unnamed = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if path.relative_to(SOURCE).parts[0].removesuffix(".py") in described or path.parent == SOURCE
        if not path.stem.startswith("_") and path.stem not in words
    ]
    assert unnamed == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}
