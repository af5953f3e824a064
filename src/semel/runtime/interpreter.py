"""The Python of the workers: which one it is, and whether it has what tasks need, asked before anything is claimed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError
from semel.runtime.versions import NOTHING_WRITTEN, by_value, own_versions, require_same
from semel.sinks.base import Sink

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

VARIABLE, SETTING = "PYSPARK_PYTHON", "spark.pyspark.python"
#: What every task imports.
ALWAYS = ("semel", "pyarrow")
#: And where a sink commits task by task: a decided batch may be gone in part, and is found again by its rows.
FINGERPRINTS = ("crc32c",)
#: Modules by the names under which pip knows them.
PACKAGES = {"confluent_kafka": "confluent-kafka", "kafka": "kafka-python"}

#: What is known of the workers: the Spark application, its interpreter, and modules that are there.
_KNOWN: set[tuple[str, str, str]] = set()


def modules_of(sinks: Iterable[Sink], *, durable: bool) -> list[str]:
    """What tasks of these sinks import."""
    modules = {*ALWAYS}
    for sink in sinks:
        modules.update(sink.modules, FINGERPRINTS if durable and sink.capabilities.commits_by_task else ())
    return sorted(modules)


def require_python(spark: SparkSession, sinks: Iterable[Sink], *, durable: bool = True) -> None:
    """Raise ConfigError unless the Python of the workers can run tasks of these sinks.

    Asked once for each Spark application: the answer costs a tiny job. One worker answers for all, and each task looks
    again for itself (`versions.sealed`).
    """
    context = spark.sparkContext
    choose_python(context)
    modules = modules_of(sinks, durable=durable)
    keys = {(context.applicationId or "", context.pythonExec, module) for module in modules}
    if keys <= _KNOWN:
        return
    found = ask_worker(context, modules)
    missing = sorted({module for module in modules if module not in found["modules"]})
    if missing:
        raise _lacks(f"no module {', '.join(missing)}", found["interpreter"], missing, context)
    driver = own_versions()
    # What the worker could not say without importing it, the tasks say.
    told = {**driver, **{name: text for name, text in found["versions"].items() if text}}
    require_same(driver, {**told, "interpreter": found["interpreter"]})
    _KNOWN.update(keys)


def choose_python(context: SparkContext) -> None:
    """Where the user has named no Python for the workers, those of this machine use ours.

    PySpark takes whatever `python3` the path finds, which is another one when a script was started by the full path of
    a virtual environment's Python. `spark.pyspark.python` it reads under spark-submit only.
    """
    if os.environ.get(VARIABLE):
        return
    setting = context.getConf().get(SETTING)
    is_local = re.fullmatch(r"local(\[.*\])?", str(context.master)) is not None
    chosen = setting or (sys.executable if is_local else "")
    if chosen:
        context.pythonExec = chosen


def ask_worker(context: SparkContext, modules: Iterable[str]) -> dict[str, Any]:
    """The interpreter of a worker, which of these modules it finds, and versions; nothing of it is imported there."""
    look = by_value(_looking_for)(list(modules))
    try:
        (answer,) = context.parallelize([0], 1).map(look).collect()
    except Exception as error:
        told = error_of_worker(str(error), context)
        if told is None:
            raise
        raise told from None
    found: dict[str, Any] = answer
    return found


def _looking_for(modules: Any) -> Any:
    """Sent by value, see `versions.by_value`."""

    def look(_: Any) -> dict[str, Any]:
        import importlib.util
        import os
        import re
        import sys

        versions = {"python": ".".join(map(str, sys.version_info[:3]))}
        found = {name: spec for name in modules if (spec := importlib.util.find_spec(name)) is not None}
        try:
            # The code itself says which release it is; what pip has noted may be of another copy.
            with open(found["semel"].origin or "") as file:
                said = re.search('^__version__ = "(.+)"', file.read(), re.MULTILINE)
            versions["semel"] = said[1] if said else ""
            # To ask importlib.metadata takes a fresh worker thirty milliseconds.
            beside = os.listdir(os.path.dirname(os.path.dirname(found["pyarrow"].origin or "")))
            noted = [match[1] for name in beside if (match := re.fullmatch(r"pyarrow-(.+)\.dist-info", name))]
            versions["pyarrow"] = noted[0] if len(noted) == 1 else ""
        except (KeyError, OSError):
            pass  # a module in an archive, or none: the tasks say more
        return {"interpreter": sys.executable, "modules": sorted(found), "versions": versions}

    return look


# When a worker cannot even begin ------------------------------------------------------------------------------------

_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')
_OTHER_PYTHON = re.compile(
    r"different version[^0-9]{0,20}([0-9]+\.[0-9]+) than that in driver[^0-9]{0,5}([0-9]+\.[0-9]+)"
)


def error_of_worker(text: str, spark: Any) -> ConfigError | None:
    """Three lines for what Spark tells in two hundred: a worker without a module, or of another Python, or none."""
    context = getattr(spark, "sparkContext", spark)
    interpreter = str(context.pythonExec)
    if (no_program := _NO_PROGRAM.search(text)) is not None:
        return _error(f"The executors cannot start the Python {no_program[1]}.", f"{_set_it()}.")
    if (other := _OTHER_PYTHON.search(text)) is not None:
        return _error(
            f"The executors use the interpreter {interpreter}, which is Python {other[1]}; the driver is {other[2]}.",
            f"{_set_it()} of version {other[2]}.",
        )
    if (no_module := _NO_MODULE.search(text)) is not None:
        return _lacks(f"no module {no_module[1]}", interpreter, [no_module[1]], context)
    return None


def _lacks(what: str, interpreter: str, modules: Iterable[str], context: SparkContext) -> ConfigError:
    version = {"semel": f"=={own_versions()['semel']}"}
    packages = " ".join(f"'{PACKAGES.get(m, m)}{version.get(m, '')}'" for m in modules)
    return _error(
        f"The executors of {context.master} use the interpreter {interpreter}, which has {what}.",
        f"{_set_it()} that has it (the driver runs {sys.executable}), or run there: "
        f"{interpreter} -m pip install {packages}.",
    )


def _set_it() -> str:
    return f"Set {VARIABLE} (or {SETTING} with spark-submit) to a Python of the executors"


def _error(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, data_now=NOTHING_WRITTEN, remedy=remedy)
