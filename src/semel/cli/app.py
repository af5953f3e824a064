"""The verbs, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from semel import __version__
from semel.cli import audit, demo, dev, model, run, verify

app = typer.Typer(
    help="Exactly-once from source to sink for PySpark Structured Streaming.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("demo")(demo.demo)
app.command("audit")(audit.audit)
app.command("verify")(verify.verify_command)
app.add_typer(dev.app, name="dev")
app.add_typer(model.app, name="model")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"semel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exactly-once from source to sink for PySpark Structured Streaming."""
