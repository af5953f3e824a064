"""The SparkSession that `semel run` starts."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, MissingExtra
from semel.runtime.pipeline import Pipeline
from semel.session.local_files import with_local_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("semel")

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
#: A Spark that runs on this machine alone has no business on its other addresses.
LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
PACKAGES = "spark.jars.packages"
WORKER_PATH = "spark.executorEnv.PYTHONPATH"


@dataclass(frozen=True)
class SparkSettings:
    """What the command line says about Spark. `show_log` leaves Spark's own log on stderr."""

    master: str = "local[*]"
    conf: Mapping[str, str] = field(default_factory=dict)
    app: str = "semel"
    folder: str = ""
    show_log: bool = False


def session_conf(settings: SparkSettings, pipelines: Sequence[Pipeline]) -> dict[str, str]:
    """Defaults, then what the pipelines ask for, then what the command line says. Pure."""
    conf = {**DEFAULTS, "spark.master": settings.master, "spark.app.name": settings.app}
    if settings.master.startswith("local"):
        conf |= LOOPBACK
    if settings.folder:
        # Modules beside the pipeline file are found by Python workers too.
        conf[WORKER_PATH] = settings.folder
    conf |= _conf_of(pipelines)
    conf |= settings.conf
    packages = dict.fromkeys(
        [*filter(None, conf.get(PACKAGES, "").split(",")), *(name for p in pipelines for name in p.packages)]
    )
    return {**conf, PACKAGES: ",".join(packages)} if packages else conf


def _conf_of(pipelines: Sequence[Pipeline]) -> dict[str, str]:
    """The pipelines share one session, so they must agree."""
    merged: dict[str, tuple[str, str]] = {}
    for pipeline in pipelines:
        for key, value in pipeline.conf.items():
            other, known = merged.setdefault(key, (pipeline.name, str(value)))
            if known != str(value):
                raise ConfigError(
                    f"Pipelines {other} and {pipeline.name} want different values of {key}: {known} and {value}.",
                    remedy="Make them agree, or run them apart: semel run FILE:NAME.",
                )
    return {key: value for key, (_, value) in merged.items()}


def open_session(settings: SparkSettings, pipelines: Sequence[Pipeline]) -> SparkSession:
    """Start Spark, or join the session that the pipeline file has started itself."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError:
        raise MissingExtra("PySpark is not installed.", extra="spark") from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = session_conf(settings, pipelines)
    if SparkContext._active_spark_context is None:
        conf = with_local_files(conf, say=_LOG.warning)
        spark_conf = SparkConf(loadDefaults=False).setAll(list(conf.items()))
        gateway = _launch_jvm(spark_conf, show_log=settings.show_log)
        try:
            SparkContext(conf=spark_conf, gateway=gateway)
        except Exception as error:
            raise ConfigError(
                f"Spark did not start: {_reason(str(error))}",
                remedy="Correct --master, --conf or the pipelines' own settings.",
            ) from error
    builder: Any = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


class _PopenArguments(dict[str, Any]):
    """PySpark keeps SIGINT from the JVM; this keeps SIGTERM from it too.

    `timeout`, systemd and a closing terminal signal the whole process group. The driver is to end its batch then, for
    which it needs its JVM. The JVM ends when the driver does: it watches its stdin.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, partial(_ignore_sigterm, value) if key == "preexec_fn" else value)


def _ignore_sigterm(then: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    then()


def _launch_jvm(conf: Any, *, show_log: bool) -> Any:
    """A JVM whose start-up noise and stack traces do not run through the user's one line of progress."""
    from pyspark import java_gateway
    from pyspark.errors import PySparkRuntimeError

    # A file without a name, gone at exit. Standard output is kept clean too: it may carry JSON lines.
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the JVM writes to it for as long as it lives
    to = sys.stderr if show_log else log
    launch_gateway: Any = java_gateway.launch_gateway
    try:
        return launch_gateway(conf, popen_kwargs=_PopenArguments(stdout=to, stderr=to))
    except PySparkRuntimeError:
        log.seek(0)
        raise ConfigError(
            f"Spark did not start: {_reason(log.read().decode(errors='replace'))}",
            remedy="Correct --master, --conf, or JAVA_HOME (Java 17 or newer); --show-spark-log shows all it says.",
        ) from None


def _reason(log: str) -> str:
    """The last line of a log that looks like an error, else the last line; places in Java code do not count."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("\tat ")]
    telling = [line for line in lines if re.search("rror|xception|No such file", line)]
    return (telling or lines or ["it said nothing"])[-1]
