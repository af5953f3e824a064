"""The order in which sinks prepare and commit, whatever the order in which the user names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import create_autospec

import pytest

import semel
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.decisions.records import VERSION, encode
from semel.errors import NewerRecord
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable, Outcome
from semel.runtime.commits import Committers
from semel.runtime.startup import start_exactly_once
from semel.runtime.task import TaskWriter
from semel.sinks.base import Participant, Remains, Sink, StagedPart, Writer, committable_for
from tests.planned import plans

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
#: Kafka first, as in the example of docs/how-to/several-sinks.md.
SINKS: tuple[Sink, ...] = (
    semel.Kafka("127.0.0.1:1", "billed"),
    semel.Postgres("host=nowhere", "orders"),
    semel.MySql("mysql://u@nowhere/shop", "orders"),
)
KAFKA, *DATABASES = (sink.name for sink in SINKS)


def test_kafka_prepares_last_and_commits_first_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for sink in SINKS:
        monkeypatch.setattr(type(sink), "participant", lambda self, _: noting(Participant, self.name, asked))
    coordinator = start_exactly_once(DecisionLog(MemoryStore()), plans(1), SINKS, Identity(PIPELINE, "billing"))
    # One commits after the other, so that their order can be seen.
    coordinator.__dict__["_committers"] = Committers(1, apart=False)
    try:
        assert coordinator.exactly_once(0, lambda _, __=None, ___="": {}).how == "committed"
    finally:
        coordinator.close()
    prepares = [f"prepare {name}" for name in (*DATABASES, KAFKA)]
    assert asked == [*prepares, f"commit {KAFKA}", *(f"commit {name}" for name in reversed(DATABASES))]


def test_a_start_under_a_newer_semel_that_has_decided_nothing_yet_is_refused_before_it_would_fence_it() -> None:
    store = MemoryStore()
    log = DecisionLog(store)
    log.create_identity(Identity(PIPELINE, "billing"))
    assert log.claim() == 1
    newer = {"version": VERSION + 1, "incarnation": 2, "claimed": "in another way"}
    store.create("incarnations/0000000002.json", encode(newer))
    with pytest.raises(NewerRecord, match=f"incarnations/0000000002.json has version {VERSION + 1}"):
        start_exactly_once(log, plans(1), SINKS, Identity(PIPELINE, "billing"))
    assert log.newest_claim() == 2


def test_in_a_task_too_kafka_prepares_last_and_parts_come_in_the_order_of_the_sinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for sink in SINKS:
        monkeypatch.setattr(type(sink), "writer", lambda self, _, durable, plan: noting(Writer, self.name, asked))  # noqa: ARG005
    nothing = ("",) * len(SINKS)
    attempt = Attempt(PIPELINE, 0, 0, Incarnation(1))
    parts = TaskWriter(SINKS, (None,) * len(SINKS), nothing, attempt, True, "").run([], task=0, retry=0)
    assert asked == [f"prepare {name}" for name in (*DATABASES, KAFKA)]
    assert [part.branch.sink for part in parts] == [KAFKA, *DATABASES]


def noting(kind: type[Any], sink: str, asked: list[str]) -> Any:
    """A participant or a writer that does nothing, and notes when it is asked to."""
    double = create_autospec(kind, instance=True)
    double.recover = Remains

    def prepare(attempt: Attempt | None = None, parts: Sequence[StagedPart] = ()) -> Any:
        asked.append(f"prepare {sink}")
        if attempt is not None:
            return (committable_for(sink, attempt, parts, {}),)
        return StagedPart(Branch(Attempt(PIPELINE, 0, 0, Incarnation(1)), sink, 0, 0), 0)

    def commit(_: Committable) -> Outcome:
        asked.append(f"commit {sink}")
        return Outcome.COMMITTED

    double.prepare, double.commit = prepare, commit
    return double
