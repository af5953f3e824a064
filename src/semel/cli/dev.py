"""`semel dev`."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semel.dev import servers
from semel.dev.servers import Status, Wish

app = typer.Typer(help="Real servers on this machine, without containers, for development.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option(file_okay=False, help="Where data and state of the servers are kept.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
PORT_HELP = (
    f"Port for clients, with one server only. At first {servers.KAFKA_PORT} (several brokers count up), "
    f"{servers.POSTGRES_PORT} or {servers.MARIADB_PORT}."
)


@app.command("up")
def up(
    server: Annotated[list[str], typer.Argument(help=f"One or more of: {', '.join(servers.KINDS)}.")],
    brokers: Annotated[int | None, typer.Option(min=1, max=5, help="How many brokers a Kafka has; at first 1.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help=PORT_HELP)] = None,
    folder: Folder = servers.FOLDER,
    json: Json = False,
) -> None:
    """Start servers that outlive this command, or start them again on the data they had. Harmless when they are up.

    Prints how to connect, with the password where there is one. Exit code 0 when all serve, 1 when one did not start,
    2 for wrong input such as a port that is taken.
    """
    print_up(servers.up(server, folder, Wish(brokers, port), progress(json)), json)


@app.command("down")
def down(
    server: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the data too.")] = False,
    folder: Folder = servers.FOLDER,
    json: Json = False,
) -> None:
    """Stop servers, and kill those that do not stop by themselves. The data stays unless --remove is given.

    Exit code 0, also when nothing was up.
    """
    stopped = servers.down(server or (), folder, progress(json), remove=remove)
    if json or not stopped:
        print_all(stopped, json)


@app.command("status")
def status(folder: Folder = servers.FOLDER, json: Json = False) -> None:
    """Show every server that was brought up here.

    Exit code 0 when all that were brought up, and not taken down since, are up; 1 when one is not, or none was.
    """
    found = servers.status(folder)
    print_all(found, json)
    raise typer.Exit(0 if servers.all_up(found) else 1)


def progress(json: bool) -> Callable[[str], None]:
    console = Console(stderr=json)
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def print_up(found: Iterable[Status], json: bool) -> None:
    """Tell each as soon as it is up: the next may fail. In JSON one server stands alone: most scripts bring up one."""
    if json:
        each = [asdict(one) for one in found]
        typer.echo(json_module.dumps(each[0] if len(each) == 1 else {"servers": each}))
        return
    for one in found:
        typer.echo(f"{one.server} {one.version} is {one.state} at {one.address}, data in {one.data}")
        if one.url:
            typer.echo(f"connect with {one.url}")


def print_all(found: Sequence[Status], json: bool) -> None:
    if json:
        typer.echo(json_module.dumps({"servers": [asdict(each) for each in found]}))
    elif not found:
        typer.echo("no server was ever brought up here: semel dev up kafka")
    else:
        for each in found:
            print_one(Console(), each)


def print_one(console: Console, one: Status) -> None:
    """In lines of their own: an address or a path is of no use with its end cut off."""
    state, style = (one.state, "bold") if one.as_wanted else (f"{one.state}, should be up", "red")
    console.print(f"{one.server} {one.version}: {state}", style=style, highlight=False)
    url = {"url": one.url} if one.url else {}
    values = {"address": one.address, **url, "data": one.data, "pids": ", ".join(map(str, one.pids))}
    for name, value in values.items():
        console.print(f"  {name:8} {value}", highlight=False, soft_wrap=True, markup=False)
