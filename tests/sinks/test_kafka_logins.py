"""Brokers that ask for a token or a Kerberos ticket: the whole life of a sink, and what is said when they refuse."""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from semel.dev.kafka import KafkaCluster, Kerberos, Security, kafka
from semel.dev.kerberos import REALM, Kdc, host, kdc
from semel.errors import BatchFailed, ConfigError, SemelError, SinkUnavailable, SourceUnavailable
from semel.ids import Branch
from semel.kafka import tokens as kafka_tokens
from semel.kafka.login import can_log_in
from semel.kafka.stand_in import StandIn
from semel.kafka.tokens import Unsecured
from semel.protocol.events import Outcome
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.pool import release_all
from semel.sources.kafka_broker import Broker, with_its_tokens
from semel.testing.harness import attempt, context
from tests.kerberos_library import gssapi_folder
from tests.processes import wait_until
from tests.sinks.kafka_rig import RECORD, Rig, prepare, prepare_one, records_of, stage, started
from tests.test_kafka_tokens import Endpoint, endpoint

__all__ = ["endpoint"]

TOKENS = {"security.protocol": "SASL_PLAINTEXT"}
KERBEROS = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"}
#: Whoever is a super user must have a password. `app` never uses it.
USERS = {"admin": "admin", "app": "app"}
SECRET = "hunter2"  # noqa: S105 - what the tests look for
NOT_STARTED = "  the data now: nothing was started and no row was written\n"
ROLLED_BACK = "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
CORRECT = "  what to do: Correct the kafka.sasl.* options of the sink."

PRODUCERS = pytest.mark.parametrize("producer", ["auto", "librdkafka"])


@pytest.fixture(scope="module")
def by_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A login lasts two seconds there: then the clients must log in again, or they are cut off."""
    security = Security(USERS, ("admin", "app"), mechanisms=("PLAIN", "OAUTHBEARER"), login_ms_max=2000)
    with kafka(tmp_path_factory.mktemp("by_token"), security=security, quick=True, say=print) as cluster:
        yield cluster


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """It looks at the cluster of the test by the listener that asks for nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kafka_tokens, "_TOKENS", {})
    names = [name for name in ("by_token", "by_ticket") if name in request.fixturenames]
    cluster: KafkaCluster = request.getfixturevalue(names[0])
    made = Rig(f"127.0.0.1:{cluster.layout.ports[0].internal}", {"log_level": "0"})
    made.servers = cluster.bootstrap
    try:
        yield made
    finally:
        made.end()


def a_life(rig: Rig, sink: Kafka) -> list[int]:
    """Everything that a pipeline does with the sink, from the check before the start to the sweep after a crash."""
    sink.check(RECORD)
    with started(sink) as participant:
        for committable in prepare(participant, sink, attempt(0), records_of(1), records_of(2)):
            assert participant.commit(committable) is Outcome.COMMITTED
        for committable in prepare(participant, sink, attempt(1)):
            assert participant.commit(committable) is Outcome.COMMITTED
        stage(sink, attempt(2), records_of(3))
        cut_short = sink.writer(Branch(attempt(2), sink.name, 1, 0))
        cut_short.write(records_of(*range(10, 100)))
        wait_until(lambda: len(rig.open_ids()) == 2, 20)
    release_all()
    with started(sink, context(2)) as participant:
        remains = participant.recover()
        assert (len(remains.branches), remains.newest_batch) == (1, 1)
        participant.abort(remains.branches)
        assert rig.open_ids() == []
        again = prepare_one(participant, sink, attempt(2, 1, 2), records_of(3))
    # Decided, and its driver died. The next one has nothing but the committable.
    with started(sink, context(3)) as participant:
        assert participant.commit(again) is Outcome.COMMITTED
        assert participant.commit(again) is Outcome.ALREADY_COMMITTED
    return rig.visible(sink.topic)


