"""Executors as processes of their own: killed, retried, speculated."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
import pytest

from semel.dev.ports import free_port
from tests.e2e.game import Game
from tests.processes import descends, executors_of, stopped_workers, wait_until

Make = Callable[..., Game]
CLUSTER = "local-cluster[2,1,1024]"


def cluster_game(make_game: Make, **changes: object) -> Game:
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    return make_game(master=CLUSTER, **changes)


def test_an_executor_killed_in_the_middle_of_a_batch_doubles_nothing(make_game: Make) -> None:
    """A task is stopped after it wrote; its executor is killed; Spark runs the task again on another one."""
    game = cluster_game(make_game, batches=5, shape="stateful")
    child = game.start("task.prepared@2=stop")
    wait_until(lambda: stopped_workers(child.pid), 90)
    executor = _parent_executor(stopped_workers(child.pid)[0], executors_of(child.pid))
    assert len(game.staged()) >= 1
    os.kill(executor, signal.SIGKILL)
    while child.poll() is None:
        # Each fresh worker stops at its second task, too: kill it, so that Spark retries the task elsewhere.
        for pid in stopped_workers(child.pid):
            with suppress(ProcessLookupError):  # it went with its executor
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    life = game.finish(child)
    assert life.returncode == 0, life
    assert game.committed() == game.batches
    # The killed task had prepared its part; nobody committed it, and the next start swept it.
    assert game.live().returncode == 0
    assert game.staged() == []


def _parent_executor(worker: int, executors: list[int]) -> int:
    return next(executor for executor in executors if descends(worker, executor))


@pytest.mark.long
def test_task_retries_double_nothing(make_game: Make) -> None:
    """A Python worker is killed after it prepared; Spark retries the task, and only the retry counts."""
    game = cluster_game(make_game, batches=5)
    life = game.live("task.prepared@2")
    assert life.returncode == 0, life
    assert game.committed() == game.batches


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers. Spark never copies a task to a host that runs it, so the workers have two addresses."""
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    ports = ["--webui-port", "0"]
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), *ports]
    started = [_daemon([spark_class, *master], folder / "master.log")]
    try:
        _wait_for_line("I have been elected leader", folder / "master.log")
        for host in ("127.0.0.1", "127.0.0.2"):
            worker = ["org.apache.spark.deploy.worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", *ports]
            command = [spark_class, *worker, "--work-dir", str(folder / "work"), url]
            started.append(_daemon(command, folder / f"worker-{host}.log"))
            _wait_for_line("Successfully registered", folder / f"worker-{host}.log")
        yield url
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_line(words: str, log: Path) -> None:
    wait_until(lambda: words in log.read_text(), 60)


def _daemon(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def test_speculative_copies_double_nothing(make_game: Make, tmp_path: Path) -> None:
    """The first attempt of every task writes its rows and then hangs; Spark starts a copy, which writes them, too."""
    speculation = (
        ("spark.speculation", "true"),
        ("spark.speculation.interval", "100ms"),
        ("spark.speculation.task.duration.threshold", "1s"),
    )
    with standalone(tmp_path) as master:
        game = make_game(batches=3, master=master, conf=speculation, shape="hanging")
        life = game.live()
        assert life.returncode == 0, life
        assert game.committed() == game.batches
        # What the hanging attempts wrote is still there: each row was written twice, and is visible once.
        assert len(game.staged()) >= 1
        assert all(name.endswith(".arrow") for name in game.staged())
        assert game.live(master="local[2]", conf=(), shape="stateless").returncode == 0
        assert game.staged() == []
