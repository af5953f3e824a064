"""How tests start Spark: without a process for each file of a checkpoint, and with its classes at hand.

Checkpoints are written as `semel run` and `semel.configure` have them (semel.session.local_files). A test that is
marked `hadoop_files` has Spark as it comes; see tests/README.md.
"""

from __future__ import annotations

import os
import warnings

from semel.dev.jars import connector_jars
from semel.errors import SemelError
from semel.session.local_files import CLASS, HADOOPS_OWN, SETTING, local_files_jar

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


def use_quick_spark() -> None:
    """Every Spark that is started from here on, by us or by a child, is such a one."""
    os.environ.setdefault(LAUNCHER_OPTIONS, JVM)
    try:
        jars = [local_files_jar(), *connector_jars(say=print)]
    except SemelError as error:
        # Most tests need no Spark. Those that do are slow then, and right.
        warnings.warn(f"Spark starts a process for each file that it writes: {error.args[0]}", stacklevel=1)
        return
    os.environ[OPTIONS] = f"-D{SETTING}={CLASS}"
    # Everywhere the same, because an archive of classes fits one class path.
    os.environ[CLASS_PATH] = os.pathsep.join(map(str, jars))


def quick_conf() -> dict[str, str]:
    """The settings of a short life. `semel` would choose files of ours by itself."""
    files = {} if OPTIONS in os.environ else {SETTING: HADOOPS_OWN}
    return {"spark.driver.extraJavaOptions": os.environ.get(SHORT_LIFE, JVM), **files}


def quick_run() -> tuple[str, ...]:
    """The same on the command line of `semel run` and others that start Spark."""
    return tuple(word for name, value in quick_conf().items() for word in ("--conf", f"{name}={value}"))


def quick_script() -> dict[str, str]:
    """The same in the environment of a script that has settings of its own."""
    return {OPTIONS: f"{os.environ.get(OPTIONS, '')} {os.environ.get(SHORT_LIFE, JVM)}"}
