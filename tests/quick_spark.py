"""How tests start Spark: without a process for each file that it writes, and with its classes at hand.

Hadoop's local file system starts `chmod` for each file and folder where its native library is missing, and PySpark
brings none. Tests use one that sets permissions in the JVM. It writes the same files, checksums included. It is there
as a FileSystem only, so Spark's checkpoints are written by the manager for those.

A test that is marked `hadoop_files`, or that uses HDFS, has Spark as users have it; see tests/README.md.
"""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version

from semel.dev.jars import connector_jars, fetch
from semel.errors import SemelError

COORDINATE = "com.globalmentor:hadoop-bare-naked-local-fs:0.1.0"
MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
FILE_SYSTEM = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"

#: Environment variables that bin/spark-submit reads, and with it PySpark, `semel run` and all that they start.
#: The options of a driver's JVM. What a session sets itself comes later and counts more.
OPTIONS = "SPARK_SUBMIT_OPTS"
#: What comes last on the class path of drivers and executors.
CLASS_PATH = "SPARK_DIST_CLASSPATH"
#: The options of the small JVM that is asked first how to start the large one: a third of a second, mostly compiling.
LAUNCHER_OPTIONS = "SPARK_LAUNCHER_OPTS"
#: Our own, for short lives: the options of their JVM, with an archive of Spark's classes; see class_archive.py.
SHORT_LIFE = "SEMEL_TEST_JAVA_OPTIONS"

#: Neither the optimizing compiler nor a parallel collector.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def manager(of: str) -> str:
    """Spark's class that writes checkpoints by FileSystem, or by FileContext, which is what users have."""
    # Spark 4.1 moved them.
    moved = tuple(map(int, version("pyspark").split(".")[:2])) >= (4, 1)
    package = "org.apache.spark.sql.execution.streaming" + (".checkpointing" if moved else "")
    return f"{package}.{of}BasedCheckpointFileManager"


def use_quick_spark() -> None:
    """Every Spark that is started from here on, by us or by a child, is such a one."""
    os.environ.setdefault(LAUNCHER_OPTIONS, JVM)
    try:
        jars = [*fetch(COORDINATE, say=print), *connector_jars(say=print)]
    except SemelError as error:
        # Most tests need no Spark. Those that do are slow then, and right.
        warnings.warn(f"Spark starts a process for each file that it writes: {error.args[0]}", stacklevel=1)
        return
    settings = {"spark.hadoop.fs.file.impl": FILE_SYSTEM, MANAGER: manager("FileSystem")}
    os.environ[OPTIONS] = " ".join(f"-D{name}={value}" for name, value in settings.items())
    # Everywhere the same, because an archive of classes fits one class path.
    os.environ[CLASS_PATH] = os.pathsep.join(map(str, jars))


def quick_conf() -> dict[str, str]:
    """The settings of a short life."""
    return {"spark.driver.extraJavaOptions": os.environ.get(SHORT_LIFE, JVM)}


def quick_run() -> tuple[str, ...]:
    """The same on the command line of `semel run` and others that start Spark."""
    return tuple(word for name, value in quick_conf().items() for word in ("--conf", f"{name}={value}"))


def quick_script() -> dict[str, str]:
    """The same in the environment of a script that has settings of its own."""
    return {OPTIONS: f"{os.environ.get(OPTIONS, '')} {os.environ.get(SHORT_LIFE, JVM)}"}
