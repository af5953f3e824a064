"""`semel demo`."""

from __future__ import annotations

import json as json_module
import random
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semel.demo.game import Settings, play
from semel.demo.screen import print_opening, print_result, screen


def demo(
    seed: Annotated[int | None, typer.Option(help="Replays a run: same orders, same kill plan.")] = None,
    kills: Annotated[int, typer.Option(min=1, max=200, help="How many times each contestant is killed.")] = 12,
    orders: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many orders are produced.")] = 6000,
    batches: Annotated[int | None, typer.Option(min=1, max=100_000, help="About how many batches they make.")] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the result.")] = Path("demo-output"),
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
    kafka: Annotated[
        bool,
        typer.Option("--kafka", help="From Kafka to Kafka, on a broker of its own, against Spark's own Kafka sink."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep databases, checkpoints and logs.")] = False,
) -> None:
    """Kill a pipeline again and again with kill -9, beside the same thing in plain Spark, and audit both.

    Exit code 0 only when nothing was lost, nothing came twice, no total is wrong, and the kills really happened.
    """
    chosen = random.SystemRandom().randrange(10**6) if seed is None else seed
    settings = Settings(chosen, kills, orders, batches or 0, output, keep, kafka)
    console = Console(stderr=json)
    print_opening(console, settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with screen(console) as shown:
        result = play(settings, shown.watch)
    if json:
        typer.echo(json_module.dumps(result.as_json()))
    else:
        print_result(console, result)
    raise typer.Exit(0 if result.ok else 1)
