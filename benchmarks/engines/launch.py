"""Engines in fresh processes: started, told when to count, ended or killed, and watched for what they hold."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.environments import FLINK, QUIX
from benchmarks.engines.talk import ENDED, FAILED, STARTED, STOP, Job
from benchmarks.processes import resident_mb, tree

from semel.dev.jars import connector_jars

ROOT = Path(__file__).parents[2]
START_S_MAX = 120.0
END_S_MAX = 60.0
SAMPLE_S = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Engine:
    """The interpreter that has it, the program that runs it, and its jars."""

    python: str
    module: str
    jars: list[str]


def engine(name: str, say: Say) -> Engine:
    """By the name that a job has: flink, quix, spark or semel. What is missing is installed."""
    if name == "flink":
        return Engine(FLINK.python(say), "benchmarks.engines.flink_job", _text(FLINK.jar_files(say)))
    if name == "quix":
        return Engine(QUIX.python(say), "benchmarks.engines.quix_job", [])
    return Engine(sys.executable, "benchmarks.engines.spark_job", _text(connector_jars(say=say)))


def _text(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


class Running:
    """One process with one job, and all processes below it."""

    def __init__(self, engine: Engine, job: Job, log: Path) -> None:
        self.name = job.engine
        self.began = time.monotonic()
        self.events: dict[str, dict[str, Any]] = {}
        self.peak_mb = 0.0
        self._log = log
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [engine.python, "-m", engine.module, job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait_for(self, event: str, seconds_max: float = START_S_MAX) -> dict[str, Any]:
        deadline = time.monotonic() + seconds_max
        while event not in self.events:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._broken(f"did not say {event!r} within {seconds_max:.0f} s") from None
            self._take(said)
        return self.events[event]

    def check(self) -> None:
        """Fails if the engine broke meanwhile."""
        while not self._said.empty():
            self._take(self._said.get())

    def tell(self, word: str) -> None:
        if self._process.stdin is None:
            raise RuntimeError("this process was started without a pipe")
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """In good order. What the engine says of itself."""
        self.check()
        self.tell(STOP)
        said = self.wait_for(ENDED, END_S_MAX)
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        return said

    def kill(self) -> float:
        """SIGKILL to every process of it; the moment when it was sent."""
        # Python workers of Spark are in a group of their own: all are looked for before the first is gone.
        pids = tree(self._process.pid)
        at = time.monotonic()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        return at

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def _listen(self) -> None:
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            if line.startswith('{"event"'):
                self._said.put(json.loads(line))
        self._said.put(None)

    def _take(self, said: dict[str, Any] | None) -> None:
        if said is None:
            raise self._broken("ended by itself")
        if said["event"] == FAILED:
            raise self._broken(f"broke: {said['error']}")
        self.events[said["event"]] = said

    def _broken(self, what: str) -> RuntimeError:
        lines = self._log.read_text(errors="replace").splitlines()[-25:]
        return RuntimeError(f"{self.name} {what}; the end of {self._log}:\n" + "\n".join(lines))

    def _watch(self) -> None:
        while self._process.poll() is None:
            self.peak_mb = max(self.peak_mb, resident_mb(self._process.pid))
            time.sleep(SAMPLE_S)


@contextmanager
def running(job: Job, *, say: Say) -> Iterator[Running]:
    """Until the job runs; what is left of it at the end is killed."""
    found = engine(job.engine, say)
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    ready = Job(**{**vars(job), "jars": found.jars})
    process = Running(found, ready, folder / "engine.log")
    try:
        process.wait_for(STARTED)
        yield process
    finally:
        process.end()
