"""The failpoints of a pipeline from Kafka to Kafka."""

from __future__ import annotations

from semel.failpoints import all_failpoints
from tests.e2e.ways import PARTITIONS, WAYS

#: What such a pipeline passes.
KINDS = ("startup", "batch", "log", "task", "kafka")
POINTS = tuple(name for name, p in all_failpoints().items() if name.split(".")[0] in KINDS and not p.seldom)
#: Points of a task take only its Python worker along: Spark fails the batch, and the driver ends with an error.
IN_A_TASK = ("task.wrote", "task.prepared", "kafka.marked")


def nth(point: str, turn: int) -> int:
    """At which hit to kill, so that a life commits a batch before it dies.

    Before the second decision the log has written a probe, the claim, the closing of a slot and the first decision. A
    batch of two tasks ends two transactions, so that the second one ends its first transaction third.
    """
    if point.startswith("startup."):
        return 1
    return {"log.written": 5, "kafka.committed": 3 if turn % len(WAYS) == PARTITIONS else 2}.get(point, 2)
