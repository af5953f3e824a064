"""What a server said before it ended."""

from __future__ import annotations

import re

_SIGNS = re.compile(r"ERROR|FATAL|PANIC|Exception|Error")
# These name an error without saying which.
_EMPTY = re.compile(r"^at |Aborting$|the database system is starting up$")


def telling_line(log: str) -> str:
    """The last line that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = (line for line in reversed(lines) if _SIGNS.search(line) and not _EMPTY.search(line))
    return next(telling, lines[-1] if lines else "it said nothing")
