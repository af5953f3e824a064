"""The picture of a run: lives and faults of the pipeline, servers that were away, batches as each sink showed them.

Inline SVG in two parts: the names of the lanes, which stay, and the lanes, which scroll. Every mark has a title. Marks
that would lie on each other are one mark, so that a run of thousands of batches stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from semel.timeline import Scale, axis, box, diamond, fault, group, path, upright, words
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
#: Closer to each other than that, in the lane of the pipeline or of a server, the second fault has no label.
LABEL_WIDTH, SERVER_LABEL_WIDTH = 13, 60

_POINT = re.compile(r"^(?P<kind>\S+).* at (?P<point>[a-z_]+\.[a-z_]+)")


def _scale(history: History) -> Scale:
    ends = [max(event.at_s, event.until_s) for event in history.events]
    seconds = max([history.ended_s, *ends]) - history.began_s
    faults = sum(event.kind == "fault" for event in history.events)
    width = min(max(WIDTH_MIN, FAULT_WIDTH * faults), WIDTH_MAX)
    return Scale(history.began_s, max(seconds, 1.0), MARGIN, width - MARGIN)


def draw(history: History, seen: Mapping[str, Mapping[int, float]], anomalies: Sequence[Anomaly]) -> str:
    """The picture as HTML. `seen` says per sink when each batch first showed."""
    scale = _scale(history)
    width = int(scale.right) + MARGIN
    rows = _rows_of_lives(history.events)
    first = LABELS + max(LANE, (max(rows.values(), default=0) + 1) * LIFE_ROW)
    # A server and a sink may have one name: what happened to the server is in a lane of its own.
    servers = sorted({e.lane for e in history.events} - {PIPELINE})
    names, marks, y = [], list(_pipeline(history.events, rows, scale)), first + GAP
    names.append(_name(PIPELINE, "lives, batches, faults", LABELS + 12))
    grounds, sinks_from = [], first + GAP + len(servers) * (LANE + GAP)
    for server in servers:
        names.append(_name(server, "checkpoint" if server == DISK else "server", y + 13))
        grounds.append(box("ground", 0, y, width, LANE, radius=3))
        marks += _server([e for e in history.events if e.lane == server], y, scale)
        y += LANE + GAP
    for sights in history.sights:
        names.append(_name(sights.sink, f"{sights.kind} sink", y + 13))
        grounds.append(box("ground", 0, y, width, LANE, radius=3))
        marks += _sink(_first_shown(history, sights.sink, seen), y, scale)
        marks += _recoveries(history.events, seen.get(sights.sink, {}), y, scale)
        marks += [_anomaly(a, y, scale) for a in anomalies if a.sink == sights.sink and a.at_s]
        y += LANE + GAP
    height = y + AXIS
    grid = [*grounds, *axis(scale, LABELS - 6, y), *_struck(history.events, sinks_from - GAP, y, scale)]
    return (
        f'<div class="timeline"><svg class="names" width="{NAMES_WIDTH}" height="{height}" aria-hidden="true">'
        f'{"".join(names)}</svg><div class="scroll" tabindex="0" role="region" aria-label="Timeline, scrolls sideways">'
        f'<svg width="{width}" height="{height}" role="img" aria-label="Lives of the pipeline, faults, and '
        f'batches as each sink showed them">{"".join([*grid, *marks])}</svg></div></div>'
    )


def _name(name: str, what: str, y: float) -> str:
    return words("lane", 0, y, _short(name, 24), title=name) + words("soft", 0, y + 14, what)


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
            yield _marked("recovery", event, diamond(scale.x(event.at_s), LABELS + 6), scale)
        if event.kind == "outage":
            yield _bar("outage", event, LABELS + 3, LIFE_ROW - 9, scale)
        if event.kind == "note":
            yield _marked("note", event, f"M{scale.x(event.at_s)},{LABELS - 4} v6", scale)
    yield from _faults(mine, scale, LABELS - 6, angle=-55)


def _faults(events: Iterable[Event], scale: Scale, y: float, *, angle: int = 0) -> Iterator[str]:
    """If two are close, the second has no label. In the lane of the pipeline labels are above, at an angle."""
    last, apart = -float("inf"), LABEL_WIDTH if angle else SERVER_LABEL_WIDTH
    for event in events:
        if event.kind == "fault":
            x = scale.x(event.at_s)
            label = _label(event.what) if x - last >= apart else ""
            last = x if label else last
            stem = path("stem", f"M{x},{y + 4} v{LIFE_ROW}") if angle else ""
            yield fault("fault", x, y, f"fault at {scale.clock(event.at_s)}: {event.what}", label, stem, angle=angle)


def _label(what: str) -> str:
    """What fits beside a mark: the kind of fault, or the step at which it struck."""
    match = _POINT.match(what)
    if match is None:
        return _short(what.split(" ", maxsplit=1)[0], 16)
    return _short(match["point"] if match["kind"] == "point" else f"{match['kind']} {match['point']}", 20)


# Servers and sinks ----------------------------------------------------------------------------------------------------


def _server(events: Sequence[Event], y: float, scale: Scale) -> Iterator[str]:
    for event in events:
        if event.kind == "outage":
            yield _bar("outage", event, y + 5, LANE - 10, scale)
    yield from _faults(events, scale, y + 15)


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
        title = f"{_words(items)} first seen at {scale.clock(items[0][0])}"
        yield box("seen", scale.x(items[0][0]) - 1, y + 4, TICK_WIDTH - 1, LANE - 8, title=title)


def _recoveries(events: Sequence[Event], seen: Mapping[int, float], y: float, scale: Scale) -> Iterator[str]:
    """A batch that was settled by a later life, and whether this sink had shown it by then."""
    for event in events:
        if event.kind != "recovery" or event.batch == NO_BATCH:
            continue
        at_s = seen.get(event.batch)
        when = "not seen here" if at_s is None else f"first seen here at {scale.clock(at_s)}"
        before = ", before it" if at_s is not None and at_s < event.at_s else ""
        title = f"{event.what}, at {scale.clock(event.at_s)}; {when}{before}"
        yield path("recovery", diamond(scale.x(event.at_s), y + LANE / 2), title)


def _struck(events: Sequence[Event], top: float, bottom: float, scale: Scale) -> Iterator[str]:
    """Where a fault struck, through the lanes of all sinks: what each of them did then is read off there."""
    for event in events:
        if event.kind == "fault":
            yield upright("struck", scale.x(event.at_s), top, bottom)


def _words(items: Sequence[tuple[float, str, int]]) -> str:
    numbers = [number for _, _, number in items]
    if items[0][1] == "rows":
        return f"{sum(numbers):,} rows"
    return f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {min(numbers)} to {max(numbers)}"


def _anomaly(anomaly: Anomaly, y: float, scale: Scale) -> str:
    x = scale.x(anomaly.at_s)
    title = f"{anomaly.kind} at {scale.clock(anomaly.at_s)}: {anomaly.evidence}"
    return group("anomaly", title, path("sign", f"M{x},{y - 4} l7,12 h-14 z"), path("bang", f"M{x},{y} v4 m0,1.5 v1"))


def _bar(kind: str, event: Event, y: float, height: float, scale: Scale) -> str:
    until_s = max(event.until_s, event.at_s)
    began, ended = scale.x(event.at_s), scale.x(until_s)
    title = f"{event.what}, {scale.clock(event.at_s)} to {scale.clock(until_s)}"
    return box(kind, began, y, max(ended - began, 1.5), height, radius=2, title=title)


def _marked(kind: str, event: Event, drawn: str, scale: Scale) -> str:
    return path(kind, drawn, f"{event.what}, at {scale.clock(event.at_s)}")


def _short(text: str, letters_max: int) -> str:
    return text if len(text) <= letters_max else text[: letters_max - 1] + "…"
