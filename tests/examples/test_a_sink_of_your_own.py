"""A sink that nobody in src knows of: its package is installed into a folder, and found by its entry point."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.quick_spark import quick_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "a_sink_of_your_own"
PAGE = ROOT / "docs" / "how-to" / "a-sink-of-your-own.md"
SOURCES = {path.name: path.read_text() for path in EXAMPLE.glob("*.py")}
SECONDS_MAX = 600

PIPELINE = """
import semel
from semel_jsonl import JsonLines


@semel.pipeline
def orders(spark):
    rows = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1).json("in")
    writer = semel.write(rows).to(JsonLines("out/orders")).option("checkpointLocation", "checkpoint")
    return writer.trigger(availableNow=True)
"""

Environment = Mapping[str, str]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment of a user who has installed the package."""
    target = tmp_path_factory.mktemp("installed")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", target, EXAMPLE],
        check=True,
        timeout=SECONDS_MAX,
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}


def python(folder: Path, environment: Environment, *arguments: str) -> str:
    """What a process says that ends well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


KINDS = "from semel.sinks.kinds import kinds; print(*kinds())"


def test_it_is_found_where_it_is_installed_and_nowhere_else(installed: Environment, tmp_path: Path) -> None:
    ours = ["memory", "sqlite", "files", "kafka", "postgres", "mysql"]
    assert python(tmp_path, os.environ, "-c", KINDS).split() == ours
    assert python(tmp_path, installed, "-c", KINDS).split() == [*ours, "jsonl"]


def test_it_keeps_the_contract(installed: Environment, tmp_path: Path) -> None:
    """As its author tests it, far from our own configuration."""
    shutil.copy(EXAMPLE / "test_semel_jsonl.py", tmp_path)
    said = python(tmp_path, installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    assert "37 passed" in said.splitlines()[-1]


@pytest.mark.usefixtures("class_archive")
def test_a_pipeline_file_writes_to_it_and_an_audit_proves_it(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(PIPELINE)
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / "in" / f"{n}.json").write_text(json.dumps({"id": n, "text": f"row {n}"}) + "\n")
    python(tmp_path, installed, "-m", "semel.cli", "run", "orders.py", *quick_run())
    rows = "from semel_jsonl import JsonLines; print(sorted(row['id'] for row in JsonLines('out/orders').rows()))"
    assert python(tmp_path, installed, "-c", rows) == "[0, 1, 2]\n"
    told = json.loads(python(tmp_path, installed, "-m", "semel.cli", "audit", "orders.py", "--json", *quick_run()))
    assert (told["verdict"], told["findings"], told["reasons"]) == (True, [], [])
    assert [batch["batch"] for batch in told["batches"]] == [0, 1, 2]


@pytest.mark.usefixtures("class_archive")
@pytest.mark.parametrize(
    ("kills", "kinds"),
    [
        # The second kill of this seed is behind the commit of the sink itself.
        pytest.param(2, ("point", "driver"), id="two-kills"),
        pytest.param(
            15,
            ("point", "driver", "supervisor", "jvm", "worker", "pause", "zombie"),
            id="every-kind",
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_is_exactly_once_under_kills(
    kills: int, kinds: tuple[str, ...], installed: Environment, tmp_path: Path
) -> None:
    plan = ("--seed", "159", "--kills", str(kills), "--faults", ",".join(kinds))
    rows = ("--rows", "400", "--rows-per-batch", "50", "--output", str(tmp_path / "report"), "--json")
    said = python(tmp_path, installed, "-m", "semel.cli", "verify", "--sinks", "jsonl", *plan, *rows, *quick_run())
    found = json.loads(said)
    assert found["verdict"] is True, found
    assert found["rows"] >= 400
    assert found["kills"] >= kills
    assert found["faults"].keys() == {*kinds}
    assert [found[kind] for kind in ("lost", "duplicated", "torn", "early", "orphans")] == [0] * 5


def lines_of_code(source: str) -> int:
    """Neither empty lines nor comments nor docstrings."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in texts for n, line in lines)


def test_it_is_short() -> None:
    assert set(SOURCES) == {"semel_jsonl.py", "semel_jsonl_reader.py", "test_semel_jsonl.py"}
    assert sum(map(lines_of_code, SOURCES.values())) < 200
    assert len(SOURCES["semel_jsonl.py"].splitlines()) < 200


def test_the_page_shows_what_is_there() -> None:
    blocks = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]
    assert len(blocks) == 4
    for block in blocks:
        assert any(block.rstrip() in source for source in SOURCES.values()), block
