"""What tests of several folders share: Spark and real servers, each started when the first test asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from semel.dev.hdfs import hdfs
from semel.dev.jars import connector_jars
from semel.dev.kafka import KafkaCluster, kafka
from semel.dev.mariadb import MariaDbServer, mariadb
from semel.dev.postgres import PostgresServer, postgres
from semel.session.local_files import HADOOPS_OWN, KEY
from semel.sinks.sql.store import Store
from tests.budget import pytest_runtest_makereport, pytest_runtest_protocol, pytest_terminal_summary
from tests.class_archive import use_class_archive
from tests.quick_spark import OPTIONS, use_quick_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# pytest finds its hooks here.
__all__ = ("pytest_runtest_makereport", "pytest_runtest_protocol", "pytest_terminal_summary")

# Before they are imported, so that their assertions tell what was there instead, as those of the tests do.
pytest.register_assert_rewrite(
    "tests.kafka_world", "tests.processes", *(f"tests.sinks.{name}_rig" for name in ("kafka", "mysql", "postgres"))
)

# A machine that is busy with other tests is slow for a second now and then, which says nothing about a test.
settings.register_profile("semel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("semel")

#: The environment variable that names a server to use in place of our own MariaDB.
MYSQL_URL = "SEMEL_TEST_MYSQL_URL"
#: Their tests take minutes each: one that comes last keeps a single process busy while the others have nothing left.
SLOW = ("e2e", "power", "verify", "cli", "audit")
#: Their tests make participants themselves.
MAKE_PARTICIPANTS = ("contract", "sinks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in SLOW)


@pytest.fixture(scope="session", autouse=True)
def quick_spark() -> None:
    use_quick_spark()


@pytest.fixture(scope="session")
def class_archive(quick_spark: None) -> None:
    """For tests that start Spark more than once."""
    use_class_archive()


@pytest.fixture(autouse=True)
def hadoop_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With this mark checkpoints are written by Hadoop's own code. See tests/quick_spark.py."""
    if not request.node.get_closest_marker("hadoop_files"):
        yield
        return
    monkeypatch.delenv(OPTIONS, raising=False)
    if "spark" not in request.fixturenames:
        yield
        return
    conf = request.getfixturevalue("spark").conf
    # What a session says counts more than what its JVM was started with.
    conf.set(KEY, HADOOPS_OWN)
    yield
    conf.unset(KEY)


@pytest.fixture(autouse=True)
def no_database_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """A participant that nobody closed would share its connections, and its locks, with those of later tests.

    Those of a query are closed with its function, which may be a little later.
    """
    before = set(Store._shared)
    yield
    if request.path.parent.name in MAKE_PARTICIPANTS:
        assert [address.rpartition("@")[2] for address, _ in set(Store._shared) - before] == []


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


@dataclass(frozen=True)
class AnotherServer:
    """One that somebody else runs: a url, and nothing that could be killed."""

    url: str


@pytest.fixture(scope="session")
def mariadb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer | AnotherServer]:
    """One MariaDB, shared: every test uses tables of its own, ends its transactions, leaves it running.

    With SEMEL_TEST_MYSQL_URL it is that server, of whichever make. Its database is called semel.
    """
    if MYSQL_URL in os.environ:
        yield AnotherServer(os.environ[MYSQL_URL])
        return
    with mariadb(tmp_path_factory.mktemp("mariadb"), say=print) as server:
        yield server
