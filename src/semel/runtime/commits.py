"""Which threads ask the sinks to commit, and which one keeps watch meanwhile.

A store may hang for ever, in a call that nobody can end. So no thread that anybody waits for makes such a call: threads
of their own do, which end with the process, and the coordinator waits for their answers as long as it wants to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Generic, TypeVar

COMMITS_AT_ONCE = 16
#: How often the coordinator looks whether it still wants to wait.
LOOK_EVERY_S = 0.25
#: What waits says so after this time, and then each time that it has waited twice as long, but once in a minute.
TELL_AFTER_S = 5.0
TELL_EVERY_S_MAX = 60.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Waiting:
    """A decided batch is not committed everywhere yet. `since` is UTC; `why` is the last that a sink has said."""

    batch: int
    sinks: tuple[str, ...]
    visible: tuple[str, ...]
    since: str
    seconds: float
    patience_s: float
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return (
            f"batch {self.batch} is decided and waits for {', '.join(self.sinks)} since {self.since}, "
            f"{self.seconds:.0f} s of at most {self.patience_s:.0f}{why}; "
            f"visible in: {', '.join(self.visible) or 'no sink yet'}"
        )


@dataclass
class Rhythm:
    """When to tell that somebody waits."""

    began: float
    next_s: float = TELL_AFTER_S
    since: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def is_due(self, now: float) -> bool:
        if now - self.began < self.next_s:
            return False
        self.next_s += min(self.next_s, TELL_EVERY_S_MAX)
        return True


class _Asked(Generic[R]):
    """The answers that are there so far, by their places."""

    def __init__(self, number: int) -> None:
        self.missing = set(range(number))
        self.answers: dict[int, R] = {}
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    def answered(self, place: int, answer: R) -> None:
        with self._changed:
            self.answers[place] = answer
            self.missing.discard(place)
            self._changed.notify()

    def failed(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Whether all have answered, or one failed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.missing or self.error is not None, seconds)


class Committers:
    """Threads that are kept from batch to batch: to start some takes as long as to commit. Nobody awaits their end.

    Each store has threads of its own, so that one which hangs holds up no question to another. With `apart` off all
    of them share the same threads.
    """

    def __init__(self, threads_max: int = COMMITS_AT_ONCE, *, apart: bool = True) -> None:
        self._threads_max = threads_max
        self._apart = apart
        self._lanes: dict[str, _Lane] = {}

    def answers(
        self,
        ask: Callable[[T], R],
        items: Sequence[T],
        go_on: Callable[[], bool],
        store_of: Callable[[T], str] = lambda _: "",
    ) -> list[R | None]:
        """Ask for every item, many at once. None stands for what was not answered when `go_on` said no."""
        asked: _Asked[R] = _Asked(len(items))
        for place, item in enumerate(items):
            self._lane(store_of(item)).take(_asking(ask, item, place, asked))
        for lane in self._lanes.values():
            lane.begin()
        while not asked.wait(LOOK_EVERY_S) and go_on():
            pass
        if asked.error is not None:
            raise asked.error
        return [asked.answers.get(place) for place in range(len(items))]

    def _lane(self, store: str) -> _Lane:
        name = store if self._apart else ""
        if name not in self._lanes:
            self._lanes[name] = _Lane(name, self._threads_max)
        return self._lanes[name]

    def shutdown(self) -> None:
        """Let the threads end when they come back. One that hangs ends with the process."""
        for lane in self._lanes.values():
            lane.shutdown()


class _Lane:
    """The threads of one store, and what they have to ask it, in its order."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._threads = 0
        self._taken = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def take(self, work: Callable[[], None]) -> None:
        self._taken += 1
        self._work.put(work)

    def begin(self) -> None:
        """As many threads as there is work for."""
        wanted, self._taken = min(self._taken, self._threads_max), 0
        for _ in range(wanted - self._threads):
            self._threads += 1
            name = f"semel-commit-{self._name}-{self._threads}"
            threading.Thread(target=self._live, name=name, daemon=True).start()

    def _live(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def shutdown(self) -> None:
        for _ in range(self._threads):
            self._work.put(None)


def _asking(ask: Callable[[T], R], item: T, place: int, asked: _Asked[R]) -> Callable[[], None]:
    def work() -> None:
        try:
            answer = ask(item)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            asked.failed(error)
        else:
            asked.answered(place, answer)

    return work


def finished(call: Callable[[], object], seconds: float, name: str) -> bool:
    """Call it in a thread that nobody needs, and wait for it no longer than this. Whether it came back.

    What it raises is raised here.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()
