"""What is special about Kafka: whose the ids are, what a control topic proves, brokers that are slow, and secrets."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient

from semel.dev.kafka import KafkaCluster
from semel.errors import ConfigError, SinkUnavailable
from semel.ids import Branch
from semel.protocol.events import Outcome
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.markers import Fate
from semel.sinks.kafka.pool import settle_all
from semel.testing.harness import OTHERS, attempt, context
from tests.processes import wait_until
from tests.sinks.kafka_rig import Rig, prepare_one, records_of, stage, stage_one, started, write


@pytest.fixture(params=["auto", "librdkafka"])
def rig(rig: Rig, request: pytest.FixtureRequest) -> Rig:
    """Each test in here runs with semel's own producer, and with librdkafka for everything."""
    rig.producer = request.param
    return rig


# Whose the ids are ------------------------------------------------------------------------------------------------


def test_a_second_pipeline_with_the_same_prefix_is_refused(rig: Rig) -> None:
    """Each would take the other's transactions for its own leftovers, and abort them."""
    sink = rig.sink(rig.topic(), transactional_id_prefix=f"shop-{rig.suffix}")
    with started(sink, context(name="first")):
        pass
    with pytest.raises(ConfigError) as caught, started(sink, context(pipeline=OTHERS, name="second")):
        pass
    assert str(caught.value) == (
        f"The transactional id prefix 'shop-{rig.suffix}' belongs to pipeline 'first' (query {context().pipeline}) "
        "already: two that share it abort each other's batches.\n"
        "  the data now: nothing was started and no row was written\n"
        "  what to do: Give each pipeline a transactional_id_prefix of its own, or none."
    )


def test_who_came_to_the_cluster_by_another_address_is_a_namesake_all_the_same(rig: Rig) -> None:
    sink = rig.sink(rig.topic())
    with started(sink, context(pipeline=OTHERS)) as before:
        before.commit(prepare_one(before, sink, attempt(pipeline=OTHERS), records_of(1)))
    by_another = replace(sink, servers=f"{sink.servers},{sink.servers}")
    assert by_another.describe() != sink.describe()
    with started(by_another) as participant:
        assert participant.recover().namesakes == (OTHERS,)
    with started(replace(sink, topic=rig.topic("returns"))) as elsewhere:
        assert elsewhere.recover().namesakes == ()


def test_the_same_pipeline_starts_again_with_its_prefix(rig: Rig) -> None:
    sink = rig.sink(rig.topic(), transactional_id_prefix=f"shop-{rig.suffix}")
    for incarnation in (1, 2, 3):
        with started(sink, context(incarnation)) as participant:
            which = attempt(incarnation, 0, incarnation)
            committable = prepare_one(participant, sink, which, records_of(incarnation))
            assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(sink.topic) == [1, 2, 3]


def test_two_sinks_of_a_pipeline_share_a_prefix(rig: Rig) -> None:
    one = rig.sink(rig.topic("one"), transactional_id_prefix=f"shop-{rig.suffix}", name=f"one_{rig.suffix}")
    two = rig.sink(rig.topic("two"), transactional_id_prefix=f"shop-{rig.suffix}", name=f"two_{rig.suffix}")
    with started(one) as first, started(two) as second:
        waiting = prepare_one(second, two, attempt(), records_of(2))
        assert (first.recover().branches, len(second.recover().branches)) == ((), 1)
        assert first.commit(prepare_one(first, one, attempt(), records_of(1))) is Outcome.COMMITTED
        assert second.commit(waiting) is Outcome.COMMITTED


def test_two_that_start_at_the_same_moment_both_see_each_other_or_one_gives_way(rig: Rig) -> None:
    """The other comes between our look and our record: we find it afterwards, and take our record back."""
    sink = rig.sink(rig.topic(), transactional_id_prefix=f"shop-{rig.suffix}")
    with started(rig.sink(sink.topic, name=f"x_{rig.suffix}")) as _:
        late = sink.participant(context(pipeline=OTHERS, name="late"))
        honest = late._write  # type: ignore[attr-defined]

        def overtaken(partition: int, key: bytes, value: bytes | None) -> None:
            if value is not None:
                with started(sink, context(name="quick")):
                    pass
            honest(partition, key, value)

        late._write = overtaken  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="belongs to pipeline 'quick'"):
            late.fence()
        late.close()
    fences = rig.world.marker_log(sink.name).fences
    assert {who for who, name in fences if name == sink.name} == {context().pipeline}
    with started(sink, context(2, name="quick")):
        pass


