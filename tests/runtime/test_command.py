"""What errors say about starting again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from semel.runtime.command import start_again


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/usr/bin/semel", "run", "jobs/orders.py", "--conf", "password=x"], " (semel run jobs/orders.py)"),
        (["/usr/bin/semel", "run", "--json", "my orders.py"], " (semel run 'my orders.py')"),
        (["lib/semel/__main__.py", "run", "orders.py"], " (semel run orders.py)"),
        (["/usr/bin/semel", "demo"], ""),
        (["{folder}/job.py", "--password", "x"], " (python {folder}/job.py)"),
        (["{folder}/gone.py"], ""),
        (["{folder}/site-packages/ipykernel_launcher.py", "-f", "kernel.json"], ""),
        ([""], ""),
        ([], ""),
    ],
)
def test_the_command_is_named_where_it_is_known_and_without_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    for name in ("job.py", "site-packages/ipykernel_launcher.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", [word.format(folder=tmp_path) for word in arguments])
    assert start_again() == "start the pipeline again" + expected.format(folder=tmp_path)
