"""A process of its own for the contract suite: takes an order as JSON from stdin, and answers on stdout.

    fresh_process.py commit    builds the participant, commits the committables, prints the outcomes
    fresh_process.py prepare   stages rows, prepares them, prints the committables, and waits to be killed

It imports no test code: what it knows, it got through the pipe.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import pyarrow as pa

from semel.decisions.records import committable_from_json, committable_to_json
from semel.ids import Attempt, Branch, Incarnation, pipeline_id
from semel.sinks.base import Context, Participant, Sink

WAIT_S_MAX = 60


def build(order: dict[str, Any]) -> tuple[Sink, Participant]:
    pipeline, name, incarnation, marked = order["context"]
    module, name = order["sink"]
    sink: Sink = getattr(importlib.import_module(module), name)(**order["settings"])
    return sink, sink.participant(Context(pipeline_id(pipeline), name, Incarnation(incarnation), marked))


def commit(order: dict[str, Any]) -> str:
    _, participant = build(order)
    outcomes = [participant.commit(committable_from_json(c)).name for c in order["committables"]]
    participant.close()
    return json.dumps(outcomes)


def prepare(order: dict[str, Any]) -> str:
    sink, participant = build(order)
    participant.fence()
    which = Attempt(pipeline_id(order["context"][0]), order["batch"], order["attempt"], order["context"][2])
    parts = []
    for task, rows in enumerate(order["tasks"]):
        writer = sink.writer(Branch(which, sink.name, task, 0))
        writer.write(pa.RecordBatch.from_pylist(rows))
        parts.append(writer.prepare())
    return json.dumps([committable_to_json(c) for c in participant.prepare(which, parts)])


def main() -> None:
    verb, order = sys.argv[1], json.loads(sys.stdin.readline())
    answer = commit(order) if verb == "commit" else prepare(order)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
    if verb == "prepare":
        time.sleep(WAIT_S_MAX)


if __name__ == "__main__":
    main()
