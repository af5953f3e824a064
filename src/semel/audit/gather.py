"""Reads the checkpoint and the sinks. It claims nothing, and asks in an order in which nothing can mislead.

A batch goes through the places in one order: planned, decided, marked in every sink, checkpointed. So this asks what is
checkpointed *first*, then the sinks, then the journals: whatever was checkpointed has its markers by the time the sinks
are asked, and whatever is marked has its decision by the time the journals are read. What happens in between concerns
batches that were not checkpointed at the beginning, which are in flight. What is planned is listed last, because from
that follows which journals may have been pruned meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from semel.audit.facts import EXACTLY_ONCE, BatchFacts, Facts, SinkFacts
from semel.audit.journals import read_decision
from semel.audit.ranges import Ranges
from semel.decisions.base import StoreUnanswered
from semel.errors import AnotherPipeline, CheckpointError, CheckpointUnusable, SemelError
from semel.ids import PipelineId
from semel.protocol.events import Journal
from semel.protocol.plans import digest_of
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.phases import BATCHES_KEPT, TIDY_EVERY_BATCHES
from semel.sinks.base import Sink

#: Spark keeps a hundred or so unless it is told otherwise.
BATCHES_MAX = 1_000


def gather(name: str, guarantee: str, checkpoint: Checkpoint, sinks: Sequence[Sink]) -> Facts:
    """All that the comparison needs to know of a pipeline."""
    facts = Facts(name, guarantee, checkpoint.location)
    with checkpoint_readable(checkpoint):
        query = checkpoint.query_id()
        if query is None:
            return replace(facts, checkpoint_error="the pipeline has not been started with this checkpoint yet")
        _refuse_another_pipeline(checkpoint, query)
        log = checkpoint.log
        facts = replace(facts, query=query, incarnation=log.newest_claim(), next_batch=checkpoint.plans.next_batch())
        if facts.incarnation:
            facts = replace(facts, holder=log.holder(facts.incarnation))
        planned = planned_batches(checkpoint)
    over = range(planned[0] if planned else 0, facts.next_batch)
    if guarantee == EXACTLY_ONCE:
        facts = replace(facts, sinks=[ask(sink, query, over) for sink in sinks])
    with checkpoint_readable(checkpoint):
        return _with_batches(facts, checkpoint)


def ask(sink: Sink, pipeline: PipelineId, over: range) -> SinkFacts:
    """What a sink can prove; a sink that does not answer proves nothing."""
    try:
        return SinkFacts(sink.name, sink.describe(), sink.evidence(pipeline, over))
    except SemelError as error:
        return SinkFacts(sink.name, sink.describe(), error=error.what)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other sinks are still to be asked
        return SinkFacts(sink.name, sink.describe(), error=f"{type(error).__name__}: {error}")


def planned_batches(checkpoint: Checkpoint) -> list[int]:
    """The newest batches that Spark has offsets of, oldest first."""
    return sorted(int(name) for name in checkpoint.store.list("offsets") if name.isdigit())[-BATCHES_MAX:]


def kept_from(newest_over: int) -> int:
    """The oldest batch whose journal is kept, when this one is the newest that has ended. See Coordinator.tidy."""
    tidied = newest_over - (newest_over + 1) % TIDY_EVERY_BATCHES
    return max(0, tidied - BATCHES_KEPT)


def _with_batches(facts: Facts, checkpoint: Checkpoint) -> Facts:
    journals = {batch: journal_of(checkpoint, batch) for batch in planned_batches(checkpoint)}
    ranges = Ranges(checkpoint.store)
    found, before = [], None
    for batch, (journal, unreadable) in journals.items():
        log = checkpoint.offsets(batch)
        if before is None and batch > 0:
            before = checkpoint.offsets(batch - 1)
        digest = "" if log is None else digest_of(log)
        lists = _lists(checkpoint, journal)
        found.append(BatchFacts(batch, ranges.of(batch, log, before), journal, unreadable, digest, lists))
        before = log
    everything = [int(name) for name in checkpoint.store.list("offsets") if name.isdigit()]
    return replace(
        facts,
        batches=found,
        kept_from=kept_from(facts.next_batch - 1),
        kept_from_later=kept_from(max(everything, default=-1)),
        left_out=len([batch for batch in everything if found and batch < found[0].number]),
        forgotten=_forgotten(checkpoint, max(everything, default=-1)),
        kafka_source=ranges.saw_kafka,
    )


def _lists(checkpoint: Checkpoint, journal: Journal) -> dict[str, str]:
    """What the sources have logged of a batch, of that which its decision names."""
    plan = next((record.plan for record in read_decision(journal).chain), None)
    paths = [file.path for file in plan.files if file.path.startswith("sources/")] if plan is not None else []
    found = {path: checkpoint.store.read(path) for path in paths}
    return {path: digest_of(content) for path, content in found.items() if content is not None}


def _forgotten(checkpoint: Checkpoint, newest: int) -> list[int]:
    """A batch is decided after it was planned, so the plans were listed too early for what is planned by now."""
    newer = [batch for batch in checkpoint.log.batches() if batch > newest and checkpoint.offsets(batch) is None]
    return [batch for batch in newer if read_decision(journal_of(checkpoint, batch)[0]).is_taken]


def journal_of(checkpoint: Checkpoint, batch: int) -> tuple[Journal, str]:
    """The journal, or why it cannot be read. One that is damaged is told, and does not end the audit."""
    try:
        return checkpoint.log.journal(batch), ""
    except CheckpointError as error:
        return (), error.what


def _refuse_another_pipeline(checkpoint: Checkpoint, query: PipelineId) -> None:
    found = checkpoint.log.identity()
    if found is not None and found.pipeline != query:
        raise AnotherPipeline(
            f"The log in {checkpoint.location} belongs to query {found.pipeline}, but the checkpoint's metadata says "
            f"{query}: files of two checkpoints are mixed."
        )


@contextmanager
def checkpoint_readable(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreUnanswered) as error:
        raise CheckpointUnusable(f"The checkpoint folder {checkpoint.location} cannot be read: {error}.") from error
