"""Faults that one failpoint does not make: zombies, lost staged rows, weaker guarantees, a watermark in the way."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Hashable

import pytest

from tests.e2e.game import Game
from tests.processes import is_stopped, wait_until

Make = Callable[..., Game]


@pytest.mark.hadoop_files
@pytest.mark.parametrize(
    ("point", "sink"),
    [
        pytest.param("batch.staged", "sqlite", marks=pytest.mark.long),
        pytest.param("batch.prepared", "files", marks=pytest.mark.long),
        ("batch.decided", "files"),
    ],
)
def test_a_zombie_driver_stops_and_the_output_is_exactly_once(make_game: Make, point: str, sink: str) -> None:
    """The first driver is stopped with SIGSTOP, the second takes over and finishes, the first wakes up."""
    game = make_game(batches=6, sink=sink)
    zombie = game.start(f"{point}@2=stop")
    wait_until(lambda: is_stopped(zombie.pid))
    heir = game.live()
    assert heir.returncode == 0, heir
    assert game.committed() == game.batches
    os.killpg(zombie.pid, signal.SIGCONT)
    woken = game.finish(zombie)
    assert woken.returncode == 1
    assert "Fenced: Incarnation 1 " in woken.error, woken.error[:3000]
    assert "the data now: this driver made nothing of its last batch visible" in woken.error
    assert "what to do: Leave this one stopped. Run a pipeline in one place only." in woken.error
    assert game.committed() == game.batches


@pytest.mark.hadoop_files
def test_a_zombie_that_holds_the_database_keeps_the_heir_out_with_a_clear_error(make_game: Make) -> None:
    """SQLite has one writer: a driver stopped inside its transaction blocks the next one, which says so and stops."""
    game = make_game(batches=4)
    zombie = game.start("batch.prepared@2=stop")
    wait_until(lambda: is_stopped(zombie.pid))
    shut_out = game.live(timeout_s=2.0)
    assert shut_out.returncode == 1
    assert "did not let us fence: database is locked" in shut_out.error
    assert "what to do: End the process that holds a write transaction on it" in shut_out.error
    os.killpg(zombie.pid, signal.SIGCONT)
    woken = game.finish(zombie)
    assert "Fenced" in woken.error
    assert game.live().returncode == 0
    assert game.committed() == game.batches


@pytest.mark.parametrize("sink", [pytest.param("sqlite", marks=pytest.mark.long), "files"])
def test_staged_rows_that_vanish_after_the_decision_are_written_again(make_game: Make, sink: str) -> None:
    game = make_game(batches=4, sink=sink)
    assert game.live("batch.decided@2").killed
    assert len(game.staged()) == 1
    for folder in (game.folder / "out.db-semel", game.folder / "out" / "_semel" / "staging"):
        for path in folder.glob("*"):
            path.unlink()
    mended = game.live()
    assert mended.returncode == 0, mended
    assert mended.batches("forwarded") == [1]
    assert [e["staged"] for e in mended.events if e.get("batch") == 1] == [True]
    assert game.committed() == game.batches
    assert len(list((game.checkpoint / "semel" / "decisions").glob("0000000001.*"))) == 3


def test_a_decided_batch_is_not_computed_again(make_game: Make) -> None:
    game = make_game(batches=3, shape="stateful")
    assert game.live("batch.decided@2").killed
    last = game.live()
    assert [(e["batch"], e["how"], e["staged"]) for e in last.events if e["event"] == "batch"] == [
        (1, "forwarded", False),
        (2, "committed", True),
    ]
    assert game.committed() == 3


@pytest.mark.spark35
@pytest.mark.parametrize("point", ["batch.decided", pytest.param("batch.committed", marks=pytest.mark.long)])
def test_a_forwarded_batch_still_moves_the_watermark(make_game: Make, point: str) -> None:
    """The killed run must close the same windows as one that was never killed, not fewer."""
    windows = []
    for failpoints in ("", f"{point}@4"):
        game = make_game(batches=10, shape="windowed", rows=30, folder=f"killed at {failpoints}")
        if failpoints:
            assert game.live(failpoints).killed
        assert game.live().returncode == 0
        windows.append(game.visible())
    assert windows[0].total() == 3 * 4
    assert windows[1] == windows[0]


def test_the_drop_in_survives_a_kill(make_game: Make) -> None:
    game = make_game(batches=4, drop_in=True)
    for point in ("batch.prepared@2", "batch.decided@1", "batch.committed@2"):
        assert game.live(point).killed
    assert game.live().returncode == 0
    assert game.committed() == game.batches


@pytest.mark.long
def test_two_sinks_commit_together_or_not_at_all(make_game: Make) -> None:
    """Killed between the two commits, both show the batch after the next start; before it, one does."""
    game = make_game(batches=5, sink="both")
    for point in ("batch.prepared@2", "sqlite.committed@2", "files.renamed@2"):
        assert game.live(point).killed
        game.committed("sqlite")
        game.committed("files")
    assert game.live().returncode == 0
    assert game.committed("sqlite") == game.committed("files") == game.batches


@pytest.mark.parametrize(
    ("guarantee", "rows", "marks"),
    [
        # One batch was visible before its kill, one was not: 20 rows each. Rows that are lost, then rows doubled; and
        # whether there is a ledger, and a decision log.
        ("at-most-once", (20, 0), (False, True)),
        pytest.param("at-least-once", (0, 20), (False, False), marks=pytest.mark.long),
        pytest.param("exactly-once", (0, 0), (True, True), marks=pytest.mark.long),
    ],
)
def test_the_guarantees_differ_under_kill(
    make_game: Make, guarantee: str, rows: tuple[int, int], marks: tuple[bool, bool]
) -> None:
    """The same kill after the rows are visible and before Spark knows: doubled, lost, and neither."""
    game = make_game(batches=4, guarantee=guarantee)
    assert game.live("sqlite.committed@2").killed
    assert game.live("batch.staged@2").killed
    assert game.live().returncode == 0
    everything = sum(game.expected, Counter[Hashable]())
    visible = game.visible()
    assert ((everything - visible).total(), (visible - everything).total()) == rows
    assert (_has_ledger(game), (game.checkpoint / "semel" / "decisions").is_dir()) == marks


def test_a_guarantee_is_not_weakened_while_a_decided_batch_is_not_visible_in_every_sink(make_game: Make) -> None:
    game = make_game(batches=3, sink="both")
    assert game.live("files.renamed@2").killed
    assert game.committed("files") == 1
    weaker = game.live(guarantee="at-most-once")
    assert weaker.returncode == 1
    (failed,) = [event for event in weaker.events if event["event"] == "failed"]
    assert failed["kind"] == "CheckpointError"
    assert failed["text"].startswith("Batch 1 was decided under exactly-once, and the checkpoint does not say")
    assert game.live().returncode == 0
    assert game.committed("sqlite") == game.committed("files") == game.batches


def _has_ledger(game: Game) -> bool:
    import sqlite3

    with sqlite3.connect(game.folder / "out.db") as connection:
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'semel_ledger'").fetchone())


def test_a_batch_that_fails_leaves_nothing_and_runs_again(make_game: Make) -> None:
    game = make_game(batches=3)
    failed = game.live("batch.staged@2=fail")
    assert "Batch 1 failed before it was decided: FailpointError: failpoint batch.staged, hit 2" in failed.error
    assert game.committed() == 1
    assert game.staged() == []
    assert game.live().returncode == 0
    assert game.committed() == 3


@pytest.mark.long
def test_random_kills(make_game: Make) -> None:
    """Five kills at moments that no failpoint names."""
    game = make_game(batches=40)
    for moment_s in (0.0, 0.2, 0.45, 0.7, 1.1):
        child = game.start()
        assert child.stdout is not None
        for line in child.stdout:
            if '"batch"' in line:
                break
        time.sleep(moment_s)
        os.killpg(child.pid, signal.SIGKILL)
        game.finish(child)
        game.committed()
    assert game.live().returncode == 0
    assert game.committed() == game.batches
