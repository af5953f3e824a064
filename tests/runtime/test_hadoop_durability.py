"""Whether data nodes sync what is closed is asked of the data nodes of a real HDFS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from semel.dev.hdfs import hdfs
from semel.runtime import hadoop_durability
from semel.runtime.hadoop_durability import NODES_ASKED_MAX, SETTING, hadoop_durability_warning


@pytest.fixture(scope="module")
def syncing_hdfs_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with hdfs(tmp_path_factory.mktemp("syncing-hdfs"), conf={SETTING: "true"}) as uri:
        yield uri


@pytest.fixture(autouse=True)
def a_busy_machine_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hadoop_durability, "ANSWER_S_MAX", 120.0)


def test_a_cluster_that_does_not_sync_is_warned_of(spark: SparkSession, hdfs_uri: str) -> None:
    said = hadoop_durability_warning(spark, f"{hdfs_uri}/checkpoint")
    assert f"{SETTING} is false on 127.0.0.1:" in said
    assert said.startswith(f"A power cut of the cluster may lose what Spark wrote to {hdfs_uri}/checkpoint")


def test_a_mount_point_is_followed_to_the_cluster_behind_it(spark: SparkSession, hdfs_uri: str) -> None:
    setting = "fs.viewfs.mounttable.asked.link./data"
    spark.conf.set(setting, f"{hdfs_uri}/")
    try:
        said = hadoop_durability_warning(spark, "viewfs://asked/data/checkpoint")
    finally:
        spark.conf.unset(setting)
    assert f"{SETTING} is false on 127.0.0.1:" in said


def test_of_a_cluster_that_syncs_nothing_is_said(spark: SparkSession, syncing_hdfs_uri: str) -> None:
    assert hadoop_durability_warning(spark, f"{syncing_hdfs_uri}/checkpoint") == ""


def test_of_local_files_nothing_is_said(spark: SparkSession, tmp_path: Path) -> None:
    assert hadoop_durability_warning(spark, str(tmp_path)) == ""


def test_a_data_node_that_does_not_answer_is_not_taken_for_one_that_syncs(
    spark: SparkSession, syncing_hdfs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Port 9 is nobody's here, and refuses.
    monkeypatch.setattr(hadoop_durability, "_data_nodes", lambda *_: ["127.0.0.1:9"])
    said = hadoop_durability_warning(spark, f"{syncing_hdfs_uri}/checkpoint")
    assert "is not known: no answer from 127.0.0.1:9" in said


def test_silent_data_nodes_are_waited_for_together(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"127.0.0.1:{port}" for port in range(1, 9)]
    together = threading.Barrier(NODES_ASKED_MAX, timeout=60)

    def asked(_: str) -> str:
        together.wait()
        return ""

    monkeypatch.setattr(hadoop_durability, "_data_nodes", lambda *_: addresses)
    monkeypatch.setattr(hadoop_durability, "_asked", asked)
    said = hadoop_durability_warning(spark, "hdfs://somewhere/checkpoint")
    assert f"no answer from {', '.join(addresses[:NODES_ASKED_MAX])}" in said


def test_a_name_node_that_is_away_is_no_error_and_not_taken_for_a_yes(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> list[str]:
        raise OSError("Access denied for user somebody. Superuser privilege is required")

    monkeypatch.setattr(hadoop_durability, "_data_nodes", refuses)
    said = hadoop_durability_warning(spark, "hdfs://127.0.0.1:9/checkpoint")
    assert "is not known: the name node does not list its data nodes to us (Access denied" in said
