"""How far a query has come in Kafka: told to the broker under the name of a group, and to us as lag.

Both are for people and their monitoring tools. Nothing in a pipeline depends on them, so nothing here may fail a batch
or hold one up: a thread of its own talks to the broker, keeps only the newest task of each kind, and remembers its last
error. The offsets come from Spark's log in the checkpoint, which has a line for each source, in the order of the plan.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from semel.errors import SemelError
from semel.sources.kafka import GROUP, SERVERS
from semel.sources.kafka_broker import Broker, Offsets, Partition, with_its_tokens
from semel.sources.lag import Lag, ends_in
from semel.sources.plan import PlannedSource

ANSWER_S_MAX = 10.0
FLUSH_S_MAX = 3.0

_LOG = logging.getLogger("semel.sources.kafka")


@dataclass(frozen=True)
class Reached:
    """Where a batch ends in one Kafka source. Options may hold secrets."""

    source: PlannedSource
    offsets: Offsets = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.source.options[GROUP]

    @property
    def servers(self) -> str:
        return self.source.options[SERVERS]


# Spark's log of offsets ---------------------------------------------------------------------------------------------


def reached_in(log: bytes | None, sources: Sequence[PlannedSource]) -> list[Reached]:
    """The end of a batch in each source that `read_kafka` made. Raises ValueError for a log that reads differently."""
    version, _, *lines = (log or b"").decode().splitlines() or ("", "")
    if version != "v1" or len(lines) != len(sources):
        raise ValueError("Spark's log of offsets is not there or reads differently from what semel knows")
    pairs = zip(sources, lines, strict=True)
    # A source that has not begun yet has a dash in its place.
    return [Reached(s, ends_in(line)) for s, line in pairs if GROUP in s.options and line != "-"]


def lowest(offsets: Iterable[Offsets]) -> dict[Partition, int]:
    """Two sources over one topic: what lies before the lower offset has been through both."""
    merged: dict[Partition, int] = {}
    for one in offsets:
        for partition, offset in one.items():
            merged[partition] = min(offset, merged.get(partition, offset))
    return merged


# The thread ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    batch: int
    reached: Sequence[Reached]


class KafkaProgress:
    """One run of a query. `began` asks for the lag behind a batch, `ended` reports its offsets; neither waits."""

    def __init__(self, sources: Sequence[PlannedSource], read: Callable[[int], bytes | None]) -> None:
        self._sources = sources
        self._read = read
        self._brokers: dict[tuple[tuple[str, str], ...], Broker] = {}
        self._news = threading.Condition()
        # At most one task of each kind waits; a newer one takes its place.
        self._waiting: dict[str, _Task] = {}
        self._working = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._last: _Task | None = None
        self._lag: Lag | None = None
        self._errors: dict[str, str] = {}

    def began(self, batch: int) -> None:
        """Measure what waits behind the end of this batch, while it runs."""
        self._give("measure", batch)

    def ended(self, batch: int) -> None:
        """Tell the broker that this batch is committed in every sink."""
        self._give("report", batch)

    def lag(self, batch: int) -> Lag | None:
        """The lag behind this batch or the one before, or None when the broker has not answered that recently."""
        known = self._lag
        return known if known is not None and known.batch >= batch - 1 else None

    @property
    def warning(self) -> str:
        """What went wrong last and has not gone right since; empty when all is well."""
        return " ".join(self._errors.values())

    def flush(self, seconds_max: float = FLUSH_S_MAX) -> bool:
        """Wait until nothing is left to do. False when it took too long."""
        with self._news:
            return self._news.wait_for(lambda: not self._waiting and not self._working, seconds_max)

    def close(self, seconds_max: float = FLUSH_S_MAX) -> None:
        """Do what is left within the limit, and let the thread end."""
        atexit.unregister(self.close)
        if self._thread is not None:
            self.flush(seconds_max)
        with self._news:
            self._closed = True
            self._waiting.clear()
            self._news.notify_all()

    def _give(self, kind: str, batch: int) -> None:
        if not any(GROUP in source.options for source in self._sources):
            return
        try:
            task = self._task(batch)
        except Exception as error:  # noqa: BLE001 - a batch never fails for want of a report
            self._note(kind, f"The offsets of batch {batch} cannot be read: {error}.")
            return
        with self._news:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="semel-kafka-progress", daemon=True)
                self._thread.start()
                # A script may end right after its last batch; the thread would die with it.
                atexit.register(self.close)
            self._waiting[kind] = task
            self._news.notify_all()

    def _task(self, batch: int) -> _Task:
        """A batch's offsets are read once: Spark has written them before the batch begins."""
        if self._last is None or self._last.batch != batch:
            self._last = _Task(batch, reached_in(self._read(batch), self._sources))
        return self._last

    def _run(self) -> None:
        while True:
            with self._news:
                self._working = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                # What the broker is told first is what others wait for.
                kind = "report" if "report" in self._waiting else "measure"
                task = self._waiting.pop(kind)
                self._working = True
            self._do(kind, task)

    def _do(self, kind: str, task: _Task) -> None:
        try:
            if kind == "report":
                self._report(task)
            else:
                self._lag = self._measure(task)
        except Exception as error:  # noqa: BLE001 - kept and shown: the next batch tries again
            what = error.what if isinstance(error, SemelError) else f"{type(error).__name__}: {error}"
            told = "did not reach the broker" if kind == "report" else "could not be compared with the broker's"
            self._note(kind, f"The offsets of batch {task.batch} {told}: {what}")
        else:
            self._errors = {other: error for other, error in self._errors.items() if other != kind}

    def _note(self, kind: str, error: str) -> None:
        """Logged when things begin to go wrong, not with every batch."""
        if kind not in self._errors:
            _LOG.warning("%s", error)
        self._errors = {**self._errors, kind: error}

    # The work ---------------------------------------------------------------------------------------------------------

    def _report(self, task: _Task) -> None:
        by_group: dict[tuple[str, str], list[Reached]] = {}
        for reached in task.reached:
            if reached.group:
                by_group.setdefault((reached.servers, reached.group), []).append(reached)
        for (_, group), members in by_group.items():
            self._broker(members[0].source).report(group, lowest(r.offsets for r in members))

    def _measure(self, task: _Task) -> Lag:
        by_cluster: dict[str, list[Reached]] = {}
        for reached in task.reached:
            by_cluster.setdefault(reached.servers, []).append(reached)
        behind: dict[str, int] = {}
        for servers, members in by_cluster.items():
            ours = lowest(r.offsets for r in members)
            ends = self._broker(members[0].source).end_offsets(ours)
            where = f"@{servers}" if len(by_cluster) > 1 else ""
            for (topic, number), end in sorted(ends.items()):
                behind[f"{topic}-{number}{where}"] = max(0, end - ours[topic, number])
        return Lag(task.batch, behind)

    def _broker(self, source: PlannedSource) -> Broker:
        key = tuple(sorted(source.options.items()))
        if key not in self._brokers:
            self._brokers[key] = Broker(with_its_tokens(source.options), ANSWER_S_MAX)
        return self._brokers[key]
