"""Kafka to Kafka under kill -9 of everything, for as long as it takes: `make chaos-kafka`.

`--seed` gives the same plan of faults again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from semel.dev.kafka import kafka
from tests.chaos.lives import Chaos
from tests.chaos.plan import plan_faults
from tests.chaos.run import Result, Say, Wanted, main, play
from tests.e2e.child import Setup
from tests.e2e.kafka_game import KafkaGame

#: A life gets through some three batches before it dies, so most rows come under fire.
DEFAULT = Wanted(seed=0, rows=300_000, kills=30, rows_per_batch=4_000)


def run(folder: Path, wanted: Wanted, say: Say) -> Result:
    with kafka(folder / "kafka", quick=True, say=say) as cluster:
        setup = Setup(str(folder / "game"), servers=cluster.bootstrap, rows_per_batch=wanted.rows_per_batch)
        chaos = Chaos(KafkaGame(setup), {"Kafka": cluster}, say)
        return play(chaos, plan_faults(wanted.seed, wanted.kills), wanted, say)


if __name__ == "__main__":
    sys.exit(main("tests.chaos.kafka", __doc__ or "", run, DEFAULT))
