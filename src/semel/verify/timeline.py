"""The picture of a run: lives and faults of the pipeline, servers that were away, batches as each sink showed them.

Inline SVG in two parts: the names of the lanes, which stay, and the lanes, which scroll. Every mark has a title. Marks
that would lie on each other are one mark, so that a run of thousands of batches stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from semel.verify.anomalies import Anomaly
from semel.verify.history import NO_BATCH, Event, History

PIPELINE, DISK = "pipeline", "disk"
NAMES_WIDTH = 170
WIDTH_MIN, WIDTH_MAX = 990, 16_000
#: So much room each fault gets, that its label can be read; the picture grows with them.
FAULT_WIDTH = 20
MARGIN = 14
#: The longest label, at its angle.
LABELS = 128
LANE, GAP, LIFE_ROW = 30, 10, 16
LIFE_ROWS_MAX = 4
AXIS = 26
#: Marks of batches that are closer than that are one.
TICK_WIDTH = 3
LABEL_WIDTH = 13
TICK_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400)
TICK_PIXELS_MIN = 80

_POINT = re.compile(r"^(?P<kind>\S+).* at (?P<point>[a-z_]+\.[a-z_]+)")


@dataclass(frozen=True)
class Scale:
    """Times of day to pixels."""

    began_s: float
    seconds: float
    width: int

    @classmethod
    def of(cls, history: History) -> Scale:
        ends = [max(event.at_s, event.until_s) for event in history.events]
        seconds = max([history.ended_s, *ends]) - history.began_s
        faults = sum(event.kind == "fault" for event in history.events)
        width = min(max(WIDTH_MIN, FAULT_WIDTH * faults), WIDTH_MAX)
        return cls(history.began_s, max(seconds, 1.0), width)

    def x(self, at_s: float) -> float:
        inside = min(max(at_s - self.began_s, 0.0), self.seconds)
        return round(MARGIN + (self.width - 2 * MARGIN) * inside / self.seconds, 1)

    def clock(self, at_s: float) -> str:
        return f"{at_s - self.began_s:,.1f} s"

    def ticks(self) -> list[int]:
        count = self.width / TICK_PIXELS_MIN
        step = next((s for s in TICK_STEPS_S if self.seconds / s <= count), TICK_STEPS_S[-1])
        return list(range(0, int(self.seconds) + 1, step))


def draw(history: History, seen: Mapping[str, Mapping[int, float]], anomalies: Sequence[Anomaly]) -> str:
    """The picture as HTML. `seen` says per sink when each batch first showed."""
    scale = Scale.of(history)
    rows = _rows_of_lives(history.events)
    first = LABELS + max(LANE, (max(rows.values(), default=0) + 1) * LIFE_ROW)
    # A server and a sink may have one name: what happened to the server is in a lane of its own.
    servers = sorted({e.lane for e in history.events} - {PIPELINE})
    names, marks, y = [], list(_pipeline(history.events, rows, scale)), first + GAP
    names.append(_name(PIPELINE, "lives, batches, faults", LABELS + 12))
    grounds, sinks_from = [], first + GAP + len(servers) * (LANE + GAP)
    for server in servers:
        names.append(_name(server, "checkpoint" if server == DISK else "server", y + 13))
        grounds.append(_ground(y, scale))
        marks += _server([e for e in history.events if e.lane == server], y, scale)
        y += LANE + GAP
    for sights in history.sights:
        names.append(_name(sights.sink, f"{sights.kind} sink", y + 13))
        grounds.append(_ground(y, scale))
        marks += _sink(_first_shown(history, sights.sink, seen), y, scale)
        marks += _recoveries(history.events, seen.get(sights.sink, {}), y, scale)
        marks += [_anomaly(a, y, scale) for a in anomalies if a.sink == sights.sink and a.at_s]
        y += LANE + GAP
    height = y + AXIS
    grid = [*grounds, *_axis(scale, LABELS - 6, y), *_struck(history.events, sinks_from - GAP, y, scale)]
    return (
        f'<div class="timeline"><svg class="names" width="{NAMES_WIDTH}" height="{height}" aria-hidden="true">'
        f'{"".join(names)}</svg><div class="scroll" tabindex="0" role="region" aria-label="Timeline, scrolls sideways">'
        f'<svg width="{scale.width}" height="{height}" role="img" aria-label="Lives of the pipeline, faults, and '
        f'batches as each sink showed them">{"".join([*grid, *marks])}</svg></div></div>'
    )


def _name(name: str, what: str, y: float) -> str:
    return (
        f'<text class="lane" x="0" y="{y}">{escape(_short(name, 24))}<title>{escape(name)}</title></text>'
        f'<text class="soft" x="0" y="{y + 14}">{escape(what)}</text>'
    )


def _ground(y: float, scale: Scale) -> str:
    return f'<rect class="ground" x="0" y="{y}" width="{scale.width}" height="{LANE}" rx="3"/>'


def _axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        x = scale.x(scale.began_s + tick)
        anchor = "start" if tick == 0 else "middle"
        yield f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
        yield f'<text class="soft" x="{x}" y="{bottom + 16}" text-anchor="{anchor}">{tick:,} s</text>'


# The pipeline ---------------------------------------------------------------------------------------------------------


def _rows_of_lives(events: Sequence[Event]) -> dict[int, int]:
    """Lives may overlap, as that of a zombie does: each gets the first row that is free. By number of the event."""
    free_from: list[float] = []
    rows: dict[int, int] = {}
    for number, event in sorted(enumerate(events), key=lambda item: item[1].at_s):
        if event.kind == "life":
            row = next((r for r, until_s in enumerate(free_from) if until_s <= event.at_s), len(free_from))
            row = min(row, LIFE_ROWS_MAX - 1)
            free_from[row : row + 1] = [max(event.until_s, event.at_s)]
            rows[number] = row
    return rows


def _pipeline(events: Sequence[Event], rows: Mapping[int, int], scale: Scale) -> Iterator[str]:
    for number, row in rows.items():
        yield _bar("life", events[number], LABELS + row * LIFE_ROW, LIFE_ROW - 3, scale)
    mine = [event for event in events if event.lane == PIPELINE]
    for event in mine:
        if event.kind == "batch":
            yield _bar("batch", event, LABELS + 3, LIFE_ROW - 9, scale)
    for event in mine:
        if event.kind == "recovery":
            yield _marked("recovery", event, _diamond(scale.x(event.at_s), LABELS + 6), scale)
        if event.kind == "outage":
            yield _bar("outage", event, LABELS + 3, LIFE_ROW - 9, scale)
        if event.kind == "note":
            yield _marked("note", event, f"M{scale.x(event.at_s)},{LABELS - 4} v6", scale)
    last = -float(LABEL_WIDTH)
    for event in mine:
        if event.kind == "fault":
            x = scale.x(event.at_s)
            is_room = x - last >= LABEL_WIDTH
            last = x if is_room else last
            yield _fault(event, LABELS, scale, _label(event.what) if is_room else "")


def _label(what: str) -> str:
    """What fits beside a mark: the kind of fault, or the step at which it struck."""
    match = _POINT.match(what)
    if match is None:
        return _short(what.split(" ", maxsplit=1)[0], 16)
    return _short(match["point"] if match["kind"] == "point" else f"{match['kind']} {match['point']}", 20)


def _fault(event: Event, y: float, scale: Scale, label: str) -> str:
    x = scale.x(event.at_s)
    words = f'<text transform="translate({x + 4},{y - 14}) rotate(-55)">{escape(label)}</text>' if label else ""
    cross = f"M{x - 4},{y - 10} l8,8 m0,-8 l-8,8"
    stem = f"M{x},{y - 2} v{LIFE_ROW}"
    title = escape(f"fault at {scale.clock(event.at_s)}: {event.what}")
    return f'<g class="fault"><title>{title}</title><path class="stem" d="{stem}"/><path d="{cross}"/>{words}</g>'


# Servers and sinks ----------------------------------------------------------------------------------------------------


def _server(events: Sequence[Event], y: float, scale: Scale) -> Iterator[str]:
    for event in events:
        if event.kind == "outage":
            yield _bar("outage", event, y + 5, LANE - 10, scale)
    last = -float("inf")
    for event in events:
        if event.kind == "fault":
            x = scale.x(event.at_s)
            is_room = x - last >= 60
            last = x if is_room else last
            words = f'<text x="{x + 8}" y="{y + 19}">{escape(_label(event.what))}</text>' if is_room else ""
            title = escape(f"fault at {scale.clock(event.at_s)}: {event.what}")
            cross = f"M{x - 4},{y + 11} l8,8 m0,-8 l-8,8"
            yield f'<g class="fault"><title>{title}</title><path d="{cross}"/>{words}</g>'


def _first_shown(
    history: History, sink: str, seen: Mapping[str, Mapping[int, float]]
) -> Iterable[tuple[float, str, int]]:
    """When something new showed: batches where rows belong to one, else looks that brought rows."""
    batches = seen.get(sink, {})
    if batches:
        return sorted((at_s, "batch", batch) for batch, at_s in batches.items())
    looks = next((s.looks for s in history.sights if s.sink == sink), ())
    return [(look.ended_s, "rows", len(look.added)) for look in looks if look.added]


def _sink(shown: Iterable[tuple[float, str, int]], y: float, scale: Scale) -> Iterator[str]:
    together: dict[int, list[tuple[float, str, int]]] = {}
    for item in shown:
        together.setdefault(int(scale.x(item[0]) / TICK_WIDTH), []).append(item)
    for items in together.values():
        x = scale.x(items[0][0])
        title = f"{_words(items)} first seen at {scale.clock(items[0][0])}"
        yield (
            f'<rect class="seen" x="{x - 1}" y="{y + 4}" width="{TICK_WIDTH - 1}" height="{LANE - 8}">'
            f"<title>{escape(title)}</title></rect>"
        )


def _recoveries(events: Sequence[Event], seen: Mapping[int, float], y: float, scale: Scale) -> Iterator[str]:
    """A batch that was settled by a later life, and whether this sink had shown it by then."""
    for event in events:
        if event.kind != "recovery" or event.batch == NO_BATCH:
            continue
        at_s = seen.get(event.batch)
        when = "not seen here" if at_s is None else f"first seen here at {scale.clock(at_s)}"
        before = ", before it" if at_s is not None and at_s < event.at_s else ""
        title = escape(f"{event.what}, at {scale.clock(event.at_s)}; {when}{before}")
        path = _diamond(scale.x(event.at_s), y + LANE / 2)
        yield f'<path class="recovery" d="{path}"><title>{title}</title></path>'


def _struck(events: Sequence[Event], top: float, bottom: float, scale: Scale) -> Iterator[str]:
    """Where a fault struck, through the lanes of all sinks: what each of them did then is read off there."""
    for event in events:
        if event.kind == "fault":
            x = scale.x(event.at_s)
            yield f'<line class="struck" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'


def _words(items: Sequence[tuple[float, str, int]]) -> str:
    numbers = [number for _, _, number in items]
    if items[0][1] == "rows":
        return f"{sum(numbers):,} rows"
    return f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {min(numbers)} to {max(numbers)}"


def _anomaly(anomaly: Anomaly, y: float, scale: Scale) -> str:
    x = scale.x(anomaly.at_s)
    title = escape(f"{anomaly.kind} at {scale.clock(anomaly.at_s)}: {anomaly.evidence}")
    path = f"M{x},{y - 4} l7,12 h-14 z"
    return (
        f'<g class="anomaly"><title>{title}</title><path d="{path}"/><path class="bang" d="M{x},{y} v4 m0,1.5 v1"/></g>'
    )


# Shapes ---------------------------------------------------------------------------------------------------------------


def _bar(kind: str, event: Event, y: float, height: float, scale: Scale) -> str:
    began, ended = scale.x(event.at_s), scale.x(max(event.until_s, event.at_s))
    lasts = f"{scale.clock(event.at_s)} to {scale.clock(max(event.until_s, event.at_s))}"
    width = round(max(ended - began, 1.5), 1)
    return (
        f'<rect class="{kind}" x="{began}" y="{y}" width="{width}" height="{height}" rx="2">'
        f"<title>{escape(f'{event.what}, {lasts}')}</title></rect>"
    )


def _marked(kind: str, event: Event, path: str, scale: Scale) -> str:
    title = escape(f"{event.what}, at {scale.clock(event.at_s)}")
    return f'<path class="{kind}" d="{path}"><title>{title}</title></path>'


def _diamond(x: float, y: float) -> str:
    return f"M{x},{y - 6} l5,6 l-5,6 l-5,-6 z"


def _short(text: str, letters_max: int) -> str:
    return text if len(text) <= letters_max else text[: letters_max - 1] + "…"
