"""`semel.configure`: what it adds to a builder, what it leaves alone, and what it says when it comes too late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import semel
from semel.dev.jars import connector_jars, unavailable
from semel.errors import ConfigError
from semel.session import configure as module
from semel.session.configure import settings_for
from semel.session.local_files import CLASS, CLASS_PATH, HADOOPS_OWN, MASTER, SETTING, VARIABLE, local_files_jar
from tests.quick_spark import JVM, OPTIONS

JARS = "spark.jars"
PATH = os.pathsep


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No JVM runs, and nobody has said anything."""
    monkeypatch.setattr(SparkContext, "_gateway", None)
    for name in (VARIABLE, "PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON", "MASTER", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return lines


def options_of(builder: SparkSession.Builder) -> dict[str, Any]:
    return dict(builder._options)


def path_of(*jars: Path | str) -> str:
    return PATH.join(map(str, jars))


def ours() -> list[Path]:
    return [local_files_jar(), *connector_jars(say=pytest.fail)]


def test_a_builder_gets_local_files_the_connector_and_this_python(said: Callable[[], list[str]]) -> None:
    builder = SparkSession.Builder().appName("shop")
    assert semel.configure(builder) is builder
    assert options_of(builder) == {"spark.app.name": "shop", SETTING: CLASS, CLASS_PATH: path_of(*ours())}
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert any(jar.name.startswith("spark-sql-kafka-0-10_") for jar in ours())
    assert said() == []


def test_a_second_time_changes_nothing() -> None:
    builder = semel.configure(SparkSession.Builder().master("local[2]"))
    before = options_of(builder)
    assert options_of(semel.configure(builder)) == before
    assert options_of(semel.configure(builder, kafka=False)) == before


def test_each_part_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    assert options_of(semel.configure(SparkSession.Builder(), kafka=False, local_files=False)) == {}
    only_files = options_of(semel.configure(SparkSession.Builder(), kafka=False))
    assert only_files == {SETTING: CLASS, CLASS_PATH: str(local_files_jar())}
    assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3"


def test_what_the_user_has_set_is_kept() -> None:
    builder = SparkSession.Builder().config(CLASS_PATH, "/mine.jar").config(SETTING, HADOOPS_OWN).config(JARS, "/a.jar")
    made = options_of(semel.configure(builder.config("spark.pyspark.python", "/my/python")))
    assert made == {
        CLASS_PATH: path_of("/mine.jar", *connector_jars(say=pytest.fail)),
        SETTING: HADOOPS_OWN,
        JARS: "/a.jar",
        "spark.pyspark.python": "/my/python",
    }
    assert "PYSPARK_PYTHON" not in os.environ


def test_packages_come_with_what_they_need_and_without_what_spark_has() -> None:
    """The connector by its coordinate stands for any other package: it is there."""
    from semel.sources.kafka import connector

    builder = semel.configure(SparkSession.Builder(), kafka=False, local_files=False, packages=[connector()])
    assert options_of(builder) == {CLASS_PATH: path_of(*connector_jars(say=pytest.fail))}


def test_a_package_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked for by name, and the pipeline needs it."""

    def nothing(coordinate: str, *, say: object) -> list[Path]:
        raise unavailable(f"Could not fetch {coordinate}.")

    monkeypatch.setattr(module, "jars_beside_spark", nothing)
    with pytest.raises(semel.SemelError, match="Could not fetch org"):
        semel.configure(SparkSession.Builder(), packages=["org.example:thing:1"])


def test_without_a_network_spark_goes_without_the_connector_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    def nothing(*, say: object) -> list[Path]:
        raise unavailable("Could not fetch the connector: Server access error.")

    monkeypatch.setattr(module, "connector_jars", nothing)
    made = options_of(semel.configure(SparkSession.Builder()))
    assert made == {SETTING: CLASS, CLASS_PATH: str(local_files_jar())}
    assert said() == [
        "semel: Spark goes without its Kafka connector: Could not fetch the connector: Server access error."
    ]


# Where else Spark takes settings from --------------------------------------------------------------------------------


def test_a_cluster_gets_its_jars_by_spark_jars_and_no_local_files() -> None:
    builder = SparkSession.Builder().master("spark://host:7077").config(JARS, "/a.jar")
    made = options_of(semel.configure(builder))
    jars = ",".join(["/a.jar", *map(str, connector_jars(say=pytest.fail))])
    assert made == {MASTER: "spark://host:7077", JARS: jars}
    assert "PYSPARK_PYTHON" not in os.environ
    assert options_of(semel.configure(builder)) == made


@pytest.mark.parametrize("text", ["spark.master  yarn", "spark.master=yarn", "# no comment\n\nspark.master\tyarn\n"])
def test_the_defaults_file_says_which_master_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "spark-defaults.conf").write_text(text)
    assert set(options_of(semel.configure(SparkSession.Builder()))) == {JARS}


def test_a_class_path_of_the_defaults_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(f"{CLASS_PATH} /theirs.jar\n")
    made = options_of(semel.configure(SparkSession.Builder()))
    assert made[CLASS_PATH] == path_of("/theirs.jar", *ours())


@pytest.mark.parametrize(
    "words", ["--master yarn", "--master=yarn", "--conf spark.master=yarn", "-c spark.master=yarn"]
)
def test_arguments_for_spark_submit_say_which_master_it_is(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--verbose {words} pyspark-shell")
    assert set(options_of(semel.configure(SparkSession.Builder()))) == {JARS}


def test_a_class_path_in_arguments_for_spark_submit_overrules_ours_so_the_class_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Told to use a class that is not there, every query would fail."""
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-class-path /theirs.jar pyspark-shell")
    assert options_of(semel.configure(SparkSession.Builder())) == {}
    wanted = path_of("/theirs.jar", *ours())
    assert said() == [
        f"semel: PYSPARK_SUBMIT_ARGS sets {CLASS_PATH}, which overrules what is added here. Put into it: {wanted}"
    ]
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--driver-class-path {wanted} pyspark-shell")
    assert options_of(semel.configure(SparkSession.Builder())) == {SETTING: CLASS}
    assert said() == []


def test_settings_are_worked_out_without_a_builder() -> None:
    made = settings_for({MASTER: "local"}, kafka=False, local_files=True, packages=(), say=pytest.fail)
    assert made == {SETTING: CLASS, CLASS_PATH: str(local_files_jar())}


@pytest.mark.parametrize("how", ["remote", "variable"])
def test_a_client_of_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    builder: Any = SimpleNamespace(_options={"spark.remote": "sc://host"} if how == "remote" else {})
    if how == "variable":
        monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with pytest.raises(ConfigError, match="a client of Spark Connect"):
        semel.configure(builder)


# As scripts use it ---------------------------------------------------------------------------------------------------

#: Tells which classes a query finds, on the driver and in a task, and what the workers' Python is.
TELL = """
import json, sys
from pyspark.sql import SparkSession
import semel

def tell(spark):
    from semel.decisions.hadoop import _first_class, hadoop_conf, jvm_of
    jvm = jvm_of(spark)
    manager = _first_class(jvm).create(jvm.org.apache.hadoop.fs.Path(f"file:{sys.argv[1]}/told"), hadoop_conf(spark))
    def kafka():
        try:
            spark.readStream.format("kafka").option("kafka.bootstrap.servers", "h:1").option("subscribe", "t").load()
            return True
        except Exception as error:
            assert "Failed to find data source: kafka" in str(error), error
            return False
    print(json.dumps({
        "files": str(manager.fc().getDefaultFileSystem().getClass().getName()),
        "kafka": kafka(),
        "python": spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("sys").executable).first(),
        "jars on sys.path": spark.sparkContext.parallelize([0], 1).map(
            lambda _: [p for p in __import__("sys").path if p.endswith(".jar") and "spark-core" not in p]).first(),
    }))

builder = (
    SparkSession.builder.config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
)
"""
HAS = {"files": CLASS, "kafka": True, "python": sys.executable, "jars on sys.path": []}


def run(tmp_path: Path, text: str, *command: str, **environment: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What a script tells, and what is said on stderr."""
    script = tmp_path / "script.py"
    script.write_text(TELL + textwrap.dedent(text))
    bare = {k: v for k, v in os.environ.items() if k not in (OPTIONS, VARIABLE, "PYSPARK_PYTHON")}
    full = [*(command or [sys.executable]), str(script), str(tmp_path)]
    variables = {**bare, OPTIONS: JVM, **environment}
    done = subprocess.run(full, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return told, [line for line in done.stderr.splitlines() if line.startswith("semel: ")]


@pytest.mark.spark35
def test_a_script_just_works(tmp_path: Path) -> None:
    ((told,), said) = run(tmp_path, "tell(semel.configure(builder.master('local[1]')).getOrCreate())")
    assert (told, said) == (HAS, [])


def test_when_a_session_is_there_it_says_what_is_too_late(tmp_path: Path) -> None:
    text = """
    spark = builder.master("local[1]").getOrCreate()
    tell(spark)
    semel.configure(SparkSession.builder).getOrCreate()
    tell(spark)
    """
    told, said = run(tmp_path, text, PYSPARK_PYTHON=sys.executable)
    assert [(one["files"], one["kafka"]) for one in told] == [(HADOOPS_OWN, False)] * 2
    assert len(said) == 1
    jars = [local_files_jar(), *connector_jars(say=pytest.fail)]
    assert said[0].startswith("semel: Spark's JVM runs already, and its class path is fixed: ")
    assert said[0].endswith(f"put on its command line: --driver-class-path {path_of(*jars)}")


def test_when_a_session_has_the_jars_its_local_files_are_switched_on_and_nothing_is_said(tmp_path: Path) -> None:
    jars = path_of(local_files_jar(), *connector_jars(say=pytest.fail))
    text = """
    spark = builder.master("local[1]").getOrCreate()
    tell(spark)
    for _ in range(2):
        tell(semel.configure(SparkSession.builder).getOrCreate())
    """
    told, said = run(tmp_path, text, PYSPARK_PYTHON=sys.executable, **{VARIABLE: jars})
    assert [(one["files"], one["kafka"]) for one in told] == [(HADOOPS_OWN, True), (CLASS, True), (CLASS, True)]
    assert said == []


def test_what_it_says_on_the_command_line_of_spark_submit_works(tmp_path: Path) -> None:
    jars = path_of(local_files_jar(), *connector_jars(say=pytest.fail))
    submit = Path(sys.executable).with_name("spark-submit")
    command = [str(submit), "--master", "local[1]", "--driver-class-path", jars]
    text = "tell(semel.configure(builder).getOrCreate())"
    ((told,), said) = run(tmp_path, text, *command, PYSPARK_PYTHON=sys.executable)
    assert (told["files"], told["kafka"], said) == (CLASS, True, [])
