"""The picture of a game: one lane per side, batches as bars, kills as red marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from semel.demo.side import Ended, Killed, Story
from semel.timeline import Scale, axis, box, cross, diamond, fault, group, path, upright, words

WIDTH = 1200
LEFT, RIGHT = 150, 30
HEAD = 74
LABELS = 74
ROW, ROW_GAP = 24, 8
LANE_GAP = 16
FOOT = 46

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


def scale_of(seconds: float) -> Scale:
    return Scale(0.0, seconds, LEFT, WIDTH - RIGHT)


def draw(lanes: Sequence[Lane], *, seed: int) -> str:
    """An SVG document. It follows the reader's light or dark setting."""
    scale = scale_of(max((life.ended_s for lane in lanes for life in lane.story.lives), default=1.0) or 1.0)
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
        box("paper", 0, 0, WIDTH, height, radius=8),
        words("title", 24, 34, "Killed again and again"),
        words("soft", 24, 53, f"kill -9 of the whole process group; seed {seed}"),
        *_legend(),
        *axis(scale, HEAD + LABELS - 12, bottom),
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
    for how, meaning in LEGEND.items():
        yield box(how, x, y - 9, 14, 10, radius=2) + _mark(how, x + 7, y - 12)
        yield words("soft", x + 20, y, meaning)
        x += 48 + 6 * len(meaning)
    yield group("kill", "", path("cross", cross(x + 5, y - 4)), words("label", x + 15, y, "kill -9, and where"))
    for x, kind, meaning in ((560, "starting", "Spark is starting"), (712, "running", "the queries run")):
        yield box(kind, x, y + 11, 14, 10, radius=2)
        yield words("soft", x + 20, y + 20, meaning)


def _lane(lane: Lane, scale: Scale, top: float) -> Iterator[str]:
    rows_top, rows_bottom = top + LABELS, top + lane_height(lane)
    yield f'<g class="lane" data-side="{escape(lane.name)}">'
    yield words("side", 24, top + LABELS - 30, lane.name)
    yield words("soft", 24, top + LABELS - 14, lane.caption)
    for life in lane.story.lives:
        began, started, ended = map(scale.x, (life.began_s, life.started_s or life.ended_s, life.ended_s))
        yield box("starting", began, rows_top - 6, started - began, rows_bottom - rows_top + 4)
        yield box("running", started, rows_top - 6, ended - started, rows_bottom - rows_top + 4)
    for number, pipeline in enumerate(pipelines_of(lane.story)):
        y = rows_top + number * (ROW + ROW_GAP)
        yield words("soft", 24, y + 16, pipeline)
        yield from (_bar(b, scale, y) for b in lane.story.batches if b.pipeline == pipeline)
    yield from (_kill(kill, scale, rows_top - 6, rows_bottom - 2) for kill in lane.story.kills)
    yield "</g>"


def _bar(batch: Ended, scale: Scale, y: float) -> str:
    began, ended = scale.x(batch.began_s), scale.x(batch.ended_s)
    how = batch.how if batch.how in LEGEND else "committed"
    title = f"{batch.pipeline} batch {batch.batch}: {batch.how} at {scale.clock(batch.ended_s)}"
    width = max(ended - began - 0.5, 2.0)
    bar = box(how, began, y + 4, width, ROW - 4, radius=1.5)
    return group("batch", title, bar, _mark(how, began + width / 2, y + 1))


def _mark(how: str, x: float, y: float) -> str:
    """A shape as well as a colour, for readers who do not tell the colours apart."""
    shapes = {"replayed": f"M{x - 4:.1f},{y - 4} h8 l-4,5 z", "forwarded": diamond(x, y - 1, 4, 4)}
    return path(how, shapes[how]) if how in shapes else ""


def _kill(kill: Killed, scale: Scale, top: float, bottom: float) -> str:
    x, title = scale.x(kill.at_s), f"kill -9 at {scale.clock(kill.at_s)}: {kill.label}"
    label = "" if kill.label == "random" else kill.label
    return fault("kill", x, top - 6, title, label, upright("stem", x, top, bottom), angle=-32)
