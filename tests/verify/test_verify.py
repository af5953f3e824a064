"""`semel verify` as a whole, on real Spark and real servers: few kills each, because each is a life of Spark."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import semel
from semel import cli
from semel.errors import ConfigError
from semel.verify.child import Probe, json_fields
from semel.verify.power.disk import require_fuse
from semel.verify.run import Result, verify
from semel.verify.settings import Settings
from semel.verify.stage import _refuse_what_cannot_be_compared
from semel.verify.workload import DEFAULT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from semel.dev.postgres import PostgresServer

PIPELINES = Path(__file__).parent / "pipelines"


#: `semel verify` with these arguments -> its exit code, stdout, stderr.
Command = Callable[..., tuple[object, str, str]]


def run(folder: Path, **settings: object) -> Result:
    chosen = {"seed": 5, "rows": 1_500, "rows_per_batch": 100, "output": folder, **settings}
    return verify(Settings(**chosen), print)  # type: ignore[arg-type]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command itself, as a shell runs it."""

    def called(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["semel", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return called


# The first round of each plan has every kind of fault once; the long one goes on from there.


@pytest.mark.parametrize("kills", [5, pytest.param(8, marks=pytest.mark.long)])
def test_files_and_tables_under_kills_are_exactly_once(kills: int, tmp_path: Path, command: Command) -> None:
    kinds = ("point", "supervisor", "jvm", "worker", "pause", "zombie", "disk-full")
    options = ("--seed", 5, "--rows", 1_500, "--rows-per-batch", 100, "--output", tmp_path, "--json")
    code, out, err = command("--sinks", "sqlite,files", "--kills", kills, "--faults", ",".join(kinds), *options)
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, True), (found, err)
    assert f"seed 5: {kills} kills, 1,500 rows" in err.splitlines()[0]
    assert [found[kind] for kind in ("lost", "duplicated", "torn", "split", "early", "reordered", "orphans")] == [0] * 7
    assert found["rows"] >= 1_500
    assert found["kills"] >= kills
    assert found["faults"].keys() == {*kinds}
    report = Path(found["report"]).read_text()
    assert report.startswith("<!DOCTYPE html>")
    assert "life-0001.log" not in report, "logs are not kept when all is well"
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.html", "result.json"]
    assert "<testsuite" in (tmp_path / "junit.xml").read_text()


@pytest.mark.parametrize("kills", [10, pytest.param(12, marks=pytest.mark.long)])
def test_kafka_and_two_databases_under_kills_of_everything_are_exactly_once(kills: int, tmp_path: Path) -> None:
    sinks, kinds = ("kafka", "postgres", "mariadb"), ("point", "driver", "server", "between", "outage", "cut", "delay")
    # The outage of this seed is one of the shortest.
    result = run(tmp_path, sinks=sinks, seed=378, kills=kills, rows=4_000, faults=kinds)
    found = result.as_json()
    assert found["verdict"] is True, found
    assert found["rows"] >= 4_000
    assert found["kills"] >= kills
    assert found["faults"].keys() == {*kinds}
    assert len(found["proven"]) >= 3 * len(sinks)


@pytest.mark.long
@pytest.mark.parametrize(
    "sinks",
    [
        ("postgres:prepared", "mariadb:xa"),
        ("postgres:upsert", "mariadb:upsert"),
        ("postgres:dedup", "mariadb:versions"),
        ("postgres:versions", "mariadb:dedup"),
    ],
    ids=" ".join,
)
def test_every_mode_of_a_database_is_exactly_once(sinks: tuple[str, ...], tmp_path: Path) -> None:
    kinds = ("point", "driver", "worker", "server", "between")
    result = run(tmp_path, sinks=sinks, kills=12, rows=4_000, faults=kinds)
    found = result.as_json()
    assert found["verdict"] is True, found
    assert found["rows"] >= 4_000
    assert found["kills"] >= 12
    assert found["faults"].keys() == {*kinds}


@pytest.mark.long
def test_executors_that_are_killed_cost_no_row(tmp_path: Path) -> None:
    kinds = ("executor",)
    result = run(tmp_path, sinks=("sqlite", "files"), kills=3, faults=kinds, master="local-cluster[2,1,1024]")
    found = result.as_json()
    assert found["verdict"] is True, found
    assert found["kills"] >= 3
    assert found["faults"].keys() == {*kinds}


@pytest.mark.long
def test_power_cuts_cost_no_row(tmp_path: Path, command: Command) -> None:
    """The checkpoint lies on a disk that forgets, and the sinks on one that does not."""
    require_fuse(may_install=True)
    options = ("--seed", 5, "--rows", 2_000, "--rows-per-batch", 100, "--output", tmp_path, "--json")
    code, out, err = command("--sinks", "sqlite,files", "--kills", 4, "--faults", "power", *options)
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, True), (found["reasons"], found["evidence"], err)
    assert [found[kind] for kind in ("lost", "duplicated", "torn", "split", "early", "reordered", "orphans")] == [0] * 7
    assert found["rows"] >= 2_000
    assert found["faults"] == {"power": found["kills"]}
    assert found["kills"] >= 4
    assert re.search(r"Something was lost by \d of \d power cuts", " ".join(found["proven"]))


