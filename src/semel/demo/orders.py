"""The input: orders from a seed, and the thread that writes them while the pipelines run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import pairwise

CUSTOMERS = 40
ITEMS = ("apples", "bread", "coffee", "dates", "eggs", "flour", "ginger", "honey")
FIRST_ORDER_AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Order:
    id: str
    customer: str
    cents: int
    item: str
    at: str


def make_orders(seed: int, count: int) -> list[Order]:
    """The same seed gives the same orders, each with an id of its own."""
    dice = random.Random(seed)  # noqa: S311 - a game, not a secret
    return [
        Order(
            id=f"order-{number:07d}",
            customer=f"customer-{dice.randrange(CUSTOMERS):02d}",
            cents=dice.randrange(50, 20_000),
            item=dice.choice(ITEMS),
            at=(FIRST_ORDER_AT + timedelta(seconds=number)).isoformat(),
        )
        for number in range(count)
    ]


def split(orders: Sequence[Order], files: int) -> list[Sequence[Order]]:
    """Into so many parts, as even as can be."""
    edges = [len(orders) * i // files for i in range(files + 1)]
    return [orders[a:b] for a, b in pairwise(edges)]


@dataclass
class Producer:
    """Hands a few parts of the input a second to `write`, but never more than what is `allowed`.

    The allowance grows with every kill, so that each life finds new input, however slow the machine is.
    """

    write: Callable[[int, Sequence[Order]], None]
    files: Sequence[Sequence[Order]]
    pause_s: float = 0.4
    written: int = 0
    produced: int = 0
    allowed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def allow(self, share: float) -> None:
        self.allowed = round(len(self.files) * min(share, 1.0))

    @property
    def done(self) -> bool:
        return self.written == len(self.files)

    def write_all(self) -> None:
        """Everything at once, for a run that nobody watches."""
        while not self.done:
            self._write(self.files[self.written])

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="orders", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while not (self.done or self._stop.wait(self.pause_s)):
            if self.written < self.allowed:
                self._write(self.files[self.written])

    def _write(self, orders: Sequence[Order]) -> None:
        self.write(self.written, orders)
        self.written += 1
        self.produced += len(orders)
