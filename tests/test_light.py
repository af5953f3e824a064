"""What an executor loads: a worker is started for every task that finds none free, so each module costs rows.

A worker unpickles what the driver sends it, and that imports what it names. Counted in a process of its own.
"""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys

import pytest

import semel
from semel.ids import Attempt, Incarnation, pipeline_id
from semel.runtime.fingerprint import Hashed
from semel.runtime.task import TaskWriter
from semel.sinks import Sink

#: What belongs to the driver, or to the command line, and has no business on an executor.
DRIVERS = ("verify", "model", "simulation", "demo", "dev", "cli", "audit", "run", "decisions", "session")
HEAVY = ("typer", "rich", "pyspark", "pandas", "sqlite3", "email", "http", "asyncio", "multiprocessing")

LOADED = """
import base64, json, pickle, sys
import pyarrow
before = set(sys.modules)
pickle.loads(base64.b64decode(sys.argv[1]))
print(json.dumps(sorted(set(sys.modules) - before)))
"""

#: Sinks, and how many modules of semel their tasks load at most.
SINKS: list[tuple[Sink, int]] = [
    (semel.Files("/nowhere/lake"), 24),
    (semel.Sqlite("/nowhere/a.db", "orders"), 27),
    (semel.Kafka("127.0.0.1:9092", "orders"), 45),
    (semel.Postgres("postgresql://shop@127.0.0.1/shop", "orders"), 31),
    (semel.MySql("mysql://shop@127.0.0.1/shop", "orders"), 38),
]


def loaded_by(task: object) -> list[str]:
    sent = base64.b64encode(pickle.dumps(task)).decode()
    ran = subprocess.run([sys.executable, "-c", LOADED, sent], capture_output=True, text=True, check=True)
    loaded: list[str] = json.loads(ran.stdout)
    return loaded


@pytest.mark.parametrize(("sink", "most"), SINKS, ids=lambda value: getattr(value, "kind", ""))
def test_a_task_loads_its_own_sink_and_nothing_of_the_driver(sink: Sink, most: int) -> None:
    attempt = Attempt(pipeline_id("0b0e6a5e-2ab2-4b5c-9f0a-1f2e3d4c5b6a"), 0, 0, Incarnation(1))
    loaded = loaded_by(TaskWriter((sink,), (None,), Hashed(("",)), attempt, True, ""))
    ours = [name for name in loaded if name.split(".")[0] == "semel"]
    assert f"semel.sinks.{sink.kind}.sink" in ours
    allowed = {"sqlite3"} if sink.kind == "sqlite" else set()
    assert [name for name in ours if name.split(".")[1:2] and name.split(".")[1] in DRIVERS] == []
    assert [name for name in loaded if name.split(".")[0] in set(HEAVY) - allowed] == []
    others = {other.kind for other, _ in SINKS} - {sink.kind}
    assert [name for name in ours if name.startswith("semel.sinks.") and name.split(".")[2] in others] == []
    assert len(ours) <= most


def test_importing_semel_loads_no_sink_until_one_is_named() -> None:
    code = "import sys, semel; print(len([m for m in sys.modules if m.startswith('semel')])); semel.Files; semel.write"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == 3  # semel, its errors, and what finds the other names


def test_every_public_name_is_there() -> None:
    for name in semel.__all__:
        assert getattr(semel, name).__name__ == name
    assert set(semel.__all__) <= set(dir(semel))
    with pytest.raises(AttributeError, match="module 'semel' has no attribute 'Oracle'"):
        semel.Oracle  # noqa: B018 - to ask is the test
