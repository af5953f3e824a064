"""With which batch each sink begins, and whether that is meant. The rule is `protocol.refusals.refuse_beginning`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from semel.decisions.log import DecisionLog
from semel.errors import CheckpointError, PlanRestored, Refused
from semel.ids import PipelineId
from semel.protocol.events import Decided, Journal, Started
from semel.protocol.recovery import effective_committables
from semel.protocol.refusals import (
    NOW,
    Beginning,
    UnderWay,
    begins_late,
    refuse_beginning,
    refuse_overtaken,
    refuse_weaker,
)
from semel.runtime.offsets import offsets_of
from semel.runtime.plans import Plans
from semel.runtime.restore import decided_batches, first_to_run, is_replanned
from semel.sinks.base import Sink

#: Offsets of many partitions are long, and a message is read by a person.
OFFSETS_SHOWN_CHARS = 300
#: So often a checkpoint is looked at that another driver moves on meanwhile.
LOOKS_MAX = 10

_LOG = logging.getLogger("semel")

#: The sinks that had a batch, each with its target as it was described then, or "" where no record says it.
SinksThen = Mapping[str, str]


def check_beginnings(
    log: DecisionLog, plans: Plans, sinks: Sequence[Sink], pipeline: PipelineId, under_way: int | None = None
) -> None:
    """Refuse a sink that would lack what the stream brought before, unless that is meant; then say where it begins.

    Refuse also a query that another driver has overtaken while it was starting. `under_way` is the batch that it runs.

    Nothing is claimed yet and nothing is changed: a pipeline that runs goes on undisturbed. It may also forget, while
    we look, the journal that we look for: what is refused must stand in a checkpoint that has not moved meanwhile.
    """
    for tries_left in reversed(range(LOOKS_MAX)):
        next_batch = plans.next_batch()
        check_overtaken(log, plans, under_way)
        try:
            _check_at(next_batch, log, plans, sinks, pipeline)
        except Refused:
            if tries_left and plans.next_batch() != next_batch:
                continue
            raise
        return


def check_overtaken(log: DecisionLog, plans: Plans, under_way: int | None) -> None:
    """Refuse a query whose batch, `under_way`, another driver has ended. Asked again right before the claim."""
    next_batch = plans.next_batch() if under_way is not None else 0
    if under_way is None or under_way >= next_batch:
        return
    decided = decided_batches(log, next_batch)
    query = UnderWay(
        under_way,
        is_next_planned=plans.has_planned(under_way + 1),
        is_over=plans.has_planned(under_way) and plans.is_over(under_way),
        newest_decided=max(decided, default=-1),
        is_replanned=is_replanned(plans, under_way, decided.get(under_way, ())),
    )
    if refuse_overtaken(query):
        raise PlanRestored(
            f"This query runs batch {under_way}, and the checkpoint is at batch {next_batch} by now: another driver of "
            "this pipeline has gone on meanwhile.",
            data_now="this start wrote nothing, and the other driver goes on undisturbed",
            remedy="Start the query again to take the pipeline over, or leave the other driver alone.",
        )


def check_nothing_owed(log: DecisionLog, plans: Plans) -> None:
    """Refuse to begin a weaker guarantee while a decided batch may have to be committed: nobody else would do it."""
    next_batch = plans.next_batch()
    newest = max(decided_batches(log, next_batch), default=-1)
    if refuse_weaker(newest_decided=newest, next_batch=next_batch):
        raise owed(newest)


def owed(batch: int) -> CheckpointError:
    return CheckpointError(
        f"Batch {batch} was decided under exactly-once, and the checkpoint does not say that it is over: it may be "
        "visible in some sinks and not in others.",
        data_now=f"this start wrote nothing; batch {batch} is decided, and what is staged of it is kept",
        remedy="Start once with guarantee='exactly-once' and the sinks that the batch has: that commits it. Stop it "
        "when it waits for input, then change the guarantee.",
    )


def _check_at(next_batch: int, log: DecisionLog, plans: Plans, sinks: Sequence[Sink], pipeline: PipelineId) -> None:
    first = first_to_run(log, next_batch)
    batch, journal = _last_written(log, first)
    if batch == 0 or (batch > first and _owes(journal) - {sink.name for sink in sinks}):
        # Nobody can begin while a sink that is left out has a decided batch to commit: that is refused later on.
        return
    then = _sinks_then(log, journal)
    begins_here = []
    for sink in sinks:
        beginning = Beginning(batch, _followed_on(sink, then, pipeline, batch, is_over=batch == first), sink.starts)
        where = f"at batch {batch}{_behind(plans, batch)}"
        if refuse_beginning(beginning):
            raise _refused(sink, where, _why(sink, then, batch))
        if begins_late(beginning):
            begins_here.append((sink.name, sink.describe(), where))
    for told in begins_here:
        _LOG.warning("Sink %s (%s) begins %s: what the stream brought before is not in it.", *told)


def _last_written(log: DecisionLog, first: int) -> tuple[int, Journal]:
    """The first batch of which nothing is written yet, and the journal of the one before, if semel wrote that."""
    for batch in range(first, max(first - 2, -1), -1):
        journal = log.journal(batch)
        if any(isinstance(record, Decided | Started) for record in journal):
            return batch + 1, journal
    return first, ()


def _owes(journal: Journal) -> set[str]:
    """The sinks to which a batch that is decided, and not over yet, may still have to be committed."""
    return {c.sink for c in effective_committables(journal) or ()}


def _sinks_then(log: DecisionLog, journal: Journal) -> SinksThen | None:
    """The sinks of the pipeline as it was when it wrote a batch; None when semel did not write it."""
    record = next((r for r in journal if isinstance(r, Decided | Started)), None)
    if record is None:
        return None
    claimed = log.claimed(record.attempt.incarnation).get("sinks")
    if isinstance(claimed, dict):
        return claimed
    decided = effective_committables(journal)
    return None if decided is None else {c.sink: "" for c in decided}


def _followed_on(sink: Sink, then: SinksThen | None, pipeline: PipelineId, batch: int, *, is_over: bool) -> bool:
    """Whether the sink is proven to have had the batch before: by our records, else by its own markers.

    Unless that batch is over, it may have no marker yet: this start commits it. Then the marker before it says enough.
    """
    if then is not None:
        described = then.get(sink.name)
        if described is None:
            return False
        if described in ("", sink.describe()):
            return True
        if not sink.is_in(described):
            return False
    # Another address for the same table, or a log that lacks the batch: if the markers are there, the rows are.
    since = batch - 1 if is_over else batch - 2
    if since < 0:
        return True
    return any(mark.batch >= since for mark in sink.evidence(pipeline, range(since, batch)).marks)


def _behind(plans: Plans, batch: int) -> str:
    content = plans.text(offsets_of(batch - 1))
    if content is None:
        return ""
    # The version and a line about the batch come first.
    offsets = " ".join(content.decode(errors="replace").strip().split("\n")[2:])
    shown = offsets if len(offsets) <= OFFSETS_SHOWN_CHARS else f"{offsets[:OFFSETS_SHOWN_CHARS]} ..."
    return f", behind offsets {shown}" if shown else ""


def _why(sink: Sink, then: SinksThen | None, batch: int) -> str:
    if then is None:
        return f"batch {batch - 1} was not written through semel under this guarantee"
    if sink.name not in then:
        return f"batch {batch - 1} went to {', '.join(sorted(then))} only"
    return f"under this name batch {batch - 1} went to {then[sink.name]}"


def _refused(sink: Sink, where: str, why: str) -> Refused:
    return Refused(
        f"Sink {sink.name} ({sink.describe()}) would begin {where}, and lack all rows before that: {why}.",
        data_now="nothing was started and no row was written; other sinks hold what they held",
        remedy=f"If that is meant, say starts={NOW!r} on the sink. If it is a slip, name the sink and its target as "
        "before. To get the earlier rows too, see docs/how-to/change-a-pipeline.md.",
    )
