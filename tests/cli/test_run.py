"""`semel run`, as a process of its own on real Spark; what needs no Spark runs in this one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from semel import cli
from semel.errors import (
    BatchFailed,
    CheckpointUnusable,
    CommitStalled,
    ConfigError,
    DecisionUnknown,
    Fenced,
    InDoubt,
    MissingExtra,
    QueryStopped,
    RowsGone,
    SemelError,
)
from semel.run import stops
from semel.run.happenings import Happening, Launched, error_in
from semel.run.runner import all_stopped, exit_code, gravest, jvm_watched, unless_stopped
from semel.run.session import SparkSettings, session_conf
from semel.run.stops import StopSignals, stop_all
from semel.runtime.durability import NOT_PROMISED
from semel.runtime.pipeline import Pipeline, StreamWriter
from tests.quick_spark import quick_run

pytestmark = pytest.mark.usefixtures("class_archive")

PIPELINES = """
import os
import semel

HERE = os.path.dirname(os.path.abspath(__file__))

def stream(spark, name, sink):
    df = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(f"{HERE}/input")
    writer = semel.write(df).to(sink).option("checkpointLocation", f"{HERE}/checkpoints/{name}")
    return writer if "KEEP_RUNNING" in os.environ else writer.trigger(availableNow=True)

@semel.pipeline
def first(spark):
    return stream(spark, "first", semel.Sqlite(f"{HERE}/shop.db", "first"))

