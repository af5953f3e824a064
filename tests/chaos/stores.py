"""Kafka to Kafka and databases in one batch, under kill -9 of everything: `make chaos-stores`.

`--seed` gives the same plan of faults again.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from semel.dev.database import DatabaseServer
from semel.dev.kafka import kafka
from semel.dev.mariadb import mariadb
from semel.dev.postgres import postgres
from tests.chaos.lives import Chaos, Server
from tests.chaos.plan import plan_faults
from tests.chaos.run import Result, Say, Wanted, main, play
from tests.e2e.child import Setup
from tests.e2e.stores_game import POINTS, StoresGame

DEFAULT = Wanted(seed=0, rows=1_000_000, kills=40, rows_per_batch=8_000)


def run(folder: Path, wanted: Wanted, say: Say) -> Result:
    with ExitStack() as stack:
        cluster = stack.enter_context(kafka(folder / "kafka", quick=True, say=say))
        databases: dict[str, DatabaseServer] = {
            "Postgres": stack.enter_context(postgres(folder / "postgres", say=say)),
            "MySql": stack.enter_context(mariadb(folder / "mariadb", say=say)),
        }
        stores = {kind: server.url for kind, server in databases.items()}
        setup = Setup(
            str(folder / "game"), servers=cluster.bootstrap, rows_per_batch=wanted.rows_per_batch, stores=stores
        )
        game = StoresGame(setup, databases=databases)
        servers: dict[str, Server] = {"Kafka": cluster, **databases}
        plan = plan_faults(wanted.seed, wanted.kills, POINTS, tuple(servers))
        return play(Chaos(game, servers, say), plan, wanted, say)


if __name__ == "__main__":
    sys.exit(main("tests.chaos.stores", __doc__ or "", run, DEFAULT))
