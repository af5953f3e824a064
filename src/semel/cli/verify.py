"""`semel verify`."""

from __future__ import annotations

import json as json_module
import random
import signal
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semel.cli.run import key_and_value
from semel.dev.servers import KINDS as SERVERS
from semel.errors import SemelError
from semel.sinks.kinds import SHIPPED
from semel.verify.audit import Audit
from semel.verify.plan import KINDS
from semel.verify.run import Result, verify
from semel.verify.settings import MASTER, Settings

EXIT_CODES = {True: 0, False: 1, "unknown": 3}
EXAMPLES = [kind.called or kind.name for kind in SHIPPED if kind.reader]
COLOURS = {True: "bold green", False: "bold red", "unknown": "bold yellow"}
WORDS = {
    True: "true: every row that went in is there, exactly as often as it should be",
    False: "false: something is wrong",
    "unknown": "unknown: nothing wrong was found, but too little was compared",
}


def verify_command(  # noqa: PLR0913, PLR0917 - one for each option
    target: Annotated[str, typer.Argument(metavar="[FILE[:NAME]]", help="A pipeline file of yours.")] = "",
    sinks: Annotated[
        str,
        typer.Option(
            help=f"Instead of a file: the built-in pipeline, into {', '.join(EXAMPLES)}, or a kind of yours; "
            "postgres:upsert names a mode."
        ),
    ] = "",
    servers: Annotated[str, typer.Option("--with", help=f"Servers to start for this run: {', '.join(SERVERS)}.")] = "",
    topics: Annotated[str, typer.Option(help="Topics to make on the Kafka that --with starts.")] = "",
    breakable: Annotated[str, typer.Option("--break", help="Servers of `semel dev` that may be killed, by name.")] = "",
    kills: Annotated[int, typer.Option(min=0, max=10_000, help="At least so many kill -9.")] = 20,
    rows: Annotated[int, typer.Option(min=0, help="At least so many rows of input.")] = 20_000,
    rows_per_batch: Annotated[int, typer.Option(min=1, help="About so many rows are fed at a time.")] = 500,
    seed: Annotated[int | None, typer.Option(help="Plays the same plan of faults again.")] = None,
    faults: Annotated[str, typer.Option(help=f"Only these kinds: {', '.join(KINDS)}.")] = "",
    identity: Annotated[str, typer.Option("--id", help="The column that tells rows apart, in every sink.")] = "",
    guarantee: Annotated[str, typer.Option(help="Of the built-in pipeline; exactly-once unless said.")] = "",
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = MASTER,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark setting; repeatable.")] = None,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder of the report.")] = Path("verify-output"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoint, data and logs of the run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Break a pipeline on purpose, again and again, while a reader watches every sink; then prove what came of it.

    Nothing is broken but what this command starts itself, and the servers named with --break. The source and the sinks
    must be empty: rows are fed, and compared one by one.

    Exit codes: 0 verdict true, 1 false, 2 wrong input, 3 unknown.
    """
    settings = Settings(
        seed=random.SystemRandom().randrange(10**6) if seed is None else seed,
        target=target,
        sinks=_names(sinks),
        servers=_names(servers),
        breakable=_names(breakable),
        topics=_names(topics),
        kills=kills,
        rows=rows,
        rows_per_batch=rows_per_batch,
        faults=_names(faults),
        identity=identity,
        guarantee=guarantee,
        master=master,
        conf=dict(key_and_value(item) for item in conf or ()),
        output=output,
        keep=keep,
    )
    _verify(settings, json=json)


def _verify(settings: Settings, *, json: bool) -> None:
    console = Console(stderr=json, highlight=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - began:5.0f} s] {text}", markup=False, soft_wrap=True)

    say(f"seed {settings.seed}: {settings.kills} kills, {settings.rows:,} rows")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # The pipeline file is read in this process, too, for its workload; what it prints is not for stdout then.
        with redirect_stdout(sys.stderr) if json else nullcontext():
            result = verify(settings, say)
    except SemelError as error:
        # Wrong input, or a server that is away: the run has not begun.
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(json_module.dumps(result.as_json()))
    else:
        print_result(console, result)
    raise typer.Exit(EXIT_CODES[result.audit.verdict])


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def print_result(console: Console, result: Result) -> None:
    audit: Audit = result.audit
    console.print(f"\nverdict {WORDS[audit.verdict]}", style=COLOURS[audit.verdict])
    found = result.as_json()
    console.print(
        f"  {found['rows']:,} rows in {found['batches']:,} batches, {found['kills']} kills, {found['faults']}"
    )
    for kind, count in audit.counts.items():
        console.print(f"  {kind:<11}{count}", style="red" if count else "")
    for text in (*audit.reasons, *(str(anomaly) for anomaly in audit.anomalies[:10])):
        console.print(f"  - {text}", markup=False, soft_wrap=True)
    console.print(f"  report   {result.report}", markup=False, soft_wrap=True)
    console.print(f"  again    {found['replay']}", markup=False, soft_wrap=True)
