"""Real servers behind a network of ours, killed, cut and started again; and those of `semel dev`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.dev import servers as dev
from semel.errors import ConfigError
from semel.verify.servers import Server, dev_server, start_servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with start_servers(("kafka", "postgres", "mariadb"), tmp_path_factory.mktemp("servers"), print) as made:
        yield made


def _answers(server: Server) -> bool:
    """Whether a client that knows only the variables gets through."""
    (url,) = server.variables.values()
    try:
        return {"kafka": _kafka_answers, "postgres": _postgres_answers, "mariadb": _mariadb_answers}[server.name](url)
    except Exception as error:  # noqa: BLE001 - each client has errors of its own
        print(server.name, type(error).__name__)  # noqa: T201 - shown when the test fails
        return False


def _kafka_answers(servers: str) -> bool:
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    return [f"{b.host}:{b.port}" for b in client.list_topics(timeout=3).brokers.values()] == [servers]


def _postgres_answers(url: str) -> bool:
    import psycopg

    with psycopg.connect(url, connect_timeout=3) as connection:
        return connection.execute("SELECT 1").fetchall() == [(1,)]


def _mariadb_answers(url: str) -> bool:
    from urllib.parse import urlsplit

    import pymysql

    at = urlsplit(url)
    login: dict[str, Any] = {"host": at.hostname, "port": at.port, "user": at.username, "password": at.password}
    with pymysql.connect(**login, connect_timeout=3, read_timeout=3).cursor() as cursor:
        return bool(cursor.execute("SELECT 1") == 1)


@pytest.mark.parametrize("name", ["kafka", "postgres", "mariadb"])
def test_a_server_is_reached_through_its_network_alone(servers: dict[str, Server], name: str) -> None:
    server = servers[name]
    assert server.proxy is not None
    before = server.proxy.connections
    assert _answers(server)
    assert server.proxy.connections > before
    server.cut()
    assert not _answers(server)
    server.repair()
    assert _answers(server)


@pytest.mark.parametrize("name", ["kafka", "postgres", "mariadb"])
def test_a_server_that_is_killed_comes_back_at_the_same_place(servers: dict[str, Server], name: str) -> None:
    server = servers[name]
    server.kill()
    assert not _answers(server)
    server.start()
    assert _answers(server)


def test_a_slow_network_is_slow(servers: dict[str, Server]) -> None:
    server = servers["postgres"]
    server.delay(0.2)
    began = time.monotonic()
    assert _answers(server)
    assert time.monotonic() - began > 0.6
    server.repair()


def test_the_variables_are_those_that_pipelines_read_and_nothing_shows_a_password(servers: dict[str, Server]) -> None:
    names = [name for server in servers.values() for name in server.variables]
    assert names == ["SEMEL_KAFKA_SERVERS", "SEMEL_POSTGRES_URL", "SEMEL_MARIADB_URL"]
    password = servers["postgres"].url.split(":")[2].split("@")[0]
    assert len(password) > 20
    assert password not in repr(servers)


def test_an_unknown_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no server 'oracle'"), start_servers(("oracle",), tmp_path, print):
        pass


def test_a_server_of_dev_is_killed_started_and_still_found_by_dev(tmp_path: Path) -> None:
    from semel.dev.ports import free_port

    with pytest.raises(ConfigError, match="no postgres of `semel dev` that is up"):
        dev_server("postgres", print, tmp_path)
    list(dev.up(["postgres"], tmp_path, dev.Wish(port=free_port()), print))
    try:
        server = dev_server("postgres", print, tmp_path)
        assert _answers(server)
        server.kill()
        assert [status.state for status in dev.status(tmp_path)] == ["down"]
        server.start()
        assert [status.state for status in dev.status(tmp_path)] == ["up"]
        assert _answers(server)
        with pytest.raises(ConfigError, match="The network to postgres is not ours"):
            server.cut()
    finally:
        dev.down([], tmp_path, print)
    assert [status.state for status in dev.status(tmp_path)] == ["down"]