@semel.pipeline
def second(spark):
    return stream(spark, "second", semel.Sqlite(f"{HERE}/shop.db", "second"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pipelines.py").write_text(PIPELINES)
    (tmp_path / "input").mkdir()
    for number in range(3):
        file = tmp_path / "input" / f"{number}.json"
        file.write_text(f'{{"id": {number}}}\n')
        # Spark takes files in the order of their times.
        os.utime(file, (1_700_000_000 + number,) * 2)
    return tmp_path


def start(folder: Path, target: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "semel.cli", "run", target, "--json", *quick_run()],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ids(folder: Path, table: str) -> list[int]:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return [row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]  # noqa: S608 - our own


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# On real Spark ------------------------------------------------------------------------------------------------------


def test_every_pipeline_of_a_file_runs_to_its_end_and_tells_it_in_json(folder: Path) -> None:
    child = start(folder, "pipelines.py")
    output, errors = child.communicate(timeout=180)
    assert (child.returncode, errors) == (0, "")
    told = events(output)
    for name in ("first", "second"):
        mine = [event for event in told if event["pipeline"] == name]
        assert [e["event"] for e in mine] == ["started", "batch", "batch", "batch", "stopped"]
        batches = [e for e in mine if e["event"] == "batch"]
        assert [(e["batch"], e["how"], e["rows"]) for e in batches] == [(n, "committed", 1) for n in range(3)]
        assert all(e["ms"] > 0 and e["attempt"] == 0 and e["at"] for e in batches)
        assert ids(folder, name) == [0, 1, 2]


def test_who_turns_the_protection_from_power_cuts_off_is_told_what_is_not_promised(folder: Path) -> None:
    """On stderr, where people look, and in the events, which programs read."""
    file = folder / "pipelines.py"
    file.write_text(file.read_text().replace(".option(", '.option("semel.powerLossSafe", "false").option('))
    child = start(folder, "pipelines.py:first")
    output, errors = child.communicate(timeout=180)
    assert (child.returncode, errors.splitlines()) == (0, [NOT_PROMISED])
    assert [(e["event"], e.get("warning", "")) for e in events(output)] == [
        ("started", NOT_PROMISED),
        *[("batch", "")] * 3,
        ("stopped", ""),
    ]


def test_sigterm_to_the_whole_group_stops_clean_and_the_next_run_goes_on(folder: Path) -> None:
    child = start(folder, "pipelines.py:first", KEEP_RUNNING="1")
    lines = iter_lines(child)
    seen = [next(lines), next(lines)]
    assert [event["event"] for event in seen] == ["started", "batch"]
    os.killpg(child.pid, signal.SIGTERM)
    rest = list(lines)
    assert (child.wait(timeout=60), rest[-1]["event"]) == (0, "stopped")
    (folder / "input" / "3.json").write_text('{"id": 3}\n')
    again = start(folder, "pipelines.py:first")
    output, errors = again.communicate(timeout=180)
    assert (again.returncode, errors) == (0, "")
    assert [e["event"] for e in events(output)][-1] == "stopped"
    assert ids(folder, "first") == [0, 1, 2, 3]


def test_a_reader_that_goes_away_ends_the_run_between_two_batches(folder: Path) -> None:
    """`semel run pipelines.py | head -n 1`: found by a review, which saw it end a batch behind its decision."""
    command = [sys.executable, "-m", "semel.cli", "run", "pipelines.py:first", *quick_run()]
    child = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "KEEP_RUNNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert " first started" in child.stdout.readline()
    child.stdout.close()
    assert (child.wait(timeout=180), child.stderr.read()) == (141, "")
    # Of what was told to nobody all is done: decided, committed, and known to Spark, but for the last one.
    decisions = sorted(name.name for name in (folder / "checkpoints" / "first" / "semel" / "decisions").iterdir())
    assert ids(folder, "first") == list(range(len(decisions))) != []
    again = start(folder, "pipelines.py:first")
    output, errors = again.communicate(timeout=180)
    assert (again.returncode, errors) == (0, "")
    assert {e["event"] for e in events(output)} == {"started", "batch", "stopped"}
    assert ids(folder, "first") == [0, 1, 2]


def test_a_reader_of_the_events_that_goes_away_stops_nothing(folder: Path) -> None:
    child = start(folder, "pipelines.py:first")
    assert child.stdout is not None
    assert child.stderr is not None
    assert '"started"' in child.stdout.readline()
    child.stdout.close()
    assert (child.wait(timeout=180), child.stderr.read()) == (0, "")
    assert ids(folder, "first") == [0, 1, 2]


def iter_lines(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


def test_a_query_that_fails_ends_with_the_three_lines_and_exit_code_1(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.executescript("CREATE TABLE first (id INTEGER CHECK (id <> 1))")
    child = start(folder, "pipelines.py:first")
    output, errors = child.communicate(timeout=180)
    assert child.returncode == 1
    what, now, remedy = errors.splitlines()
    assert "refused the rows of batch 1: CHECK constraint failed" in what
    assert now == "  the data now: the batch was rolled back: nothing of it is visible in any sink"
    assert remedy.startswith("  what to do: Mend the cause and start the pipeline again")
    assert [(e["event"], e["batch"]) for e in events(output)] == [("started", None), ("batch", 0), ("failed", None)]
    assert ids(folder, "first") == [0]


# Bad input ----------------------------------------------------------------------------------------------------------


def semel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["semel", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


BAD_FILES = {
    "no pipeline": ("x = 1\n", "There is no pipeline in bad.py.", "Mark a function with @semel.pipeline"),
    "syntax": ("x = 1\ndef (:\n", "bad.py does not import: line 2: SyntaxError: ", "Mend the line"),
    "error": (
        "def f():\n    return 1 / 0\n\nf()\n",
        "bad.py does not import: line 2: ZeroDivisionError: division by zero",
        "Mend the line",
    ),
    "missing module": ("\nimport no_such_thing\n", "line 2: ModuleNotFoundError: No module named", "Mend the line"),
    "semel's own error": (
        "import semel\n@semel.pipeline(name='a b')\ndef f(spark): ...\n",
        "A pipeline cannot be named 'a b'.",
        "Use letters",
    ),
    "needs Spark": (
        "from pyspark.sql import functions as F\n@F.udf('long')\ndef f(x):\n    return x\n",
        "bad.py does not import: line 2: PySparkRuntimeError: [SESSION_OR_CONTEXT_NOT_EXISTS]",
        "Move the line into the pipeline function",
    ),
    "namesakes": (
        "import semel\na = semel.pipeline(name='x')(print)\nb = semel.pipeline(name='x')(print)\n",
        "bad.py has more than one pipeline named x.",
        "Give each a name of its own",
    ),
}


@pytest.mark.parametrize(("content", "what", "remedy"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_told_in_three_lines_with_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    what: str,
    remedy: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Other tests of this process may have left a session behind.
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    Path("bad.py").write_text(content)
    code, out, err = semel(capsys, monkeypatch, "run", "bad.py")
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert what in lines[0]
    assert lines[1] == "  the data now: nothing was started and no row was written"
    assert lines[2].startswith(f"  what to do: {remedy}")


def test_an_unknown_name_says_which_exist(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, _, err = semel(capsys, monkeypatch, "run", "pipelines.py:third")
    assert code == 2
    assert "There is no pipeline 'third' in pipelines.py." in err
    assert "Name one of those that exist: first, second." in err


def test_a_missing_file_and_a_bad_setting_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = semel(capsys, monkeypatch, "run", "nowhere.py")
    assert code == 2
    assert err.startswith("There is no pipeline file nowhere.py.\n  the data now: ")
    code, _, err = semel(capsys, monkeypatch, "run", "nowhere.py", "--conf", "novalue")
    assert code == 2
    assert err.startswith("--conf novalue is not KEY=VALUE.\n")


def test_version_and_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert semel(capsys, monkeypatch, "--version")[:2] == (0, "semel 0.2.0\n")
    code, out, _ = semel(capsys, monkeypatch, "--help")
    assert code == 0
    assert "run" in out
    assert "demo" in out


def test_without_the_extra_the_command_line_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("semel.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = semel(capsys, monkeypatch, "--version")
    assert code == 2
    assert err.startswith("The command line needs typer, which is not installed.\n")
    assert "pip install 'semel[cli]'" in err


# Pure ---------------------------------------------------------------------------------------------------------------


def test_the_error_inside_what_spark_says_is_found_again() -> None:
    inner, outer = BatchFailed("Batch 3 failed."), Fenced("Incarnation 1 stopped\nat batch 3.")
    text = "\n".join(
        [
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Traceback (most recent call last):",
            f"semel.errors.BatchFailed: {inner}",
            "During handling of the above exception, another exception occurred:",
            f"semel.errors.Fenced: {outer}",
            "JVM stacktrace:",
        ]
    )
    found = error_in(text)
    assert (type(found), str(found)) == (Fenced, str(outer))
    assert error_in("java.lang.IllegalStateException: no") is None


class FakeRunning:
    """A started pipeline whose query ends as told when it is stopped."""

    def __init__(self, words: str) -> None:
        self.query = SimpleNamespace(exception=lambda: words or None, isActive=True)

    def stop(self, _grace_s: float) -> bool:
        return True


ENDS = {
    "clean": ("", "stopped", None),
    "not begun": (f"semel.errors.QueryStopped: {QueryStopped('Batch 4 was not begun.')}", "stopped", None),
    "cut off": ("py4j.Py4JException: Error while obtaining a new communication channel", "stopped", None),
    "failed": (f"semel.errors.BatchFailed: {BatchFailed('Batch 4 failed.')}", "failed", BatchFailed),
}


@pytest.mark.parametrize(("words", "event", "kind"), ENDS.values(), ids=ENDS.keys())
def test_a_batch_that_fails_while_a_signal_stops_it_is_told_as_failed(
    words: str, event: str, kind: type[BatchFailed] | None
) -> None:
    told: list[Happening] = []
    one = Launched("orders", cast(Any, FakeRunning(words)))
    failures = stop_all([one], cast(Any, SimpleNamespace(stop=lambda: None)), StopSignals(), told.append)
    assert [type(failure) for failure in failures] == ([kind] if kind else [])
    assert [h.event for h in told] == [event]


class StuckRunning(FakeRunning):
    """Its stop came to no good end, and Spark does not say why."""

    def __init__(self, raises: Exception | None) -> None:
        super().__init__("")
        self.raises = raises

    def stop(self, _grace_s: float) -> bool:
        if self.raises:
            raise self.raises
        return False

    def undone(self) -> CommitStalled:
        return CommitStalled("Batch 4 is decided.")


@pytest.mark.parametrize("raises", [None, TimeoutError("Spark did not stop")])
def test_a_stop_that_is_not_whole_is_told_with_the_batch_that_is_decided(raises: Exception | None) -> None:
    told: list[Happening] = []
    one = Launched("orders", cast(Any, StuckRunning(raises)))
    failures = stop_all([one], cast(Any, SimpleNamespace(stop=lambda: None)), StopSignals(), told.append)
    assert [exit_code(failure) for failure in failures] == [4]
    assert [(h.event, h.error.splitlines()[0]) for h in told] == [("failed", "Batch 4 is decided.")]


def test_pipelines_that_do_not_stop_have_one_grace_for_all_of_them() -> None:
    """Each of these stops only while the others do."""
    together = threading.Barrier(3)

    class Slow(FakeRunning):
        def stop(self, _grace_s: float) -> bool:
            together.wait(60)
            return True

    told: list[Happening] = []
    runs = [Launched(name, cast(Any, Slow(""))) for name in ("first", "second", "third")]
    assert stop_all(runs, cast(Any, SimpleNamespace(stop=lambda: None)), StopSignals(), told.append, 0.5) == []
    assert [(h.pipeline, h.event) for h in told] == [(run.name, "stopped") for run in runs]
    assert not together.broken


def test_a_pipeline_whose_stop_never_returns_is_told_with_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "STOP_S_MAX", 0.2)
    released = threading.Event()

    class Stuck(StuckRunning):
        def stop(self, _grace_s: float) -> bool:
            return released.wait(60)

    told: list[Happening] = []
    one = Launched("orders", cast(Any, Stuck(None)))
    try:
        failures = stop_all([one], cast(Any, SimpleNamespace(stop=lambda: None)), StopSignals(), told.append, 0.1)
    finally:
        released.set()
    assert [exit_code(failure) for failure in failures] == [4]


@pytest.mark.parametrize("first", [BatchFailed("Batch 7 failed."), None])
def test_of_several_failures_the_one_that_must_not_be_left_as_it_is_ends_the_run_and_all_are_told(
    first: BatchFailed | None, caplog: pytest.LogCaptureFixture
) -> None:
    spark = cast(Any, SimpleNamespace(stop=lambda: None))
    failed = f"semel.errors.BatchFailed: {BatchFailed('Batch 9 failed.')}"

    def life() -> None:
        with all_stopped(spark, StopSignals(), print) as runs:
            runs += [
                Launched("second", cast(Any, FakeRunning(failed))),
                Launched("third", cast(Any, StuckRunning(None))),
            ]
            if first is not None:
                raise first

    with pytest.raises(CommitStalled, match="Batch 4 is decided"):
        life()
    assert [message.splitlines()[0] for message in caplog.messages] == [
        *(["Batch 7 failed."] if first else []),
        "Batch 9 failed.",
    ]
    assert all(len(message.splitlines()) == 3 for message in caplog.messages)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_needs_a_person_is_told_before_what_a_start_completes(order: tuple[int, ...]) -> None:
    failures = [InDoubt("a person"), CommitStalled("the next start"), BatchFailed("nothing is open")]
    assert gravest([failures[place] for place in order]).what == "a person"
    assert gravest([failures[place] for place in order if place]).what == "the next start"
    first, second = RowsGone("of one"), InDoubt("of another")
    assert gravest([failures[2], second, first]) is second
    assert gravest([DecisionUnknown("not known"), failures[2]]).what == "not known"
    assert gravest([failures[2], DecisionUnknown("not known"), failures[1]]).what == "the next start"


def test_a_start_that_hangs_is_given_up_when_a_stop_was_asked_for_and_its_grace_is_over() -> None:
    released, stop = threading.Event(), StopSignals()
    stop._asked.set()
    try:
        with pytest.raises(QueryStopped, match="Pipeline orders was stopped while it waited for a store in its start"):
            unless_stopped(cast(Any, lambda: released.wait(60)), "orders", stop, 0.3)
    finally:
        released.set()


def test_a_start_that_ends_within_the_grace_tells_how_it_ended() -> None:
    stop = StopSignals()
    stop._asked.set()
    running = cast(Any, FakeRunning(""))
    assert unless_stopped(lambda: running, "orders", stop, 60) is running

    def stalled() -> Any:
        raise CommitStalled("Batch 4 is decided.")

    with pytest.raises(CommitStalled, match="Batch 4 is decided"):
        unless_stopped(stalled, "orders", stop, 60)


def test_a_spark_that_does_not_stop_is_killed_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "SPARK_STOP_S_MAX", 0.2)
    released, killed = threading.Event(), []
    gateway = SimpleNamespace(proc=SimpleNamespace(kill=lambda: killed.append("jvm")))
    spark = SimpleNamespace(stop=lambda: released.wait(60), sparkContext=SimpleNamespace(_gateway=gateway))
    try:
        assert stop_all([], cast(Any, spark), StopSignals(), lambda _: None) == []
        assert killed == ["jvm"]
    finally:
        released.set()


def test_exit_codes_tell_a_supervisor_what_to_do() -> None:
    for error in (CommitStalled("x"), InDoubt("x"), RowsGone("x"), DecisionUnknown("x")):
        assert exit_code(error) == 4, f"after {type(error).__name__} a batch may be visible in some stores only"
    assert exit_code(BatchFailed("x")) == 1
    assert exit_code(MissingExtra("x", extra="cli")) == 2
    assert exit_code(CheckpointUnusable("x")) == 2
    assert exit_code(Fenced("x")) == 3


def test_the_command_line_beats_the_pipelines_and_packages_are_gathered() -> None:
    def unbuilt(_: object) -> StreamWriter:
        raise AssertionError("the settings of a session are known before anything is built")

    def named(name: str, **conf: str) -> Pipeline:
        return Pipeline(unbuilt, name, ("a:b:1",), conf)

    settings = SparkSettings(conf={"k": "from the command line", "spark.jars.packages": "c:d:2"})
    conf = session_conf(settings, [named("one", k="1", other="2"), named("two", other="2")])
    assert (conf["k"], conf["other"]) == ("from the command line", "2")
    assert conf["spark.jars.packages"] == "c:d:2,a:b:1"
    assert "spark.jars.packages" not in session_conf(SparkSettings(), [])
    with pytest.raises(ConfigError, match="Pipelines one and two want different values of k: 1 and 2"):
        session_conf(settings, [named("one", k="1"), named("two", k="2")])


@pytest.mark.parametrize("kind", ["Py4JNetworkError", "Py4JError"])
def test_a_jvm_that_is_gone_is_told_in_our_words(kind: str) -> None:
    """Py4J says the one or the other, depending on what it was doing when the JVM died."""
    from py4j import protocol

    with pytest.raises(SemelError, match="Spark's JVM is gone: no answer") as told, jvm_watched():
        raise getattr(protocol, kind)("no answer")
    assert "Start again" in told.value.remedy
