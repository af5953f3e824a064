"""Fixtures of the kill tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.dev.database import DatabaseServer
from semel.dev.kafka import KafkaCluster
from tests.e2e.child import Setup
from tests.e2e.game import Game
from tests.e2e.kafka_game import KafkaGame
from tests.e2e.stores_game import StoresGame


@pytest.fixture(scope="session", autouse=True)
def every_test_starts_spark_again(class_archive: None) -> None:
    pass


@pytest.fixture
def make_game(tmp_path: Path) -> Iterator[Callable[..., Game]]:
    """A game with fresh input: `make_game(sink="files", shape="stateful", batches=6)`. No child outlives the test."""
    games: list[Game] = []

    def make(batches: int = 24, rows: int = 20, folder: str = "game", **setup: Any) -> Game:
        games.append(Game(Setup(str(tmp_path / folder), **setup), batches, rows).deal())
        return games[-1]

    yield make
    for game in games:
        game.end()


@pytest.fixture
def make_kafka_game(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., KafkaGame]]:
    """A game from topic to topic: `make_kafka_game(batches=6)`. The broker is the shared one unless `servers` says so.

    Whatever a test does to the shared broker, it runs again when the test has ended.
    """
    games: list[KafkaGame] = []
    shared: list[KafkaCluster] = []

    def make(batches: int = 6, servers: str = "", watched_at: str = "", **setup: Any) -> KafkaGame:
        if not servers:
            shared.append(request.getfixturevalue("kafka_cluster"))
        made = Setup(str(tmp_path / f"game-{len(games)}"), servers=servers or shared[0].bootstrap, **setup)
        games.append(KafkaGame(made, watched_at))
        return games[-1].deal(batches)

    yield make
    for game in games:
        game.end()
    for cluster in shared:
        cluster.start_all()


@pytest.fixture
def make_stores_game(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., StoresGame]]:
    """A game from a topic to a topic and a table in each database; the servers are the shared ones."""
    games: list[StoresGame] = []
    servers: dict[str, DatabaseServer] = {
        "Postgres": request.getfixturevalue("postgres_server"),
        "MySql": request.getfixturevalue("mariadb_server"),
    }
    cluster: KafkaCluster = request.getfixturevalue("kafka_cluster")

    def make(batches: int = 6, **setup: Any) -> StoresGame:
        stores = {kind: server.url for kind, server in servers.items()}
        folder = str(tmp_path / f"game-{len(games)}")
        games.append(StoresGame(Setup(folder, servers=cluster.bootstrap, stores=stores, **setup), databases=servers))
        games[-1].deal(batches)
        return games[-1]

    yield make
    for game in games:
        game.end()
    cluster.start_all()
    for server in servers.values():
        server.start()
