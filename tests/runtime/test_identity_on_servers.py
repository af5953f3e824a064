"""The same as in `test_identity`, where it is Kafka or PostgreSQL that holds the rows and the markers."""

from __future__ import annotations

import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import semel
from semel.errors import AnotherPipeline
from semel.sinks.base import Sink
from tests.runtime.test_identity import at, begins_at_batch_2, finish, refused
from tests.sinks.kafka_rig import Rig
from tests.sinks.postgres_rig import Database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Target(ABC):
    """A store with names of its own for this test."""

    @abstractmethod
    def sink(self, where: str, **settings: Any) -> Sink: ...

    @abstractmethod
    def ids(self, sink: Sink) -> list[int]: ...

    @abstractmethod
    def end(self) -> None: ...


class KafkaTarget(Target):
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.rig = Rig(request.getfixturevalue("kafka_cluster").bootstrap)

    def sink(self, where: str, **settings: Any) -> Sink:
        columns = ["CAST(id AS STRING) AS key", "name AS value"]
        return semel.Kafka(self.rig.servers, self.rig.topic(where), select=columns, **settings)

    def ids(self, sink: Sink) -> list[int]:
        assert isinstance(sink, semel.Kafka)
        return self.rig.visible(sink.topic)

    def end(self) -> None:
        self.rig.end()


class PostgresTarget(Target):
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.db = Database(request.getfixturevalue("postgres_server").url)

    def sink(self, where: str, **settings: Any) -> Sink:
        return self.db.sink(where, create=True, **settings)

    def ids(self, sink: Sink) -> list[int]:
        assert isinstance(sink, semel.Postgres)
        return [row[0] for row in self.db.run(f"SELECT id FROM {sink.table} ORDER BY id")]  # noqa: S608 - our own

    def end(self) -> None:
        self.db.end()


@pytest.fixture(params=[KafkaTarget, PostgresTarget])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    # The slots of workers are files in the temporary folder, and stay there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: Target = request.param(request)
    yield made
    made.end()


def test_a_second_start_with_another_checkpoint_writes_nothing_until_it_is_meant(
    stream: DataFrame, tmp_path: Path, target: Target
) -> None:
    name = f"orders_{uuid.uuid4().hex[:8]}"
    out = target.sink("out")
    finish(at(stream, tmp_path / "c1", out, name=name))
    for sink in (out, *(replace(out, name=f"renamed_{n}") for n in range(3))):
        with pytest.raises(AnotherPipeline) as caught:
            finish(at(stream, tmp_path / f"c2_{sink.name}", sink, name=name))
        assert caught.value.what.startswith(f"Sink {sink.name} holds batches that pipeline {name!r} wrote under anoth")
    assert target.ids(out) == list(range(20))
    finish(at(stream, tmp_path / "c3", replace(out, starts="again"), name=name))
    assert target.ids(out) == sorted([*range(20), *range(20)])


def test_a_renamed_target_and_an_added_sink_are_refused_until_they_are_meant(
    stream: DataFrame, tmp_path: Path, put: Callable[[int], None], target: Target
) -> None:
    out = target.sink("out", name="target")
    finish(at(stream, tmp_path / "c", out))
    put(2)
    renamed, added = target.sink("orders", name="target"), target.sink("added", name="added")
    claims = sorted((tmp_path / "c" / "semel" / "incarnations").iterdir())
    error = refused(at(stream, tmp_path / "c", renamed))
    assert error.what == begins_at_batch_2(renamed, f"under this name batch 1 went to {out.describe()}")
    error = refused(at(stream, tmp_path / "c", out, added))
    assert error.what == begins_at_batch_2(added, "batch 1 went to target only")
    assert sorted((tmp_path / "c" / "semel" / "incarnations").iterdir()) == claims
    finish(at(stream, tmp_path / "c", replace(renamed, starts="now"), replace(added, starts="now")))
    assert (target.ids(out), target.ids(renamed), target.ids(added)) == (
        list(range(20)),
        list(range(20, 30)),
        list(range(20, 30)),
    )
