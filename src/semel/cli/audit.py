"""`semel audit`."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer
from rich.console import Console

from semel.audit.report import LAST, as_json, print_audit
from semel.audit.run import audit as audit_pipelines
from semel.audit.run import exit_code
from semel.cli.run import key_and_value
from semel.run.loading import split_target
from semel.run.session import SparkSettings


def audit(
    target: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A pipeline file, or one pipeline of it.")],
    master: Annotated[str, typer.Option(help="Where Spark runs; it only reads the checkpoint.")] = "local[1]",
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark setting; repeatable.")] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help=f"How many of the newest batches to list; {LAST}, with --json all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per pipeline on stdout.")] = False,
) -> None:
    """Compare what Spark planned, what was decided and what every sink has marked, and say what that proves.

    The pipeline may be running or not. Nothing is written, started or claimed.

    Exit codes: 0 verdict true, 1 false, 2 wrong input or checkpoint, 3 unknown.
    """
    settings = SparkSettings(
        master=master,
        conf=dict(key_and_value(item) for item in conf or ()),
        app=f"semel audit {split_target(target)[0].stem}",
        folder=str(split_target(target)[0].resolve().parent),
    )
    console, audits = Console(), []
    for found in audit_pipelines(target, settings):
        audits.append(found)
        if json:
            typer.echo(json_module.dumps(as_json(found, last)))
        else:
            print_audit(found, console, last or LAST)
    raise typer.Exit(exit_code(audits))
