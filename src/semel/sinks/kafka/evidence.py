"""What the control topic says of a pipeline's batches: for `semel audit`, which only reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from semel.errors import SinkUnavailable
from semel.ids import PipelineId
from semel.sinks.evidence import Evidence, Mark
from semel.sinks.kafka.ids import id_pattern
from semel.sinks.kafka.markers import Fate, Marker, MarkerLog, WholeMarkerLog, partition_of
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.requests import Transaction

if TYPE_CHECKING:
    from semel.sinks.kafka import Kafka

PAUSE_S = 0.05


def evidence(sink: Kafka, pipeline: PipelineId, batches: range) -> Evidence:
    """The marks of these batches and of younger ones."""
    wire = Wire(sink.servers, sink.options, sink.timeout_s)
    try:
        return _evidence(sink, pipeline, batches, wire)
    finally:
        wire.close()


def _evidence(sink: Kafka, pipeline: PipelineId, batches: range, wire: Wire) -> Evidence:
    topic, us = sink.control_topic, (pipeline, sink.name)
    if not wire.partitions(topic):
        return Evidence(why=f"there is no control topic {topic} at {sink.servers}")
    log = WholeMarkerLog(topic, partition_of(sink.name), who=us)
    listed = _read_until_ended(sink, pipeline, batches, wire, log)
    asked = [m for m in log.markers.values() if m.branch.attempt.batch >= batches.start]
    open_ = [m for m in log.markers.values() if m.fate is Fate.OPEN and m.transaction is not None]
    branches = tuple(sorted(m.branch for m in open_ if _entry(m.transaction) in listed))
    marks = tuple(_mark(m) for m in asked if m.fate is Fate.COMMITTED)
    newest = log.newest_committed(*us)
    known_from = log.known_from
    if newest is None and known_from is None:
        return Evidence(why=f"the control topic {topic} has nothing of this pipeline", branches=branches)
    # The newest marker of each task outlives compaction, so what is younger than all of them was never there.
    known_from = (newest or 0) + 1 if known_from is None else known_from
    why = f"the control topic {topic} is compacted: it keeps the newest marker of each task"
    return Evidence(marks, known_from, why, forgets=True, branches=branches)


def _read_until_ended(
    sink: Kafka, pipeline: PipelineId, batches: range, wire: Wire, log: MarkerLog
) -> set[tuple[str, int]]:
    """Read to where no transaction of these batches is being ended; what is open then.

    EndTxn is answered before the end is in the control topic, so that a batch may be over a little earlier.
    """
    ours = id_pattern(sink.prefix(pipeline)).fullmatch
    deadline = time.monotonic() + sink.timeout_s
    while True:
        listed = set(wire.open_transactions(lambda name: ours(name) is not None))
        log.catch_up(wire)
        open_ = [m for m in log.markers.values() if m.fate is Fate.OPEN and m.branch.attempt.batch in batches]
        ending = [m for m in open_ if _entry(m.transaction) not in listed]
        if not ending:
            return listed
        if time.monotonic() > deadline:
            raise SinkUnavailable(f"{sink.describe()} does not end the transaction of {ending[0].branch}.")
        time.sleep(PAUSE_S)


def _entry(transaction: Transaction | None) -> tuple[str, int]:
    """As brokers list what is open."""
    return ("", -1) if transaction is None else (transaction.id, transaction.producer_id)


def _mark(marker: Marker) -> Mark:
    """The driver's marker of a batch without rows stands for all of it."""
    a = marker.branch.attempt
    part = "" if marker.transaction is None else str(marker.branch)
    return Mark(a.batch, part, a.attempt, a.incarnation, marker.rows, plan=marker.plan)
