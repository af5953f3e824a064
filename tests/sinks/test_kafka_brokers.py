"""The Kafka sink on three brokers: what it asks of them before the first row, and what it does when one is dead."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]
from kafka.protocol.metadata import CoordinatorType

from semel.decisions.log import DecisionLog, Identity
from semel.decisions.memory import MemoryStore
from semel.dev.kafka import KafkaCluster, kafka
from semel.errors import Refused
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.runtime.plans import SparkPlans
from semel.runtime.startup import start_exactly_once
from semel.sinks.base import StagedPart
from semel.sinks.kafka import Kafka
from semel.sinks.kafka import participant as kafka_participant
from semel.sinks.kafka.markers import Fate, partition_of
from semel.sinks.kafka.topics import IN_SYNC, TRANSACTION_STATE, UNCLEAN
from semel.testing.harness import attempt, context
from tests.processes import wait_until
from tests.sinks.kafka_rig import Rig, prepare_one, records_of, stage, stage_one, started

#: Less than a request may take (10 s): a call that needs a broker which never answers fails.
TIMEOUT_S = 8.0
FENCED_S_MAX = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with kafka(tmp_path_factory.mktemp("brokers"), brokers=3, quick=True, heap_mb=256, say=print) as cluster:
        first = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "the-first-of-all"})
        first.init_transactions(FENCED_S_MAX)
        # The brokers make this topic when it is first needed; each hears of it in its own time.
        wait_until(
            lambda: all(knows(address, TRANSACTION_STATE) for address in cluster.bootstrap.split(",")), FENCED_S_MAX
        )
        yield cluster


def knows(address: str, topic: str) -> bool:
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        return bool(admin.describe_configs([resource])[resource].result(TIMEOUT_S))
    except KafkaException:
        return False


@pytest.fixture
def three(cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Rig(cluster.bootstrap)
    try:
        yield made
    finally:
        made.end()


def in_service(cluster: KafkaCluster) -> set[int]:
    return set(AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0}).list_topics(timeout=10).brokers)


# Before the first row -------------------------------------------------------------------------------------------------


def test_what_an_election_or_a_lost_disk_may_take_is_refused_or_told_before_the_first_row(
    three: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    safe, unclean = three.topic("safe"), three.topic("unclean", config={UNCLEAN: "true"})
    few, one = three.topic("few", config={IN_SYNC: "1"}), f"one_{three.suffix}"
    three.world._admin.create_topics([NewTopic(one, 2, 1)])[one].result(TIMEOUT_S)

    assert not starts_with_a_word(three.sink(safe), caplog)

    refused = three.sink(unclean, name=f"unclean_{three.suffix}")
    log = DecisionLog(MemoryStore())
    running = log.claim()
    with pytest.raises(Refused) as raised:
        start_exactly_once(log, SparkPlans(MemoryStore()), [refused], Identity(context().pipeline))
    # Nobody is fenced by a start that is refused.
    assert log.newest_claim() == running
    what, now, remedy = str(raised.value).splitlines()
    assert what.startswith(f"At {three.servers} {UNCLEAN}=true for {unclean}: an election may then lose what was ack")
    assert now == "  the data now: this start wrote nothing; what was visible before still is"
    command = f"--alter --entity-type topics --entity-name {unclean} --add-config {UNCLEAN}=false"
    assert f"kafka-configs.sh --bootstrap-server {three.servers} {command}" in remedy
    assert three.world.count_markers(of=refused.name) == 0
    assert not starts_with_a_word(replace(refused, accept_unclean_elections=True), caplog)
    assert three.world.count_markers(of=refused.name) == 1

    (said,) = starts_with_a_word(three.sink(few, name="few"), caplog)
    assert said.startswith(
        f"What is acknowledged at {three.servers} may be on a single disk: {few} has {IN_SYNC}=1 with 3"
    )
    (said,) = starts_with_a_word(three.sink(one, name="one"), caplog)
    assert f"may be on a single disk: {one} has 1 copy on 3 brokers.\n  the data now: " in said


def starts_with_a_word(sink: Kafka, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a start warns of."""
    caplog.clear()
    with started(sink):
        return told(caplog)


