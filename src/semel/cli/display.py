"""What `semel run` shows: one live line on a terminal, one plain line per event elsewhere, or JSON lines."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from semel.run.happenings import Happening, Hear

COLOURS = {"committed": "green", "forwarded": "cyan", "replayed": "yellow", "skipped": "magenta"}


class Output(Console):
    """Remembers that its reader has gone away, where rich would end the thread that prints: that commits a batch."""

    is_read = True

    def on_broken_pipe(self) -> None:
        self.quiet, self.is_read = True, False
        _to_nowhere()


@dataclass(frozen=True)
class Display:
    """What shows the happenings, and whether anybody still wants to see them."""

    hear: Hear
    is_read: Callable[[], bool] = lambda: True


@contextmanager
def display_for(*, json: bool) -> Iterator[Display]:
    """The display that suits where the output goes."""
    output = Output()
    if json:
        yield Display(_serialized(tell_json))
    elif not output.is_terminal:
        hear = _serialized(lambda happening: output.print(plain_line(happening), highlight=False, soft_wrap=True))
        yield Display(hear, lambda: output.is_read)
    else:
        line = LiveLine()
        with Live(get_renderable=line.render, console=output, refresh_per_second=4):
            yield Display(_serialized(line.hear))


def _to_nowhere() -> None:
    """What is still in the buffer of stdout would fail once more when the process ends, and change its exit code."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _serialized(hear: Hear) -> Hear:
    """Pipelines run in threads of their own; their events are told one after the other."""
    lock = threading.Lock()

    def told(happening: Happening) -> None:
        with lock:
            hear(happening)

    return told


def tell_json(happening: Happening) -> None:
    """One line, flushed at once. A reader that went away does not stop the pipelines."""
    event = asdict(happening)
    for name in ("lag", "lag_by_partition", "warning", "error"):
        # Only what there is: a pipeline without Kafka has no lag. A lag of 0 is one.
        if event[name] is None or event[name] == "":
            del event[name]
    if happening.event != "waiting":
        for name in ("waits_for", "visible_in", "since", "seconds"):
            del event[name]
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _to_nowhere()


def plain_line(happening: Happening) -> str:
    h = happening
    if h.event == "waiting":
        return f"{h.at} {h.pipeline} {_waiting(h)}"
    if h.event != "batch":
        return f"{h.at} {h.pipeline} {h.event}{f'; {h.warning}' if h.warning else ''}"
    lag = "" if h.lag is None else f", lag {h.lag}"
    warning = f"; {h.warning}" if h.warning else ""
    return f"{h.at} {h.pipeline} batch {h.batch} {h.how}, {h.rows} rows in {h.ms:.0f} ms{lag}{warning}"


def _waiting(h: Happening) -> str:
    why = f": {h.warning}" if h.warning else ""
    return (
        f"batch {h.batch} is decided, visible in {', '.join(h.visible_in) or 'no sink yet'}, "
        f"and waits for {', '.join(h.waits_for)} since {h.since} ({h.seconds:.0f} s){why}"
    )


@dataclass
class LiveLine:
    """The last that was heard of each pipeline, in one line."""

    clock: Callable[[], float] = time.monotonic
    last: dict[str, tuple[Happening, float]] = field(default_factory=dict)

    def hear(self, happening: Happening) -> None:
        self.last[happening.pipeline] = (happening, self.clock())

    def render(self) -> Text:
        if not self.last:
            return Text("starting Spark ...", style="dim")
        parts = [self._part(happening, self.clock() - heard) for happening, heard in self.last.values()]
        return Text("   ", no_wrap=True, overflow="ellipsis").join(parts)

    def _part(self, h: Happening, age_s: float) -> Text:
        text = Text.assemble((h.pipeline, "bold"), no_wrap=True, overflow="ellipsis")
        if h.event == "waiting":
            return text.append(f" {_waiting(h)}", "yellow")
        if h.event != "batch":
            return text.append(f" {h.event}", "red" if h.event == "failed" else "dim")
        per_s = h.rows / h.ms * 1000 if h.ms else 0.0
        text.append(f" batch {h.batch} ").append(h.how, COLOURS.get(h.how, ""))
        text.append(f" {h.rows} rows, {per_s:,.0f}/s")
        if h.lag is not None:
            text.append(f", lag {h.lag:,}")
        text.append(f", {age_s:.0f} s ago", "dim")
        return text.append(f" {h.warning}", "yellow") if h.warning else text
