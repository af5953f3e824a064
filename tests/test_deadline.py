"""What is left of the seconds that a caller has set."""

from __future__ import annotations

import threading
import time

from semel.deadline import SECONDS_MIN, limited, seconds_left, within, within_half


def test_without_a_limit_a_call_has_its_own() -> None:
    assert seconds_left() is None
    assert limited(60.0) == 60.0
    with within_half():
        assert seconds_left() is None


def test_a_block_inside_another_cannot_have_more_than_that() -> None:
    with within(10), within(60):
        assert 9 < limited(60.0) <= 10
        assert limited(3.0) == 3.0
        with within(1):
            assert limited(60.0) <= 1
        with within_half():
            assert 4 < limited(60.0) <= 5
        assert 9 < limited(60.0) <= 10
    assert seconds_left() is None


def test_when_the_time_is_over_a_call_still_has_a_moment() -> None:
    with within(-5):
        assert seconds_left() == SECONDS_MIN


def test_a_limit_holds_for_its_own_thread_alone() -> None:
    found: list[float | None] = []
    with within(10):
        other = threading.Thread(target=lambda: found.append(seconds_left()))
        other.start()
        other.join()
    assert found == [None]


def test_time_passes() -> None:
    with within(10):
        before = limited(60.0)
        time.sleep(0.02)
        assert limited(60.0) < before
