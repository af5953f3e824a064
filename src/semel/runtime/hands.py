"""How many tasks write a batch, and when the driver writes it itself. Pure.

A task of Python costs more than a few hundred rows do, and Spark has as many of them as the source has partitions, or
as the last shuffle had: 200 as it comes. So few rows are handed to the driver, more to few tasks, and many to as many
as Spark has. What Spark computes before the rows are written keeps its partitions; a task that writes several of them
takes one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Rows that one task writes as soon as two tasks do.
FEW_ROWS = 1_000
#: Below this many rows for each of them, more tasks cost more than they gain.
ROWS_PER_TASK = 10_000
#: Where rows were shuffled, as many tasks as there are cores would do; twice as many even out what is uneven.
TASKS_PER_CORE = 2
#: What the driver takes: so many rows as a rule, and so many bytes. The option `semel.driverRows` sets the rows.
DRIVER_ROWS = 5_000
DRIVER_BYTES = 4 * 1024 * 1024
#: The first batch of a start is often larger, and finds no worker that runs: the driver takes so many times as much.
FIRST_BATCH = 10
#: How large a row is taken for, before there was any.
ROW_BYTES = 512


@dataclass(frozen=True)
class Hands:
    """`tasks` is 0 where Spark's own partitions decide. On the driver it is how many tasks compute the rows.

    `by_hash` says that rows are to be known by their hashes, also where a checksum of them in their order would do.
    """

    tasks: int = 0
    on_driver: bool = False
    by_hash: bool = False

    def __str__(self) -> str:
        return "the driver" if self.on_driver else f"{self.tasks} tasks" if self.tasks else "one task a partition"


AS_PLANNED = Hands()


@dataclass(frozen=True)
class BatchSize:
    """What is known of a batch before it runs. `rows` is None where nobody can say, `row_bytes` 0 before the first.

    `is_first` says that it is the first one after a start.
    """

    partitions: int
    is_shuffled: bool
    rows: int | None = None
    row_bytes: int = 0
    is_first: bool = False


@dataclass(frozen=True)
class Allowed:
    """What the user and the sinks allow. No `tasks_max` is 0."""

    cores: int
    tasks_max: int = 0
    driver_rows: int = DRIVER_ROWS


def choose_hands(batch: BatchSize, allowed: Allowed) -> Hands:
    """For a batch that is staged for the first time. One that is staged again has what it was decided with."""
    if batch.rows is not None and _suits_the_driver(batch, batch.rows, allowed):
        return Hands(min(allowed.cores, batch.partitions), on_driver=True)
    wanted = batch.partitions
    if batch.is_shuffled:
        wanted = min(wanted, TASKS_PER_CORE * allowed.cores)
    if batch.rows is not None:
        # Behind a shuffle a task has the state of its partitions to keep, too.
        at_least = 1 if batch.rows <= FEW_ROWS and not batch.is_shuffled else allowed.cores
        enough = max(at_least, math.ceil(batch.rows / ROWS_PER_TASK))
        wanted = min(wanted, enough)
    if allowed.tasks_max:
        wanted = min(wanted, allowed.tasks_max)
    return Hands(wanted) if wanted < batch.partitions else AS_PLANNED


def _suits_the_driver(batch: BatchSize, rows: int, allowed: Allowed) -> bool:
    times = FIRST_BATCH if batch.is_first else 1
    if not allowed.driver_rows or rows > times * allowed.driver_rows:
        return False
    return rows * (batch.row_bytes or ROW_BYTES) <= times * DRIVER_BYTES


@dataclass(frozen=True)
class Written:
    """By how many tasks a decided batch was written, and whether their fingerprints go by the order of the rows."""

    tasks: int
    in_order: bool = True


def hands_again(written: Written) -> Hands:
    """For a batch that is decided: its rows must be found again.

    One that was written by one task is one committable of each sink, and must be again. Of others each partition is
    written for itself: what several of them had together is found by the print of each.
    """
    return Hands(1) if written.tasks == 1 else Hands(by_hash=not written.in_order)


@dataclass
class Pace:
    """What the batches before tell of the next one, in one run of a query."""

    rows_in: int | None = None
    rows_out: int | None = None
    row_bytes: int = 0

    @property
    def is_first(self) -> bool:
        return self.rows_out is None

    def saw(self, rows_in: int | None, rows_out: int, row_bytes: int) -> None:
        self.rows_in, self.rows_out = rows_in, rows_out
        self.row_bytes = row_bytes or self.row_bytes

    def expects(self, rows_in: int | None, *, is_shuffled: bool) -> int | None:
        """How many rows come out of a batch into which so many go; None where nothing tells.

        Behind a shuffle there may be state, all of which may come out whatever goes in.
        """
        if rows_in is None:
            return self.rows_out
        if is_shuffled:
            return None if self.rows_out is None else max(rows_in, self.rows_out)
        if not self.rows_in or self.rows_out is None:
            return rows_in
        return math.ceil(rows_in * max(1.0, self.rows_out / self.rows_in))
