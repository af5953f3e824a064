"""Rows that know who they are and when they were sent, and the process that sends them at a steady rate.

A value is a number and the time of the machine's monotonic clock, in 8 bytes each, and a filling. All processes of a
machine share that clock, and nobody sets it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

ROW_BYTES = 150
HEAD = struct.Struct(">qq")
FILLING = (b"abcdefghij" * 15)[: ROW_BYTES - HEAD.size]
TICK_S = 0.005
#: librdkafka's own queue holds 100,000 rows; it is emptied before that.
ROWS_BETWEEN_POLLS = 10_000
#: A feeder that falls behind by more than this share would measure another rate than it says.
MISSED_MAX = 0.02
#: Rows of a key follow one another at random distances: a prime spreads them over all keys.
SPREAD = 7_919


def value_of(number: int) -> bytes:
    return HEAD.pack(number, time.monotonic_ns()) + FILLING


def key_of(number: int, keys: int = 0) -> bytes:
    """The number itself, or one of so many keys. Whole rounds of `keys` rows bring each of them once."""
    return str(number * SPREAD % keys if keys else number).encode()


def producer(servers: str) -> Any:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": servers, "linger.ms": 1, "queue.buffering.max.messages": 1_000_000}
    # What it cannot send is an error of ours; a broker that was stopped after it is none.
    return Producer(settings | {"enable.idempotence": True, "log_level": 0})


def preload(servers: str, topic: str, rows: int, *, keys: int = 0) -> None:
    """Rows that are there before an engine starts."""
    sending = producer(servers)
    for number in range(rows):
        _send(sending, topic, number, keys)
        if number % ROWS_BETWEEN_POLLS == 0:
            sending.poll(0)
    _flush(sending)


def _send(sending: Any, topic: str, number: int, keys: int) -> None:
    while True:
        try:
            sending.produce(topic, value_of(number), key=key_of(number, keys))
            return
        except BufferError:
            sending.poll(0.05)


def _flush(sending: Any) -> None:
    if sending.flush(60):
        raise RuntimeError("the broker did not take all rows of the input within a minute")


# At a steady rate -----------------------------------------------------------------------------------------------------


@dataclass
class Feeder:
    """Sends rows until told to stop, in a process of its own, so that nothing of the benchmark delays it."""

    servers: str
    topic: str
    rate: int
    first: int = 0
    keys: int = 0
    _process: Any = field(default=None, repr=False)
    _pipe: Any = field(default=None, repr=False)

    def start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self.servers, self.topic, self.rate, self.first, self.keys)
        self._process = context.Process(target=_feed, args=arguments, daemon=True)
        self._process.start()

    def stop(self) -> int:
        """How many rows there are, with those before the first. Fails when it could not keep its rate."""
        self._pipe.send("stop")
        if not self._pipe.poll(120):
            raise RuntimeError("the feeder did not end within two minutes")
        sent, seconds = self._pipe.recv()
        self._process.join(30)
        if sent < (1 - MISSED_MAX) * self.rate * seconds - self.rate * TICK_S:
            raise RuntimeError(f"the feeder sent {sent} rows in {seconds:.1f} s, fewer than {self.rate} a second")
        return self.first + int(sent)

    def end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def fed(servers: str, topic: str, rate: int, *, first: int = 0, keys: int = 0) -> Iterator[Feeder]:
    feeder = Feeder(servers, topic, rate, first, keys)
    feeder.start()
    try:
        yield feeder
    finally:
        feeder.end()


def _feed(pipe: Any, servers: str, topic: str, rate: int, first: int, keys: int) -> None:
    sending = producer(servers)
    began = time.monotonic()
    sent = 0
    while not pipe.poll(TICK_S):
        due = int((time.monotonic() - began) * rate)
        for number in range(sent, due):
            _send(sending, topic, first + number, keys)
        sent = due
        sending.poll(0)
    seconds = time.monotonic() - began
    _flush(sending)
    pipe.send((sent, seconds))
