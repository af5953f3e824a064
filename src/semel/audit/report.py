"""An audit as one JSON object, and as lines for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from semel.audit.results import Audit, Cell, Row

COLOURS = {True: "green", False: "red", None: "yellow"}
LAST = 20


# JSON ---------------------------------------------------------------------------------------------------------------


def as_json(audit: Audit, last: int | None = None) -> dict[str, Any]:
    """Everything. `last` limits the list of batches, not what was compared."""
    facts, rows = audit.facts, audit.rows if last is None else audit.rows[-last:]
    return {
        "verdict": "unknown" if audit.verdict is None else audit.verdict,
        "pipeline": facts.pipeline,
        "guarantee": facts.guarantee,
        "checkpoint": facts.checkpoint,
        "query": facts.query,
        "incarnation": facts.incarnation,
        "compared": len(audit.rows),
        "batches": [_row_as_json(row) for row in rows],
        "sinks": [{"name": s.name, "target": s.target, "error": s.error} for s in facts.sinks],
        "findings": [
            {"kind": f.kind, "batch": f.batch, "sink": f.sink, "evidence": f.evidence, "breaks": f.breaks}
            for f in audit.findings
        ],
        "proven": list(audit.proven),
        "not_proven": list(audit.not_proven),
        "reasons": list(audit.reasons),
        "notes": list(audit.notes),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    decision = row.decision
    return {
        "batch": row.number,
        "state": row.state,
        "proven": row.proven,
        "rows_in_source_max": row.range.rows_max,
        "files_in_source": row.range.files,
        "decided": decision.is_taken,
        "attempt": decision.chain[-1].attempt.attempt if decision.chain else None,
        "incarnation": decision.chain[-1].attempt.incarnation if decision.chain else None,
        "mended": decision.mended,
        "checkpointed": row.over,
        "sinks": {cell.sink: _cell_as_json(cell) for cell in row.cells},
        "not_proven": row.untold,
    }


def _cell_as_json(cell: Cell) -> dict[str, Any]:
    return {
        "state": cell.state,
        "committables": cell.decided,
        "marked": cell.marked,
        "rows_decided": cell.rows_decided,
        "rows_marked": cell.rows_marked,
        "attempts": list(cell.attempts),
        "incarnations": list(cell.incarnations),
        "why": cell.why,
    }


# Lines --------------------------------------------------------------------------------------------------------------


def print_audit(audit: Audit, console: Console, last: int = LAST) -> None:
    """The newest batches last, then findings, then what is proven and what is not; the verdict is the last line."""
    facts = audit.facts
    known = facts.guarantee, f"checkpoint {facts.checkpoint}" if facts.checkpoint else ""
    say(console, ", ".join([f"pipeline {facts.pipeline}", *filter(None, known)]))
    if facts.incarnation:
        say(console, f"incarnation {facts.incarnation}: {facts.holder}")
    if audit.rows:
        console.print(_table(audit, last))
    harmful_first = sorted(audit.findings, key=lambda finding: not finding.breaks)
    _section(console, "findings", [_finding_line(f.kind, f.batch, f.sink, f.evidence) for f in harmful_first])
    _section(console, "notes", audit.notes)
    _section(console, "proven", audit.proven)
    _section(console, "not proven", audit.not_proven)
    proven = sum(row.proven for row in audit.rows)
    console.print(
        Text.assemble(
            ("verdict ", "bold"),
            (audit.word, f"bold {COLOURS[audit.verdict]}"),
            f": {proven} of {len(audit.rows)} batches proven in every sink",
        ),
        soft_wrap=True,
    )


def _table(audit: Audit, last: int) -> Table:
    rows = audit.rows[-last:]
    names = list(dict.fromkeys(cell.sink for row in rows for cell in row.cells))
    left_out = len(audit.rows) - len(rows)
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="dim")
    if left_out:
        table.title = f"{left_out} older batches are compared and not listed; --last lists more"
    for heading in ("batch", "source", "decided", *names, "checkpointed"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = {cell.sink: cell_text(cell) for cell in row.cells}
        table.add_row(
            str(row.number),
            str(row.range),
            decided_text(row),
            *(cells.get(name, Text()) for name in names),
            "yes" if row.over else "in flight",
        )
    return table


def decided_text(row: Row) -> str:
    if not row.decision.is_taken:
        return "not told" if row.untold else "no" if not row.over else "-"
    mended = ", mended" if row.decision.mended else ""
    return f"attempt {row.decision.chain[-1].attempt.attempt}{mended}"


def cell_text(cell: Cell) -> Text:
    """What a sink shows of a batch, in a few words."""
    rows = "" if cell.rows_marked is None else f"{cell.rows_marked:,} rows"
    parts = f"{cell.marked} of {cell.decided}"
    words = {
        "marked": (rows or "marked", ""),
        "missing": ("no marker", "red"),
        "part": (f"{parts} marked", "red"),
        "waiting": (f"{parts} so far", "cyan"),
        "untold": ("not told", "yellow"),
        "none": (rows, ""),
    }
    return Text(*words[cell.state])


def _finding_line(kind: str, batch: int, sink: str, evidence: str) -> str:
    return f"{kind}: batch {batch}{f' in {sink}' * bool(sink)}: {evidence}"


def _section(console: Console, title: str, lines: list[str] | tuple[str, ...]) -> None:
    if lines:
        console.print(Text(title, "bold"))
        for line in lines:
            say(console, f"  {line}")


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
