"""What tests of several folders share: Spark and real servers, each started when the first test asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from semel.dev.hdfs import hdfs
from semel.dev.jars import connector_jars
from semel.dev.kafka import KafkaCluster, kafka
from semel.dev.mariadb import MariaDbServer, mariadb
from semel.dev.postgres import PostgresServer, postgres

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


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One PostgreSQL, shared: every test uses tables of its own, ends its transactions, leaves it running."""
    with postgres(tmp_path_factory.mktemp("postgres"), say=print) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer]:
    """One MariaDB, shared: every test uses tables of its own, ends its transactions, leaves it running."""
    with mariadb(tmp_path_factory.mktemp("mariadb"), say=print) as server:
        yield server
