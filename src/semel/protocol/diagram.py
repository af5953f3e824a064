"""The protocol's diagram, drawn from the tables.

python -m semel.protocol.diagram                              print it
python -m semel.protocol.diagram --write docs/protocol.md     put it between the two markers of a page
"""

from __future__ import annotations

import sys
from pathlib import Path

from semel.protocol.events import Outcome
from semel.protocol.states import ACTIONS, ANSWERS_TRIGGERED, EVENT_TRIGGERED, FINAL, State

BEGIN = "<!-- generated: begin -->\n"
END = "<!-- generated: end -->\n"


def mermaid() -> str:
    """A state diagram in Mermaid, which GitHub and most editors draw."""
    lines = ["stateDiagram-v2", "    [*] --> OPEN: nothing is decided", "    [*] --> DECIDED: found decided at start"]
    for source, moves in EVENT_TRIGGERED.items():
        for event, target in moves.items():
            if source is not target:
                lines.append(f"    {source.name} --> {target.name}: {event.__name__}")
    for outcome, target in ANSWERS_TRIGGERED:
        if outcome is not Outcome.ALREADY_COMMITTED:
            label = "all committed" if outcome is Outcome.COMMITTED else f"a sink answered {outcome.value}"
            lines.append(f"    {State.DECIDED.name} --> {target.name}: {label}")
    lines += [f"    {state.name} --> [*]" for state in State if state in FINAL and state not in EVENT_TRIGGERED]
    return "\n".join(lines)


def action_table() -> str:
    """What the coordinator does in each state, as a Markdown table."""
    rows = [f"| {state.name} | {action.value} |" for state, action in ACTIONS.items()]
    return "\n".join(["| state | what the coordinator does |", "|---|---|", *rows])


def document() -> str:
    """The generated part of docs/protocol.md."""
    return f"```mermaid\n{mermaid()}\n```\n\n{action_table()}\n"


def refreshed(page: str) -> str:
    """The page with the generated part between its markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(
            f"the page needs {BEGIN.strip()} and, after it, {END.strip()}, each on a line of its own, once"
        )
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{document()}{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    """Print the generated part, or write it into a page."""
    if not arguments:
        sys.stdout.write(document())
        return 0
    if len(arguments) != 2 or arguments[0] != "--write":
        sys.stderr.write("usage: python -m semel.protocol.diagram [--write PAGE]\n")
        return 2
    page = Path(arguments[1])
    page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
