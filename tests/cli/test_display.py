"""What `semel run` shows of lag and warnings: nothing where there is none."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from semel.cli.display import LiveLine, display_for, plain_line, tell_json
from semel.run.happenings import Happening

PLAIN = Happening("batch", "orders", 17, "committed", 200, 0, 100.0, at="now")
LAGGING = replace(PLAIN, lag=1200, lag_by_partition={"orders-0": 1200, "orders-1": 0})
WARNED = replace(PLAIN, warning="The offsets of batch 16 did not reach the broker.")
WAITING = Happening(
    "waiting",
    "orders",
    17,
    warning="postgres: PostgreSQL cannot be reached",
    waits_for=("postgres",),
    visible_in=("kafka", "files"),
    since="noon",
    seconds=5.2,
    at="now",
)


def told(happening: Happening, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    tell_json(happening)
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_lag_and_warning_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(told(PLAIN, capsys)) == {"event", "pipeline", "batch", "how", "rows", "attempt", "ms", "at"}
    lagging = told(LAGGING, capsys)
    assert (lagging["lag"], lagging["lag_by_partition"]) == (1200, {"orders-0": 1200, "orders-1": 0})
    assert told(replace(PLAIN, lag=0, lag_by_partition={}), capsys)["lag"] == 0
    assert told(WARNED, capsys)["warning"] == WARNED.warning


def test_a_plain_line_has_them_too() -> None:
    assert plain_line(PLAIN) == "now orders batch 17 committed, 200 rows in 100 ms"
    assert plain_line(LAGGING) == "now orders batch 17 committed, 200 rows in 100 ms, lag 1200"
    assert plain_line(WARNED) == f"now orders batch 17 committed, 200 rows in 100 ms; {WARNED.warning}"


@pytest.mark.parametrize(
    ("happening", "expected"),
    [
        (PLAIN, "orders batch 17 committed 200 rows, 2,000/s, 0 s ago"),
        (LAGGING, "orders batch 17 committed 200 rows, 2,000/s, lag 1,200, 0 s ago"),
        (WARNED, f"orders batch 17 committed 200 rows, 2,000/s, 0 s ago {WARNED.warning}"),
    ],
)
def test_the_live_line_has_them_too(happening: Happening, expected: str) -> None:
    line = LiveLine(clock=lambda: 5.0)
    line.hear(happening)
    assert line.render().plain == expected


def test_a_decided_batch_that_waits_says_for_whom_and_where_it_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "batch 17 is decided, visible in kafka, files, and waits for postgres since noon (5 s): "
        "postgres: PostgreSQL cannot be reached"
    )
    assert plain_line(WAITING) == f"now orders {words}"
    line = LiveLine(clock=lambda: 5.0)
    line.hear(WAITING)
    assert line.render().plain == f"orders {words}"
    found = told(WAITING, capsys)
    assert (found["event"], found["batch"], found["since"], found["seconds"]) == ("waiting", 17, "noon", 5.2)
    assert (found["waits_for"], found["visible_in"]) == (["postgres"], ["kafka", "files"])


def test_whoever_prints_when_the_reader_has_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would end the thread with SystemExit, which holds whatever it is in the middle of: a commit."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", pipe)
        with display_for(json=False) as display:
            assert display.is_read()
            display.hear(PLAIN)
            assert not display.is_read()
            display.hear(LAGGING)
        pipe.write("what is still in the buffer goes nowhere")
        pipe.flush()
