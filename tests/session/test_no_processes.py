"""Which programs Spark starts for the files of a checkpoint: seen by a `chmod` that keeps a list of its calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semel.session.local_files import HADOOPS_OWN, SETTING, VARIABLE
from tests.quick_spark import JVM, OPTIONS

PIPELINE = """
import os
import semel

HERE = os.path.dirname(os.path.abspath(__file__))

@semel.pipeline
def orders(spark):
    df = spark.readStream.schema("key string").option("maxFilesPerTrigger", 1).json(f"{HERE}/in").groupBy("key").count()
    return (
        semel.write(df).to(semel.Sqlite(f"{HERE}/shop.db", "orders")).outputMode("update")
        .option("checkpointLocation", f"{HERE}/checkpoint").trigger(availableNow=True)
    )
"""
BATCHES = 3


def programs_started(folder: Path, *settings: str) -> list[str]:
    """What `chmod` was asked for below the checkpoint, while `semel run` made three batches with state."""
    (folder / "pipelines.py").write_text(PIPELINE)
    (folder / "in").mkdir()
    for n in range(BATCHES):
        (folder / "in" / f"{n}.json").write_text(json.dumps({"key": f"k{n}"}))
    seen = folder / "seen"
    seen.touch()
    program = folder / "bin" / "chmod"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {seen}\nexec {shutil.which("chmod")} "$@"\n')
    program.chmod(0o755)
    bare = {name: value for name, value in os.environ.items() if name != VARIABLE}
    variables = {**bare, OPTIONS: JVM, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "semel.cli", "run", str(folder / "pipelines.py"), "--json"]
    words = [word for setting in ("spark.sql.shuffle.partitions=2", *settings) for word in ("--conf", setting)]
    done = subprocess.run([*command, *words], env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    batches = [told for line in done.stdout.splitlines() if (told := json.loads(line))["event"] == "batch"]
    assert [told["rows"] for told in batches] == [1] * BATCHES
    assert (folder / "checkpoint" / "commits" / f"{BATCHES - 1}").is_file()
    return [line for line in seen.read_text().splitlines() if "/checkpoint" in line]


def test_semel_run_starts_no_process_for_a_file_of_its_checkpoint(tmp_path: Path) -> None:
    assert programs_started(tmp_path) == []


@pytest.mark.long
def test_with_hadoops_own_code_there_is_one_for_each(tmp_path: Path) -> None:
    """So the list would have shown them."""
    started = programs_started(tmp_path, f"{SETTING}={HADOOPS_OWN}")
    # offsets, commits and two versions of the state for each batch, each with its checksum
    assert len(started) >= 2 * 4 * BATCHES
