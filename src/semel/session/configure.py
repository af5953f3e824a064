"""A session of the user's own, with what semel runs well in: `semel.configure(SparkSession.builder).getOrCreate()`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from semel.dev.jars import Say, connector_jars, jars_beside_spark
from semel.errors import ConfigError, MissingExtra, SemelError
from semel.session.local_files import (
    CLASS,
    CLASS_PATH,
    KEY,
    MASTER,
    SETTING,
    is_local,
    local_files_jar,
    on_class_path,
    with_local_files,
    without_it,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PYTHON, PYTHON_SETTING = "PYSPARK_PYTHON", "spark.pyspark.python"
JARS = "spark.jars"
SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
#: What spark-submit calls these settings on its command line.
SHORT = {"--master": MASTER, "--driver-class-path": CLASS_PATH, "--jars": JARS}
#: A class of the Kafka connector.
KAFKA = "org.apache.spark.sql.kafka010.KafkaSourceProvider"

_Builder = TypeVar("_Builder", bound="SparkSession.Builder")


def configure(
    builder: _Builder, *, kafka: bool = True, local_files: bool = True, packages: Iterable[str] = ()
) -> _Builder:
    """Give a builder what semel runs well with, and return it. What you have set yourself is kept.

    `kafka`: Spark's Kafka connector for the PySpark that is installed. `local_files`: checkpoints on a local disk
    without a process for each file. `packages`: more jars by Maven coordinate, `organisation:name:version`. And with a
    `local` master Python workers use the Python of the script, unless PYSPARK_PYTHON says otherwise.

    Jars are fetched once and kept; what is fetched, and what must be done without, is said on stderr. Call it before
    the session is there: jars and class paths are fixed when the JVM starts.
    """
    try:
        from pyspark import SparkContext
    except ImportError:
        raise MissingExtra("PySpark is not installed.", extra="spark") from None
    given: dict[str, Any] = builder._options  # there is no other way to see them
    if "spark.remote" in given or os.environ.get("SPARK_REMOTE"):
        raise ConfigError(
            "semel.configure is for a session with a JVM of its own, and this one is a client of Spark Connect.",
            remedy="Leave .remote(...) and SPARK_REMOTE out.",
        )
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        asked = _Asked(kafka, local_files, tuple(packages))
        settings = _what_can_still_be_set(asked, builder, _say)
    else:
        settings = settings_for(
            {name: str(value) for name, value in given.items()},
            kafka=kafka,
            local_files=local_files,
            packages=packages,
            say=_say,
        )
    for name, value in settings.items():
        builder.config(name, value)
    return builder


def _say(text: str) -> None:
    sys.stderr.write(f"semel: {text}\n")


# Before the JVM starts -----------------------------------------------------------------------------------------------


def settings_for(
    given: Mapping[str, str], *, kafka: bool, local_files: bool, packages: Iterable[str], say: Say
) -> dict[str, str]:
    """What is to be set beside what a builder was given. It looks at all places where Spark takes settings from.

    The Python of the workers is no setting of a builder: PySpark reads a variable of the environment.
    """
    submitted = _submit_arguments(os.environ.get(SUBMIT_ARGUMENTS, ""))
    known = {**_defaults_file(), **given, **submitted}
    # Where nobody says, PySpark's own scripts do: local[*].
    known.setdefault(MASTER, os.environ.get("MASTER", "local[*]"))
    made = dict(known)
    if is_local(known[MASTER]) and not os.environ.get(PYTHON) and PYTHON_SETTING not in known:
        os.environ[PYTHON] = sys.executable
    if local_files:
        made = with_local_files(made, say=say)
    made |= _with_jars(made, _jars(kafka, packages, say))
    settings = {name: value for name, value in made.items() if known.get(name) != value}
    return _without_what_is_overruled(settings, submitted, say)


def _jars(kafka: bool, packages: Iterable[str], say: Say) -> list[Path]:
    """Without the connector Spark starts, and `read_kafka` says what it lacks. A package is asked for by name."""
    jars: list[Path] = []
    if kafka:
        try:
            jars = connector_jars(say=say)
        except SemelError as error:
            say(f"Spark goes without its Kafka connector: {error.what}")
    return list(dict.fromkeys([*jars, *(jar for name in packages for jar in jars_beside_spark(name, say=say))]))


def _with_jars(conf: Mapping[str, str], jars: list[Path]) -> dict[str, str]:
    """On the class path where the driver is all there is; else by `spark.jars`, which brings them to the executors."""
    if is_local(conf[MASTER]):
        return on_class_path(conf, jars)
    known = list(filter(None, conf.get(JARS, "").split(",")))
    return {JARS: ",".join(dict.fromkeys([*known, *map(str, jars)]))} if jars else {}


def _without_what_is_overruled(settings: dict[str, str], submitted: Mapping[str, str], say: Say) -> dict[str, str]:
    """A class that Spark is told to use and cannot find would fail every query."""
    lost = [name for name in (CLASS_PATH, JARS) if name in settings and name in submitted]
    for name in lost:
        say(f"{SUBMIT_ARGUMENTS} sets {name}, which overrules what is added here. Put into it: {settings[name]}")
    return {name: value for name, value in settings.items() if name not in lost and not (lost and name == SETTING)}


def _submit_arguments(text: str) -> dict[str, str]:
    """The settings among the words of a spark-submit command line."""
    words = shlex.split(text)
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):  # the last word has nothing behind it
        name, equals, value = word.partition("=")
        if name in SHORT:
            found[SHORT[name]] = value if equals else following
        elif name in ("--conf", "-c"):
            setting, _, said = (value if equals else following).partition("=")
            found[setting] = said
    return found


def _defaults_file() -> dict[str, str]:
    """What spark-defaults.conf says. What a builder sets takes its place there, so ours is added to it."""
    from pyspark import find_spark_home

    home: Any = find_spark_home._find_spark_home
    folder = Path(os.environ.get("SPARK_CONF_DIR") or Path(home()) / "conf")
    found = {}
    try:
        lines = (folder / "spark-defaults.conf").read_text().splitlines()
    except OSError:
        return {}
    for line in map(str.strip, lines):
        if line and not line.startswith("#"):
            name, _, value = line.replace("=", " ", 1).replace("\t", " ").partition(" ")
            found[name] = value.strip()
    return found


# When it runs already ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    kafka: bool
    local_files: bool
    packages: tuple[str, ...]


def _what_can_still_be_set(asked: _Asked, builder: Any, say: Say) -> dict[str, str]:
    """Of a JVM that runs the class path is fixed. What it has is used; for the rest, what would have brought it."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    context = SparkContext._active_spark_context
    jvm: Any = SparkContext._jvm
    conf: Any = context.getConf() if context is not None else SparkConf(_jvm=jvm)
    master = str(builder._options.get(MASTER) or conf.get(MASTER) or "")
    missing: list[Path] = []
    settings = {}
    if asked.local_files and is_local(master) and _is_ours_to_set(conf, builder):
        if _has_class(jvm, CLASS):
            # A context that is there has read its settings; a session's own reach Hadoop without the prefix.
            settings[SETTING if context is None else KEY] = CLASS
        else:
            missing += _made(say)
    if asked.kafka and not _has_class(jvm, KAFKA):
        missing += _jars(kafka=True, packages=(), say=say)
    missing += [jar for jar in _jars(kafka=False, packages=asked.packages, say=say) if not _has_jar(jvm, jar)]
    if missing:
        say(_too_late(missing, master))
    return settings


def _made(say: Say) -> list[Path]:
    try:
        return [local_files_jar()]
    except (SemelError, OSError) as error:
        say(without_it(error))
        return []


def _is_ours_to_set(conf: Any, builder: Any) -> bool:
    return conf.get(SETTING) is None and SETTING not in builder._options


def _has_class(jvm: Any, name: str) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Py4JJavaError:
        return False
    return True


def _has_jar(jvm: Any, jar: Path) -> bool:
    """By any class that is in it."""
    import zipfile

    with zipfile.ZipFile(jar) as archive:
        classes = (name for name in archive.namelist() if name.endswith(".class") and "-" not in name)
        found = next((name.removesuffix(".class").replace("/", ".") for name in classes), None)
    return found is None or _has_class(jvm, found)


def _too_late(missing: list[Path], master: str) -> str:
    jars = list(map(str, missing))
    option = f"--driver-class-path {os.pathsep.join(jars)}" if is_local(master) else f"--jars {','.join(jars)}"
    return (
        f"Spark's JVM runs already, and its class path is fixed: {len(jars)} jars cannot be added. Call "
        f"semel.configure before the session is made; with spark-submit, put on its command line: {option}"
    )
