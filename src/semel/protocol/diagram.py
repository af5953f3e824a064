"""The protocol's diagram, drawn from the tables. `python -m semel.protocol.diagram` prints it."""

from __future__ import annotations

import sys

from semel.protocol.events import Outcome
from semel.protocol.states import ACTIONS, ANSWERS_TRIGGERED, EVENT_TRIGGERED, FINAL, State


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


if __name__ == "__main__":
    sys.stdout.write(document())
