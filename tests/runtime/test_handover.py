"""Who waits for whom when a driver takes a pipeline over, and who starts again."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

import semel
from semel.decisions.files import FileStore
from semel.decisions.log import INCARNATIONS_KEPT, DecisionLog
from semel.decisions.memory import MemoryStore
from semel.decisions.records import encode
from semel.errors import BatchFailed, Fenced, PlanRestored, SemelError, SinkUnavailable
from semel.process import born, is_alive, this_process
from semel.run import runner
from semel.run.happenings import Happening, Launched
from semel.run.runner import exit_code, failure_of, is_superseded, launch, watch
from semel.run.stops import StopSignals
from semel.runtime.batch import PLAN_OVERWRITTEN
from semel.runtime.commits import Waiting
from semel.runtime.handover import HANDOVER, Handover, Watch, wait_for_older
from semel.runtime.phases import Report
from semel.runtime.restore import restored
from semel.sinks.base import Sink
from tests.processes import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LIMITS = Handover(look_every_s=1.0, wait_s=10.0)
HERE = this_process()
ELSEWHERE = {"host": "another.host", "pid": 7}


class Clock:
    """Time that passes while somebody sleeps; what happens meanwhile is said by `at`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at: dict[float, Any] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for due in [s for s in self.at if s <= self.now_s]:
            self.at.pop(due)()


@pytest.fixture
def log() -> DecisionLog:
    return DecisionLog(MemoryStore())


def waited(log: DecisionLog, ours: int, clock: Clock) -> tuple[bool, float]:
    ended = wait_for_older(log, ours, LIMITS, clock=lambda: clock.now_s, sleep=clock.sleep)
    return ended, clock.now_s


def test_the_first_driver_waits_for_nobody(log: DecisionLog) -> None:
    assert waited(log, log.claim(), Clock()) == (True, 0.0)


def test_a_newer_driver_waits_until_the_older_one_has_left(log: DecisionLog) -> None:
    older, clock = log.claim(**ELSEWHERE), Clock()
    clock.at[3.0] = lambda: log.leave(older)
    assert waited(log, log.claim(**HERE), clock) == (True, 3.0)
    # Who has left once is not waited for again, nor is anybody before it.
    assert waited(log, log.claim(), Clock()) == (True, 0.0)


def test_a_driver_that_is_paused_is_waited_for_no_longer_than_the_limit(log: DecisionLog) -> None:
    log.claim(**ELSEWHERE)
    assert waited(log, log.claim(**HERE), Clock()) == (False, 10.0)


def test_a_process_of_this_host_that_has_ended_is_not_waited_for(log: DecisionLog) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(child.pid)
    log.claim(pid=child.pid, born=born(child.pid))
    ours, clock = log.claim(**HERE), Clock()

    def kill() -> None:
        child.kill()
        # It is dead, and its parent, this test, has not heard of it yet.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    clock.at[2.0] = kill
    found = waited(log, ours, clock)
    child.communicate()
    assert found == (True, 2.0)
    assert not is_alive(child.pid)


CONTAINER = {**HERE, "pid": 1, "born": 77, "machine": f"{HERE['machine']} of another container"}


@pytest.mark.parametrize(
    "older",
    [CONTAINER, {**CONTAINER, "pid": HERE["pid"]}, {**HERE, "machine": "another boot"}],
    ids=["the first process of a container", "by chance our id", "another machine of this name"],
)
def test_who_shares_our_host_name_and_not_our_machine_is_waited_for(log: DecisionLog, older: dict[str, Any]) -> None:
    """Containers may share a host name, and each begins with process 1. Nobody in here sees whether it lives."""
    theirs, clock = log.claim(**older), Clock()
    clock.at[3.0] = lambda: log.leave(theirs)
    assert waited(log, log.claim(), clock) == (True, 3.0)


def test_a_process_that_has_the_id_of_one_that_died_is_not_waited_for(log: DecisionLog) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        log.claim(pid=child.pid, born=born(child.pid) - 1)
        assert waited(log, log.claim(), Clock()) == (True, 0.0)
        child.communicate()


def test_of_a_claim_of_an_older_semel_host_and_id_tell(log: DecisionLog) -> None:
    def of_old(pid: int) -> None:
        said = {"incarnation": log.newest_claim() + 1, "host": HERE["host"], "pid": pid, "claimed_at": "then"}
        assert log.store.create(f"incarnations/{said['incarnation']:010d}.json", encode(said))

    of_old(os.getpid())
    assert waited(log, log.claim(), Clock()) == (True, 0.0)
    of_old(1)
    assert waited(log, log.claim(), Clock()) == (False, 10.0)


def test_an_earlier_start_of_this_process_is_passed_over(log: DecisionLog) -> None:
    """A query that is started again by itself still waits for whom it fenced first."""
    older, clock = log.claim(**ELSEWHERE), Clock()
    log.claim(**HERE)
    clock.at[4.0] = lambda: log.leave(older)
    assert waited(log, log.claim(**HERE), clock) == (True, 4.0)


