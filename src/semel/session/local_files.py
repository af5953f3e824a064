"""Checkpoints on a local disk without a process for each file, by a class of our own; see LocalFiles.java.

Spark's checkpoint manager reaches a file system by Hadoop's FileContext, and which class that is for `file:` is a
setting. So nothing else changes: not the manager, not HDFS, not what queries read and write by Hadoop's FileSystem.

The class is compiled on this machine, once for each PySpark, by the compiler that PySpark brings: no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from semel.dev.jars import Say, cache_folder, java, pyspark_jars, unavailable
from semel.errors import SemelError

CLASS = "semel.session.LocalFiles"
#: Hadoop's name of the setting, and Spark's.
KEY = "fs.AbstractFileSystem.file.impl"
SETTING = f"spark.hadoop.{KEY}"
#: What users have who do not ask for anything else, and what turns ours off where it is the default.
HADOOPS_OWN = "org.apache.hadoop.fs.local.LocalFs"

SOURCE = Path(__file__).with_name("LocalFiles.java")
MASTER, CLASS_PATH = "spark.master", "spark.driver.extraClassPath"
#: What bin/spark-class puts last on every class path.
VARIABLE = "SPARK_DIST_CLASSPATH"
COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
COMPILER_JARS = ("janino-*.jar", "commons-compiler-*.jar")
HADOOP_JARS = ("*.jar",)
COMPILE_S_MAX = 60
WITHOUT_IT = (
    "Checkpoints on a local disk are written by Hadoop's own code, which starts a process for each file: "
    "80 ms more for each batch, far more with state."
)


def with_local_files(conf: Mapping[str, str], *, say: Say) -> dict[str, str]:
    """These settings of a session that is to be started, and ours unless somebody has chosen otherwise.

    An executor on another machine would not find the class, nor the checkpoint; so it is for a `local` master alone.
    """
    if SETTING in conf or not is_local(conf.get(MASTER, "")):
        return dict(conf)
    try:
        jar = local_files_jar()
    except (SemelError, OSError) as error:
        say(without_it(error))
        return dict(conf)
    return {**conf, SETTING: CLASS, **on_class_path(conf, [jar])}


def without_it(error: SemelError | OSError) -> str:
    """One line: what it costs, and why it is so."""
    return f"{WITHOUT_IT} {error.what if isinstance(error, SemelError) else error}"


def is_local(master: str) -> bool:
    """Whether the driver is the only executor."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def on_class_path(conf: Mapping[str, str], jars: list[Path]) -> dict[str, str]:
    """The setting that adds jars to the driver's class path, behind what is there; nothing where they are there.

    Jars of `spark.jars` would be copied at each start, and those of `spark.jars.packages` land on the `sys.path` of
    Python workers, where each costs a task time.
    """
    known = conf.get(CLASS_PATH, "").split(os.pathsep)
    there = {*known, *os.environ.get(VARIABLE, "").split(os.pathsep)}
    missing = [text for text in map(str, jars) if text not in there]
    return {CLASS_PATH: os.pathsep.join([*filter(None, known), *missing])} if missing else {}


def local_files_jar() -> Path:
    """The jar with our class, compiled when it is not there yet. Raises SemelError where it cannot be."""
    jar = jar_of(SOURCE.read_bytes())
    if not jar.is_file():
        jar.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=jar.parent, prefix=".local-files-") as text:
            made = Path(text) / "made.jar"
            _pack(_compiled(Path(text)), made)
            # Whoever looks meanwhile finds the whole file or none.
            os.replace(made, jar)
    return jar


def jar_of(source: bytes) -> Path:
    """Where the classes of a source are kept, whether they are there or not. Each PySpark has its own Hadoop."""
    digest = hashlib.sha256(source + version("pyspark").encode()).hexdigest()
    return cache_folder() / f"semel-local-files-{digest[:16]}.jar"


def _compiled(folder: Path) -> Path:
    classes = folder / "classes"
    classes.mkdir()
    command = [java(), "-XX:TieredStopAtLevel=1", "-cp", _found(COMPILER_JARS), COMPILER]
    command += ["-d", str(classes), "-encoding", "UTF-8", "-classpath", _found(HADOOP_JARS), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)  # noqa: S603  the arguments are ours, there is no shell
    except subprocess.TimeoutExpired:
        raise unavailable(f"{SOURCE.name} was not compiled within {COMPILE_S_MAX} s.") from None
    # The compiler ends with 0 whatever happens.
    if not (classes / f"{CLASS.replace('.', '/')}.class").is_file():
        raise unavailable(f"{SOURCE.name} cannot be compiled: {(done.stdout + done.stderr).strip()[-500:]}")
    return classes


def _found(patterns: tuple[str, ...]) -> str:
    """A class path of jars inside PySpark."""
    found = {pattern: sorted(pyspark_jars().glob(pattern)) for pattern in patterns}
    if missing := [pattern for pattern, jars in found.items() if not jars]:
        raise unavailable(f"This PySpark has no {', '.join(missing)}, which {SOURCE.name} is compiled with.")
    return os.pathsep.join(str(jar) for jars in found.values() for jar in jars)


def _pack(classes: Path, jar: Path) -> None:
    with zipfile.ZipFile(jar, "w") as archive:
        for file in sorted(classes.rglob("*.class")):
            # The same bytes whenever it is made: an archive of classes goes by them.
            archive.writestr(zipfile.ZipInfo(file.relative_to(classes).as_posix()), file.read_bytes())
