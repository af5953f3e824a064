"""What a benchmark and an engine in a process of its own say to each other: lines of JSON out, a word a line in.

The engines' processes import nothing else of ours, because each has a virtual environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

#: Words that a benchmark says. From `MARK` on, what the engine tells of itself counts; `STOP` ends it.
MARK, STOP = "mark", "stop"
#: What an engine says: its JVM or its interpreter is up, its job runs, it ended, or it broke.
SESSION, STARTED, ENDED, FAILED = "session", "started", "ended", "failed"


@dataclass(frozen=True)
class Job:
    """Rows of a topic, or how many of each key there are, into one sink or several."""

    engine: str
    servers: str
    input: str
    outputs: list[str]
    folder: str
    jars: list[str] = field(default_factory=list)
    #: What it keeps: nothing, or a count for each key.
    count: bool = False
    #: semel only: "kafka", "sqlite" or "postgres", and where the table is.
    sink: str = "kafka"
    place: str = ""
    #: "rocksdb" or "hdfs"; Flink calls the latter "hashmap".
    state: str = "hdfs"
    #: How often Flink makes a checkpoint, and Quix Streams commits.
    commit_ms: int = 1_000
    #: More of the engine's own settings.
    settings: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


def tell(event: str, **more: object) -> None:
    at = {"at": time.monotonic(), "wall_ns": time.time_ns()}
    print(json.dumps({"event": event, **at, **more}), flush=True)


def words() -> Iterator[str]:
    """What the benchmark says. It ends when the benchmark does."""
    for line in sys.stdin:
        yield line.strip()