def test_who_has_left_is_forgotten_with_its_claim(log: DecisionLog) -> None:
    for _ in range(INCARNATIONS_KEPT + 3):
        log.leave(log.claim())
    assert len(log.store.list("left")) <= INCARNATIONS_KEPT
    assert log.has_left(log.newest_claim())
    assert not log.has_left(1)


class Query:
    def __init__(self) -> None:
        self.isActive = True

    def stop(self) -> None:
        self.isActive = False


class Function:
    """At its third look there is a newer claim."""

    def __init__(self, query: Query, asked: list[str]) -> None:
        self.query, self.asked, self.looks = query, asked, 0
        self.fenced: Exception | None = None

    def find_newer(self) -> Exception | None:
        self.looks += 1
        self.fenced = Fenced("a newer one is there") if self.looks == 3 else None
        return self.fenced

    def drain(self, grace_s: float) -> None:
        self.asked.append(f"drain {grace_s:.0f} s, active {self.query.isActive}")

    def end(self) -> None:
        self.asked.append(f"end, active {self.query.isActive}")


def test_the_older_driver_drains_stops_and_only_then_says_that_it_has_left() -> None:
    query, asked = Query(), list[str]()
    function: Any = Function(query, asked)
    watched: Any = query
    Watch(watched, function, Handover(look_every_s=0.0)).run()
    assert function.looks == 3
    assert asked == ["drain 3 s, active True", "end, active False"]


# Spark's own race ---------------------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path) -> Sink:
    return semel.Sqlite(str(tmp_path / "out.db"), "out")


def rows(folder: Path) -> Any:
    with sqlite3.connect(folder / "out.db") as connection:
        return connection.execute("SELECT count(*), count(DISTINCT id) FROM out").fetchone()


def test_a_query_that_lost_a_race_for_a_file_of_the_checkpoint_is_started_again(
    stream: DataFrame, out: Sink, tmp_path: Path, put: Callable[[int], None]
) -> None:
    put(2)
    writer = semel.write(stream).to(out).option("checkpointLocation", str(tmp_path / "c"))
    writer = writer.trigger(availableNow=True)
    commits = tmp_path / "c" / "commits"

    def an_older_driver_is_quicker(report: Report) -> None:
        if report.batch == 1:
            shutil.copy(commits / "0", commits / "1")

    told: list[Happening] = []
    run = Launched("orders", writer.launch(an_older_driver_is_quicker), begin=writer.launch)
    watch([run], StopSignals(), told.append)
    assert [(h.event, bool(h.warning)) for h in told] == [("started", True), ("stopped", False)]
    assert run.restarts == 1
    assert rows(tmp_path) == (30, 30)


def test_who_is_superseded_leaves_the_end_of_its_batch_to_the_newer_one(
    stream: DataFrame, out: Sink, tmp_path: Path
) -> None:
    """It is committed, and Spark has not written `commits/1`: the newer one would fail when it does."""
    checkpoint = tmp_path / "c"
    log = DecisionLog(FileStore(checkpoint / "semel"))

    def a_newer_one_claims(report: Report) -> None:
        if report.batch == 1:
            log.claim()

    writer = semel.write(stream).to(out).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    running = writer.launch(a_newer_one_claims)
    with suppress(StreamingQueryException):  # unless it was stopped even before
        running.query.awaitTermination()
    assert isinstance(failure_of(Launched("orders", running)), Fenced)
    wait_until(lambda: log.has_left(1), 10)
    assert sorted(path.name for path in (checkpoint / "commits").iterdir() if path.name.isdigit()) == ["0"]
    assert rows(tmp_path) == (20, 20)

    writer.start().awaitTermination()
    assert (checkpoint / "commits" / "1").exists()
    assert rows(tmp_path) == (20, 20)


def test_a_function_that_was_fenced_serves_the_next_query(
    stream: DataFrame, out: Sink, tmp_path: Path, put: Callable[[int], None]
) -> None:
    """In a notebook `write = semel.sink(...)` stays, and the query is started again."""
    put(2)
    log = DecisionLog(FileStore(tmp_path / "c" / "semel"))
    write = semel.sink(out)

    def another_claims(df: DataFrame, batch: int) -> None:
        write(df, batch)
        if log.newest_claim() == 1:
            log.leave(log.claim(**ELSEWHERE))

    def run() -> None:
        query = stream.writeStream.foreachBatch(another_claims).option("checkpointLocation", str(tmp_path / "c"))
        query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="incarnation 2 claimed this pipeline"):
        run()
    assert rows(tmp_path) == (10, 10)
    run()
    assert rows(tmp_path) == (30, 30)
    assert write.find_newer() is None
    write.end()


LOST = "[STREAM_FAILED] Query terminated: [CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log."
#: What Spark says when the file came to be there while it was writing its own.
LOST_WHILE_WRITING = "Multiple streaming queries are concurrently using file:/shop/checkpoint/commits."


RESTORED = f"[STREAM_FAILED] Query terminated: semel.errors.PlanRestored: {restored(7, [])}"
NOT_BEGUN = BatchFailed(f"Batch 7 was not begun: {PLAN_OVERWRITTEN}.")
OVERWRITTEN = f"[STREAM_FAILED] Query terminated: semel.errors.BatchFailed: {NOT_BEGUN}"


