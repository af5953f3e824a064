"""Spark's loaded classes, kept in an archive that every later JVM maps: it halves the start of a child.

A kill test starts a JVM for each kill. The archive is bound to the class path and the JVM; where it does not fit, the
JVM ignores it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pyspark

from semel.sources.kafka import connector
from tests.e2e import child

MAKE_TIMEOUT_S_MAX = 300


def use_class_archive() -> None:
    """Make the archive unless it is there, and have every child that is started from here use it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "semel"
    key = hashlib.sha256(f"{sys.prefix} {pyspark.__version__} {connector()}".encode()).hexdigest()[:12]
    archive = cache / f"spark-{pyspark.__version__}-{key}.jsa"
    os.environ[child.CLASS_ARCHIVE] = str(archive)
    cache.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        # Of several test processes one makes it, and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            command = [sys.executable, child.__file__, "--archive", str(archive)]
            subprocess.run(command, check=False, timeout=MAKE_TIMEOUT_S_MAX)
