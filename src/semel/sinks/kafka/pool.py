"""The producers of one worker process: initialised ahead of need, under transactional ids that nobody else uses.

A transactional producer serves one branch and is dropped. No two transactions may ever share a producer id and epoch
(KAFKA-17754), so each begins with InitProducerId. That takes some milliseconds, and half a second while the transaction
before it under the same id is still being ended. Therefore the next producers are initialised in the background while
the batch is decided, and under other ids of the pool.

**The pool of ids is fixed.** Brokers remember an id for a week, so there cannot be one per batch. A worker leases a
slot of its machine, held by a file lock that the kernel releases however the worker ends, and numbers its ids in there:

    <prefix>-<sink>-<machine>-<slot>-<number>

An id may be used again once what it was used for last is settled: when a task of batch N runs, everything before N is.
What each id was used for is written into the slot's file, because the next holder of the slot must know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from semel.sinks.kafka.ids import Lease, Use
from semel.sinks.kafka.producers import WIRES, Producer, make_producer

WARM_MAX = 8


@dataclass
class Ready:
    """A producer whose id has a fresh epoch, and which has no transaction yet."""

    id: str
    number: int
    producer: Producer


class Pool:
    """The transactional producers of this process under one prefix, with one set of settings.

    It keeps as many ready as the process needed for its last batch, up to a limit: Spark may run several tasks here,
    one by one, and a producer of librdkafka has threads and connections of its own.
    """

    def __init__(self, prefix: str, conf: Mapping[str, Any], *, topics: Sequence[str], by_row: bool) -> None:
        self.conf = dict(conf)
        self.topics = tuple(topics)
        self.by_row = by_row
        self.lease = Lease(prefix)
        self._lock = threading.Lock()
        self._warm: list[_Initialising] = []
        self._use: Use = (-1, -1)
        self._taken = self._taken_before = 0

    def take(self, use: Use) -> Ready:
        """A producer for one branch: one that was made ahead, or a new one."""
        with self._lock:
            self._count(use)
            ready = self._take_warm(use)
            if ready is None:
                ready = self._make(self._free_number(use))
            self.lease.note(ready.number, use)
            return ready

    def _count(self, use: Use) -> None:
        if use != self._use:
            self._use, self._taken_before, self._taken = use, self._taken, 0
        self._taken += 1

    def _take_warm(self, use: Use) -> Ready | None:
        """The first that is done, else the first that is under way."""
        while self._warm:
            warm = next((w for w in self._warm if not w.is_alive()), self._warm[0])
            self._warm.remove(warm)
            ready = warm.result()
            if ready is not None and self.lease.is_free(ready.number, use):
                return ready
            if ready is not None:
                ready.producer.drop()
        return None

    def warm_up(self, use: Use) -> None:
        """Begin to make the next ones. Called when a branch of `use` is prepared: everything before it is settled."""
        with self._lock:
            while len(self._warm) < min(max(self._taken, self._taken_before, 1), WARM_MAX):
                number = self._free_number(use)
                self._warm.append(_Initialising(number, self._make))
                self._warm[-1].start()

    def _free_number(self, use: Use) -> int:
        """The first id whose last use is settled, and which nobody is making ready."""
        being_made = {w.number for w in self._warm}
        return next(n for n in count() if n not in being_made and self.lease.is_free(n, use))

    def settle(self) -> None:
        """Wait until nothing is in the making."""
        with self._lock:
            for warm in self._warm:
                warm.join()

    def release(self) -> None:
        with self._lock:
            for ready in [warm.result() for warm in self._warm]:
                if ready is not None:
                    ready.producer.drop()
            self._warm.clear()
            self.lease.release()

    def _make(self, number: int) -> Ready:
        transactional_id = self.lease.transactional_id(number)
        producer = make_producer({**self.conf, "transactional.id": transactional_id}, by_row=self.by_row)
        try:
            producer.learn(self.topics)
            producer.init_transactions()
        except BaseException:
            producer.drop()
            raise
        return Ready(transactional_id, number, producer)


class _Initialising(threading.Thread):
    """A producer in the making. If it fails nobody is told: the next task makes its own, and says what is wrong."""

    def __init__(self, number: int, make: Callable[[int], Ready]) -> None:
        super().__init__(name="semel-kafka-init", daemon=True)
        self.number = number
        self._make = make
        self._made: Ready | None = None

    def run(self) -> None:
        with suppress(Exception):
            self._made = self._make(self.number)

    def result(self) -> Ready | None:
        self.join()
        return self._made


_POOLS: dict[tuple[Any, ...], Pool] = {}
_PLAIN: dict[tuple[Any, ...], Producer] = {}


def pool_for(prefix: str, conf: Mapping[str, Any], *, topics: Sequence[str], by_row: bool) -> Pool:
    """The pool of this process. A worker that Spark uses again finds its producers made."""
    key = (prefix, by_row, tuple(topics), *sorted(conf.items()))
    if key not in _POOLS:
        _POOLS[key] = Pool(prefix, conf, topics=topics, by_row=by_row)
    return _POOLS[key]


def plain_producer(conf: Mapping[str, Any], *, by_row: bool) -> Producer:
    """The producer without transactions that this process keeps, for the weaker guarantees."""
    key = (by_row, *sorted(conf.items()))
    if key not in _PLAIN:
        _PLAIN[key] = make_producer(conf, by_row=by_row)
    return _PLAIN[key]


def forget_plain_producer(conf: Mapping[str, Any], *, by_row: bool) -> None:
    """After a failure: what a producer still holds must not come with the rows of the next task."""
    producer = _PLAIN.pop((by_row, *sorted(conf.items())), None)
    if producer is not None:
        producer.drop()


def settle_all() -> None:
    """Wait until no producer of this process is in the making."""
    for pool in _POOLS.values():
        pool.settle()


def release_pool(prefix: str) -> None:
    """Let go of the producers under one prefix: of a driver that wrote small batches itself."""
    for key in [key for key in _POOLS if key[0] == prefix]:
        _POOLS.pop(key).release()


def release_all() -> None:
    """Let go of every producer and every slot of this process. A worker need not: the kernel does it."""
    for pool in _POOLS.values():
        pool.release()
    for producer in _PLAIN.values():
        producer.drop()
    for wire in WIRES.values():
        wire.close()
    _POOLS.clear()
    _PLAIN.clear()
    WIRES.clear()
