"""Facts in, findings and verdict out. Pure: it can be tried on facts that no pipeline would leave behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from semel.audit import findings
from semel.audit.cells import cell_of, sinks_of
from semel.audit.facts import EXACTLY_ONCE, BatchFacts, Facts
from semel.audit.journals import read_decision
from semel.audit.results import Audit, Cell, Finding, Row, batches_in_words
from semel.sinks.evidence import NOTHING_KNOWN

#: What no audit of markers can say.
LIMITS = (
    "That the rows are the right ones: markers and counts are compared, not rows. `semel verify` compares rows.",
    "That the rows are still there: whoever deletes or changes rows later does not touch the marker.",
)
KAFKA_LIMIT = (
    "How many rows a range of Kafka offsets holds: the difference is an upper bound, because ends of transactions, "
    "aborted and compacted records have offsets, too; and the query may filter, join or aggregate."
)


def compare(facts: Facts) -> Audit:
    if facts.checkpoint_error:
        why = f"Nothing was compared: {facts.checkpoint_error}."
        return Audit(facts, None, reasons=(why,), not_proven=(why, *LIMITS))
    rows = tuple(_row(facts, batch) for batch in facts.batches)
    if facts.guarantee != EXACTLY_ONCE:
        why = f"The guarantee is {facts.guarantee}: it leaves neither decisions nor markers, so nothing can be proven."
        return Audit(facts, None, rows, reasons=(why,), not_proven=(why, *LIMITS))
    found = (
        *findings.unplanned(facts),
        *findings.forgotten(facts),
        *(finding for row in rows for finding in row.findings),
        *findings.orphans(facts, rows),
    )
    reasons = tuple(_reasons(facts, rows))
    return Audit(
        facts,
        False if any(f.breaks for f in found) else None if reasons else True,
        rows,
        found,
        reasons,
        tuple(f"Batch {row.number}: {note}." for row in rows for note in row.notes),
        tuple(_proven(facts, rows, found)),
        (*reasons, *_forgotten(facts, rows), *LIMITS, *([KAFKA_LIMIT] if facts.kafka_source else [])),
    )


# One batch ----------------------------------------------------------------------------------------------------------


def _row(facts: Facts, batch: BatchFacts) -> Row:
    over, pruned = batch.number < facts.next_batch, batch.number < facts.kept_from
    decision = read_decision(() if pruned else batch.journal)
    state = "checkpointed" if over else "decided" if decision.is_taken else "planned"
    row = Row(batch.number, batch.range, state, decision)
    if facts.guarantee != EXACTLY_ONCE:
        return row
    cells = tuple(cell_of(facts, row, sink) for sink in sinks_of(facts, decision))
    found: list[Finding] = [*findings.of_journal(row), *findings.of_plan(row, batch)]
    found += findings.of_marks(facts, row, batch)
    found += findings.of_cells(row, cells) if over else [findings.in_flight(row, batch, cells)]
    untold, by_design = _why_no_decision(facts, row, batch)
    notes = tuple(_notes(row, batch, pruned=pruned))
    return replace(row, cells=cells, findings=tuple(found), notes=notes, untold=untold, by_design=by_design)


def _why_no_decision(facts: Facts, row: Row, batch: BatchFacts) -> tuple[str, bool]:
    """Why the journal of a batch says nothing, and whether that is as it should be."""
    if batch.unreadable:
        return batch.unreadable.rstrip("."), False
    if row.decision.is_taken or not row.over:
        return "", False
    if row.number < max(facts.kept_from, facts.kept_from_later):
        return "the journal is pruned, so that only markers can be seen", True
    if row.decision.begun_weaker:
        return "begun under at-most-once, so that nobody can say whether it was written", False
    return "there is no decision: it ran under a weaker guarantee, or its journal was removed", False


def _notes(row: Row, batch: BatchFacts, *, pruned: bool) -> Iterable[str]:
    if row.decision.late and row.over:
        yield "a driver that had been superseded recorded a second decision later; nobody acts on it"
    if pruned and batch.journal:
        yield "its journal was pruned, and what is there now was recorded later; nobody acts on it"
    if row.decision.mended:
        yield "it was mended: what had vanished after the decision was written again"


# What it comes to ---------------------------------------------------------------------------------------------------


def _reasons(facts: Facts, rows: Sequence[Row]) -> Iterable[str]:
    """Why this cannot be called proven, though nothing need be wrong."""
    if not any(row.over for row in rows):
        yield "Nothing was compared: no batch is over yet."
        return
    if not any(row.proven for row in rows):
        yield "No batch is proven in every sink."
    for sink in facts.sinks:
        if sink.evidence is None:
            yield f"Sink {sink.name} did not answer: {sink.error}"
        elif not _proven_cells(rows, sink.name):
            nothing = sink.evidence.why if sink.evidence.known_from == NOTHING_KNOWN else ""
            yield f"Nothing is proven of sink {sink.name}: {nothing or 'no batch that is over is proven in it'}."
    yield from _grouped([(row.untold, row.number) for row in rows if row.untold and not row.by_design])
    away = {sink.name for sink in facts.sinks if sink.evidence is None}
    for name in sorted({cell.sink for row in rows for cell in row.cells} - away):
        cells = [(row, cell) for row in rows for cell in row.cells if cell.sink == name and not cell.by_design]
        yield from _grouped([(cell.why, row.number) for row, cell in cells if cell.state == "untold"], name)


def _forgotten(facts: Facts, rows: Sequence[Row]) -> Iterable[str]:
    """What cannot be told any more, as it should be."""
    if facts.left_out:
        yield f"{facts.left_out:,} older batches that Spark still has offsets of were not looked at."
    yield from _grouped([(row.untold, row.number) for row in rows if row.untold and row.by_design])
    for sink in facts.sinks:
        cells = [(row, cell) for row in rows for cell in row.cells if cell.sink == sink.name and cell.by_design]
        yield from _grouped([(cell.why, row.number) for row, cell in cells if cell.state == "untold"], sink.name)


def _grouped(why: Iterable[tuple[str, int]], sink: str = "") -> Iterable[str]:
    """One line for each reason, with the batches that it holds for."""
    batches: dict[str, list[int]] = {}
    for reason, number in why:
        batches.setdefault(reason, []).append(number)
    for reason, numbers in batches.items():
        yield f"{batches_in_words(numbers).capitalize()}{f' in {sink}' * bool(sink)}: {reason}."


def _proven_cells(rows: Sequence[Row], sink: str) -> list[Cell]:
    """What one sink proves, whatever the others do."""
    return [
        cell
        for row in rows
        for cell in row.cells
        if (cell.sink, cell.state) == (sink, "marked")
        and (row.over and row.decision.is_taken)
        and not any(finding.breaks and finding.sink == sink for finding in row.findings)
    ]


def _proven(facts: Facts, rows: Sequence[Row], found: Sequence[Finding]) -> Iterable[str]:
    proven = [row.number for row in rows if row.proven]
    if proven:
        words = batches_in_words(proven).capitalize()
        yield f"{words}: decided once, and every sink of the decision holds the marker of every part."
    for sink in facts.sinks:
        cells = _proven_cells(rows, sink.name)
        if cells and all(cell.rows_marked is not None for cell in cells):
            rows_marked = sum(cell.rows_marked or 0 for cell in cells)
            yield f"{sink.name}: {rows_marked:,} rows in {len(cells):,} batches, as many as were decided."
    kinds = {finding.kind for finding in found}
    if proven and all(sink.evidence for sink in facts.sinks):
        if "early" not in kinds:
            yield "No sink holds a marker without a decision, of the batches whose journal is kept."
        if "orphan" not in kinds:
            yield "No sink holds anything staged or prepared of a batch that is over."
