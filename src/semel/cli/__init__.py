"""The command line: one short module per verb, no logic in them."""

from __future__ import annotations

import sys
from typing import NoReturn

from semel.errors import MissingExtra, SemelError


def main() -> None:
    """What the console script calls. An error of semel is three lines, never a traceback."""
    try:
        from semel.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _end(MissingExtra(f"The command line needs {error.name}, which is not installed.", extra="cli"), 2)
    from semel.run.runner import exit_code

    try:
        app(prog_name="semel")
    except SemelError as error:
        _end(error, exit_code(error))


def _end(error: SemelError, code: int) -> NoReturn:
    sys.stderr.write(f"{error}\n")
    sys.exit(code)
