"""Short demos on real Spark: two contestants, killed equally often."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from semel import cli
from tests.processes import wait_until

SVG = "{http://www.w3.org/2000/svg}"

#: The demo without the run that makes each start of Spark cheaper. With few starts it costs more than it spares.
COLD = """
from unittest.mock import patch
from semel import cli
with patch("semel.demo.game._warm_up"):
    cli.main()
"""


def play(folder: Path, *arguments: str, python: tuple[str, str] = ("-m", "semel.cli")) -> dict[str, Any]:
    """A demo with exit code 0: what it says on stdout."""
    command = [sys.executable, *python, "demo", "--json", "--seed", "7", "--output", "out", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_short_demo_is_exactly_once_and_says_so_in_one_json_object(tmp_path: Path) -> None:
    result = play(tmp_path, "--kills", "3", "--orders", "600")
    expected = {"seed": 7, "produced": 600, "delivered": 600, "lost": 0, "duplicated": 0, "aggregates_wrong": 0}
    assert {key: result[key] for key in expected} == expected
    assert result["kills"] == 3
    # 24 files, two per batch, two pipelines. A kill before Spark wrote a batch's offsets may make one batch of two.
    assert 24 - 2 * 3 <= result["batches"] <= 2 * 24
    assert result["replayed"] >= 1
    assert result["seconds"] > 0
    assert result["ok"] is True
    assert (result["baseline"]["kills"], result["baseline"]["lost"]) == (3, 0)
    assert set(result["baseline"]) >= {"produced", "delivered", "duplicated", "aggregates_wrong", "batches", "replayed"}
    output = Path(result["output"])
    assert output == tmp_path / "out"
    assert json.loads((output / "result.json").read_text()) == result
    assert kill_marks(output / "timeline.svg") == {"semel": 3, "plain Spark": 3}
    # Only the result is left behind: no database, no checkpoint, no archive.
    assert sorted(path.name for path in output.iterdir()) == ["result.json", "timeline.svg"]


@pytest.mark.long
def test_a_short_demo_on_kafka_is_exactly_once(tmp_path: Path) -> None:
    """Two batches in each life: where a second one does not come, plain Spark is killed only after a wait."""
    few = ("--kills", "1", "--batches", "4", "--orders", "40")
    result = play(tmp_path, "--kafka", *few, python=("-c", COLD))
    expected = {"produced": 40, "delivered": 40, "lost": 0, "duplicated": 0, "aggregates_wrong": 0, "ok": True}
    assert {key: result[key] for key in expected} == expected
    assert (result["kills"], result["baseline"]["kills"]) == (1, 1)
    assert result["batches"] >= 4
    output = tmp_path / "out"
    assert kill_marks(output / "timeline.svg") == {"semel": 1, "plain Spark": 1}
    # The broker's data is gone as well.
    assert sorted(path.name for path in output.iterdir()) == ["result.json", "timeline.svg"]


def test_an_interrupted_demo_leaves_no_process_and_no_data_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "semel.cli", "demo", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Where the tests run in the background, it would ignore the signal as they do.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it does nothing else
    )
    wait_until(lambda: len(processes_of(tmp_path)) >= 2)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=180)
    assert (demo.returncode, output) == (130, b"")
    wait_until(lambda: not processes_of(tmp_path))
    assert list((tmp_path / "demo-output").iterdir()) == []


def processes_of(folder: Path) -> list[str]:
    """The processes that were told to work in the folder: the demo's children, their JVMs and Python workers."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        # A process may end while we look; one that has ended is what we hope for.
        with suppress(OSError):
            if f"={folder}/demo-output".encode() in environment.read_bytes():
                found.append(environment.parent.name)
    return found


def kill_marks(picture: Path) -> dict[str, int]:
    groups = list(ET.fromstring(picture.read_text()).iter(f"{SVG}g"))  # noqa: S314 - our own text
    return {
        lane.get("data-side", ""): sum(g.get("class") == "kill" for g in lane.iter(f"{SVG}g"))
        for lane in groups
        if lane.get("class") == "lane"
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kills", "0"], "--kills"),
        (["--kills", "many"], "--kills"),
        (["--orders", "5"], "too few"),
        (["--batches", "3"], "too few"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_arguments_end_with_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["semel", "demo", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
