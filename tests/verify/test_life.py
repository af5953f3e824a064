"""The child process: what it says of a pipeline, and one life of it with real Spark."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.errors import ConfigError
from semel.verify import child
from semel.verify.child import Probe, probe
from semel.verify.life import Life, _look_at
from tests.processes import wait_until
from tests.verify.lives import PIPELINES, Lives

pytestmark = pytest.mark.usefixtures("class_archive")


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = Lives(tmp_path)
    made.feed(2)
    yield made
    made.end()


# Probe ----------------------------------------------------------------------------------------------------------------


def _probe(lives: Lives, target: str) -> Probe:
    return probe(str(PIPELINES / target), lives.environment, lives.conf, lives.folder)


def test_a_pipeline_is_described_and_nothing_is_touched(lives: Lives) -> None:
    found = _probe(lives, "orders.py")
    assert (found.pipeline, found.guarantee) == ("orders", "exactly-once")
    (sink,) = found.sinks
    assert sink == semel.Sqlite(f"{lives.folder}/out.db", "orders", select=("id", "key AS name"))
    assert found.columns == {sink.name: ("id", "name")}
    assert found.is_stateful is False
    (source,) = found.sources
    assert source.format == "json"
    assert source.options["path"] == f"{lives.folder}/in"
    assert sorted(path.name for path in lives.folder.iterdir()) == ["in"]


def test_a_pipeline_with_state_is_known_as_such(lives: Lives) -> None:
    assert _probe(lives, "several.py:totals").is_stateful is True


def test_one_of_several_pipelines_must_be_named(lives: Lives) -> None:
    with pytest.raises(ConfigError, match="more than one pipeline: totals, failing") as error:
        _probe(lives, "several.py")
    assert error.value.remedy.endswith("several.py:totals")


def test_what_is_wrong_with_a_pipeline_is_raised_here_as_there(lives: Lives) -> None:
    with pytest.raises(ConfigError, match="The select or where of sink sqlite_orders does not fit the rows"):
        _probe(lives, "unknown_column.py")
    with pytest.raises(ConfigError, match="There is no pipeline file"):
        _probe(lives, "nowhere.py")


def test_the_description_is_for_its_owner_alone(tmp_path: Path) -> None:
    child._answer(tmp_path / "answer", ConfigError("no"))
    assert stat.S_IMODE((tmp_path / "answer").stat().st_mode) == 0o600


# Lives ----------------------------------------------------------------------------------------------------------------


def test_a_life_is_known_by_its_parts_and_none_of_them_outlives_it(lives: Lives) -> None:
    life = lives.start()
    assert life.wait(lambda: life.batches >= 2, 60), life.reason
    # The trigger of the file would have ended it here.
    assert not life.wait(lambda: False, 1.0)
    assert not life.ended
    assert life.members("python") == [life.pid]
    assert len(life.members("jvm")) == 1
    assert len(life.members("worker")) >= 1
    assert life.members("executor") == []
    assert [(batch.number, batch.how, batch.rows) for batch in life.told] == [
        (0, "committed", 10),
        (1, "committed", 10),
    ]
    assert (lives.checkpoint / "commits" / "1").exists()
    assert not (lives.folder / "not-used").exists()
    members = life.members()
    assert life.kill() is True
    assert [pid for pid in members if _look_at(pid)] == []
    assert lives.rows() == lives.all_rows
    _a_next_life_goes_on_and_stops_clean(lives)


def _a_next_life_goes_on_and_stops_clean(lives: Lives) -> None:
    lives.feed(1)
    life = lives.start()
    assert life.wait(lambda: life.batches == 1, 60), life.reason
    life.signal(signal.SIGSTOP)
    wait_until(lambda: life.stopped, 5)
    lives.feed(1)
    assert not life.wait(lambda: life.batches > 1, 1.0)
    life.signal(signal.SIGCONT)
    assert life.wait(lambda: life.batches == 2, 30)
    assert life.stop(30) == 0
    assert (life.error, life.members()) == ("", [])
    assert lives.rows() == lives.all_rows


def test_a_life_says_of_what_it_died(lives: Lives) -> None:
    lives.target = f"{PIPELINES / 'several.py'}:failing"
    life = lives.start()
    assert not life.wait(lambda: life.batches > 2, 60)
    assert life.join() is False
    assert life.child.process.returncode == 1
    assert life.error_kind == "BatchFailed"
    assert "row 3 is bad" in life.error or "failed before it was decided" in life.error
    assert not life.fenced


# Without Spark --------------------------------------------------------------------------------------------------------


def _life(tmp_path: Path, code: str) -> Life:
    return Life(1, [sys.executable, "-c", code], {}, tmp_path, tmp_path / "log")


def test_what_a_file_prints_beside_events_is_passed_over(tmp_path: Path) -> None:
    life = _life(tmp_path, """print("hello"); print("[1]"); print("null"); print('{"event": "batch", "batch": 4}')""")
    life.join()
    assert [batch.number for batch in life.told] == [4]


def test_a_process_in_a_group_of_its_own_belongs_to_the_life(tmp_path: Path) -> None:
    code = "import os, subprocess, sys, time; subprocess.Popen(['sleep', '60'], process_group=0); time.sleep(60)"
    life = _life(tmp_path, code)
    wait_until(lambda: len(life.members()) == 2, 10)
    (stranger,) = set(life.members()) - {life.pid}
    assert os.getpgid(stranger) != life.pid
    assert life.kill() is True
    assert _look_at(stranger) is None


def test_a_driver_that_dies_alone_leaves_members_that_are_found_and_ended(tmp_path: Path) -> None:
    life = _life(tmp_path, "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)")
    wait_until(lambda: len(life.members()) == 2, 10)
    assert life.signal(signal.SIGKILL, "python") == 1
    wait_until(lambda: life.ended, 10)
    assert len(life.members()) == 1
    assert life.join(orphaned_s_max=0.2) is True
    assert life.members() == []


def test_a_life_that_ends_by_itself_just_before_it_is_killed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = _life(tmp_path, "raise SystemExit(3)")
    life.child.process.wait()
    # Between the look at it and the signal it went.
    seen = iter([False])
    monkeypatch.setattr(Life, "ended", property(lambda _: next(seen, True)))
    assert life.kill() is False


def test_waiting_ends_with_the_life(tmp_path: Path) -> None:
    began = time.monotonic()
    life = _life(tmp_path, "raise SystemExit(3)")
    assert life.wait(lambda: False, 30) is False
    assert time.monotonic() - began < 10
    life.join()
    assert life.reason.startswith("it said nothing; exit code 3")


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        ({"availableNow": True}, {}),
        ({"once": True}, {}),
        ({"processingTime": "1 second"}, {"processingTime": "1 second"}),
        ({}, {}),
    ],
)
def test_only_triggers_that_end_a_pipeline_are_replaced(trigger: dict[str, Any], expected: dict[str, Any]) -> None:
    writer: Any = semel.StreamWriter(None, trigger_=trigger, options_={"checkpointLocation": "theirs", "other": 1})  # type: ignore[arg-type]
    adapted = child.adapted(writer, "ours")
    assert adapted.trigger_ == expected
    assert adapted.options_ == {"checkpointLocation": "ours", "other": 1}
