"""How a producer says that rows did not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

#: No answer came yet, and nothing says that none will.
NO_ANSWER = frozenset({"_TIMED_OUT", "_TRANSPORT"})
#: Rows that were given up because of something else; and what a producer says in whose transaction nothing is wrong.
PURGED = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT"})
NOTHING_WRONG = frozenset({"_STATE", "_NOT_CONFIGURED"})
TOO_LARGE = "MSG_SIZE_TOO_LARGE"
#: A row that may go to any partition.
UNASSIGNED = -1
PATIENCE_S = 1.0
PAUSE_S = 0.02

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A row, a topic or the producer itself, in librdkafka's words: `name` is its code, such as TOO_LARGE.

    Where it is not about one row, the size is -1. `retriable` is what may pass when it is asked again.
    """

    name: str
    text: str
    topic: str = ""
    partition: int = -1
    key: bytes | None = None
    size: int = -1
    retriable: bool = False


class DeliveryFailed(Exception):
    """Rows were not acknowledged. The first failure is the cause; the others are often its echo."""

    def __init__(self, text: str, failures: Sequence[Failure]) -> None:
        super().__init__(text)
        self.failures = tuple(failures)

    @property
    def is_transient(self) -> bool:
        return all(f.retriable or f.name in NO_ANSWER for f in self.failures)


def patiently(ask: Callable[[float], T], timeout_s: float) -> T:
    """Ask again until the time is up, but not where the login was refused, as librdkafka itself would.

    `ask` gets the seconds that it may take, and raises DeliveryFailed with all that librdkafka has reported since.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask(max(PAUSE_S, min(PATIENCE_S, deadline - time.monotonic())))
        except DeliveryFailed as error:
            if not error.is_transient or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)
