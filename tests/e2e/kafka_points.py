"""The failpoints of a pipeline from Kafka to Kafka."""

from __future__ import annotations

from semel.failpoints import FAILPOINTS, SELDOM

#: What such a pipeline passes.
KINDS = ("startup", "batch", "log", "task", "kafka")
POINTS = tuple(p for p in FAILPOINTS if p.split(".")[0] in KINDS and p not in SELDOM)
#: Points of a task take only its Python worker along: Spark fails the batch, and the driver ends with an error.
IN_A_TASK = ("task.wrote", "task.prepared", "kafka.marked")
