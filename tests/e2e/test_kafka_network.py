"""A network between the pipeline and the broker that fails: cut off, answers lost, a commit that comes late."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kafka_game import KafkaGame
from tests.e2e.proxy import END_TXN, KafkaProxy, proxied_kafka
from tests.processes import stopped_workers, wait_until

MakeProxied = Callable[..., KafkaGame]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaProxy, str]]:
    with proxied_kafka(tmp_path_factory.mktemp("proxied")) as (_, proxy, direct):
        yield proxy, direct


@pytest.fixture
def proxy(network: tuple[KafkaProxy, str]) -> Iterator[KafkaProxy]:
    yield network[0]
    network[0].repair()


@pytest.fixture
def make_proxied_game(make_kafka_game: Callable[..., KafkaGame], network: tuple[KafkaProxy, str]) -> MakeProxied:
    """A game whose child reaches the broker through the proxy. The reader that watches is never cut off."""
    return lambda **given: make_kafka_game(servers=network[0].address, watched_at=network[1], **given)


def stop_tasks(child: subprocess.Popen[str]) -> list[int]:
    """The Python workers of both tasks of a batch, stopped by a failpoint."""
    wait_until(lambda: len(stopped_workers(child.pid)) == 2)
    return stopped_workers(child.pid)


def wake(workers: list[int]) -> None:
    for pid in workers:
        os.kill(pid, signal.SIGCONT)


def test_tasks_that_are_cut_off_for_a_moment_go_on(make_proxied_game: MakeProxied, proxy: KafkaProxy) -> None:
    game = make_proxied_game(batches=4)
    child = game.start("task.wrote@2=stop")
    workers = stop_tasks(child)
    proxy.cut()
    wake(workers)
    time.sleep(3)
    assert child.poll() is None
    assert len(game.watcher.sights) == game.setup.rows_per_batch
    proxy.repair()
    game.require_good_end(game.finish(child))


@pytest.mark.long
def test_tasks_that_stay_cut_off_fail_the_batch_and_the_next_start_runs_it_again(
    make_proxied_game: MakeProxied, proxy: KafkaProxy
) -> None:
    game = make_proxied_game(batches=4, kafka={"timeout_s": 1.0, "options": {"delivery.timeout.ms": "2000"}})
    child = game.start("task.wrote@2=stop")
    workers = stop_tasks(child)
    proxy.cut()
    wake(workers)
    life = game.finish(child)
    assert life.returncode == 1
    assert "BatchFailed: " in life.error, life.error[:3000]
    assert "the data now: the batch was rolled back: nothing of it is visible in any sink" in life.error
    assert "what to do: Mend the cause and start the pipeline again" in life.error
    proxy.repair()
    assert game.committed() == game.setup.rows_per_batch
    game.require_good_end(game.live())


def test_a_commit_whose_answer_is_lost_is_asked_for_again(make_proxied_game: MakeProxied, proxy: KafkaProxy) -> None:
    """The broker has committed, the driver does not know it, and the connection breaks."""
    game = make_proxied_game(batches=4)
    lost = proxy.hold_next(END_TXN, answer=True)
    child = game.start()
    lost.wait()
    # The other transaction of the batch may follow on the same connection; its answer is lost with the first.
    wait_until(lambda: len(game.watcher.sights) > 0)
    proxy.cut()
    proxy.repair()
    lost.release()
    game.require_good_end(game.finish(child))


def test_the_late_commit_of_a_dead_driver_does_not_hit_the_next_transaction(
    make_proxied_game: MakeProxied, proxy: KafkaProxy
) -> None:
    """KAFKA-17754: EndTxn is held up in the network while its driver dies and the next one uses the same ids.

    The next driver commits what the first decided, and has transactions of its own open under the same ids when the
    late request arrives. Were it to hit one of them, rows would become visible that nobody has decided.
    """
    game = make_proxied_game(batches=4)
    late = proxy.hold_next(END_TXN)
    first = game.start()
    late.wait()
    ids = game.open_transactions()
    assert len(ids) == 2
    os.killpg(first.pid, signal.SIGKILL)
    game.finish(first)
    heir = game.start("batch.prepared=stop")
    game.wait_until_stopped(heir)
    assert game.open_transactions() == ids
    assert game.committed() == game.setup.rows_per_batch
    late.release()
    time.sleep(1)
    assert game.open_transactions() == ids
    assert game.committed() == game.setup.rows_per_batch
    game.wake(heir)
    game.require_good_end(game.finish(heir))