def refusal(call: Callable[[], object], kind: type[SemelError] = ConfigError) -> str:
    """What is said. At once: no client waits until it gives up."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < 5.0
    return str(caught.value)


# Tokens -----------------------------------------------------------------------------------------------------------


@PRODUCERS
def test_a_pipeline_whose_tokens_come_from_a_function(by_token: KafkaCluster, rig: Rig, producer: str) -> None:
    small = {"batch.size": "100"}
    sink = rig.sink(rig.topic(), options={**TOKENS, **small}, token_provider=Unsecured("app"), producer=producer)
    assert a_life(rig, sink) == [1, 2, 3]


@PRODUCERS
def test_a_pipeline_whose_tokens_come_from_an_endpoint(
    by_token: KafkaCluster, rig: Rig, endpoint: Endpoint, producer: str
) -> None:
    """librdkafka asks by itself, semel for the rest: each client of the process shares that token."""
    endpoint.answer = lambda: (200, {"access_token": Unsecured("app")()[0], "expires_in": 600})
    options = endpoint.options(**{"batch.size": "100"})
    assert a_life(rig, rig.sink(rig.topic(), options=options, producer=producer)) == [1, 2, 3]
    assert {login for login, _ in endpoint.asked} == {f"me:{SECRET}"}


@PRODUCERS
def test_clients_log_in_again_with_new_tokens(by_token: KafkaCluster, rig: Rig, producer: str) -> None:
    """For three times as long as a login lasts, with tokens that last no longer."""
    provider = Noting(rig.suffix)
    sink = rig.sink(rig.topic(), options=TOKENS, token_provider=provider, producer=producer)
    numbers: list[int] = []
    with started(sink) as participant:
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            numbers.append(len(numbers))
            one = prepare_one(participant, sink, attempt(numbers[-1]), records_of(numbers[-1]))
            assert participant.commit(one) is Outcome.COMMITTED
            time.sleep(0.1)
    assert rig.visible(sink.topic) == numbers
    assert provider.asked >= 3


class Noting:
    """Tokens that last two seconds."""

    def __init__(self, user: str) -> None:
        self.user, self.asked = user, 0

    def __call__(self) -> tuple[str, float]:
        self.asked += 1
        return Unsecured("app", 2.0)()


@PRODUCERS
def test_a_token_that_the_broker_does_not_take_is_told_at_once(by_token: KafkaCluster, rig: Rig, producer: str) -> None:
    topic = rig.topic()
    sink = rig.sink(topic, options=TOKENS, token_provider=nonsense, producer=producer)
    said = f"Kafka at {rig.servers} cannot be reached: the login was refused: "
    status = '{"status":"invalid_token"}'
    for call in (lambda: sink.check(RECORD), lambda: sink.participant(context())):
        assert refusal(call) == f"{said}{status}.\n{NOT_STARTED}{CORRECT}"
    text = refusal(lambda: stage(sink, attempt(), records_of(1)), BatchFailed)
    assert status in text
    assert text.splitlines()[1:] == [
        ROLLED_BACK.rstrip(),
        CORRECT if producer == "auto" else f"{CORRECT} Then start the pipeline again.",
    ]


def nonsense() -> tuple[str, float]:
    return SECRET, 100.0


@PRODUCERS
def test_a_provider_that_fails_is_told_at_once(by_token: KafkaCluster, rig: Rig, producer: str) -> None:
    sink = rig.sink(rig.topic(), options=TOKENS, token_provider=functools.partial(fail, SECRET), producer=producer)
    what = "The token provider functools.partial failed: OSError."
    remedy = "Mend the token provider, then start the pipeline again."
    for call in (lambda: sink.check(RECORD), lambda: sink.participant(context())):
        assert refusal(call, SinkUnavailable) == (
            f"{what}\n  the data now: nothing was changed by this call\n  what to do: {remedy}"
        )
    assert refusal(lambda: stage(sink, attempt(), records_of(1)), BatchFailed).startswith(f"{what}\n{ROLLED_BACK}")


def fail(secret: str) -> tuple[str, float]:
    raise OSError(secret)


def test_who_is_let_in_may_not_do_everything(by_token: KafkaCluster, rig: Rig) -> None:
    """The broker goes by the user in the token."""
    sink = rig.sink(rig.topic(), options=TOKENS, token_provider=Unsecured("stranger"))
    assert refusal(lambda: sink.check(RECORD)).startswith(f"This user may not write to topic {sink.topic} at ")
    with pytest.raises(ConfigError, match="may not read and write semel's control topic"), started(sink):
        pass


def test_rows_with_headers_and_timestamps_take_librdkafkas_way(by_token: KafkaCluster, rig: Rig) -> None:
    batch = records_of(1).append_column("timestamp", pa.array([None], pa.timestamp("us")))
    sink = rig.sink(rig.topic(), options=TOKENS, token_provider=Unsecured("app"))
    with started(sink) as participant:
        assert participant.commit(prepare_one(participant, sink, attempt(), batch)) is Outcome.COMMITTED
    assert rig.visible(sink.topic) == [1]


def test_a_control_topic_is_created_and_read_by_token(by_token: KafkaCluster, rig: Rig) -> None:
    topic = rig.topic()
    control = f"control_{rig.suffix}"
    sink = rig.sink(topic, options=TOKENS, token_provider=Unsecured("app"), control_topic=control)
    with started(sink):
        assert rig.world.wire.partitions(control) == 8
    with started(sink, context(2)):
        pass


def asks_what_a_source_asks(rig: Rig, broker: Broker) -> None:
    topic = rig.topic(f"in_{uuid.uuid4().hex[:8]}", partitions=2)
    places = [(topic, 0), (topic, 1)]
    assert broker.partitions([topic]) == places
    assert broker.partitions_like(f"{topic}.*") == places
    group = f"billing-{topic}"
    assert broker.group_offsets(group, places) == {}
    broker.report(group, {places[0]: 7})
    assert broker.group_offsets(group, places) == {places[0]: 7}
    assert broker.end_offsets(places) == dict.fromkeys(places, 0)
    with pytest.raises(ConfigError, match=r"There is no topic nowhere on "):
        broker.partitions([topic, "nowhere"])


def test_a_source_asks_by_token(by_token: KafkaCluster, rig: Rig) -> None:
    settings = {"kafka.bootstrap.servers": rig.servers, **{f"kafka.{k}": v for k, v in TOKENS.items()}}
    handler = {"kafka.sasl.login.callback.handler.class": "com.example.OurOwnCallbackHandler"}
    settings |= {"kafka.sasl.mechanism": "OAUTHBEARER", **handler}
    asks_what_a_source_asks(rig, Broker(with_its_tokens(settings, Unsecured("app")), 5.0))
    # As whoever reports offsets knows the source: by what Spark has kept of it.
    asks_what_a_source_asks(rig, Broker(with_its_tokens(settings), 5.0))
    refused = Broker(with_its_tokens(settings, nonsense), 5.0)
    assert "did not let us in" in refusal(lambda: refused.partitions(["orders"]))
    silent = Broker(with_its_tokens(settings, functools.partial(fail, SECRET)), 5.0)
    assert refusal(lambda: silent.partitions(["orders"]), SourceUnavailable).startswith("The token provider functools")


# Kerberos ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kdc]:
    """A KDC, and the library with which this process talks to it."""
    folder = gssapi_folder()
    with kdc(tmp_path_factory.mktemp("kdc"), say=print) as made, pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv("KRB5_CONFIG", str(made.config))
        patch.setenv("KRB5CCNAME", str(made.folder / "nobody's.ticket"))
        yield made


@pytest.fixture(scope="module")
def by_ticket(realm: Kdc, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    own = Kerberos(f"kafka/{host()}@{REALM}", realm.keytab(f"kafka/{host()}"), realm.config)
    security = Security(USERS, ("admin", "app"), mechanisms=("PLAIN", "GSSAPI"), kerberos=own)
    with kafka(tmp_path_factory.mktemp("by_ticket"), security=security, quick=True, say=print) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def keytab(realm: Kdc) -> Path:
    return realm.keytab("app")


def named(who: str, keytab: Path) -> dict[str, str]:
    return {**KERBEROS, "sasl.kerberos.principal": f"{who}@{REALM}", "sasl.kerberos.keytab": str(keytab)}


def test_a_pipeline_with_a_keytab(by_ticket: KafkaCluster, keytab: Path, rig: Rig) -> None:
    options = {**named("app", keytab), "batch.size": "100"}
    assert a_life(rig, rig.sink(rig.topic(), options=options)) == [1, 2, 3]


def test_a_pipeline_with_the_ticket_of_kinit(
    by_ticket: KafkaCluster, realm: Kdc, keytab: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{realm.ticket('app', keytab)}")
    assert a_life(rig, rig.sink(rig.topic(), options={**KERBEROS, "batch.size": "100"})) == [1, 2, 3]


def test_who_has_another_ticket_may_do_something_else(by_ticket: KafkaCluster, realm: Kdc, rig: Rig) -> None:
    sink = rig.sink(rig.topic(), options=named("stranger", realm.keytab("stranger")))
    assert refusal(lambda: sink.check(RECORD)).startswith(f"This user may not write to topic {sink.topic} at ")


def test_without_a_ticket_nothing_is_tried(by_ticket: KafkaCluster, keytab: Path, rig: Rig) -> None:
    """On the way of the rows and on the way of the commits."""
    topic = rig.topic()
    wrong = {
        "no ticket": (KERBEROS, r"No Kerberos credentials available"),
        "no keytab": (named("app", Path("/nowhere")), r"gave no ticket: "),
        "a keytab of another": (named("somebody", keytab), r"gave no ticket: "),
    }
    for options, what in wrong.values():
        sink = rig.sink(topic, options=options)
        calls: list[Any] = [lambda sink=sink: sink.check(RECORD), lambda sink=sink: sink.participant(context())]
        for call in calls:
            with pytest.raises(ConfigError, match=what) as caught:
                call()
            assert "get a ticket with kinit" in caught.value.remedy
        with pytest.raises(BatchFailed, match=what):
            stage(sink, attempt(), records_of(1))


def test_a_service_that_the_realm_does_not_know_is_told(by_ticket: KafkaCluster, keytab: Path, rig: Rig) -> None:
    sink = rig.sink(rig.topic(), options={**named("app", keytab), "sasl.kerberos.service.name": "other"})
    for call in (lambda: sink.check(RECORD), lambda: sink.participant(context())):
        said = refusal(call)
        assert "the login was refused: Kerberos gave no ticket: Server other/" in said
        assert "not found in Kerberos database" in said


def test_a_source_asks_with_a_ticket(by_ticket: KafkaCluster, keytab: Path, rig: Rig) -> None:
    words = f'useKeyTab=true keyTab="{keytab}" principal="app@{REALM}" serviceName="kafka"'
    jaas = {"kafka.sasl.jaas.config": f"com.sun.security.auth.module.Krb5LoginModule required {words};"}
    java = {"kafka.bootstrap.servers": rig.servers, **{f"kafka.{k}": v for k, v in KERBEROS.items()}, **jaas}
    asks_what_a_source_asks(rig, Broker(java, 5.0))


@pytest.mark.skipif(can_log_in(KERBEROS), reason="this librdkafka knows Kerberos")
def test_what_needs_a_librdkafka_with_kerberos_says_what_to_install(
    by_ticket: KafkaCluster, keytab: Path, rig: Rig
) -> None:
    topic, built = rig.topic(), "the one that is installed was built without Kerberos (GSSAPI)"
    sink = rig.sink(topic, options=named("app", keytab), producer="librdkafka")
    said = refusal(lambda: sink.check(RECORD))
    assert said.startswith(f"All rows of Kafka topic {topic} at {rig.servers}, because of producer='librdkafka',")
    assert built in said
    assert "pip install --no-binary confluent-kafka" in said
    batch = records_of(1).append_column("timestamp", pa.array([None], pa.timestamp("us")))
    said = refusal(lambda: stage(rig.sink(topic, options=named("app", keytab)), attempt(), batch), BatchFailed)
    assert said.startswith("Rows with headers or timestamps, or producer='librdkafka', need librdkafka,")
    assert built in said


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    sink = Kafka("127.0.0.1:1", "orders", options=KERBEROS)
    for call in (lambda: sink.check(RECORD), lambda: sink.participant(context())):
        assert "pip install 'semel[kafka-kerberos]'" in refusal(call)


def test_a_client_that_nobody_holds_any_more_is_closed_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may be collected in the thread of its connections, which cannot wait for itself to end."""
    closed_by: list[threading.Thread] = []
    client = SimpleNamespace(close=lambda: closed_by.append(threading.current_thread()))
    monkeypatch.setattr("semel.kafka.connection.connect", lambda *_: client)
    stand_in = StandIn({"bootstrap.servers": "127.0.0.1:1"}, SinkUnavailable)
    assert stand_in._client(1.0) is client
    del stand_in
    wait_until(lambda: closed_by, 10)
    assert [thread.name for thread in closed_by] == ["semel-kafka-close"]
