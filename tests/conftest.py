"""What tests of several folders share: Spark, HDFS and Kafka, each started when the first test asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from semel.dev.hdfs import hdfs
from semel.dev.jars import connector_jars
from semel.dev.kafka import KafkaCluster, kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.jars", ",".join(map(str, connector_jars(say=print))))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def hdfs_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with hdfs(tmp_path_factory.mktemp("hdfs"), say=print) as uri:
        yield uri


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One broker, shared: every test uses topics and groups of its own and leaves the broker running."""
    with kafka(tmp_path_factory.mktemp("kafka"), quick=True, say=print) as cluster:
        yield cluster
