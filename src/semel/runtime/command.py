"""The command that started this program, for errors that end with what to run next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def start_again() -> str:
    """How to start the pipeline again: "start the pipeline again", and with which command where that is known.

    Options are left out: there may be a password among them.
    """
    words = _command(Path(sys.argv[0]) if sys.argv else Path(), sys.argv[1:])
    return f"start the pipeline again ({shlex.join(words)})" if words else "start the pipeline again"


def _command(program: Path, arguments: list[str]) -> list[str]:
    if program.name == "semel" or program.parts[-2:] in (("semel", "__main__.py"), ("cli", "__main__.py")):
        file = next((word for word in arguments[1:] if word.endswith(".py")), "")
        return ["semel", "run", file] if file and arguments[0] == "run" else []
    # A notebook's program is not what the user started.
    is_script = program.suffix == ".py" and program.is_file() and "site-packages" not in program.parts
    return ["python", str(program)] if is_script else []
