"""Failpoints kill for real, where and when they are told to."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from semel import failpoints
from semel.failpoints import VARIABLE, FailpointError, all_failpoints, failpoint, parse

SOURCE = Path(failpoints.__file__).parent
HITS = """
import sys
from semel.failpoints import failpoint
for hit in range(1, 6):
    print(hit, flush=True)
    failpoint("batch.decided")
print("survived", flush=True)
"""
WITH_CHILD = """
import subprocess, sys
from semel.failpoints import failpoint
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
failpoint("batch.decided")
"""


@pytest.fixture(autouse=True)
def _no_hits_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_hits", Counter())
    monkeypatch.delenv(VARIABLE, raising=False)


def run(code: str, plan: str, *, leader: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: plan},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        start_new_session=leader,
    )


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", {}),
        (" , ", {}),
        ("batch.decided", {"batch.decided": (1, "kill")}),
        ("task.prepared@3", {"task.prepared": (3, "kill")}),
        ("batch.prepared@2=stop", {"batch.prepared": (2, "stop")}),
        ("batch.staged=fail, log.written", {"batch.staged": (1, "fail"), "log.written": (1, "kill")}),
    ],
)
def test_a_plan_names_points_hits_and_actions(text: str, plan: dict[str, tuple[int, str]]) -> None:
    assert parse(text) == plan


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("batch.dedicated", "unknown failpoint 'batch.dedicated'; known: startup.claimed, "),
        ("batch.decided=explode", "unknown action 'explode' of failpoint batch.decided; use kill, stop or fail"),
        ("batch.decided@0", "unknown hit '0' of failpoint batch.decided; hits are counted from 1"),
        ("batch.decided@-1", "unknown hit '-1' of failpoint batch.decided; hits are counted from 1"),
        ("batch.decided@soon", "unknown hit 'soon' of failpoint batch.decided; hits are counted from 1"),
    ],
)
def test_a_plan_that_could_never_act_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="unknown") as raised:
        parse(text)
    assert str(raised.value).startswith(complaint)


def test_every_failpoint_that_the_code_names_is_in_the_table() -> None:
    named = {
        call.args[0].value
        for path in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "failpoint"
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert "log.written" in named
    assert named - set(all_failpoints()) == set()


# Acting ---------------------------------------------------------------------------------------------------------------


def test_without_the_variable_nothing_happens_and_nothing_is_counted() -> None:
    failpoint("batch.decided")
    assert failpoints._hits == {}


def test_a_failing_point_raises_at_its_hit_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "batch.staged@2=fail")
    failpoint("batch.staged")
    failpoint("batch.prepared")
    with pytest.raises(FailpointError, match=r"failpoint batch\.staged, hit 2"):
        failpoint("batch.staged")
    failpoint("batch.staged")
    assert failpoints._hits["batch.staged"] == 3


def test_a_point_kills_its_process_at_the_first_hit() -> None:
    killed = run(HITS, "batch.decided")
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, ["1"])


def test_a_point_kills_its_process_at_the_hit_that_was_named() -> None:
    killed = run(HITS, "batch.decided@3")
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, ["1", "2", "3"])


def test_a_point_that_is_not_named_does_nothing() -> None:
    survived = run(HITS, "batch.prepared")
    assert (survived.returncode, survived.stdout.split()[-1]) == (0, "survived")


def test_a_leader_takes_its_group_along() -> None:
    # The child holds the other end of our pipe: `run` returns in time only if the child dies too.
    killed = run(WITH_CHILD, "batch.decided", leader=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "ready\n")


def test_a_stopped_process_is_a_zombie_driver_that_can_wake_up() -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", HITS],
        env={**os.environ, VARIABLE: "batch.decided@2=stop"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(sleeper.pid, signal.SIGCONT)
        output, _ = sleeper.communicate(timeout=30)
    finally:
        sleeper.kill()
    assert (sleeper.returncode, output.split()) == (0, ["1", "2", "3", "4", "5", "survived"])
