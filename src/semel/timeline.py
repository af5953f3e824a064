"""Pictures of what happened when, as SVG: a scale, its axis, and marks with titles. Pure text, no dependency.

What is a mark, where its lane lies and which colours it has say those who draw: the demo and the report of `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

TICK_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400)
TICK_PIXELS_MIN = 72
#: Half of a label of the axis. One that would begin left of the picture begins at its tick.
LABEL_HALF = 30


@dataclass(frozen=True)
class Scale:
    """Moments to pixels between `left` and `right`. What lies before or after is shown at the edge."""

    began_s: float
    seconds: float
    left: float
    right: float

    def x(self, at_s: float) -> float:
        inside = min(max(at_s - self.began_s, 0.0), self.seconds)
        return round(self.left + (self.right - self.left) * inside / self.seconds, 1)

    def clock(self, at_s: float) -> str:
        return f"{at_s - self.began_s:,.1f} s"

    def ticks(self) -> list[int]:
        count = (self.right - self.left) / TICK_PIXELS_MIN
        step = next((s for s in TICK_STEPS_S if self.seconds / s <= count), TICK_STEPS_S[-1])
        return list(range(0, int(self.seconds) + 1, step))


def axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        x = scale.x(scale.began_s + tick)
        yield upright("grid", x, top, bottom)
        yield words("soft", x, bottom + 17, f"{tick:,} s", f' text-anchor="{"start" if x < LABEL_HALF else "middle"}"')


# Marks ----------------------------------------------------------------------------------------------------------------


def group(kind: str, title: str, *marks: str) -> str:
    """Marks that are one."""
    return f'<g class="{kind}">{_title(title)}{"".join(marks)}</g>'


def box(kind: str, x: float, y: float, width: float, height: float, *, radius: float = 0, title: str = "") -> str:
    place = f'x="{x}" y="{y}" width="{round(width, 1)}" height="{height}"'
    return f'<rect class="{kind}" {place} rx="{radius}">{_title(title)}</rect>'


def path(kind: str, drawn: str, title: str = "") -> str:
    return f'<path class="{kind}" d="{drawn}">{_title(title)}</path>'


def upright(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'


def words(kind: str, x: float, y: float, text: str, more: str = "", title: str = "") -> str:
    """`more` are attributes."""
    return f'<text class="{kind}" x="{x}" y="{y}"{more}>{escape(text)}{_title(title)}</text>'


def fault(kind: str, x: float, y: float, title: str, label: str, *marks: str, angle: int = 0) -> str:
    """A cross with its middle at this place, and its label beside it or, at an angle, above."""
    up, right = (8, 4) if angle else (-4, 8)
    place = f' transform="translate({round(x + right, 1)},{y - up}) rotate({angle})"'
    return group(kind, title, *marks, path("cross", cross(x, y)), words("label", 0, 0, label, place) if label else "")


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def cross(x: float, y: float) -> str:
    return f"M{round(x - 4, 1)},{y - 4} l8,8 m0,-8 l-8,8"


def diamond(x: float, y: float, wide: int = 5, high: int = 6) -> str:
    """So far from the middle to each side."""
    return f"M{round(x, 1)},{y - high} l{wide},{high} l-{wide},{high} l-{wide},-{high} z"
