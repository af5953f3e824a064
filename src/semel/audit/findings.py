"""What is wrong, and what is merely worth a line: each finding by its name, with its evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from semel.audit.cells import marks_of
from semel.audit.facts import BatchFacts, Facts
from semel.audit.journals import proves
from semel.audit.results import Cell, Finding, Row
from semel.ids import Branch
from semel.protocol.invariants import nothing_early, nothing_torn
from semel.sinks.evidence import UNSAID, Evidence, Mark

NAMED_MAX = 3


# Of one batch -------------------------------------------------------------------------------------------------------


def of_journal(row: Row) -> Iterable[Finding]:
    for problem in row.decision.problems:
        yield Finding("contradiction", row.number, "", f"its journal contradicts itself: {problem}")
    if row.decision.late and not row.over:
        yield Finding("contradiction", row.number, "", "its journal holds two decisions, and it is not checkpointed")
    if row.range.wrong:
        yield Finding("contradiction", row.number, "", f"Spark's offsets contradict each other: {row.range.wrong}")


def of_plan(row: Row, batch: BatchFacts) -> Iterable[Finding]:
    """What the checkpoint says against the plan that the batch was decided for.

    Sources clean their logs with time, so that of a batch that is over only what is there can be wrong.
    """
    plan = row.decision.chain[0].plan if row.decision.is_taken else None
    if plan is None or not batch.offsets:
        return
    found = {**batch.lists, f"offsets/{row.number}": batch.offsets}
    for file in plan.files:
        if found.get(file.path, file.digest) != file.digest:
            words = f"{file.path} is not as it was decided: {' '.join((file.content or file.digest).split()[-1:])}"
            yield Finding("replanned" if row.over else "forgotten", row.number, "", words)
        elif file.path not in found and not row.over:
            yield Finding("forgotten", row.number, "", f"it is decided, and there is no {file.path}")


def of_marks(facts: Facts, row: Row, batch: BatchFacts) -> Iterable[Finding]:
    """What each marker says against the decision."""
    # Where the journal is gone or cannot be read, nobody can say whether there was a decision.
    has_journal = not batch.unreadable and (row.decision.is_taken or not row.over)
    for sink in facts.sinks:
        marks = marks_of(sink, row.number)
        named = list(row.decision.everything(sink.name))
        strangers = [m for m in marks if not any(proves(m, c) for c in named)]
        if strangers and has_journal:
            (words,) = nothing_early([row.number], [])
            who = ", ".join(m.part or f"attempt {m.attempt}" for m in strangers[:NAMED_MAX])
            yield Finding("early", row.number, sink.name, f"{words}: no decision names {who}")
        yield from _duplicates(row, sink.name, marks)
        for mark in marks:
            if mark.damage:
                yield Finding("lost", row.number, sink.name, mark.damage)
            for committable in named:
                if mark.plan and committable.plan not in ("", mark.plan) and proves(mark, committable):
                    words = f"the marker of {committable.key} was written for another plan than the decision"
                    yield Finding("contradiction", row.number, sink.name, words)
                if mark.rows not in (UNSAID, committable.rows) and proves(mark, committable):
                    words = f"the marker of {committable.key} says {mark.rows} rows, the decision {committable.rows}"
                    yield Finding("contradiction", row.number, sink.name, words)


def _duplicates(row: Row, sink: str, marks: Sequence[Mark]) -> Iterable[Finding]:
    """A mend takes the place of what it mends: of all that was decided under one key, one may be visible."""
    by_key: dict[str, set[Mark]] = {}
    for committable in row.decision.everything(sink):
        by_key.setdefault(committable.key, set()).update(m for m in marks if proves(m, committable))
    for key, found in sorted(by_key.items()):
        if len(found) > 1:
            attempts = " and ".join(str(m.attempt) for m in sorted(found, key=lambda m: m.attempt))
            yield Finding("duplicated", row.number, sink, f"attempts {attempts} have both committed {key}")


def of_cells(row: Row, cells: Sequence[Cell]) -> Iterable[Finding]:
    """What is missing of a batch that is over."""
    for cell in cells:
        if cell.state == "part":
            rows = nothing_torn([(row.number, cell.rows_decided or 0, cell.rows_marked or 0)])
            words = f"{cell.marked} of {cell.decided} parts have a marker" + f": {rows[0]}" * bool(rows)
            yield Finding("torn", row.number, cell.sink, words)
        elif cell.state == "missing" and row.decision.is_taken:
            words = f"{cell.rows_decided:,} rows are decided and checkpointed, and there is no marker of them"
            yield Finding("lost", row.number, cell.sink, words)
    missing = [cell.sink for cell in cells if cell.state == "missing"]
    marked = [cell.sink for cell in cells if cell.state == "marked"]
    if missing and marked:
        words = f"it is marked in {', '.join(marked)} and not in {', '.join(missing)}"
        yield Finding("split", row.number, ", ".join(missing), words)


def in_flight(row: Row, batch: BatchFacts, cells: Sequence[Cell]) -> Finding:
    """What is known of a batch that is not over."""
    if row.decision.is_taken:
        told = [f"{c.sink} {c.marked} of {c.decided}" for c in cells if c.state in ("marked", "waiting")]
        words = f"decided in attempt {row.decision.chain[-1].attempt.attempt}; markers so far: "
        words += ", ".join(told) or "none that can be seen"
    else:
        closed = f"; {len(batch.journal)} earlier attempts at it are closed" * bool(batch.journal)
        words = f"planned, and not decided{closed}"
    return Finding("in flight", row.number, "", words)


# Of all -------------------------------------------------------------------------------------------------------------


def unplanned(facts: Facts) -> Iterable[Finding]:
    """Batches that a sink knows and the checkpoint does not. The sinks were asked first, so the checkpoint is older."""
    newest = max((batch.number for batch in facts.batches), default=facts.next_batch - 1)
    for sink in facts.sinks:
        evidence = sink.evidence or Evidence()
        seen = {*(m.batch for m in evidence.marks), *(b.attempt.batch for b in evidence.branches)}
        for batch in sorted(number for number in seen if number > newest):
            words = f"the sink knows it, and the checkpoint no batch after {newest}: the checkpoint is older"
            yield Finding("contradiction", batch, sink.name, words)


def forgotten(facts: Facts) -> Iterable[Finding]:
    for batch in facts.forgotten:
        yield Finding(
            "forgotten", batch, "", f"it is decided, and there is no offsets/{batch}: the checkpoint is older"
        )


def orphans(facts: Facts, rows: Sequence[Row]) -> Iterable[Finding]:
    """What is left of batches that are over. What is lost is told as that: here it could still be had."""
    lost = {(f.batch, f.sink) for row in rows for f in row.findings if f.kind in ("lost", "torn")}
    for sink in facts.sinks:
        left: dict[int, list[Branch]] = {}
        for branch in sink.evidence.branches if sink.evidence else ():
            if branch.attempt.batch < facts.next_batch and (branch.attempt.batch, sink.name) not in lost:
                left.setdefault(branch.attempt.batch, []).append(branch)
        for batch, branches in sorted(left.items()):
            more = f" and {len(branches) - 1} more" * (len(branches) > 1)
            yield Finding("orphan", batch, sink.name, f"{branches[0]}{more}: staged or prepared, and the batch is over")