def test_a_prefix_that_begins_another_one_does_not_touch_its_transactions(rig: Rig) -> None:
    topic = rig.topic()
    short = rig.sink(topic, transactional_id_prefix=f"orders-{rig.suffix}", name="eu")
    small = {"batch.size": "100"}
    long = rig.sink(topic, transactional_id_prefix=f"orders-{rig.suffix}-eu", name="eu", options=small)
    with started(short) as ours, started(long, context(pipeline=OTHERS, name="other")) as theirs:
        prepared = prepare_one(theirs, long, attempt(pipeline=OTHERS), records_of(1))
        cut_short = long.writer(Branch(attempt(pipeline=OTHERS), long.name, 1, 0))
        cut_short.write(records_of(*range(10, 1000)))
        wait_until(lambda: len(rig.open_ids()) == 2, 20)
        assert ours.recover().branches == ()
        ours.abort([])
        assert len(rig.open_ids()) == 2
        cut_short.abort()
        assert theirs.commit(prepared) is Outcome.COMMITTED
    assert rig.visible(topic) == [1]


# What the control topic proves ------------------------------------------------------------------------------------


@pytest.fixture
def own_control(rig: Rig) -> Kafka:
    """A sink with a control topic of its own."""
    rig.world.control_topic = f"control-{rig.suffix}"
    return rig.sink(rig.topic(), control_topic=rig.world.control_topic)


def create_anew(rig: Rig) -> None:
    """The control topic is deleted by mistake, and the next start makes another one."""
    admin = AdminClient({"bootstrap.servers": rig.servers})
    admin.delete_topics([rig.world.control_topic])[rig.world.control_topic].result(20)
    wait_until(lambda: rig.world.wire.partitions(rig.world.control_topic) == 0, 20)


@pytest.mark.parametrize("ended", [True, None], ids=["committed", "open"])
def test_without_its_marker_a_transaction_is_not_taken_for_gone(
    rig: Rig, own_control: Kafka, ended: bool | None
) -> None:
    """Committed once, written again: that would be every row twice. As long as the broker knows, it is asked."""
    with started(own_control) as participant:
        committable = prepare_one(participant, own_control, attempt(), records_of(1, 2))
    if ended:
        assert rig.world.wire.end(rig.transaction(committable), commit=True) == "NO_ERROR"
    create_anew(rig)
    with started(own_control, context(2)) as participant:
        assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(own_control.topic) == [1, 2]


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "aborted"])
def test_when_the_control_topic_is_another_one_and_the_broker_does_not_know_it_is_in_doubt(
    rig: Rig, own_control: Kafka, committed: bool
) -> None:
    with started(own_control) as participant:
        committable = prepare_one(participant, own_control, attempt(), records_of(1, 2))
    transaction = rig.transaction(committable)
    rig.world.wire.end(transaction, commit=committed)
    rig.initialise(transaction.id)
    create_anew(rig)
    with started(own_control, context(2)) as participant:
        assert participant.commit(committable) is Outcome.IN_DOUBT


def test_a_marker_that_compaction_has_dropped_was_of_an_aborted_transaction(rig: Rig) -> None:
    """The cleaner of the broker drops what was aborted; what was committed stays until its task has a newer marker."""
    sink = rig.sink(rig.topic())
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), records_of(1))
        rig.world.wire.end(rig.transaction(committable), commit=False)
    with started(sink, context(2)) as participant:
        log = participant._caught_up()
        log.catch_up(participant.wire)
        del log.markers[committable.branches[0]]
        assert participant.commit(committable) is Outcome.GONE


def test_what_was_committed_a_moment_ago_counts_before_its_end_is_in_the_control_topic(rig: Rig) -> None:
    """EndTxn is answered first: for some milliseconds the marker of a committed transaction still looks open."""
    sink = rig.sink(rig.topic())
    with started(sink) as participant:
        first = prepare_one(participant, sink, attempt(0), records_of(1))
        participant.wire.end = lambda *_, **__: "NO_ERROR"  # type: ignore[method-assign]
        assert participant.commit(first) is Outcome.COMMITTED
        assert rig.marker(first.branches[0]).fate is Fate.OPEN
        replayed = prepare_one(participant, sink, attempt(0, 1), records_of(1))
        assert participant.commit(replayed) is Outcome.ALREADY_COMMITTED
        assert participant.recover().newest_batch == 0


