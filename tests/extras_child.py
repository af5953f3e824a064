"""A machine on which nothing is installed but some extras: imports of everything else fail in here.

    extras_child.py import    imports what the extra is for
    extras_child.py write     takes a pickled sink, and writes a batch through it as a task and the driver do

It gets one line of JSON: {"blocked": [...], "modules": [...], "sink": ..., "rows": [...]}.
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any


class Absent:
    """Finds nothing, and lets nobody else find it, under these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def write(order: dict[str, Any]) -> list[str]:
    import pyarrow as pa

    from semel.ids import Attempt, Incarnation, PipelineId
    from semel.runtime.fingerprint import IN_ORDER, Hashed
    from semel.runtime.task import TaskWriter
    from semel.sinks.base import Context

    sink = pickle.loads(base64.b64decode(order["sink"]))  # noqa: S301 - the test's own bytes
    batch = pa.RecordBatch.from_pylist(order["rows"])
    which = Attempt(PipelineId(order["pipeline"]), 0, 0, Incarnation(1))
    sink.check(batch.schema)
    participant = sink.participant(Context(which.pipeline, "extras", which.incarnation))
    try:
        participant.fence()
        asked = IN_ORDER if sink.capabilities.commits_by_task else ""
        parts = TaskWriter((sink,), (None,), Hashed((asked,)), which, True, "").run([batch], 0, 0)
        committables = participant.prepare(which, parts)
        return [participant.commit(c).name for c in committables]
    finally:
        participant.close()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    sys.meta_path.insert(0, Absent(order["blocked"]))
    for name in order["modules"]:
        importlib.import_module(name)
    answer = write(order) if sys.argv[1] == "write" else []
    present = sorted({name.partition(".")[0] for name in sys.modules} & set(order["blocked"]))
    sys.stdout.write(json.dumps({"answer": answer, "present": present}) + "\n")


if __name__ == "__main__":
    main()
