"""kill -9 at every arrow of the protocol, Kafka to Kafka, with a read_committed reader running all the time.

One pipeline lives through all kills in a row, so that each life both recovers from the last kill and runs into the
next. In every build the chain of several stores, in `test_stores_kills.py`, passes the same points.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.kafka_game import KafkaGame, forwarded
from tests.e2e.kafka_points import IN_A_TASK, POINTS, nth
from tests.e2e.ways import died_as_it_should, way

# The points of a start are more telling after a kill that leaves something to recover: transactions that nobody has
# decided, or a decision that nobody has committed.
ORDER = (
    "batch.began",
    "task.wrote",
    "kafka.marked",
    "task.prepared",
    "batch.staged",
    "startup.claimed",
    "startup.closed",
    "batch.prepared",
    "startup.swept",
    "log.written",
    "batch.decided",
    "startup.committed",
    "kafka.committed",
    "batch.committed",
)
#: Two workers a life, each with a few ids, and those of a life before it whose workers have not noticed its end yet.
IDS_MAX = 12
#: Whoever dies here leaves a decided batch, which the next one that gets so far commits without writing it again.
DECIDED = ("batch.decided", "kafka.committed", "batch.committed")


@pytest.mark.long
def test_kill_at_every_failpoint(make_kafka_game: Callable[..., KafkaGame]) -> None:
    game = make_kafka_game(batches=2 * len(ORDER))
    left_decided: list[str] = []
    for turn, point in enumerate(ORDER):
        life = game.live(f"{point}@{nth(point, turn)}", **way(turn))
        assert died_as_it_should(life, turn, in_a_task=point in IN_A_TASK), f"{point}: {life}"
        if not point.startswith("startup."):
            staged = [staged for _, staged in forwarded(life)]
            assert staged == [False] * len(left_decided), f"{point} after {left_decided}"
            left_decided = [point] if point in DECIDED else []
        game.committed()
        if point == "startup.swept":
            # Readers are held up no longer by what the driver before had prepared and never decided.
            assert game.open_transactions() == []
    last = game.require_good_end(game.live())
    assert [staged for _, staged in forwarded(last)] == [False]
    transactions = game.transactions()
    # Brokers remember an id for a week: there is a small pool of them, and never one for each transaction.
    assert len(transactions) >= game.batches
    assert len({transaction.id for transaction in transactions}) <= IDS_MAX


def test_the_order_names_every_failpoint_that_a_kafka_pipeline_passes() -> None:
    assert sorted(ORDER) == sorted(POINTS)
