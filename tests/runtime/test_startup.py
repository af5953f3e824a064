"""The order in which sinks prepare and commit, whatever the order in which the user names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

import semel
from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.decisions.records import VERSION, encode
from semel.errors import NewerRecord, PlanChanged
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.protocol.events import Committable, Decided, Outcome
from semel.runtime.commits import Committers
from semel.runtime.fingerprint import Hashed
from semel.runtime.plans import SparkPlans
from semel.runtime.startup import start_exactly_once
from semel.runtime.task import TaskWriter
from semel.sinks.base import Participant, Remains, Sink, StagedPart, Writer, committable_for
from tests.planned import offsets, plans

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
        monkeypatch.setattr(type(sink), "check_store", lambda _self, _pipeline: None)
    coordinator = start_exactly_once(DecisionLog(MemoryStore()), plans(1), SINKS, Identity(PIPELINE, "billing"))
    # One commits after the other, so that their order can be seen.
    coordinator.__dict__["_committers"] = Committers(1, apart=False)
    try:
        assert coordinator.exactly_once(0, lambda _, __=None, ___="", ____=None: {}).how == "committed"
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
    parts = TaskWriter(SINKS, (None,) * len(SINKS), Hashed(nothing), attempt, True, "").run([], task=0, retry=0)
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


# State of a batch that is not decided ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Batch 0 is decided and over, batch 1 is planned; the tasks of batch 1 and a maintenance wrote their state."""
    for batch in range(2):
        write(tmp_path, f"offsets/{batch}", offsets(batch))
        write(tmp_path, f"state/0/0/{batch + 1}.delta", b"delta")
        write(tmp_path, f"state/0/0/{batch + 1}.snapshot", b"snapshot")
    write(tmp_path, "commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    decide(tmp_path, 0)
    return tmp_path


def write(root: Path, path: str, content: bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


def decide(root: Path, batch: int) -> None:
    log, plans = DecisionLog(FileStore(root / "semel")), SparkPlans(FileStore(root))
    log.append(Decided(Attempt(PIPELINE, batch, 0, Incarnation(1)), (), plan=plans.read(batch)))


def start(root: Path, under_way: int | None = None) -> set[str]:
    """What state there is after a start."""
    log, plans = DecisionLog(FileStore(root / "semel")), SparkPlans(FileStore(root))
    start_exactly_once(log, plans, (), Identity(PIPELINE, "billing"), under_way=under_way).close()
    return {path.name for path in (root / "state" / "0" / "0").iterdir()}


@pytest.mark.parametrize("plan", ["planned", "torn", "lost", "lost with the commit before"])
def test_state_of_an_undecided_batch_goes_whatever_became_of_its_plan(checkpoint: Path, plan: str) -> None:
    if plan == "torn":
        (checkpoint / "offsets" / "1").write_bytes(b"")
    elif plan != "planned":
        (checkpoint / "offsets" / "1").unlink()
    if "commit" in plan:
        (checkpoint / "commits" / "0").unlink()
    assert start(checkpoint) == {"1.delta", "1.snapshot"}


@pytest.mark.parametrize("plan", ["planned", "lost"])
def test_state_of_a_decided_batch_stays(checkpoint: Path, plan: str) -> None:
    decide(checkpoint, 1)
    write(checkpoint, "state/0/0/3.snapshot", b"of batch 2, whose plan and delta were lost")
    if plan == "lost":
        (checkpoint / "offsets" / "1").unlink()
    assert start(checkpoint) == {"1.delta", "1.snapshot", "2.delta", "2.snapshot"}


def test_of_a_batch_that_spark_runs_already_only_the_snapshot_goes(checkpoint: Path) -> None:
    assert start(checkpoint, under_way=1) == {"1.delta", "1.snapshot", "2.delta"}


def test_behind_a_decided_batch_that_spark_runs_already_all_state_goes(checkpoint: Path) -> None:
    decide(checkpoint, 1)
    write(checkpoint, "state/0/0/3.delta", b"of batch 2, whose plan was lost")
    assert start(checkpoint, under_way=1) == {"1.delta", "1.snapshot", "2.delta", "2.snapshot"}


def test_a_start_that_is_refused_leaves_the_state(checkpoint: Path) -> None:
    decide(checkpoint, 1)
    write(checkpoint, "offsets/1", offsets(1, end=999))
    write(checkpoint, "offsets/2", offsets(2))
    write(checkpoint, "commits/2", b"v1\n{}")
    before = {path.name for path in (checkpoint / "state" / "0" / "0").iterdir()}
    with pytest.raises(PlanChanged):
        start(checkpoint)
    assert {path.name for path in (checkpoint / "state" / "0" / "0").iterdir()} == before
