"""Pictures of figures, as SVG without scripts, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log10

from semel.timeline import box, upright, words

WIDTH, LEFT, RIGHT, TOP = 760, 150, 90, 54
BAR, GAP, GROUP_GAP = 13, 3, 14
#: Of Okabe and Ito: also those who do not tell red from green tell these apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 15px }
.soft { fill: #57606a; font-size: 12px } .grid { stroke: #d0d7de } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 } .grid { stroke: #3d444d } .page { fill: #0d1117 }
}
"""


@dataclass(frozen=True)
class Bars:
    """`groups`: a name -> one figure for each of `series`. A figure that is missing is None."""

    title: str
    series: Sequence[str]
    groups: Mapping[str, Sequence[float | None]]


def bars(shown: Bars) -> str:
    """Groups below one another, a bar for each series, its figure beside it. The scale begins at 0."""
    most = max((f for figures in shown.groups.values() for f in figures if f is not None), default=1.0)
    step = _step(most)
    end = ceil(most / step) * step
    per_group = len(shown.series) * (BAR + GAP) + GROUP_GAP
    bottom = TOP + per_group * len(shown.groups)
    marks = [words("title", 12, 22, shown.title), *_legend(shown.series)]
    for tick in range(round(end / step) + 1):
        x = _x(tick * step, end)
        marks += [upright("grid", x, TOP - 4, bottom), words("soft", x, bottom + 16, _text(tick * step), _MIDDLE)]
    for row, (name, figures) in enumerate(shown.groups.items()):
        top = TOP + row * per_group + GROUP_GAP / 2
        marks += [words("", LEFT - 10, top + (per_group - GROUP_GAP) / 2 + 4, name, _END), *_group(figures, top, end)]
    return _page(marks, bottom + 28)


_MIDDLE, _END = ' text-anchor="middle"', ' text-anchor="end"'


def _group(figures: Sequence[float | None], top: float, end: float) -> list[str]:
    marks = []
    for number, figure in enumerate(figures):
        y = top + number * (BAR + GAP)
        if figure is None:
            marks.append(words("soft", LEFT + 6, y + BAR - 2, "not measured"))
            continue
        width = _x(figure, end) - LEFT
        marks.append(box(f"s{number}", LEFT, y, max(width, 1), BAR, radius=2, title=_text(figure)))
        marks.append(words("soft", LEFT + width + 6, y + BAR - 2, _text(figure)))
    return marks


def _legend(series: Sequence[str]) -> list[str]:
    marks = []
    x = LEFT
    for number, name in enumerate(series):
        marks += [box(f"s{number}", x, 33, 10, 10, radius=2), words("soft", x + 15, 42, name)]
        x += 15 + 8 * len(name) + 24
    return marks


def _page(marks: Sequence[str], height: float) -> str:
    colours = " ".join(f".s{number} {{ fill: {colour} }}" for number, colour in enumerate(COLOURS))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {round(height)}" role="img">'
    back = f'<rect class="page" width="{WIDTH}" height="{round(height)}"/>'
    return "\n".join([head, f"<style>{STYLE}{colours}</style>", back, *marks, "</svg>", ""])


def _x(figure: float, end: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * figure / end, 1)


def _step(most: float) -> float:
    """Between four and ten of them: 1, 2 or 5 times a power of ten."""
    rough = (most or 1.0) / 5
    power = 10.0 ** int(log10(rough) // 1)
    return next((power * n for n in (1, 2, 5) if power * n >= rough), power * 10)


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 or float(figure).is_integer() else f"{figure:,.1f}"