def test_a_mend_is_committed_beside_what_is_visible_of_its_batch(rig: Rig) -> None:
    """Also when its task has the number of one that is visible, and from a driver that knows the markers only."""
    sink = rig.sink(rig.topic())
    with started(sink) as participant:
        kept, gone = participant.prepare(attempt(0), stage(sink, attempt(0), records_of(1), records_of(2)))
        assert participant.commit(kept) is Outcome.COMMITTED
        rig.world.end_by_branch(gone.branches[0])
        assert participant.commit(gone) is Outcome.GONE
        prepared = prepare_one(participant, sink, attempt(0, 1), records_of(2))
        mended = replace(prepared, key=gone.key, mends=True)
    with started(sink, context(2)) as participant:
        assert [participant.commit(c) for c in (kept, mended)] == [Outcome.ALREADY_COMMITTED, Outcome.COMMITTED]
    with started(sink, context(3)) as participant:
        assert [participant.commit(c) for c in (kept, mended)] == [Outcome.ALREADY_COMMITTED] * 2
    assert rig.visible(sink.topic) == [1, 2]


def test_the_control_topic_is_made_with_the_settings_that_the_proof_rests_on(rig: Rig, own_control: Kafka) -> None:
    from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

    resource = ConfigResource(ConfigResource.Type.TOPIC, own_control.control_topic)
    admin = AdminClient({"bootstrap.servers": rig.servers})
    found = admin.describe_configs([resource])[resource].result(20)
    chosen = ("cleanup.policy", "compression.type", "delete.retention.ms", "unclean.leader.election.enable")
    assert {name: found[name].value for name in chosen} == {
        "cleanup.policy": "compact",
        "compression.type": "uncompressed",
        "delete.retention.ms": "3600000",
        "unclean.leader.election.enable": "false",
    }
    # By the topic itself, whatever becomes of the broker's own setting.
    assert not found["unclean.leader.election.enable"].is_default
    assert rig.world.wire.partitions(own_control.control_topic) == 8


def test_a_long_control_topic_is_read_in_portions(rig: Rig) -> None:
    """More than one fetch brings, of another pipeline, and our marker behind it."""
    sink = rig.sink(rig.topic())
    log = rig.world.marker_log(sink.name)
    begin = log.position
    rig.fill_control_topic(log.partition, records=3000, size=4000)
    write(sink, records_of(1))
    log = rig.world.marker_log(sink.name)
    assert log.position - begin > 3000
    assert log.newest_committed(context().pipeline, sink.name) == 0


# Leftovers --------------------------------------------------------------------------------------------------------


def test_what_a_retried_task_left_open_is_ended_with_its_batch(rig: Rig) -> None:
    """Spark ran the task twice: the first one prepared, and its answer was lost."""
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        lost = stage_one(sink, Branch(attempt(), sink.name, 0, 0), records_of(1))
        won = stage_one(sink, Branch(attempt(), sink.name, 0, 1), records_of(1))
        won.payload["retried"] = True  # type: ignore[index]
        (committable,) = participant.prepare(attempt(), [won])
        assert rig.open_ids() == [won.payload["id"]]
        assert participant.commit(committable) is Outcome.COMMITTED
        rig.world.wait_until_ended()
        assert rig.marker(str(lost.branch)).fate is Fate.ABORTED
    assert rig.visible(topic) == [1]


def test_a_running_pipeline_sweeps_now_and_then(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older incarnation's task prepares after the sweep at start holds up readers: it is ended in passing."""
    monkeypatch.setattr("semel.sinks.kafka.participant.SWEEP_EVERY_S", 0.0)
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink, context(2)) as participant:
        stage(sink, attempt(0, 0, 1), records_of(7))
        committable = prepare_one(participant, sink, attempt(0, 1, 2), records_of(1))
        assert participant.commit(committable) is Outcome.COMMITTED
    assert rig.visible(topic) == [1]


