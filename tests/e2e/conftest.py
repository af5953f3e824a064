"""Fixtures of the kill tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.e2e.child import CLASS_ARCHIVE, Setup
from tests.e2e.game import Game


@pytest.fixture(scope="session", autouse=True)
def class_archive() -> None:
    """Keep Spark's loaded classes in an archive that every later JVM maps: it halves the start of a child.

    A kill test starts a JVM for each kill. The archive is bound to the class path and the JVM; where it does not fit,
    the JVM ignores it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "semel"
    key = hashlib.sha256(f"{sys.prefix} {pyspark.__version__}".encode()).hexdigest()[:12]
    archive = cache / f"spark-{pyspark.__version__}-{key}.jsa"
    os.environ[CLASS_ARCHIVE] = str(archive)
    cache.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        # Of several test processes one makes it, and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            child = str(Path(__file__).parent / "child.py")
            subprocess.run([sys.executable, child, "--archive", str(archive)], check=False)


@pytest.fixture
def make_game(tmp_path: Path) -> Iterator[Callable[..., Game]]:
    """A game with fresh input: `make_game(sink="files", shape="stateful", batches=6)`. No child outlives the test."""
    games: list[Game] = []

    def make(batches: int = 24, rows: int = 20, folder: str = "game", **setup: Any) -> Game:
        games.append(Game(Setup(str(tmp_path / folder), **setup), batches, rows).deal())
        return games[-1]

    yield make
    for game in games:
        game.end()
