"""Executors as processes of their own: killed, retried, speculated."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyspark
from tests.e2e.game import Game, wait_until

Make = Callable[..., Game]
CLUSTER = "local-cluster[2,1,1024]"


def cluster_game(make_game: Make, **changes: object) -> Game:
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    return make_game(master=CLUSTER, **changes)


def executors_of(group: int) -> list[int]:
    """The executor JVMs of a child's process tree, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if b"CoarseGrainedExecutorBackend" in path.read_bytes() and _descends(pid, group):
                found.append(pid)
        except OSError:  # it ended while we looked
            continue
    return found


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return False


def test_an_executor_killed_in_the_middle_of_a_batch_doubles_nothing(make_game: Make) -> None:
    """A task is stopped after it wrote; its executor is killed; Spark runs the task again on another one."""
    game = cluster_game(make_game, batches=5, shape="stateful")
    child = game.start("task.prepared@2=stop")
    wait_until(lambda: _stopped_workers(child.pid), 90)
    executor = _parent_executor(_stopped_workers(child.pid)[0], executors_of(child.pid))
    assert len(game.staged()) >= 1
    os.kill(executor, signal.SIGKILL)
    while child.poll() is None:
        # Each fresh worker stops at its second task, too: kill it, so that Spark retries the task elsewhere.
        for pid in _stopped_workers(child.pid):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    life = game.finish(child)
    assert life.returncode == 0, life
    assert game.committed() == game.batches
    # The killed task had prepared its part; nobody committed it, and the next start swept it.
    assert game.live().returncode == 0
    assert game.staged() == []


def _stopped_workers(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rsplit(")", 1)[1].split()[0]
            command = (path.parent / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if state == "T" and b"pyspark" in command and _descends(int(path.parent.name), group):
            found.append(int(path.parent.name))
    return found


def _parent_executor(worker: int, executors: list[int]) -> int:
    return next(executor for executor in executors if _descends(worker, executor))


def test_task_retries_double_nothing(make_game: Make) -> None:
    """A Python worker is killed after it prepared; Spark retries the task, and only the retry counts."""
    game = cluster_game(make_game, batches=5)
    life = game.live("task.prepared@2")
    assert life.returncode == 0, life
    assert game.committed() == game.batches


def test_speculative_copies_double_nothing(make_game: Make) -> None:
    """Every task is copied as soon as it can be, so that two attempts write the same rows at once."""
    speculation = (
        ("spark.speculation", "true"),
        ("spark.speculation.interval", "10ms"),
        ("spark.speculation.multiplier", "0"),
        ("spark.speculation.quantile", "0"),
        ("spark.speculation.minTaskRuntime", "0ms"),
    )
    game = cluster_game(make_game, batches=8, shape="stateful", conf=speculation)
    life = game.live()
    assert life.returncode == 0, life
    assert game.committed() == game.batches
