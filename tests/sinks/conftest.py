"""What the tests in this folder share: the broker of those of Kafka, with topics for each, and the folder of Files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.dev.kafka import KafkaCluster
from tests.sinks.kafka_rig import Rig


@pytest.fixture
def rig(kafka_cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # The slots of workers are files in the temporary folder, and stay there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Rig(kafka_cluster.bootstrap)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"
