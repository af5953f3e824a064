"""`semel audit` on pipelines that really ran: killed, running, stopped. Sinks are SQLite and Parquet files."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from semel import cli
from semel.audit.report import as_json
from semel.audit.results import Audit
from semel.audit.run import audit_one, audit_writer
from semel.errors import ConfigError
from semel.failpoints import VARIABLE
from semel.run.loading import load_pipelines
from tests.processes import wait_until
from tests.quick_spark import quick_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("class_archive")

PIPELINE = """
import os
import semel

HERE = os.path.dirname(os.path.abspath(__file__))

@semel.pipeline
def shop(spark):
    df = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(f"{HERE}/input")
    sinks = semel.Sqlite(f"{HERE}/shop.db", "orders", name="table"), semel.Files(f"{HERE}/lake", name="lake")
    writer = semel.write(df, guarantee=os.environ.get("GUARANTEE", "exactly-once")).to(*sinks)
    writer = writer.option("checkpointLocation", f"{HERE}/checkpoint")
    return writer if "KEEP_RUNNING" in os.environ else writer.trigger(availableNow=True)
"""
SECONDS_MAX = 180
ROWS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(PIPELINE)
    (tmp_path / "input").mkdir()
    for number in range(3):
        put(tmp_path, number)
    return tmp_path


def put(folder: Path, number: int) -> None:
    """The input of one batch."""
    file = folder / "input" / f"{number}.json"
    hidden = folder / "input" / f".{number}.json"
    hidden.write_text("".join(f'{{"id": {number * ROWS + k}}}\n' for k in range(ROWS)))
    # Spark takes files in the order of their times.
    os.utime(hidden, (1_700_000_000 + number,) * 2)
    hidden.rename(file)


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "semel.cli", *arguments, *quick_run()],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = child.communicate(timeout=SECONDS_MAX)
    return child.returncode, output, errors


def run(folder: Path, failpoints: str = "") -> int:
    code, _, errors = finish(start(folder, "run", "shop.py", "--json", **{VARIABLE: failpoints}))
    assert code in (0, -signal.SIGKILL), errors
    return code


def ran(spark: SparkSession, folder: Path) -> None:
    """In this process, where nobody is to be killed."""
    (pipeline,) = load_pipelines(str(folder / "shop.py"))
    pipeline(spark).start().awaitTermination()


def audited(spark: SparkSession, folder: Path) -> Audit:
    """In this process: a Spark of its own would take longer than the audit."""
    (pipeline,) = load_pipelines(str(folder / "shop.py"))
    return audit_one(pipeline, spark, folder / "shop.py")


def everything(folder: Path) -> dict[str, bytes]:
    """All that the pipeline keeps, checkpoint and sinks."""
    kept = [folder / "checkpoint", folder / "lake", *folder.glob("shop.db*")]
    files = [file for top in kept for file in (top.rglob("*") if top.is_dir() else [top]) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def kinds(audit: Audit) -> list[str]:
    return [finding.kind for finding in audit.findings]


# From the command line ----------------------------------------------------------------------------------------------


def test_a_pipeline_that_ran_to_its_end_is_proven_and_a_deleted_ledger_row_is_lost(folder: Path) -> None:
    assert run(folder) == 0
    before = everything(folder)
    code, output, errors = finish(start(folder, "audit", "shop.py", "--json"))
    assert (code, errors) == (0, "")
    told = json.loads(output)
    assert everything(folder) == before
    assert (told["verdict"], told["pipeline"], told["guarantee"]) == (True, "shop", "exactly-once")
    assert told["checkpoint"] == str(folder / "checkpoint")
    assert (told["incarnation"], told["findings"], told["reasons"]) == (1, [], [])
    assert [(b["batch"], b["files_in_source"], b["attempt"], b["checkpointed"]) for b in told["batches"]] == [
        (n, 1, 0, True) for n in range(3)
    ]
    for batch in told["batches"]:
        for sink in ("table", "lake"):
            assert (batch["sinks"][sink]["state"], batch["sinks"][sink]["rows_marked"]) == ("marked", ROWS)
    assert "table: 15 rows in 3 batches, as many as were decided." in told["proven"]
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute("DELETE FROM semel_ledger WHERE batch = 1")
        connection.commit()
    code, output, errors = finish(start(folder, "audit", "shop.py:shop", "--last", "2"))
    assert (code, errors) == (1, "")
    lines = output.splitlines()
    assert lines[-1] == "verdict false: 2 of 3 batches proven in every sink"
    assert any("lost: batch 1 in table: 5 rows are decided and checkpointed" in line for line in lines)
    assert any("split: batch 1 in table: it is marked in lake and not in table" in line for line in lines)
    assert "1 older batches are compared and not listed" in output
    assert "no marker" in output


def test_a_pipeline_that_was_never_started_is_unknown_and_nothing_is_made(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code, output, errors = finish(start(folder, "audit", "shop.py", "--json"))
    assert (code, errors) == (3, "")
    told = json.loads(output)
    assert (told["verdict"], told["batches"]) == ("unknown", [])
    assert told["reasons"] == [
        "Nothing was compared: the pipeline has not been started with this checkpoint yet.",
    ]
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before


# Killed and started again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failpoint", "markers"),
    [
        pytest.param("batch.decided@2", "table 0 of 1, lake 0 of 1", marks=pytest.mark.long),
        ("sqlite.committed@2", "table 1 of 1, lake 0 of 1"),
    ],
)
def test_a_batch_that_was_decided_when_the_driver_died_is_in_flight_and_not_lost(
    spark: SparkSession, folder: Path, failpoint: str, markers: str
) -> None:
    assert run(folder, failpoint) == -signal.SIGKILL
    before = everything(folder)
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (True, ["in flight"])
    assert audit.findings[0].batch == 1
    # Sinks commit at the same time: the other one may or may not have been faster than the signal.
    told = audit.findings[0].evidence
    assert told in (
        f"decided in attempt 0; markers so far: {m}" for m in (markers, markers.replace("lake 0", "lake 1"))
    )
    assert [row.state for row in audit.rows] == ["checkpointed", "decided"]
    after = everything(folder)
    companions = {name for name in after if name.endswith(("-shm", "-wal"))}
    assert {n: c for n, c in after.items() if n not in companions} == {
        n: c for n, c in before.items() if n not in companions
    }
    assert run(folder) == 0
    again = audited(spark, folder)
    assert (again.verdict, kinds(again), again.facts.incarnation) == (True, [], 2)
    assert [row.proven for row in again.rows] == [True, True, True]
    assert "lake: 15 rows in 3 batches, as many as were decided." in again.proven


def test_a_batch_that_was_staged_when_the_driver_died_is_in_flight(spark: SparkSession, folder: Path) -> None:
    assert run(folder, "batch.prepared") == -signal.SIGKILL
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (None, ["in flight"])
    assert audit.findings[0].evidence == "planned, and not decided"
    assert audit.reasons == ("Nothing was compared: no batch is over yet.",)


def test_beside_a_running_driver_nothing_is_called_wrong(spark: SparkSession, folder: Path) -> None:
    child = start(folder, "run", "shop.py", "--json", KEEP_RUNNING="1")
    try:
        wait_until((folder / "checkpoint" / "commits" / "0").exists, SECONDS_MAX)
        audits = []
        for number in range(3, 18):
            put(folder, number)
            audits.append(audited(spark, folder))
        wait_until((folder / "checkpoint" / "commits" / "17").exists, SECONDS_MAX)
        audits.append(audited(spark, folder))
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        code, _, errors = finish(child)
    assert (code, errors) == (0, "")
    assert [(audit.verdict, kinds(audit)) for audit in audits if {*kinds(audit)} - {"in flight"}] == []
    assert {audit.verdict for audit in audits} == {True}
    proven = [sum(row.proven for row in audit.rows) for audit in audits]
    assert proven == sorted(proven)
    assert proven[-1] > proven[0], "the pipeline made no progress while it was audited"
    last = audited(spark, folder)
    assert (last.verdict, kinds(last), last.facts.incarnation) == (True, [], 1)
    assert "table: 90 rows in 18 batches, as many as were decided." in last.proven


# What was done to the sinks, the checkpoint or the guarantee --------------------------------------------------------


def test_what_is_done_to_sinks_and_checkpoint_is_told(spark: SparkSession, folder: Path) -> None:
    ran(spark, folder)
    assert audited(spark, folder).verdict is True
    (data,) = (folder / "lake").glob("b0000000001-*")
    content = data.read_bytes()
    data.unlink()
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (False, ["lost"])
    assert data.name in audit.findings[0].evidence
    data.write_bytes(content)
    (record,) = (folder / "checkpoint" / "semel" / "decisions").glob("0000000002.*")
    decision = record.read_bytes()
    record.write_bytes(decision.replace(b'"rows": 5', b'"rows": 6'))
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert "does not match its checksum" in audit.reasons[0]
    record.unlink()
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert audit.reasons == (
        "Batch 2: there is no decision: it ran under a weaker guarantee, or its journal was removed.",
    )
    # Spark would run batch 2 again, and nobody would know that it is visible.
    (folder / "checkpoint" / "commits" / "2").unlink()
    audit = audited(spark, folder)
    assert audit.verdict is False
    assert [(f.kind, f.batch, f.sink) for f in audit.findings if f.breaks] == [
        ("early", 2, "table"),
        ("early", 2, "lake"),
    ]
    record.write_bytes(decision)
    (folder / "checkpoint" / "offsets" / "2").unlink()
    audit = audited(spark, folder)
    assert audit.verdict is False
    assert {(f.kind, f.batch) for f in audit.findings} == {("contradiction", 2), ("forgotten", 2)}


def test_a_sink_that_is_not_there_leaves_it_unknown(spark: SparkSession, folder: Path) -> None:
    ran(spark, folder)
    for file in folder.glob("shop.db*"):
        if file.is_file():
            file.rename(folder / f"away-{file.name}")
    audit = audited(spark, folder)
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert audit.reasons[1] == f"Nothing is proven of sink table: there is no database {folder / 'shop.db'}."
    assert not (folder / "shop.db").exists()


def test_below_exactly_once_nothing_is_proven(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUARANTEE", "at-least-once")
    (pipeline,) = load_pipelines(str(folder / "shop.py"))
    writer = pipeline(spark)
    writer.start().awaitTermination()
    audit = audit_writer(writer)
    assert (audit.verdict, audit.proven, len(audit.rows)) == (None, (), 3)
    assert {row.state for row in audit.rows} == {"checkpointed"}
    assert "The guarantee is at-least-once" in as_json(audit)["reasons"][0]


def test_the_checkpoint_may_be_on_hdfs(
    spark: SparkSession, folder: Path, hdfs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pipeline,) = load_pipelines(str(folder / "shop.py"))
    writer = pipeline(spark).option("checkpointLocation", f"{hdfs_uri}/audited")
    assert audit_writer(writer).verdict is None
    writer.start().awaitTermination()
    audit = audit_writer(writer)
    assert (audit.verdict, kinds(audit), len(audit.rows)) == (True, [], 3)
    assert [row.range.files for row in audit.rows] == [1, 1, 1]


# Bad input ----------------------------------------------------------------------------------------------------------


def semel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["semel", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


BAD: dict[str, tuple[str, list[str], str]] = {
    "no file": ("", ["nowhere.py"], "There is no pipeline file nowhere.py."),
    "no pipeline": ("x = 1\n", ["bad.py"], "There is no pipeline in bad.py."),
    "does not import": ("x = (\n", ["bad.py"], "bad.py does not import: line 1: SyntaxError"),
    "no such name": (PIPELINE, ["bad.py:other"], "There is no pipeline 'other' in bad.py."),
    "bad setting": (PIPELINE, ["bad.py", "--conf", "novalue"], "--conf novalue is not KEY=VALUE."),
}


@pytest.mark.parametrize(("content", "arguments", "what"), BAD.values(), ids=BAD.keys())
def test_wrong_input_is_told_in_three_lines_with_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    arguments: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(content)
    code, out, err = semel(capsys, monkeypatch, "audit", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 3)
    assert err.startswith(what)


@pytest.mark.parametrize("arguments", [["--last", "0"], ["--last", "many"], []])
def test_wrong_options_are_refused_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    target = ["shop.py"] if arguments else []
    assert semel(capsys, monkeypatch, "audit", *target, *arguments)[0] == 2


def test_a_pipeline_that_cannot_be_built_is_wrong_input_and_a_source_that_is_away_is_unknown(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text("import semel\n@semel.pipeline\ndef shop(spark):\n    return 1 / 0\n")
    with pytest.raises(ConfigError, match="line 4: ZeroDivisionError"):
        audited(spark, tmp_path)
    (tmp_path / "shop.py").write_text(
        "import semel\n@semel.pipeline\ndef shop(spark):\n"
        '    return semel.read_kafka(spark, "in", servers="127.0.0.1:1", timeout_s=2)\n'
    )
    audit = audited(spark, tmp_path)
    assert (audit.verdict, audit.rows) == (None, ())
    assert "the pipeline cannot be built: Kafka at 127.0.0.1:1 cannot be reached" in audit.reasons[0]
