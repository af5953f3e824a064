"""The Python of the workers is asked before anything is claimed. Each test is a script, started as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from semel.errors import ConfigError
from semel.runtime.interpreter import choose_python, error_of_worker, modules_of
from semel.sinks import MySql, Postgres
from semel.sinks.base import Sink
from tests.quick_spark import quick_script

SESSION = """
import json, sys
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
)
import semel
from semel.errors import SemelError
from semel.runtime import interpreter
root = sys.argv[1]
stream = spark.readStream.schema("id INT").json(root + "/in")
sink = semel.Sqlite(root + "/shop.db", "orders")
"""
AS_WRITER = """
try:
    writer = semel.write(stream).to(sink).option("checkpointLocation", root + "/cp").trigger(availableNow=True)
    writer.start().awaitTermination()
    print(json.dumps([spark.sparkContext.pythonExec, len(interpreter._KNOWN)]))
except SemelError as error:
    print("ERROR", error)
"""
AS_DROP_IN = """
try:
    query = stream.writeStream.foreachBatch(semel.sink(sink)).option("checkpointLocation", root + "/cp")
    query.trigger(availableNow=True).start().awaitTermination()
except Exception as error:
    print("ERROR", error)
"""


def run(tmp_path: Path, text: str, **environment: str) -> str:
    """The script's output. Nothing but the full path of this Python says which one it is."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1}\n')
    script = tmp_path / "script.py"
    script.write_text(SESSION + textwrap.dedent(text))
    bare = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    path = {"PATH": f"/usr/bin:/bin:{os.environ['PATH']}"}
    variables = {**bare, **path, **quick_script(), **environment}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return str(folder / "bin" / "python")


@pytest.mark.usefixtures("class_archive")
def test_a_script_of_a_virtual_environment_just_works_in_local_mode(tmp_path: Path) -> None:
    """And the worker was asked once: what is known of it are semel and pyarrow."""
    assert json.loads(run(tmp_path, AS_WRITER).splitlines()[-1]) == [sys.executable, 2]


@pytest.mark.usefixtures("class_archive")
@pytest.mark.parametrize("text", [AS_WRITER, AS_DROP_IN], ids=["writer", "drop_in"])
def test_a_python_without_semel_is_told_in_three_lines_before_anything_is_claimed(
    text: str, tmp_path: Path, bare_python: str
) -> None:
    out = run(tmp_path, text, PYSPARK_PYTHON=bare_python)
    found = re.search(r"(The executors of .*)\n  the data now: (.*)\n  what to do: (.*)", out)
    assert found is not None, out
    assert found[1] == (
        f"The executors of local[1] use the interpreter {bare_python}, which has no module pyarrow, semel."
    )
    assert found[2] == "nothing of this batch was written; what was committed before stays visible"
    assert found[3].startswith("Set PYSPARK_PYTHON (or spark.pyspark.python with spark-submit) to a Python")
    assert not list(tmp_path.glob("cp/semel/incarnations/*"))
    assert not (tmp_path / "shop.db").exists()


ASK = """
from semel.runtime.interpreter import require_python
for mode in ("ledger", "prepared"):
    try:
        require_python(spark, [semel.Postgres("postgresql://host/shop", "orders", mode=mode)])
        print(mode, "can run")
    except SemelError as error:
        print(mode, error)
"""


@pytest.mark.usefixtures("class_archive")
def test_a_worker_that_cannot_keep_fingerprints_is_found_before_anything_is_claimed(tmp_path: Path) -> None:
    """It has all that tasks import but crc32c, which only what commits task by task needs."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['crc32c'] = None\n")
    worker = tmp_path / "python"
    worker.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    worker.chmod(0o755)
    out = run(tmp_path, ASK, PYSPARK_PYTHON=str(worker))
    assert "ledger can run" in out
    told = f"prepared The executors of local[1] use the interpreter {sys.executable}, which has no module crc32c."
    assert told in out, out
    assert "-m pip install 'crc32c'." in out


# Without Spark --------------------------------------------------------------------------------------------------------


def context(master: str, setting: str = "") -> SimpleNamespace:
    conf = {"spark.pyspark.python": setting} if setting else {}
    return SimpleNamespace(master=master, pythonExec="python3", getConf=lambda: conf)


@pytest.mark.parametrize(
    ("sink", "needs"),
    [
        (Postgres("postgresql://host/shop", "orders", mode="prepared"), {"psycopg", "numpy", "crc32c"}),
        (Postgres("postgresql://host/shop", "orders", mode="ledger"), {"psycopg", "numpy"}),
        (MySql("mysql://user@host/shop", "orders", mode="xa"), {"pymysql", "numpy", "crc32c"}),
        (MySql("mysql://user@host/shop", "orders", mode="ledger"), {"pymysql", "numpy"}),
    ],
)
def test_only_what_commits_task_by_task_keeps_fingerprints(sink: Sink, needs: set[str]) -> None:
    assert set(modules_of([sink], durable=True)) == {"semel", "pyarrow", *needs}
    assert set(modules_of([sink], durable=False)) == {"semel", "pyarrow", *needs} - {"crc32c"}


@pytest.mark.parametrize(
    ("master", "variable", "setting", "chosen"),
    [
        ("local[2]", "", "", sys.executable),
        ("local", "", "", sys.executable),
        ("local[2]", "/their/python", "", "python3"),
        ("spark://host:7077", "", "", "python3"),
        ("local-cluster[2,1,1024]", "", "", "python3"),
        ("spark://host:7077", "", "/on/executors/python", "/on/executors/python"),
    ],
)
def test_semel_names_a_python_only_where_the_user_has_not(
    master: str, variable: str, setting: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", variable)
    spark = context(master, setting)
    choose_python(spark)  # type: ignore[arg-type]
    assert spark.pythonExec == chosen


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "...\nModuleNotFoundError: No module named 'semel'\n...",
            "use the interpreter python3, which has no module semel.",
        ),
        ('java.io.IOException: Cannot run program "/no/python": error=2', "cannot start the Python /no/python."),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark",
            "use the interpreter python3, which is Python 3.12; the driver is 3.11.",
        ),
    ],
)
def test_what_spark_tells_of_a_worker_ends_in_three_lines(text: str, told: str) -> None:
    error = error_of_worker(text, context("local[1]"))
    assert isinstance(error, ConfigError)
    assert error.what.endswith(told)
    assert "PYSPARK_PYTHON" in error.remedy


def test_other_errors_are_left_as_they_are() -> None:
    assert error_of_worker("ZeroDivisionError: division by zero", context("local[1]")) is None