def lost(newer: Fenced | None, begun: list[int], said: str = LOST) -> Launched:
    query = SimpleNamespace(isActive=False, exception=lambda: said)
    function = SimpleNamespace(fenced=newer, find_newer=lambda: newer, look_for_newer=lambda: newer, end=lambda: None)
    running: Any = SimpleNamespace(query=query, function=function)

    def begin() -> Any:
        begun.append(1)
        return running

    return Launched("orders", running, begin=begin)


def test_who_cannot_ask_whether_it_was_superseded_does_not_claim_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fence the newer driver, which runs."""
    begun, told = list[int](), list[Happening]()
    run = lost(None, begun)
    answers: list[Any] = [OSError("Input/output error")] * 3

    def look_for_newer() -> Any:
        if answers:
            raise answers.pop()
        return Fenced("pid 7 took over")

    function: Any = run.running.function
    function.look_for_newer = look_for_newer
    assert is_superseded(run, LIMITS, sleep=lambda _: None)
    answers += [OSError("Input/output error")] * 100
    monkeypatch.setattr(runner, "is_superseded", partial(is_superseded, limits=LIMITS, sleep=lambda _: None))
    with pytest.raises(SemelError, match="whether another driver has taken it over cannot be found out: Input/output"):
        watch([run], StopSignals(), told.append)
    assert (begun, run.restarts, [h.event for h in told]) == ([], 0, ["failed"])


@pytest.mark.parametrize(
    ("said", "told_as"), [(LOST, "CONCURRENT_STREAM_LOG_UPDATE"), (LOST_WHILE_WRITING, "concurrently using file:/shop")]
)
def test_it_is_started_again_only_so_often(said: str, told_as: str) -> None:
    begun, told = list[int](), list[Happening]()
    with pytest.raises(SemelError, match=rf"Pipeline orders failed: .*{told_as}"):
        watch([lost(None, begun, said)], StopSignals(), told.append)
    assert len(begun) == HANDOVER.restarts
    assert [h.event for h in told] == ["started"] * HANDOVER.restarts + ["failed"]


@pytest.mark.parametrize(("said", "told_as"), [(RESTORED, PlanRestored), (OVERWRITTEN, BatchFailed)])
def test_so_is_one_that_has_the_rows_of_another_plan_in_its_hands(said: str, told_as: type[SemelError]) -> None:
    """Nothing is left to do for a person: the next start goes on from what is in the checkpoint by now."""
    begun, told = list[int](), list[Happening]()
    with pytest.raises(told_as):
        watch([lost(None, begun, said)], StopSignals(), told.append)
    assert len(begun) == HANDOVER.restarts
    assert [h.event for h in told] == ["started"] * HANDOVER.restarts + ["failed"]


@pytest.mark.parametrize(
    ("raised", "told_as"),
    [
        (SinkUnavailable("PostgreSQL cannot be reached."), "PostgreSQL cannot be reached."),
        (ValueError("no such thing\nas this"), "Pipeline orders could not be started again: no such thing"),
    ],
)
def test_a_new_start_that_fails_is_told_as_why_the_pipeline_does_not_run(raised: Exception, told_as: str) -> None:
    def begin() -> Any:
        raise raised

    told, run = list[Happening](), lost(None, [])
    run.begin = begin
    with pytest.raises(SemelError) as caught:
        watch([run], StopSignals(), told.append)
    assert (caught.value.what, run.told, exit_code(caught.value)) == (told_as, True, 1)
    assert [(h.event, h.error) for h in told] == [("failed", str(caught.value))]


def test_a_query_that_is_started_again_tells_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches, and that a decided batch waits for a sink."""
    monkeypatch.setattr(runner, "planned_batch", lambda _spark, _writer: None)
    heard: list[Any] = []

    def launched(listener: Any, waiting: Any, _is_stopped: Any) -> Any:
        heard.append((listener, waiting))
        return SimpleNamespace(function=SimpleNamespace(not_promised="the moon"))

    class Orders:
        name = "orders"

        def __call__(self, _spark: Any) -> Any:
            return SimpleNamespace(launch=launched)

    pipeline: Any = Orders()
    told = list[Happening]()
    run = launch(pipeline, pipeline, tmp_path, told.append)
    assert run.begin is not None
    run.begin()
    for listener, waiting in heard:
        listener(Report(7, "committed", rows=3))
        waiting(Waiting(7, ("kafka",), (), "then", 5.0, 30.0, "no answer"))
    assert [h.event for h in told] == ["started", "batch", "waiting", "batch", "waiting"]
    assert told[0].warning == "the moon"


def test_the_older_one_that_loses_the_race_ends_fenced() -> None:
    begun, told = list[int](), list[Happening]()
    with pytest.raises(Fenced, match="pid 7 took over") as caught:
        watch([lost(Fenced("pid 7 took over"), begun)], StopSignals(), told.append)
    assert (begun, [h.event for h in told], exit_code(caught.value)) == ([], ["failed"], 3)
