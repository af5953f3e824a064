"""Spark's classes, kept from one run to the next, so that a life starts in half the time.

The JVM can write what it has loaded to an archive (class data sharing, JEP 350) and map it at its next start. It takes
an archive only for the class path and the JVM that it was made with, and does without it otherwise.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from semel.dev.jars import cache_folder, java, pyspark_jars
from semel.session.local_files import SOURCE, jar_of

#: What the class path of a life is made of, beside PySpark's own jars: settings, and what bin/spark-class adds to it.
SETTINGS = ("spark.driver.extraClassPath", "spark.jars", "spark.jars.packages")
VARIABLES = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")


def archive_of(conf: Mapping[str, str]) -> Path:
    """Where the classes for these settings are kept, whether they are there or not."""
    program = os.path.realpath(java())
    said = [program, str(os.stat(program).st_mtime_ns), str(pyspark_jars())]
    said.append(jar_of(SOURCE.read_bytes()).name)
    said += [*(conf.get(name, "") for name in SETTINGS), *(os.environ.get(name, "") for name in VARIABLES)]
    name = hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]
    return cache_folder().with_name("classes") / f"{name}.jsa"


def keep(made: Path, archive: Path) -> None:
    """Keep what a life has written. A process that looks meanwhile finds the whole file or none."""
    with suppress(OSError):  # without it all works, only slower
        if made.stat().st_size:
            archive.parent.mkdir(parents=True, exist_ok=True)
            copy = archive.with_name(f".{archive.name}.{os.getpid()}")
            shutil.copyfile(made, copy)
            os.replace(copy, archive)
