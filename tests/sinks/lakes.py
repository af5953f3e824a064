"""What the tests of Files share: a participant that has fenced, batches, and what two kinds of readers see."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Participant
from semel.sinks.files.sink import Files, committed_files
from semel.testing.harness import OURS, Rows, attempt, context, prepare_one


def started(sink: Files, incarnation: int = 1) -> Participant:
    participant = sink.participant(context(incarnation))
    participant.fence()
    return participant


def prepared(sink: Files, *tasks: Rows, batch: int = 0) -> Committable:
    return prepare_one(started(sink), sink, attempt(batch), *tasks)


def committed(sink: Files, *batches: Rows) -> None:
    participant = started(sink)
    for number, rows in enumerate(batches):
        assert participant.commit(prepare_one(participant, sink, attempt(number), rows)) is Outcome.COMMITTED


def plain_ids(lake: Path) -> list[int]:
    """What somebody sees who knows nothing of manifests."""
    found = ds.dataset(lake, format="parquet")
    return sorted(found.to_table()["id"].to_pylist()) if found.files else []


def helper_ids(lake: Path) -> list[int]:
    return [i for file in committed_files(lake) for i in pq.read_table(file)["id"].to_pylist()]


def manifest_path(lake: Path, batch: int = 0, sink: str = "files_lake") -> Path:
    return lake / "_semel" / "manifests" / OURS / sink / f"{batch:010d}.json"