def test_the_control_topic_is_made_with_the_copies_that_the_cluster_can_give(three: Rig) -> None:
    name = f"control_{three.suffix}"
    with started(three.sink(three.topic(), control_topic=name)):
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        found = three.world._admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        partitions = three.world._admin.list_topics(name, timeout=TIMEOUT_S).topics[name].partitions.values()
    assert {setting: found[setting].value for setting in (UNCLEAN, IN_SYNC)} == {UNCLEAN: "false", IN_SYNC: "2"}
    assert [len(partition.replicas) for partition in partitions] == [3] * 8


# A broker that is dead ------------------------------------------------------------------------------------------------


def test_batches_go_on_beside_a_broker_that_is_dead(
    three: Rig, cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To look for leftovers every broker is asked. The batch needs the leaders of its partitions, and nobody else.

    The others have taken over what the dead broker had, and our driver does not know that it is gone: it still has a
    connection that nobody answers.
    """
    monkeypatch.setattr(kafka_participant, "SWEEP_EVERY_S", 0.0)
    sink = three.sink(three.topic(partitions=3), timeout_s=TIMEOUT_S)
    with started(sink) as participant:
        assert participant.recover().branches == ()  # it is connected to every broker now
        assert participant.commit(prepare_one(participant, sink, attempt(0), records_of(0))) is Outcome.COMMITTED
        assert told(caplog) == []
        (staged,) = stage(sink, attempt(1), records_of(1))
        dead = (set(cluster.brokers) - needed_by_the_driver(three, sink, staged)).pop()
        cluster.processes[dead].send(signal.SIGSTOP)
        wait_until(lambda: dead not in in_service(cluster), FENCED_S_MAX)
        # What tidies up beside the batches waits no longer than a sweep, and knows that this was not all.
        began = time.monotonic()
        sight = participant.in_sight()
        assert time.monotonic() - began < kafka_participant.SWEEP_S_MAX + TIMEOUT_S / 2
        assert [str(branch) for branch in sight.branches] == [str(staged.branch)]
        assert sight.missing.startswith(f"no answer from broker {dead}: ")
        (committable,) = participant.prepare(attempt(1), [staged])
        assert participant.commit(committable) is Outcome.COMMITTED
        (said,) = told(caplog)
        assert f"broker {dead}: " in said.partition("may hold back readers: no answer from ")[2]
        assert said.endswith("Nothing of the batch depends on it; it is tried again in 0 s.")
        cluster.kill(dead)
        lost = stage_one(sink, Branch(attempt(2), sink.name, 0, 0), records_of(2))
        won = stage_one(sink, Branch(attempt(2), sink.name, 0, 1), records_of(2))
        (committable,) = participant.prepare(attempt(2), [won])
        assert participant.commit(committable) is Outcome.COMMITTED
        # What the others list is ended all the same.
        three.world.wait_until_ended()
        assert three.marker(str(lost.branch)).fate is Fate.ABORTED
    with started(sink, context(2)) as participant:
        remains = participant.recover()
        assert (remains.branches, remains.newest_batch) == ((), 2)
    assert three.visible(sink.topic) == [0, 1, 2]


def needed_by_the_driver(rig: Rig, sink: Kafka, part: StagedPart) -> set[int]:
    """The brokers that have the markers and the transaction of a task."""
    wire = rig.world.wire
    _, leaders = wire.leaders(sink.control_topic)
    kind, client = CoordinatorType.TRANSACTION, wire._client
    coordinator = wire._manager.run(lambda: client._find_coordinator_id(part.payload["id"], key_type=kind))
    return {leaders[partition_of(sink.name)], int(coordinator)}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "semel" and r.levelno >= logging.WARNING]
