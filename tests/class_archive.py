"""Spark's loaded classes, kept in an archive that every later JVM maps: it halves the start of a short life.

A kill test starts a JVM for each kill. The archive is bound to the class path and the JVM; where it does not fit, the
JVM ignores it. tests/quick_spark.py gives every JVM of the tests the same class path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version

from semel.dev.jars import cache_folder
from tests.e2e import child
from tests.quick_spark import CLASS_PATH, JVM, SHORT_LIFE

MAKE_TIMEOUT_S_MAX = 300
#: A JVM tells on stdout what it thinks of an archive.
QUIET = "-Xlog:disable"


def use_class_archive() -> None:
    """Make the archive unless it is there, and have every short life that is started from here use it."""
    cache = cache_folder().parent
    key = hashlib.sha256(f"{sys.prefix} {os.environ.get(CLASS_PATH, '')}".encode()).hexdigest()[:12]
    archive = cache / f"spark-{version('pyspark')}-{key}.jsa"
    cache.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        # Of several test processes one makes it, and the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            making = {**os.environ, SHORT_LIFE: f"{JVM} -XX:ArchiveClassesAtExit={archive} {QUIET}"}
            command = [sys.executable, child.__file__, "--load-classes"]
            subprocess.run(command, env=making, check=False, timeout=MAKE_TIMEOUT_S_MAX)
    mapped = f" -XX:SharedArchiveFile={archive} {QUIET}" if archive.exists() else ""
    os.environ[SHORT_LIFE] = JVM + mapped
