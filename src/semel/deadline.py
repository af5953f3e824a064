"""How long what is called from here may take: the caller says it once, and every call below it asks.

A commit after the decision has a number of seconds in all. A sink's client makes several calls for one commit, in
layers that know nothing of each other; each gives up when what is left of those seconds is over.

    with within(20):            at most 20 seconds from now on, in this thread
        limited(60.0)           -> 20 or less: what a call may take that would otherwise have 60
        progressed("piece 3")   who has set the limit may grant more: this is work, and no waiting
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A client that is given no time at all would not even ask.
SECONDS_MIN = 0.05

#: Hears of what is done, and returns how many seconds there are from now on; None when they stay what they are.
Grant = Callable[[object], float | None]


class _Ends(threading.local):
    at: float | None = None
    grant: Grant | None = None


_ends = _Ends()


@contextmanager
def within(seconds: float, grant: Grant | None = None) -> Iterator[None]:
    """What is called in this block, in this thread, has so many seconds; less where a block around it says less."""
    before, granted = _ends.at, _ends.grant
    at = time.monotonic() + seconds
    _ends.at, _ends.grant = at if before is None else min(before, at), grant
    try:
        yield
    finally:
        _ends.at, _ends.grant = before, granted


def progressed(what: object) -> None:
    """A part of what was asked for is done. It has a name: to do it twice is no progress."""
    if _ends.grant is None or _ends.at is None:
        return
    seconds = _ends.grant(what)
    if seconds is not None:
        _ends.at = max(_ends.at, time.monotonic() + seconds)


def seconds_left() -> float | None:
    """What is left, never less than a moment; None when nobody has set a limit."""
    return None if _ends.at is None else max(SECONDS_MIN, _ends.at - time.monotonic())


def limited(seconds: float) -> float:
    """The limit of a call that has one of its own."""
    left = seconds_left()
    return seconds if left is None else min(seconds, left)


@contextmanager
def within_half() -> Iterator[None]:
    """For a call that is quick when all is well: what does not answer leaves time to ask again on a new connection."""
    left = seconds_left()
    if left is None:
        yield
        return
    with within(left / 2):
        yield
