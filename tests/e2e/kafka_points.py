"""The failpoints of a pipeline from Kafka to Kafka."""

from __future__ import annotations

from semel.failpoints import all_failpoints

#: What such a pipeline passes.
KINDS = ("startup", "batch", "log", "task", "kafka")
POINTS = tuple(name for name, p in all_failpoints().items() if name.split(".")[0] in KINDS and not p.seldom)
#: Points of a task take only its Python worker along: Spark fails the batch, and the driver ends with an error.
IN_A_TASK = ("task.wrote", "task.prepared", "kafka.marked")
