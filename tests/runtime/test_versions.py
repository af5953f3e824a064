"""Tasks of another release are refused before they write, and the driver looks a second time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.errors import ConfigError
from semel.runtime.task import error_of_task
from semel.runtime.versions import WIRE, own_versions, require_same

DRIVER = {
    **own_versions(),
    "python": "3.11.2",
    "pyarrow": "21.0.0",
    "semel": "0.2.0",
    "interpreter": "/venv/bin/python",
}


@pytest.mark.parametrize(
    "other", [{}, {"python": "3.11.9"}, {"pyarrow": "21.0.1"}, {"interpreter": "/usr/bin/python3"}]
)
def test_what_works_together_is_taken(other: dict[str, str]) -> None:
    require_same(DRIVER, {**DRIVER, **other})
    assert own_versions()["semel"] == semel.__version__


@pytest.mark.parametrize(
    ("other", "told", "remedy"),
    [
        ({"semel": "0.1.0"}, "semel 0.1.0 there, 0.2.0 on the driver", "'semel==0.2.0', then start again."),
        ({"wire": "1"}, f"semel's wire format 1 there, {WIRE} on the driver", "'semel==0.2.0', then start again."),
        ({"pyarrow": "19.0.0"}, "pyarrow 19.0.0 there, 21.0.0 on the driver", "'semel==0.2.0' 'pyarrow==21.0.0', then"),
        ({"python": "3.12.1"}, "Python 3.12.1 there, 3.11.2 on the driver", "Set PYSPARK_PYTHON to a Python 3.11 of"),
    ],
)
def test_what_differs_is_refused_with_the_command_that_mends_it(other: dict[str, str], told: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_same(DRIVER, {**DRIVER, **other})
    assert caught.value.what == f"The executors (/venv/bin/python) run other versions than the driver: {told}."
    assert caught.value.data_now == "nothing of this batch was written; what was committed before stays visible"
    assert remedy in caught.value.remedy


def test_a_task_that_tells_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="semel unknown there"):
        require_same(DRIVER, {})


#: A worker of Spark unpickles what it is sent and calls it with batches.
WORKER = "import pickle, sys; print(list(pickle.loads(open(sys.argv[1], 'rb').read())([])))"
DRIVERS = """
import sys
from pyspark import cloudpickle
from semel.runtime.versions import own_versions, sealed

def task(batches):
    yield 'written'

open(sys.argv[1], 'wb').write(cloudpickle.dumps(sealed(task, own_versions())))
"""


def as_on_an_executor(tmp_path: Path, path: str) -> subprocess.CompletedProcess[str]:
    """A sealed task of this semel, in a process that finds the modules of this path first."""
    sent = tmp_path / "sent"
    subprocess.run([sys.executable, "-c", DRIVERS, str(sent)], check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", WORKER, str(sent)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_task_of_the_same_release_runs(tmp_path: Path) -> None:
    done = as_on_an_executor(tmp_path, "")
    assert (done.stdout, done.returncode) == ("['written']\n", 0)


@pytest.mark.parametrize(
    ("init", "told"),
    [
        ('__version__ = "0.1.0"', "semel 0.1.0 there, "),
        (f'__version__ = "{semel.__version__}"', f"semel's wire format 1 there, {WIRE} on the driver"),
        ("import a_module_that_is_not_there", "lacks what tasks need: No module named 'a_module_that_is_not_there'"),
    ],
)
def test_an_older_semel_on_an_executor_fails_in_three_lines_and_writes_nothing(
    tmp_path: Path, init: str, told: str
) -> None:
    package = tmp_path / "old" / "semel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(init) + "\n")
    done = as_on_an_executor(tmp_path, str(package.parent))
    assert (done.stdout, done.returncode) == ("", 1)
    error: Any = error_of_task(done.stderr)
    assert isinstance(error, ConfigError)
    assert told in error.what
    assert "nothing of this batch was written" in error.data_now
    assert "-m pip install" in error.remedy
    assert f"semel=={semel.__version__}" in error.remedy
