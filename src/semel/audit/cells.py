"""What one sink shows of one batch. Pure."""

from __future__ import annotations

from dataclasses import replace

from semel.audit.facts import Facts, SinkFacts
from semel.audit.journals import Decision, is_marked_by_the_sink, proves
from semel.audit.results import Cell, Row
from semel.sinks.evidence import UNSAID, Mark


def sinks_of(facts: Facts, decision: Decision) -> list[SinkFacts]:
    """Those of the pipeline, and those that it had when the batch was decided."""
    known = {sink.name for sink in facts.sinks}
    former = [name for name in decision.sinks if name not in known]
    return [*facts.sinks, *(SinkFacts(name, name, error="the pipeline has no such sink any more") for name in former)]


def marks_of(sink: SinkFacts, batch: int) -> list[Mark]:
    return [mark for mark in sink.evidence.marks if mark.batch == batch] if sink.evidence else []


def cell_of(facts: Facts, row: Row, sink: SinkFacts) -> Cell:
    marks = marks_of(sink, row.number)
    seen = Cell(
        sink.name,
        marked=len(marks),
        rows_marked=None if UNSAID in {m.rows for m in marks} or not marks else sum(m.rows for m in marks),
        attempts=tuple(sorted({m.attempt for m in marks if m.attempt != UNSAID})),
        incarnations=tuple(sorted({m.incarnation for m in marks if m.incarnation != UNSAID})),
    )
    if not row.decision.is_taken:
        return _without_decision(facts, row, sink, seen)
    versions = row.decision.versions(sink.name)
    if not versions:
        return seen
    owed = [of_key for of_key in versions.values() if is_marked_by_the_sink(of_key[-1])]
    done = [of_key for of_key in owed if any(proves(m, c) for m in marks for c in of_key)]
    rows = sum(of_key[-1].rows for of_key in versions.values())
    return _told(row, sink, replace(seen, decided=len(owed), marked=len(done), rows_decided=rows))


def _told(row: Row, sink: SinkFacts, cell: Cell) -> Cell:
    if sink.evidence is None:
        return replace(cell, state="untold", why=sink.error.rstrip("."))
    if cell.marked == cell.decided:
        return replace(cell, state="marked")
    if not row.over:
        return replace(cell, state="waiting")
    if row.number < sink.evidence.known_from:
        return replace(cell, state="untold", why=sink.evidence.why, by_design=sink.evidence.forgets)
    return replace(cell, state="part" if cell.marked else "missing")


def _without_decision(facts: Facts, row: Row, sink: SinkFacts, seen: Cell) -> Cell:
    """A batch whose journal is gone. A sink that has marked batches before and after it should have marked it."""
    if sink.evidence is None:
        return replace(seen, state="untold", why=sink.error.rstrip("."))
    if not row.over:
        return seen
    if seen.marked:
        return replace(seen, state="marked")
    others = [mark.batch for mark in sink.evidence.marks]
    between = bool(others) and min(others) < row.number < max(others) and row.number >= sink.evidence.known_from
    seen_elsewhere = any(marks_of(other, row.number) for other in facts.sinks)
    return replace(seen, state="missing" if between and seen_elsewhere else "none")