def test_at_least_once_is_found_out(tmp_path: Path, command: Command) -> None:
    """It dies where its rows are visible already, and Spark does not know yet."""
    what = ("--sinks", "kafka", "--guarantee", "at-least-once", "--kills", 2, "--faults", "point")
    # Of the two points of this seed one lies behind the rows, batch.committed.
    options = ("--seed", 10, "--rows", 1_500, "--rows-per-batch", 100, "--output", tmp_path, "--json")
    code, out, err = command(*what, *options)
    found = json.loads(out)
    assert (code, found["verdict"]) == (1, False), (found, err)
    assert found["duplicated"] > 0
    assert found["lost"] == 0


@pytest.mark.long
def test_a_pipeline_that_drops_rows_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.verify.run.QUIET_S_MAX", 5.0)
    result = run(tmp_path, target=f"{PIPELINES / 'broken.py'}:losing", kills=1, rows=500, faults=("driver",))
    found = result.as_json()
    assert found["verdict"] is False
    assert found["lost"] == found["rows"] // 10
    assert found["duplicated"] == 0


def test_rows_that_were_never_read_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the last life, whose Spark cannot have started yet."""
    monkeypatch.setattr("semel.verify.run.UNREAD_S_MAX", 0.5)
    result = run(tmp_path, sinks=("sqlite",), kills=0, rows=500)
    found = result.as_json()
    assert found["verdict"] == "unknown", found
    assert found["lost"] == 0
    assert re.search(r"[\d,]+ rows were fed and not read, and nothing has moved for", " ".join(found["reasons"]))


@pytest.mark.long
def test_a_filter_that_the_workload_knows_of_loses_nothing(tmp_path: Path, command: Command) -> None:
    """More rows go in than its sink ever shows."""
    options = ("--kills", 1, "--faults", "driver", "--rows", 2_000, "--rows-per-batch", 50, "--output", tmp_path)
    code, out, err = command(f"{PIPELINES / 'own.py'}:halved", "--seed", 5, *options)
    assert code == 0, out + err
    assert "verdict true" in out
    assert re.search(r"2,\d\d\d rows in \d+ batches, 1 kills, \{'driver': 1\}", out)
    assert f"semel verify {PIPELINES / 'own.py'}:halved --faults driver --seed 5" in out


@pytest.mark.long
def test_a_pipeline_that_keeps_state_is_verified_and_no_server_of_others_is_touched(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """97 rows come out, whatever goes in."""
    monkeypatch.setenv("OWN_POSTGRES_URL", postgres_server.url)
    monkeypatch.setenv("OWN_TABLE", "firsts_of_verify")
    before = postgres_server.members()
    what = (f"{PIPELINES / 'own.py'}:firsts", "--seed", 5, "--kills", 2, "--faults", "point,driver")
    options = ("--rows", 2_000, "--rows-per-batch", 50, "--output", tmp_path, "--json")
    code, out, err = command(*what, *options)
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, True), (found, err)
    assert (found["rows"] >= 2_000, found["kills"]) == (True, 2)
    assert "the pipeline keeps state" in " ".join(found["not_proven"])
    assert postgres_server.members() == before
    with psycopg.connect(postgres_server.url) as connection:
        assert connection.execute("SELECT count(*), max(id) FROM firsts_of_verify").fetchall() == [(97, 96)]


def test_a_pipeline_that_fails_by_itself_is_told_with_its_error(tmp_path: Path, command: Command) -> None:
    options = ("--kills", 1, "--rows", 500, "--rows-per-batch", 100, "--output", tmp_path, "--json")
    code, out, err = command(f"{PIPELINES / 'broken.py'}:failing", "--seed", 5, *options)
    found = json.loads(out)
    assert (code, found["verdict"]) == (3, "unknown"), (found, err)
    assert "row 300 is bad" in " ".join(found["reasons"])
    (work,) = tmp_path.glob("run-5-*")
    assert (work / "checkpoint" / "offsets" / "0").exists(), "what is not true is looked into"
    assert str(next(work.glob("logs/*.log")).relative_to(tmp_path)) in Path(found["report"]).read_text()


def test_a_pipeline_that_gets_no_row_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("semel.verify.run.FIRST_BATCH_S_MAX", 10.0)
    options = ("--kills", 1, "--rows", 500, "--rows-per-batch", 100, "--output", tmp_path)
    code, out, err = command(f"{PIPELINES / 'own.py'}:elsewhere", *options)
    assert code == 3, out + err
    assert "verdict unknown" in out
    assert "it made no second batch within 10 s" in out


def test_without_rows_nothing_is_known(tmp_path: Path) -> None:
    result = run(tmp_path, sinks=("sqlite",), rows=0, kills=0)
    assert result.as_json()["verdict"] == "unknown"
    assert "nothing was compared" in " ".join(result.as_json()["reasons"])


def _file_into(sink: str) -> str:
    return (
        "import os, semel\n"
        "@semel.pipeline\n"
        "def orders(spark):\n"
        "    rows = spark.readStream.schema('id long, key string').json(os.environ['SEMEL_VERIFY_FOLDER'] + '/in')\n"
        f"    return semel.write(rows).to({sink}).option('checkpointLocation', 'not-used')\n"
    )


# Bad input ------------------------------------------------------------------------------------------------------------


def test_rows_without_identity_are_refused_with_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'id', only key") as refused:
        run(tmp_path, target=f"{PIPELINES / 'broken.py'}:nameless", kills=1)
    assert "@semel.workload" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_rows_that_nobody_knows_again_are_wrong_input_and_not_lost(tmp_path: Path, command: Command) -> None:
    """In a value of Kafka this cannot be seen before the first row, and nothing could be compared."""
    options = ("--kills", 1, "--rows", 500, "--rows-per-batch", 100, "--output", tmp_path / "out", "--json")
    code, out, err = command(f"{PIPELINES / 'broken.py'}:renumbered", *options)
    assert (code, out) == (2, ""), out + err
    assert "Rows of sink sqlite_orders cannot be told apart" in err
    assert "the first is 10000" in err
    assert "rows were fed" in err
    assert "@semel.workload" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("select", "fields"),
    [
        (("key", "to_json(struct(id, key)) AS value"), ("id", "key")),
        (("CAST(to_json(struct(key AS k)) AS binary) AS value",), ("k",)),
        (("key", "key AS value"), ()),
        (("to_json(array(id)) AS value",), ()),
    ],
)
def test_the_fields_of_a_value_are_known_where_the_plan_makes_them(
    select: tuple[str, ...], fields: tuple[str, ...], spark: SparkSession
) -> None:
    rows = spark.sql("SELECT 1L AS id, 'a' AS key")
    assert json_fields(rows, semel.Kafka("localhost:1", "out", select=select)) == fields
    # As the user's own query makes them.
    assert json_fields(rows.selectExpr(*select).select("*"), semel.Kafka("localhost:1", "out")) == fields


def test_values_without_identity_are_refused_before_anything_is_fed() -> None:
    sink = semel.Kafka("localhost:1", "out", name="out", select=("to_json(struct(key)) AS value",))
    found = Probe("orders", "exactly-once", (sink,), (), {"out": ("value",)}, {"out": ("key",)}, False)
    with pytest.raises(ConfigError, match="its values have no field 'id', only key") as refused:
        _refuse_what_cannot_be_compared(Settings(seed=1, target="x.py"), found, DEFAULT, None, ())  # type: ignore[arg-type]
    assert "JSON of the value" in refused.value.remedy


def test_a_file_with_several_pipelines_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="losing"):
        run(tmp_path, target=str(PIPELINES / "broken.py"), kills=1)


def test_a_table_that_holds_rows_is_refused_and_not_touched(tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    with sqlite3.connect(database) as shop:
        shop.execute("CREATE TABLE orders (id integer, key text)")
        shop.execute("INSERT INTO orders VALUES (1, 'a')")
    file = tmp_path / "shop.py"
    file.write_text(_file_into(f"semel.Sqlite({str(database)!r}, 'orders')"))
    with pytest.raises(ConfigError, match="is not empty"):
        run(tmp_path / "out", target=str(file), kills=1)
    with sqlite3.connect(database) as shop:
        assert shop.execute("SELECT id FROM orders").fetchall() == [(1,)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "What is to be verified?"),
        (["no-such-file.py"], "There is no pipeline file no-such-file.py"),
        (["--sinks", "kafka,oracle"], "oracle"),
        (["--sinks", "postgres:fast"], "There is no mode of postgres named fast"),
        (["--sinks", "kafka:xa"], "The sink kafka has no modes"),
        (["--sinks", "postgres,postgres:upsert"], "named twice"),
        (["--sinks", "kafka", "--faults", "flood"], "flood"),
        (["--sinks", "kafka", "--guarantee", "maybe"], "maybe"),
        (["shop.py", "--guarantee", "exactly-once"], "in its file"),
        (["shop.py", "--topics", "orders"], "--with kafka"),
        (["shop.py", "--break", "postgres"], "postgres"),
        (["shop.py", "--with", "kafka", "--break", "kafka"], "kafka is started for this run, and cannot be that of"),
        (["--sinks", "kafka,sqlite", "--break", "kafka"], "kafka is started for this run, and cannot be that of"),
        (["--sinks", "sqlite", "--faults", "zombie,disk-full"], "zombie and disk-full kill nobody"),
        (["torn.py"], "torn.py"),
        (["shop.py"], "There is no pipeline in shop.py"),
        (["away.py"], "PostgreSQL cannot be reached"),
        (["uneven.py"], "Row 7 of the workload cannot be made: ZeroDivisionError"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    away = "semel.Postgres('postgresql://nobody@127.0.0.1:1/shop', 'orders', create=True)"
    sqlite = "semel.Sqlite(os.environ['SEMEL_VERIFY_FOLDER'] + '/out.db', 'orders')"
    files = {
        "shop.py": "import semel\n",
        "torn.py": "def orders(spark:\n",
        "away.py": _file_into(away),
        "uneven.py": _file_into(sqlite)
        + "@semel.workload(orders)\ndef row(n):\n    return {'id': n, 'key': str(1 // (n - 7))}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, out, err = command(*arguments)
    assert code == 2, out + err
    assert words in out + err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == set(files)


def test_nothing_is_broken_but_what_was_started_or_named() -> None:
    """A pipeline may talk to any server; the nemesis knows those of the run, and those named with --break."""
    assert Settings(seed=1, target="shop.py").all_servers == ()
    assert Settings(seed=1, target="shop.py", servers=("kafka",)).all_servers == ("kafka",)
    assert Settings(seed=1, sinks=("postgres:upsert", "sqlite")).all_servers == ("postgres",)
