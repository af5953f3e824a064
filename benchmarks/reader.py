"""A read_committed reader of its own process: which rows it saw, when each was sent, and when it became visible."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks.rows import HEAD

if TYPE_CHECKING:
    import numpy as np

ROWS_AT_ONCE = 5_000
POLL_S = 0.02
#: After the last row that is due, a row that comes twice has so long to show itself.
LATER_S = 2.0


class WrongRows(Exception):
    """An engine lost rows or showed rows twice: its figures mean nothing."""


@dataclass(frozen=True)
class Seen:
    """What one reader saw of one topic, in its order."""

    numbers: np.ndarray[Any, Any]
    sent_ns: np.ndarray[Any, Any]
    seen_ns: np.ndarray[Any, Any]
    appended_ms: np.ndarray[Any, Any]

    def lost(self, rows: int) -> int:
        """Of the rows 0 to `rows`, those that were never seen."""
        import numpy as np

        return int(rows - np.isin(np.arange(rows), self.numbers).sum())

    def doubled(self) -> int:
        import numpy as np

        return int(len(self.numbers) - len(np.unique(self.numbers)))

    def require_each_once(self, engine: str, rows: int) -> None:
        strange = int(((self.numbers < 0) | (self.numbers >= rows)).sum())
        if self.lost(rows) or self.doubled() or strange:
            raise WrongRows(
                f"{engine}: of {rows:,} rows {self.lost(rows):,} were lost and {self.doubled():,} came twice; "
                f"{strange:,} were never sent"
            )


@dataclass
class Reader:
    servers: str
    topics: Sequence[str]
    _process: Any = field(default=None, repr=False)
    _pipe: Any = field(default=None, repr=False)

    def start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_read, args=(theirs, self.servers, list(self.topics)), daemon=True)
        self._process.start()
        self._answer(60)

    def count(self) -> int:
        """Rows so far, of all topics; one that came twice in a topic is one."""
        self._pipe.send("count")
        return int(self._answer(60))

    def newest_sent_ns(self) -> int:
        """When the row was sent that was the last to become visible so far."""
        self._pipe.send("newest")
        return int(self._answer(60))

    def wait_for(self, rows: int, seconds_max: float) -> None:
        """Until that many rows of each topic were seen. Returns at the limit, too: what is missing, is lost."""
        deadline = time.monotonic() + seconds_max
        while self.count() < rows * len(self.topics) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(LATER_S)

    def finish(self) -> dict[str, Seen]:
        import numpy as np

        self._pipe.send("finish")
        found = self._answer(120)
        self._process.join(30)
        return {topic: Seen(*(np.frombuffer(c, "int64") for c in columns)) for topic, columns in found.items()}

    def end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, seconds_max: float) -> Any:
        if not self._pipe.poll(seconds_max):
            raise RuntimeError(f"the reader did not answer within {seconds_max:.0f} s")
        return self._pipe.recv()


@contextmanager
def reading(servers: str, topics: Sequence[str]) -> Iterator[Reader]:
    reader = Reader(servers, topics)
    reader.start()
    try:
        yield reader
    finally:
        reader.end()


def consumer_of(servers: str, topics: Sequence[str], **more: Any) -> Any:
    """Reads all partitions from the beginning, without a group."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    settings = {"bootstrap.servers": servers, "group.id": "bench-reader", "enable.auto.commit": False}
    consumer = Consumer({**settings, "isolation.level": "read_committed", **more})
    known = consumer.list_topics(timeout=30).topics
    consumer.assign([TopicPartition(t, p, OFFSET_BEGINNING) for t in topics for p in known[t].partitions])
    return consumer


@dataclass
class _Found:
    """One topic: a column each for numbers, when sent, when seen, when appended; and which numbers there were."""

    columns: tuple[array[int], ...] = field(default_factory=lambda: tuple(array("q") for _ in range(4)))
    known: bytearray = field(default_factory=bytearray)
    distinct: int = 0

    def note(self, message: Any, now_ns: int) -> int:
        """When it was sent."""
        number, sent_ns = HEAD.unpack_from(message.value())
        for column, value in zip(self.columns, (number, sent_ns, now_ns, message.timestamp()[1]), strict=True):
            column.append(value)
        if number >= len(self.known):
            self.known.extend(bytes(number + ROWS_AT_ONCE - len(self.known)))
        self.distinct += not self.known[number]
        self.known[number] = 1
        return int(sent_ns)


def _read(pipe: Any, servers: str, topics: list[str]) -> None:
    consumer = consumer_of(servers, topics)
    found = {topic: _Found() for topic in topics}
    pipe.send("ready")
    newest_ns = 0
    while True:
        # `consume` waits until it has all that it was asked for: only the first row may be waited for.
        first = consumer.poll(POLL_S)
        if first is not None:
            messages = [first, *consumer.consume(ROWS_AT_ONCE, 0)]
            newest_ns = max(newest_ns, _note(found, messages, time.monotonic_ns()))
        if pipe.poll():
            word = pipe.recv()
            if word == "finish":
                break
            pipe.send(sum(one.distinct for one in found.values()) if word == "count" else newest_ns)
    consumer.close()
    pipe.send({topic: tuple(column.tobytes() for column in one.columns) for topic, one in found.items()})


def _note(found: dict[str, _Found], messages: list[Any], now_ns: int) -> int:
    """When the newest of them was sent."""
    for message in messages:
        if message.error() is not None:
            raise RuntimeError(str(message.error()))
    return max(found[message.topic()].note(message, now_ns) for message in messages)