def test_a_newer_incarnation_is_left_alone_by_the_sweep(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie that was paused in a batch must not end what its successor has prepared."""
    monkeypatch.setattr("semel.sinks.kafka.participant.SWEEP_EVERY_S", 0.0)
    sink = rig.sink(rig.topic())
    with started(sink) as zombie:
        parts = stage(sink, attempt(0), records_of(1))
        successors = stage(sink, attempt(0, 0, 2), records_of(1))
        zombie.prepare(attempt(0), parts)
        assert rig.marker(str(successors[0].branch)).fate is Fate.OPEN
        zombie.abort(part.branch for part in (*parts, *successors))


def test_a_zombie_that_rolls_its_batch_back_leaves_the_tasks_of_its_successor_alone(rig: Rig) -> None:
    """A task that is still writing has no marker yet, so that nothing but the fence says whose it is."""
    topic = rig.topic()
    sink = rig.sink(topic, options={"batch.size": "100"})
    with started(sink) as zombie:
        own = stage(sink, attempt(0), records_of(0))
        with started(sink, context(2)) as successor:
            writer = sink.writer(Branch(attempt(0, 1, 2), sink.name, 0, 0))
            writer.write(records_of(*range(100)))
            wait_until(lambda: len(rig.open_ids()) == 2, 20)
            # What a coordinator does with a batch that failed, or was decided by another.
            zombie.abort(b for b in zombie.recover().branches if b.attempt == attempt(0))
            assert len(rig.open_ids()) == 1
            zombie._sweep_if_due(set(), retried=True)
            assert len(rig.open_ids()) == 1
            (committable,) = successor.prepare(attempt(0, 1, 2), [writer.prepare()])
            assert successor.commit(committable) is Outcome.COMMITTED
    assert rig.marker(str(own[0].branch)).fate is Fate.ABORTED
    assert rig.visible(topic) == list(range(100))


# Slow and silent brokers ------------------------------------------------------------------------------------------


@contextmanager
def paused(cluster: KafkaCluster) -> Iterator[None]:
    pid = cluster.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_broker_that_does_not_answer_is_told_within_the_time_limit(rig: Rig, kafka_cluster: KafkaCluster) -> None:
    topic = rig.topic()
    sink = rig.sink(topic, timeout_s=1.0)
    with started(sink) as participant:
        committable = prepare_one(participant, sink, attempt(), records_of(1))
        settle_all()
        with paused(kafka_cluster):
            began = time.monotonic()
            with pytest.raises(SinkUnavailable) as caught:
                participant.commit(committable)
            took_s = time.monotonic() - began
        assert 0.8 < took_s < 2.0
        transaction = committable.payload["id"]
        assert str(caught.value).startswith(f"Kafka at {rig.servers} gave no answer to EndTxn of {transaction}: ")
        wait_until(lambda: rig.world.wire.partitions(topic) == 2, 20)
        # Whether the request had arrived is not known; asked again, the sink says what became of it.
        assert participant.commit(committable) in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)
    assert rig.visible(topic) == [1]


def test_a_transaction_timeout_below_the_usual_time_for_a_delivery_is_allowed(rig: Rig) -> None:
    """librdkafka refuses a producer whose rows may take longer than their transaction."""
    sink = rig.sink(rig.topic(), transaction_timeout_ms=20_000)
    sink.check(records_of().schema)
    write(sink, records_of(1))
    assert sink.producer_settings()["delivery.timeout.ms"] == "20000"
    assert rig.visible(sink.topic) == [1]


# Secrets ----------------------------------------------------------------------------------------------------------

SECRET = "hunter2-do-not-show"  # noqa: S105 - what the tests look for


def secretive(**more: str) -> Kafka:
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "app"}
    return Kafka("127.0.0.1:1", "orders", options={**login, "sasl.password": SECRET, **more}, timeout_s=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"kafka.sasl.jaas.config": f'x.PlainLoginModule required username="app" password="{SECRET}";'},
        {"kafka.ssl.key.password": SECRET},
        {"ssl.key.pem": SECRET},
        {"ssl.keystore.key": SECRET},
        {"sasl.oauthbearer.client.secret": SECRET},
    ],
    ids=lambda options: next(iter(options)),
)
def test_secrets_are_shown_nowhere(options: dict[str, str]) -> None:
    sink = secretive(**options)
    shown = [repr(sink), str(sink), sink.describe(), sink.default_name(), f"{sink!r:>5}"]
    for call in (lambda: sink.check(records_of().schema), lambda: sink.participant(context())):
        with pytest.raises((ConfigError, SinkUnavailable)) as caught:
            call()
        shown += [str(caught.value), repr(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    assert [text for text in shown if SECRET in text] == []
    assert "'sasl.password': '***'" in repr(sink)


def test_the_sink_that_executors_get_still_knows_its_secrets() -> None:
    copy = pickle.loads(pickle.dumps(secretive()))  # noqa: S301 - our own bytes
    assert copy.producer_settings()["sasl.password"] == SECRET


def test_what_is_written_down_holds_no_secret(rig: Rig) -> None:
    """The fence names the target, the committable goes into the decision log, the part through Spark."""
    options = {"sasl.username": "app", "sasl.password": SECRET}
    sink = rig.sink(rig.topic(), options=options)
    with started(sink) as participant:
        parts = stage(sink, attempt(), records_of(1))
        (committable,) = participant.prepare(attempt(), parts)
        participant.commit(committable)
    log = rig.world.marker_log(sink.name)
    (fence,) = [f for f in log.fences.values() if f.sink == sink.name]
    assert fence.target == sink.describe()
    written = [
        json.dumps(dict(committable.payload)),
        json.dumps(dict(parts[0].payload)),
        repr(fence),
        repr(log.markers),
    ]
    assert [text for text in written if SECRET in text] == []
