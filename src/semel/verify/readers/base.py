"""What the readers of all kinds of sinks share.

A reader looks at its store again and again, in a thread of its own, while everything else is being killed. It never
gives up: a look that cannot be taken is a miss. What it finds, it turns into numbers of rows.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from semel.errors import SemelError
from semel.ids import PipelineId, parse_branch
from semel.sinks.base import Sink
from semel.verify.history import Look, Sights
from semel.verify.workload import Workload, identity_text

#: The number of the row that has this identity; None when nobody fed it.
NumberOf = Callable[[str], int | None]

#: A look costs the store something: the reader rests for so many times as long as the last one took, within limits. One
#: that had to wait for a network that was silent is no reason to rest for minutes.
REST = 5.0
PAUSE_S, PAUSE_S_MAX = 0.05, 5.0
MISSED_PAUSE_S = 0.5
STOP_S_MAX = 60.0
#: So many strangers are named; the others are only counted.
STRANGERS_NAMED_MAX = 1000
STRANGER_LETTERS_MAX = 120
NOBODYS = -1


class Reader(threading.Thread, ABC):
    """`start()` it, `stop()` it, let it `settle()`, and ask what it saw: `sights()`.

    `snapshots` says that each look shows whole batches, unless the sink has torn one. `seen` is how many different rows
    were visible at some time. `marked` is off below exactly-once: then no marker says what is committed.
    """

    snapshots = True

    def __init__(self, sink: Sink, workload: Workload, number_of: NumberOf, *, marked: bool = True) -> None:
        super().__init__(name=f"reader of {sink.name}", daemon=True)
        self.sink = sink
        self.marked = marked
        self.workload = workload
        self.misses = 0
        self.looks: list[Look] = []
        self.in_order: dict[int, list[int]] = {}
        #: What the newest look showed: how often each row was there.
        self.rows: Counter[int] = Counter()
        self._numbers = _Numbers(self._unknown_yet)
        self._number_of = number_of
        self._seen: set[int] = set()
        self._strangers: dict[str, None] = {}
        self._strangers_unnamed = 0
        self._stopping = threading.Event()
        self._error = "no last look was taken"
        self._last_looks = 0

    # What differs from store to store ---------------------------------------------------------------------------------

    @abstractmethod
    def check_ready(self) -> None:
        """Before the run: raise ConfigError when the target holds rows already, or has no way to the identity, and
        SinkUnavailable when it cannot be reached. Changes nothing."""

    @abstractmethod
    def look(self) -> None:
        """Look once, and note what was seen. Raises anything when the store is away."""

    @abstractmethod
    def left_behind(self, pipeline: PipelineId) -> list[str]:
        """What is open, prepared or staged under the name of this pipeline, in words. Raises as `look` does."""

    def let_go(self) -> None:
        """Close what is open. The next look opens it again."""

    def look_last(self, deadline_s: float) -> None:  # noqa: ARG002 - one look shows all, in most stores
        """The look after which nothing changes any more. `deadline_s` is a time of time.monotonic."""
        self.look()

    # The thread -------------------------------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        return len(self._seen)

    @property
    def first_stranger(self) -> str:
        """The first row that nobody fed, in words; empty when there is none."""
        return next(iter(self._strangers), "")

    def run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self.look()
                pause_s = self.pause_s(time.monotonic() - began)
            except Exception:  # noqa: BLE001 - whatever it is, there is nothing to see now
                self.misses += 1
                self._close()
                pause_s = MISSED_PAUSE_S
            self._stopping.wait(pause_s)

    def pause_s(self, took_s: float) -> float:
        return min(max(PAUSE_S, REST * took_s), PAUSE_S_MAX)

    def stop(self) -> None:
        """End the thread, and let go of the store."""
        self._stopping.set()
        if self.is_alive():
            self.join(STOP_S_MAX)
        if not self.is_alive():
            self._close()

    def _close(self) -> None:
        try:
            self.let_go()
        except Exception:  # noqa: BLE001 - a connection that cannot be closed is lost already
            return

    # The end ----------------------------------------------------------------------------------------------------------

    def settle(self, seconds_max: float) -> None:
        """Take the last look, when everything else has ended. What keeps it from that is told by `sights`."""
        self.stop()
        if self.is_alive():
            self._error = f"the reader hangs: its last look has not ended for {STOP_S_MAX:.0f} s"
            return
        deadline_s, before = time.monotonic() + seconds_max, len(self.looks)
        while True:
            try:
                self.look_last(deadline_s)
                self._last_looks = len(self.looks) - before
                self._error = ""
                return
            except Exception as error:  # noqa: BLE001 - the store may be away; then nothing is known of it
                self._error = in_words(error)
            finally:
                self._close()
            if time.monotonic() > deadline_s:
                return
            time.sleep(MISSED_PAUSE_S)

    def sights(self, pipeline: PipelineId) -> Sights:
        """All that was seen, and what is left behind in the store."""
        error, left = self._error, list[str]()
        # A pipeline that never started has no id, and left nothing. Where nothing is known, nothing more is asked.
        if pipeline and not error:
            try:
                left = self.left_behind(pipeline)
            except Exception as failed:  # noqa: BLE001 - as above
                error = f"what is left behind cannot be listed: {in_words(failed)}"
            finally:
                self._close()
        return Sights(
            sink=self.sink.name,
            kind=self.sink.kind,
            snapshots=self.snapshots,
            looks=tuple(self.looks),
            last_looks=self._last_looks,
            misses=self.misses,
            rows=Counter(self.rows),
            in_order={partition: tuple(found) for partition, found in self.in_order.items()},
            strangers=tuple(self._named_strangers()),
            left=tuple(left),
            error=error,
        )

    # Rows -------------------------------------------------------------------------------------------------------------

    def number(self, value: Hashable) -> int | None:
        """The row that a value of the identity stands for. None, and remembered as a stranger, when nobody fed it."""
        found = self._numbers[value]
        return None if found == NOBODYS else found

    def known(self, identity: str) -> int | None:
        return self._number_of(identity)

    def _unknown_yet(self, value: Hashable) -> int:
        found = None if value is None else self.known(identity_text(value))
        if found is None:
            self.stranger(f"a row without {self.workload.identity}" if value is None else identity_text(value))
            return NOBODYS
        return found

    def stranger(self, words: str) -> None:
        named = words if len(words) <= STRANGER_LETTERS_MAX else words[: STRANGER_LETTERS_MAX - 3] + "..."
        if len(self._strangers) < STRANGERS_NAMED_MAX:
            self._strangers[named] = None
        elif named not in self._strangers:
            self._strangers_unnamed += 1

    def _named_strangers(self) -> list[str]:
        more = [f"and {self._strangers_unnamed} more"] if self._strangers_unnamed else []
        return [*self._strangers, *more]

    def show(self, began_s: float, values: Iterable[Hashable]) -> None:
        """Note a look at the whole store: these are the identities that it holds now."""
        now = Counter(map(self._numbers.__getitem__, values))
        ended_s = time.time()
        now.pop(NOBODYS, None)
        before, self.rows = self.rows, now
        self.add_look(Look(began_s, ended_s, _more(now, before), _more(before, now)))

    def add_look(self, look: Look) -> None:
        self.looks.append(look)
        self._seen.update(look.added)


class _Numbers(dict[Hashable, int]):
    """The numbers of the values that were met before: looking one up takes no call of a Python function.

    A row is known before it can be seen, so a stranger stays one.
    """

    def __init__(self, unknown: Callable[[Hashable], int]) -> None:
        super().__init__()
        self._unknown = unknown

    def __missing__(self, value: Hashable) -> int:
        found = self[value] = self._unknown(value)
        return found


def _more(rows: Counter[int], than: Counter[int]) -> Sequence[int]:
    """The rows that are more often in one than in the other. Most looks show no change: a dict knows that soonest."""
    if dict.__eq__(rows, than):
        return ()
    differ = sorted((number, count) for number, count in rows.items() if than.get(number) != count)
    return [number for number, count in differ for _ in range(count - than[number])]


def names_ours(name: str, pipeline: PipelineId, sink: str) -> bool:
    """Whether a name in the store is one of this pipeline's, and not of another sink of it."""
    branch = parse_branch(name)
    return pipeline in name and (branch is None or branch.sink == sink)


def in_words(error: BaseException) -> str:
    """An error in one line."""
    text = error.what if isinstance(error, SemelError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
