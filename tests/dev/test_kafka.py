"""The local Kafka, with real brokers."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from kafka.admin import KafkaAdminClient

from semel.dev.kafka import KafkaCluster, Kerberos, Security, kafka, lay_out
from semel.dev.kafka_settings import properties_of
from semel.dev.ports import free_port
from semel.errors import ConfigError, SemelError

QUIET = {"log_level": 0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with kafka(tmp_path_factory.mktemp("kafka"), quick=True) as running:
        yield running


def create(cluster: KafkaCluster, topic: str, user: str | None = None, copies: int = -1) -> None:
    admin = AdminClient({**cluster.client_options(user), **QUIET})
    admin.create_topics([NewTopic(topic, 1, copies)])[topic].result(20)


def produce(cluster: KafkaCluster, topic: str, *values: str, user: str | None = None) -> list[str]:
    """Send values, and return what went wrong with each of them."""
    failed: list[str] = []
    producer = Producer({**cluster.client_options(user), **QUIET, "acks": "all", "delivery.timeout.ms": 20_000})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error.name()) if error else None)
    assert producer.flush(30) == 0
    return failed


def consume(cluster: KafkaCluster, topic: str, count: int) -> list[str]:
    consumer = Consumer({**cluster.client_options(), **QUIET, "group.id": "test"})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    messages = consumer.consume(count, timeout=20)
    consumer.close()
    return [(message.value() or b"").decode() for message in messages if not message.error()]


# One broker ---------------------------------------------------------------------------------------------------------


def test_what_is_produced_is_consumed(cluster: KafkaCluster) -> None:
    create(cluster, "plain")
    assert produce(cluster, "plain", "a", "b") == []
    assert consume(cluster, "plain", 2) == ["a", "b"]


def test_a_group_of_consumers_and_a_transaction_work_on_one_broker(cluster: KafkaCluster) -> None:
    create(cluster, "transactions")
    producer = Producer({**cluster.client_options(), **QUIET, "transactional.id": "t"})
    producer.init_transactions(20)
    for value, ended in (("kept", producer.commit_transaction), ("gone", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce("transactions", value)
        ended(20)
    group = {"group.id": "g", "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    consumer = Consumer({**cluster.client_options(), **QUIET, **group, "enable.partition.eof": True})
    consumer.subscribe(["transactions"])
    # The second is the news that there is no more.
    first, end = consumer.consume(2, timeout=20)
    consumer.close()
    assert (first.value(), end.error() is not None) == (b"kept", True)


def test_a_new_cluster_has_the_features_that_kafkas_own_tool_gives_it(cluster: KafkaCluster) -> None:
    client = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    features = client.describe_features()
    client.close()
    # Without them, transactions would work as in versions before KIP-890.
    assert features["transaction.version"]["finalized"] == (2, 2)
    assert features["group.version"]["finalized"] == (1, 1)


def test_a_topic_that_nobody_created_does_not_come_to_life(cluster: KafkaCluster) -> None:
    producer = Producer({**cluster.client_options(), **QUIET, "topic.metadata.propagation.max.ms": 100})
    errors: list[str] = []
    producer.produce("mispselt", "x", on_delivery=lambda error, _: errors.append(error.name() if error else "none"))
    producer.flush(20)
    assert errors == ["UNKNOWN_TOPIC_OR_PART"]


def test_a_broker_that_is_killed_starts_again_with_its_data_on_its_port(cluster: KafkaCluster) -> None:
    create(cluster, "killed")
    assert produce(cluster, "killed", "before") == []
    address, pid = cluster.bootstrap, cluster.processes[0].pid
    cluster.kill()
    assert not cluster.is_alive()
    with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
        probe.connect(("127.0.0.1", cluster.layout.ports[0].client))
    cluster.start()
    assert (cluster.bootstrap, cluster.processes[0].pid == pid) == (address, False)
    assert produce(cluster, "killed", "after") == []
    assert consume(cluster, "killed", 2) == ["before", "after"]


def test_a_broker_that_is_stopped_ends_by_itself_and_starting_twice_is_harmless(cluster: KafkaCluster) -> None:
    create(cluster, "stopped")
    assert produce(cluster, "stopped", "before") == []
    assert cluster.stop()
    assert not cluster.is_alive()
    cluster.start()
    pid = cluster.processes[0].pid
    cluster.start()
    assert cluster.processes[0].pid == pid
    assert consume(cluster, "stopped", 1) == ["before"]


def test_a_folder_keeps_its_number_of_brokers(cluster: KafkaCluster) -> None:
    with pytest.raises(ConfigError, match="holds the data of another number of brokers: 1, not 3") as raised:
        KafkaCluster(lay_out(cluster.layout.folder, brokers=3)).launch()
    assert raised.value.data_now == "the data in that folder was not touched; nothing was started"


# Three brokers ------------------------------------------------------------------------------------------------------


def test_three_brokers_go_on_without_one_of_them(tmp_path: Path) -> None:
    with kafka(tmp_path, brokers=3, quick=True) as three:
        assert len(three.bootstrap.split(",")) == 3
        create(three, "copied")
        assert produce(three, "copied", "with three") == []
        three.kill(1)
        assert produce(three, "copied", "with two") == []
        assert [three.is_alive(broker) for broker in three.brokers] == [True, False, True]
        three.start(1)
        assert consume(three, "copied", 2) == ["with three", "with two"]
        pids = [three.processes[broker].pid for broker in three.brokers]
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False] * 3


# Passwords ----------------------------------------------------------------------------------------------------------


def test_clients_log_in_and_may_do_what_an_acl_allows(tmp_path: Path) -> None:
    odd = 'quote " backslash \\ umlaut ü smile 😀'
    security = Security({"admin": "a", "alice": odd, "bob": "b"})
    with kafka(tmp_path, security=security, quick=True) as secured:
        create(secured, "guarded", user="admin")
        write = (AclOperation.WRITE, AclPermissionType.ALLOW)
        acl = AclBinding(ResourceType.TOPIC, "guarded", ResourcePatternType.LITERAL, "User:alice", "*", *write)
        admin = AdminClient({**secured.client_options("admin"), **QUIET})
        admin.create_acls([acl])[acl].result(20)
        assert produce(secured, "guarded", "x", user="alice") == []
        assert produce(secured, "guarded", "x", user="bob") == ["TOPIC_AUTHORIZATION_FAILED"]
        assert seen_with({**secured.client_options("alice")}) == {"guarded"}
        assert seen_with({**secured.client_options("alice"), "sasl.password": "wrong"}) is None
        command_line = Path(f"/proc/{secured.processes[0].pid}/cmdline").read_text()
    assert "umlaut" not in command_line
    settings = tmp_path / "broker-0" / "server.properties"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert "umlaut" not in repr(secured.layout)


def seen_with(options: dict[str, str]) -> set[str] | None:
    """The topics that a client sees; None when it is not let in."""
    with suppress(KafkaException):
        return set(AdminClient({**options, **QUIET}).list_topics(timeout=3).topics)
    return None


BAD_SECURITY = {
    "a blank in a name": ({"a b": "x"}, ("a b",), "A Kafka user cannot be named 'a b'."),
    "a super user without a password": ({"a": "x"}, ("b",), "These super users have no password: b."),
    "no super user": ({"a": "x"}, (), "there is no super user at all"),
}


@pytest.mark.parametrize("mechanisms", [("PLAIN", "GSSAPI"), ("PLAIN",)])
def test_kerberos_and_its_mechanism_come_together(mechanisms: tuple[str, ...]) -> None:
    own = None if "GSSAPI" in mechanisms else Kerberos("kafka/localhost@R", Path("/k"), Path("/krb5.conf"))
    with pytest.raises(ConfigError, match="GSSAPI needs `kerberos`"):
        Security({"admin": "a"}, mechanisms=mechanisms, kerberos=own)


@pytest.mark.parametrize(("users", "supers", "what"), BAD_SECURITY.values(), ids=BAD_SECURITY.keys())
def test_bad_users_are_refused(users: dict[str, str], supers: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Security(users, supers)
    assert what in raised.value.what


def test_an_unknown_user_says_which_exist(tmp_path: Path) -> None:
    layout = lay_out(tmp_path, security=Security({"admin": "a", "alice": "secret"}))
    with pytest.raises(ConfigError) as raised:
        KafkaCluster(layout).client_options("carol")
    assert "Name one that exists: admin, alice." in str(raised.value)
    assert "secret" not in str(raised.value)


# What cannot start --------------------------------------------------------------------------------------------------


def test_a_broker_that_cannot_start_quotes_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(SemelError) as raised,
        kafka(tmp_path, properties={"num.io.threads": "none"}, quick=True) as never,
    ):
        assert never is None
    what, data_now, remedy = str(raised.value).splitlines()
    assert what.startswith("Kafka broker 0 ended while it started: ")
    assert "ConfigException: Invalid value none for configuration num.io.threads" in what
    assert data_now == "  the data now: nothing was started and no row was written"
    assert remedy == f"  what to do: Read {tmp_path}/broker-0/broker.log, then try again."


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError) as raised, kafka(tmp_path / "new", ports=[port]):
            pass
    assert raised.value.what == f"Kafka broker 0 cannot listen on 127.0.0.1:{port}: another program does."
    assert not (tmp_path / "new").exists()


def test_numbers_of_brokers_and_ports_are_checked(tmp_path: Path) -> None:
    for brokers in (0, 6, -1):
        with pytest.raises(ConfigError, match=f"cannot have {brokers} brokers"):
            lay_out(tmp_path, brokers=brokers)
    with pytest.raises(ConfigError, match="2 brokers cannot use 1 ports"):
        lay_out(tmp_path, brokers=2, ports=[9092])
    with pytest.raises(ConfigError, match="not all ports: 65535, 65536"):
        lay_out(tmp_path, brokers=2, ports=[65_535, 65_536])
    with pytest.raises(ConfigError, match="cannot lie in"):
        lay_out(tmp_path / "one,two")
    with pytest.raises(ConfigError, match="broker 0 was never started"):
        KafkaCluster(lay_out(tmp_path)).kill()


# Pure ---------------------------------------------------------------------------------------------------------------


def test_copies_follow_the_number_of_brokers_and_the_caller_has_the_last_word(tmp_path: Path) -> None:
    names = ("transaction.state.log.replication.factor", "transaction.state.log.min.isr", "min.insync.replicas")
    found = {
        brokers: tuple(properties_of(lay_out(tmp_path, brokers=brokers), 0)[name] for name in names)
        for brokers in (1, 2, 3, 5)
    }
    assert found == {1: ("1", "1", "1"), 2: ("2", "1", "1"), 3: ("3", "2", "2"), 5: ("3", "2", "2")}
    own = lay_out(tmp_path, properties={"min.insync.replicas": "7", "some.other": "x"})
    assert [properties_of(own, 0)[name] for name in ("min.insync.replicas", "some.other")] == ["7", "x"]
