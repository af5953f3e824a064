"""What a reader of the output topic saw, held against what went in, what Spark planned and what was decided. Pure.

A row says where it came from: its partition and offset in the input topic, and the task that wrote it. Spark's own log
says which offsets belong to which batch, and the decision log when each batch was decided, so that nothing here rests
on what the sink says of itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from semel.protocol.invariants import nothing_duplicated, nothing_early, nothing_lost, nothing_torn

#: How many input partitions there are; the row with id i is in partition i % PARTITIONS, at offset i // PARTITIONS.
PARTITIONS = 2


class Sight(NamedTuple):
    """One record of the output topic as a read_committed reader saw it, and when."""

    id: int
    source_partition: int
    source_offset: int
    task: int
    partition: int
    offset: int
    at: float


@dataclass(frozen=True)
class BatchPlan:
    """Which input offsets belong to which batch: per partition, where each batch ends."""

    ends: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, offsets: Sequence[Mapping[int, int]]) -> BatchPlan:
        """`offsets` are Spark's: for each batch in order, partition -> the offset after its last row."""
        return cls({p: tuple(batch.get(p, 0) for batch in offsets) for p in range(PARTITIONS)})

    @property
    def batches(self) -> int:
        return len(self.ends[0])

    def batch_of(self, partition: int, offset: int) -> int:
        """The batch that reads this row; -1 when no batch does yet."""
        batch = bisect_right(self.ends[partition], offset)
        return batch if batch < self.batches else -1

    def rows(self, batch: int) -> int:
        before = {p: ends[batch - 1] if batch else 0 for p, ends in self.ends.items()}
        return sum(ends[batch] - before[p] for p, ends in self.ends.items())


@dataclass(frozen=True)
class Findings:
    """What is wrong, in words, kind by kind; and how many rows were compared to say so."""

    compared: int
    lost: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    early: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        return {kind: len(getattr(self, kind)) for kind in ("lost", "duplicated", "torn", "early")}

    def require_clean(self, rows: int) -> None:
        """Fail when anything is wrong, and when fewer rows were compared than the caller knows to be there.

        An audit that compares nothing finds nothing (Kafka's own group_mode_transactions_test once passed so).
        """
        wrong = [*self.lost[:3], *self.duplicated[:3], *self.torn[:3], *self.early[:3]]
        assert not wrong, f"{self.counts}: {'; '.join(wrong)}"
        assert rows > 0, "an audit of no rows says nothing"
        assert self.compared == rows, f"{self.compared} rows were compared, {rows} should have been"


def audit(
    sights: Collection[Sight],
    plan: BatchPlan,
    decided_at: Mapping[tuple[int, int], float],
    *,
    rows: int | None = None,
    settled: bool = True,
) -> Findings:
    """`decided_at` is by batch and task. With `rows`, that many ids must all be there, once each.

    While transactions are open a reader sees a topic only up to the first of them, so the last batches may show in part
    although every transaction ends whole: then `settled` is False.
    """
    actual: Counter[Hashable] = Counter(s[:3] for s in sights)
    wanted = actual.keys() if rows is None else [(i, i % PARTITIONS, i // PARTITIONS) for i in range(rows)]
    expected: Counter[Hashable] = Counter(dict.fromkeys(wanted, 1))
    return Findings(
        compared=len(actual),
        lost=tuple(nothing_lost(expected, actual)),
        duplicated=tuple(nothing_duplicated(expected, actual)),
        torn=(*_out_of_order(sights, plan), *(_torn(sights, plan, whole=rows is not None) if settled else ())),
        early=tuple(_early(sights, plan, decided_at)),
    )


def _torn(sights: Iterable[Sight], plan: BatchPlan, *, whole: bool) -> list[str]:
    """Every batch is visible whole. The newest may still be on its way, branch by branch, unless all must be there."""
    visible = Counter(plan.batch_of(partition, offset) for _, partition, offset in {s[:3] for s in sights})
    newest = max(visible, default=-1)
    return nothing_torn((b, plan.rows(b), n) for b, n in visible.items() if b >= 0 and (whole or b < newest))


def _out_of_order(sights: Iterable[Sight], plan: BatchPlan) -> list[str]:
    """Batch N is written when all of N-1 is visible, so in each partition the batches follow each other."""
    wrong, newest = [], Counter[int]()
    for s in sorted(sights, key=lambda s: (s.partition, s.offset)):
        batch = plan.batch_of(s.source_partition, s.source_offset)
        if batch < newest[s.partition]:
            wrong.append(f"batch {batch}: row {s.id} comes after rows of batch {newest[s.partition]}")
        newest[s.partition] = max(newest[s.partition], batch)
    return wrong


def _early(sights: Iterable[Sight], plan: BatchPlan, decided_at: Mapping[tuple[int, int], float]) -> list[str]:
    """No row is seen before the decision that names the task which wrote it."""
    by_batch = [(plan.batch_of(s.source_partition, s.source_offset), s) for s in sights]
    undecided = nothing_early({batch for batch, _ in by_batch}, {batch for batch, _ in decided_at})
    return undecided + [
        f"row {s.id} of batch {batch}, task {s.task}, was seen before it was decided"
        for batch, s in by_batch
        if s.at < decided_at.get((batch, s.task), math.inf)
    ]
