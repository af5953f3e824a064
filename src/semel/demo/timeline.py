"""The picture of a game: one lane per side, batches as bars, kills as red marks. Pure text, no dependency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from semel.demo.side import Ended, Killed, Story

WIDTH = 1200
LEFT, RIGHT = 150, 30
HEAD = 74
LABELS = 74
ROW, ROW_GAP = 24, 8
LANE_GAP = 16
FOOT = 46
TICKS_MAX = 14
TICK_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)

# Plain rules rather than CSS variables, which not every program that shows SVG knows.
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1c2430; }
  .title { font-size: 16px; font-weight: 600; } .side { font-size: 14px; font-weight: 600; }
  .soft { fill: #667085; font-size: 11px; }
  .paper { fill: #ffffff; } .grid { stroke: #e4e7ec; } .starting { fill: #f5f7fa; } .running { fill: #e6ebf2; }
  .committed { fill: #3a9d6b; } .replayed { fill: #e39a1b; } .forwarded { fill: #2f7fd6; }
  .kill line { stroke: #d92d20; stroke-width: 1.5; } .kill path { stroke: #d92d20; stroke-width: 2; fill: none; }
  .kill text { fill: #d92d20; font-size: 11px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ee; } .soft { fill: #98a2b3; }
    .paper { fill: #12161c; } .grid { stroke: #2a313c; } .starting { fill: #181d25; } .running { fill: #262e3a; }
    .committed { fill: #46b37e; } .replayed { fill: #f0ae3c; } .forwarded { fill: #5ba3f0; }
    .kill line, .kill path { stroke: #ff6257; } .kill text { fill: #ff6257; }
  }
"""

#: How a batch ended -> what the legend says of it.
LEGEND = {"committed": "committed", "replayed": "run again", "forwarded": "found decided, committed forward"}


@dataclass(frozen=True)
class Lane:
    name: str
    caption: str
    story: Story


@dataclass(frozen=True)
class Scale:
    """Seconds of the game to pixels of the picture."""

    seconds: float

    def x(self, at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.seconds, 1)

    def ticks(self) -> list[int]:
        step = next((s for s in TICK_STEPS_S if self.seconds / s <= TICKS_MAX), TICK_STEPS_S[-1])
        return list(range(0, int(self.seconds) + 1, step))


def draw(lanes: Sequence[Lane], *, seed: int) -> str:
    """An SVG document. It follows the reader's light or dark setting."""
    scale = Scale(max((life.ended_s for lane in lanes for life in lane.story.lives), default=1.0) or 1.0)
    tops = []
    bottom = HEAD
    for lane in lanes:
        tops.append(bottom)
        bottom += lane_height(lane) + LANE_GAP
    height = bottom + FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="Timeline of the demo: batches and kills of both sides">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
        f'<text class="title" x="24" y="34">Killed again and again</text><text class="soft" x="24" y="53">'
        f"kill -9 of the whole process group; seed {seed}</text>",
        *_legend(),
        *_axis(scale, HEAD + LABELS - 12, bottom),
    ]
    for lane, top in zip(lanes, tops, strict=True):
        lines += _lane(lane, scale, top)
    return "\n".join([*lines, "</svg>", ""])


def pipelines_of(story: Story) -> list[str]:
    return sorted({batch.pipeline for batch in story.batches})


def lane_height(lane: Lane) -> int:
    rows = max(1, len(pipelines_of(lane.story)))
    return LABELS + rows * (ROW + ROW_GAP)


def _legend() -> Iterator[str]:
    x, y = 560, 30
    for how, words in LEGEND.items():
        yield f'<rect class="{how}" x="{x}" y="{y - 9}" width="14" height="10" rx="2"/>{_mark(how, x + 7, y - 12)}'
        yield f'<text class="soft" x="{x + 20}" y="{y}">{words}</text>'
        x += 48 + 6 * len(words)
    yield f'<g class="kill"><path d="{_cross(x + 5, y - 4)}"/><text x="{x + 15}" y="{y}">kill -9, and where</text></g>'
    for x, kind, words in ((560, "starting", "Spark is starting"), (712, "running", "the queries run")):
        yield f'<rect class="{kind}" x="{x}" y="{y + 11}" width="14" height="10" rx="2"/>'
        yield f'<text class="soft" x="{x + 20}" y="{y + 20}">{words}</text>'


def _axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        x = scale.x(tick)
        yield f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
        yield f'<text class="soft" x="{x}" y="{bottom + 18}" text-anchor="middle">{tick} s</text>'


def _lane(lane: Lane, scale: Scale, top: float) -> Iterator[str]:
    rows_top, rows_bottom = top + LABELS, top + lane_height(lane)
    yield f'<g class="lane" data-side={quoteattr(lane.name)}>'
    yield f'<text class="side" x="24" y="{top + LABELS - 30}">{escape(lane.name)}</text>'
    yield f'<text class="soft" x="24" y="{top + LABELS - 14}">{escape(lane.caption)}</text>'
    for life in lane.story.lives:
        started = life.started_s or life.ended_s
        yield _band("starting", scale, (life.began_s, started), rows_top - 6, rows_bottom - 2)
        yield _band("running", scale, (started, life.ended_s), rows_top - 6, rows_bottom - 2)
    for number, pipeline in enumerate(pipelines_of(lane.story)):
        y = rows_top + number * (ROW + ROW_GAP)
        yield f'<text class="soft" x="24" y="{y + 16}">{escape(pipeline)}</text>'
        yield from (_bar(b, scale, y) for b in lane.story.batches if b.pipeline == pipeline)
    yield from (_kill(kill, scale, rows_top - 6, rows_bottom - 2) for kill in lane.story.kills)
    yield "</g>"


def _band(kind: str, scale: Scale, between: tuple[float, float], top: float, bottom: float) -> str:
    began, ended = map(scale.x, between)
    return f'<rect class="{kind}" x="{began}" y="{top}" width="{max(ended - began, 0):.1f}" height="{bottom - top}"/>'


def _bar(batch: Ended, scale: Scale, y: float) -> str:
    began, ended = scale.x(batch.began_s), scale.x(batch.ended_s)
    how = batch.how if batch.how in LEGEND else "committed"
    title = f"{batch.pipeline} batch {batch.batch}: {batch.how} at {batch.ended_s:.1f} s"
    width = max(ended - began - 0.5, 2.0)
    return (
        f'<g class="batch"><title>{escape(title)}</title><rect class="{how}" x="{began}" y="{y + 4}" '
        f'width="{width:.1f}" height="{ROW - 4}" rx="1.5"/>{_mark(how, began + width / 2, y + 1)}</g>'
    )


def _mark(how: str, x: float, y: float) -> str:
    """A shape as well as a colour, for readers who do not tell the colours apart."""
    shapes = {
        "replayed": f"M{x - 4:.1f},{y - 4} h8 l-4,5 z",
        "forwarded": f"M{x:.1f},{y - 5} l4,4 l-4,4 l-4,-4 z",
    }
    return f'<path class="{how}" d="{shapes[how]}"/>' if how in shapes else ""


def _kill(kill: Killed, scale: Scale, top: float, bottom: float) -> str:
    x = scale.x(kill.at_s)
    label = "" if kill.label == "random" else kill.label
    return (
        f'<g class="kill"><title>{escape(f"kill -9 at {kill.at_s:.1f} s: {kill.label}")}</title>'
        f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/><path d="{_cross(x, top - 6)}"/>'
        f'<text transform="translate({x + 3},{top - 13}) rotate(-32)">{escape(label)}</text></g>'
    )


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f},{y - 4} l8,8 m0,-8 l-8,8"
