"""The report as one HTML file: no script, nothing loaded from elsewhere, light or dark as the reader has it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from urllib.parse import quote

from semel.verify.anomalies import NAMES, json_key
from semel.verify.audit import Audit
from semel.verify.history import History, Sights
from semel.verify.plan import KINDS
from semel.verify.timeline import draw

HEADINGS = {
    True: "True: every row, exactly as often as it should be",
    False: "False: something is wrong",
    "unknown": "Unknown: not enough to say that all is right",
}
MEANINGS = {
    True: "Every row that was fed is in every sink as often as expected, and no reader saw anything that it should not "
    "have. What was compared, and what was not, is listed below.",
    False: "At least one property does not hold. The evidence is below: what was found, where and when.",
    "unknown": "Nothing wrong was found in what was compared, but something is missing. Unknown is not a pass.",
}
CLASSES = {True: "true", False: "false", "unknown": "unknown"}
STYLE = Path(__file__).with_name("page.css")

_SHAPES = {
    "a life of the pipeline": '<rect class="life" width="16" height="11" y="1" rx="2"/>',
    "a batch": '<rect class="batch" width="10" height="7" y="3" rx="2"/>',
    "a fault": '<g class="fault"><path d="M4,2 l8,8 m0,-8 l-8,8"/></g>',
    "a recovery": '<path class="recovery" d="M8,0 l5,6 l-5,6 l-5,-6 z"/>',
    "a note": '<path class="note" d="M8,2 v9"/>',
    "a server away": '<rect class="outage" width="16" height="11" y="1" rx="2"/>',
    "a batch first seen in a sink": '<rect class="seen" x="6" width="3" height="13"/>',
    "an anomaly": '<g class="anomaly"><path d="M8,0 l7,12 h-14 z"/></g>',
}


class Markup(str):
    """Text that is HTML already. Everything else is escaped."""

    __slots__ = ()


def page(history: History, audit: Audit, folder: Path) -> str:
    """`folder` is where the file will lie: logs are linked from there."""
    parts = [
        _verdict(history, audit),
        _numbers(history, audit),
        _section("What was found, sink by sink", _counts(history, audit)),
        _section("Timeline", Markup(draw(history, audit.seen, audit.anomalies)), _legend()),
        _evidence(history, audit),
        _faults(history),
        _claims(audit),
        _section("Play it again", _p(f"Seed {history.seed} gives the same plan of faults."), _pre(history.replay)),
        _logs(history, folder),
        _section("What the names mean", _table(("anomaly", "meaning"), [(_strong(k), v) for k, v in NAMES.items()])),
    ]
    title = escape(f"semel verify: {history.pipeline}: {str(audit.verdict).lower()}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text()}</style></head>\n<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


# Sections -------------------------------------------------------------------------------------------------------------


def _verdict(history: History, audit: Audit) -> str:
    began = datetime.fromtimestamp(history.began_s, timezone.utc)
    of = f"semel verify · pipeline {history.pipeline} · {history.guarantee} · {began:%d %B %Y, %H:%M:%S} UTC"
    strangers = [f"Rows that nobody fed: {', '.join(audit.strangers[:5])}."] if len(audit.strangers) > 1 else []
    reasons = _list([*audit.reasons, *strangers]) if audit.reasons else ""
    meaning = MEANINGS[audit.verdict]
    if audit.verdict is False and audit.reasons:
        meaning += " Besides, the run left these questions open:"
    return (
        f'<p class="brand">{escape(of)}</p><div class="verdict {CLASSES[audit.verdict]}" role="status">'
        f"<h1>{escape(HEADINGS[audit.verdict])}</h1>{_p(meaning)}{reasons}</div>"
    )


def _numbers(history: History, audit: Audit) -> str:
    numbers = {
        "rows fed": history.rows,
        "rows compared": audit.compared,
        "batches": audit.batches,
        "kills": history.kills,
        "faults": sum(history.faults.values()),
        "looks": sum(len(s.looks) for s in history.sights),
        "anomalies": sum(audit.counts.values()),
        "seconds": round(history.ended_s - history.began_s),
    }
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{n:,}</dd></div>" for name, n in numbers.items())
    return f'<dl class="numbers">{items}</dl>'


def _counts(history: History, audit: Audit) -> Markup:
    """A number where it was looked for; a dash, with the reason as its title, where it was not."""
    heads = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in ("rows", "looks", "missed"))
    heads += "".join(f'<th scope="col" class="number">{escape(json_key(kind))}</th>' for kind in NAMES)
    rows = "".join(_count_row(sights, audit) for sights in history.sights)
    return Markup(
        f'<div class="box"><table><thead><tr><th scope="col">sink</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        '</div><p class="soft">A dash: it was not looked for there. What is not proven says why.</p>'
    )


def _count_row(sights: Sights, audit: Audit) -> str:
    plain = (sum(sights.rows.values()), len(sights.looks), sights.misses)
    cells = "".join(f'<td class="number">{n:,}</td>' for n in plain)
    skipped = audit.unchecked.get(sights.sink, {})
    for kind in NAMES:
        n = audit.by_sink.get(sights.sink, {}).get(kind, 0)
        if n:
            cells += f'<td class="number bad">{n:,}</td>'
        elif kind in skipped:
            cells += f'<td class="number none" title="{escape(skipped[kind])}">&ndash;</td>'
        else:
            cells += '<td class="number good">0</td>'
    name = f'{escape(sights.sink)} <span class="soft">{escape(sights.kind)}</span>'
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _legend() -> Markup:
    items = "".join(
        f'<li><svg width="16" height="13" aria-hidden="true">{shape}</svg>{escape(words)}</li>'
        for words, shape in _SHAPES.items()
    )
    return Markup(f'<ul class="legend">{items}</ul>')


def _evidence(history: History, audit: Audit) -> str:
    if not audit.anomalies:
        return ""
    rows = [
        (_strong(a.kind), a.sink, f"{a.at_s - history.began_s:,.3f} s" if a.at_s else "at the end", a.evidence)
        for a in sorted(audit.anomalies, key=lambda a: list(NAMES).index(a.kind))
    ]
    total = sum(audit.counts.values())
    more = f"{len(rows):,} of {total:,} are shown: the first of each kind and sink." if total > len(rows) else ""
    return _section("Evidence", _table(("anomaly", "sink", "when", "evidence"), rows), _p(more) if more else "")


def _faults(history: History) -> str:
    rows = [(_strong(kind), f"{n:,}", KINDS.get(kind, "")) for kind, n in sorted(history.faults.items())]
    if not rows:
        return _section("Faults", _p("No fault was injected."))
    return _section("Faults", _table(("fault", "times", "what it is"), rows, numbers=(1,)))


def _claims(audit: Audit) -> str:
    held = _list(audit.proven) if audit.proven else _p("Nothing.")
    return (
        f'<div class="columns"><section><h2>What this run shows</h2>{held}</section>'
        f"<section><h2>What it does not</h2>{_list(audit.not_proven)}</section></div>"
    )


def _logs(history: History, folder: Path) -> str:
    if not history.logs:
        return ""
    paths = [os.path.relpath(folder / log, folder) for log in history.logs]
    items = "".join(f'<li><a href="{escape(quote(path))}">{escape(Path(path).name)}</a></li>' for path in paths)
    note = "What each life said. Logs are kept when the verdict is not true, or with --keep."
    return _section("Logs", _p(note), Markup(f'<ul class="logs">{items}</ul>'))


# Parts ----------------------------------------------------------------------------------------------------------------


def _section(heading: str, *parts: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Markup:
    def cells(kind: str, values: Sequence[str], more: str = "") -> Iterator[str]:
        for place, value in enumerate(values):
            css = ' class="number"' if place in numbers else ""
            yield f"<{kind}{more}{css}>{_text(value)}</{kind}>"

    head = "".join(cells("th", heads, ' scope="col"'))
    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return Markup(f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _text(value: str) -> str:
    return value if isinstance(value, Markup) else escape(value)


def _strong(text: str) -> Markup:
    return Markup(f"<strong>{escape(text)}</strong>")


def _p(text: str) -> Markup:
    return Markup(f"<p>{escape(text)}</p>")


def _pre(text: str) -> Markup:
    return Markup(f"<pre><code>{escape(text)}</code></pre>")


def _list(items: Iterable[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>")
