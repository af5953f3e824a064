"""What the terminal shows while the game runs, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from semel.demo.game import Result, Score, Settings
from semel.demo.side import Side

ROWS = ("produced", "delivered", "lost", "duplicated", "aggregates_wrong", "kills", "batches", "replayed")
BAD = {"lost", "duplicated", "aggregates_wrong"}


@dataclass
class Screen:
    """A live table on a terminal; elsewhere one line per kill."""

    console: Console
    began: float = field(default_factory=time.monotonic)
    live: Live | None = None
    told: dict[str, int] = field(default_factory=dict)

    def watch(self, sides: Sequence[Side]) -> None:
        if not sides:
            self._say_warming_up()
        elif self.live is not None:
            self.live.update(self._table(sides))
        else:
            self._tell_kills(sides)

    def _say_warming_up(self) -> None:
        words = "starting Spark once, to make the many starts to come cheaper ..."
        if self.live is not None:
            self.live.update(words)
        else:
            self.console.print(words, highlight=False)

    def _tell_kills(self, sides: Sequence[Side]) -> None:
        for side in sides:
            kills = side.story.kills
            for number in range(self.told.get(side.name, 0), len(kills)):
                self.console.print(
                    f"{kills[number].at_s:6.1f} s  {side.name}: kill {number + 1} of {len(side.kills)} "
                    f"({kills[number].label}), {side.delivered} of {side.producer.produced} orders delivered",
                    highlight=False,
                )
            self.told[side.name] = len(kills)

    def _table(self, sides: Sequence[Side]) -> Table:
        table = Table(box=None, pad_edge=False, title_justify="left", title_style="dim")
        table.title = f"{time.monotonic() - self.began:.0f} s"
        for heading in ("", "now", "kill -9", "orders produced", "delivered"):
            table.add_column(
                heading, justify="left" if heading in ("", "now") else "right", style="bold" * (not heading)
            )
        for side in sides:
            last = f" {side.story.kills[-1].label}" if side.story.kills else ""
            kills = f"{len(side.story.kills)} of {len(side.kills)}[dim]{last}[/]"
            table.add_row(side.name, side.doing, kills, str(side.producer.produced), str(side.delivered))
        return table


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    if not console.is_terminal:
        yield Screen(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield Screen(console, live=live)


def print_opening(console: Console, settings: Settings) -> None:
    console.print(f"seed {settings.seed}", highlight=False)
    console.print(
        f"{settings.orders} orders to semel and to plain Spark, each {settings.kills} times kill -9; some minutes.",
        highlight=False,
        style="dim",
    )


def print_result(console: Console, result: Result) -> None:
    table = Table(title=f"after {result.semel.kills} and {result.baseline.kills} times kill -9")
    table.add_column("")
    table.add_column("semel", justify="right")
    table.add_column("plain Spark", justify="right")
    for row in ROWS:
        table.add_row(row.replace("_", " "), _cell(result.semel, row), _cell(result.baseline, row))
    console.print(table)
    console.print(verdict_of(result), highlight=False)
    for line in result.evidence:
        console.print(f"  {line}", highlight=False)
    console.print(f"{result.seconds:.0f} s; timeline and result in {result.output}", highlight=False, soft_wrap=True)


def _cell(score: Score, row: str) -> str:
    value = getattr(score, row)
    if row not in BAD:
        return str(value)
    return f"[red]{value}[/]" if value else f"[green]{value}[/]"


def verdict_of(result: Result) -> str:
    """In words, and honest when the other side was lucky."""
    if not result.ok:
        missed = result.kills_asked - result.semel.kills
        why = f"{missed} kill(s) did not happen" if missed > 0 else "semel was not exactly-once"
        return f"FAILED: {why}. Run it again with --seed {result.seed} --keep."
    other = result.baseline
    if not (other.lost or other.duplicated or other.aggregates_wrong):
        return "semel: exactly once. Plain Spark was lucky this time: nothing lost, nothing twice."
    return f"semel: exactly once. Plain Spark: {other.duplicated} row(s) twice, {other.lost} lost."
