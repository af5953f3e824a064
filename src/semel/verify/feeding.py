"""Rows come as long as a run lasts, a little ahead of what the pipeline has read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from semel.errors import SemelError
from semel.verify.feeders import Feeder
from semel.verify.nemesis import Broken

#: The pipeline never finds less input than this many batches, and not much more.
BATCHES_AHEAD = 15
FEED_EVERY_S = 0.1
JOIN_S_MAX = 60.0


class Feeding:
    """`read` says how many rows the pipeline is done with: what its sinks show may be less, or more.

    `failed` is empty, or why no more rows come. `draining` is set after the last fault.
    """

    def __init__(self, feeder: Feeder, rows: int, rows_per_batch: int, read: Callable[[], int]) -> None:
        self.feeder = feeder
        self.rows = rows
        self.rows_per_batch = rows_per_batch
        self.read = read
        self.draining = False
        self.failed = ""
        self._stopping = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Rows come until the block ends. Raises Broken when they could not, whatever else has come of that."""
        thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        # The first rows before the first life: Spark's source wants its topic to be there.
        self._try()
        thread.start()
        try:
            self.require()
            yield
        except Broken:
            self.require()
            raise
        finally:
            self._stopping.set()
            thread.join(JOIN_S_MAX)
        self.require()

    def require(self) -> None:
        """Raise Broken when no more rows come."""
        if self.failed:
            raise Broken(f"the source could not be fed: {self.failed}")

    def _run(self) -> None:
        while not self.failed and not self._stopping.wait(FEED_EVERY_S):
            self._try()

    def _try(self) -> None:
        try:
            self.feed()
        except SemelError as error:
            self.failed = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is to be told
            self.failed = f"{type(error).__name__}: {error}"

    def feed(self) -> None:
        """Without end as long as there are faults to come, and not one batch more than wanted after the last."""
        if self.draining and self.feeder.fed >= self.rows:
            return
        if self.feeder.fed - self.read() < BATCHES_AHEAD * self.rows_per_batch:
            self.feeder.feed(self.rows_per_batch)
