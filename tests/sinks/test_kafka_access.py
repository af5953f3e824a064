"""A broker with logins and ACLs: what the sink needs, no more, and what it says when something is missing."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from semel.dev.jars import java
from semel.dev.kafka import KafkaCluster, Security, Tls, kafka
from semel.errors import BatchFailed, ConfigError, SemelError
from semel.ids import Branch
from semel.kafka.connection import to_kafka_python
from semel.protocol.events import Outcome
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.pool import release_all, settle_all
from semel.testing.harness import attempt, context
from tests.processes import wait_until
from tests.sinks.kafka_rig import RECORD, Rig, prepare, prepare_one, records_of, stage, started

SCRAM = "SCRAM-SHA-512"
TELLING = "hunter2"
PASSWORD = f'se"cret\\ {TELLING}'
NOTHING_STARTED = "  the data now: nothing was started and no row was written\n"
ROLLED_BACK = "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
BY_ACL = (
    "  what to do: Allow it with an ACL (docs/sinks/kafka.md lists what the sink needs), then start the pipeline again."
)

PATHS = pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])

Rule = tuple[ResourceType, str, AclOperation]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    users = {"admin": "admin", "app": PASSWORD}
    with kafka(tmp_path_factory.mktemp("secured"), security=Security(users), quick=True, say=print) as cluster:
        yield cluster


class Access:
    """A topic, a control topic and a user `app` who may do what the test allows."""

    def __init__(self, cluster: KafkaCluster) -> None:
        quiet = {**cluster.client_options("admin"), "log_level": "0"}
        self.admin = AdminClient(dict(quiet))
        self.rig = Rig(cluster.bootstrap, {k: v for k, v in quiet.items() if k != "bootstrap.servers"})
        self.control = self.rig.world.control_topic = f"control_{self.rig.suffix}"
        self.prefix = f"shop-{self.rig.suffix}"
        self.topic = f"orders_{self.rig.suffix}"
        self.options = {k: v for k, v in cluster.client_options("app").items() if k != "bootstrap.servers"}

    def create_topics(self, *, control: bool) -> None:
        if not control:
            self.rig.world.control_topic = f"other_{self.rig.suffix}"
        self.rig.world.create_topics(self.topic)
        self.rig.world.control_topic = self.control

    def allow(self, *rules: Rule) -> None:
        bindings = [self._binding(*rule) for rule in rules]
        for future in self.admin.create_acls(bindings).values():
            future.result(20)
        wait_until(lambda: len(self.admin.describe_acls(_everything()).result(20)) == len(bindings), 20)

    def _binding(self, kind: ResourceType, name: str, operation: AclOperation) -> AclBinding:
        prefixed = kind == ResourceType.TRANSACTIONAL_ID
        pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
        return AclBinding(kind, name, pattern, "User:app", "*", operation, AclPermissionType.ALLOW)

    def forbid_everything(self) -> None:
        for future in self.admin.delete_acls([_everything()]).values():
            future.result(20)
        wait_until(lambda: not self.admin.describe_acls(_everything()).result(20), 20)

    def sink(self, **options: str) -> Kafka:
        return Kafka(
            self.rig.servers,
            self.topic,
            options={**self.options, **options},
            transactional_id_prefix=self.prefix,
            control_topic=self.control,
            name=f"orders_{self.rig.suffix}",
            timeout_s=5.0,
        )

    @property
    def needed(self) -> dict[str, Rule]:
        """What docs/sinks/kafka.md says suffices. Write and Read imply Describe."""
        topic, control, ids = (ResourceType.TOPIC, ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID)
        return {
            "topic: Write": (topic, self.topic, AclOperation.WRITE),
            "control: Read": (control, self.control, AclOperation.READ),
            "control: Write": (control, self.control, AclOperation.WRITE),
            "control: DescribeConfigs": (control, self.control, AclOperation.DESCRIBE_CONFIGS),
            "ids: Write": (ids, self.prefix, AclOperation.WRITE),
        }


def _everything() -> AclBindingFilter:
    anything: Any = None
    kinds = (ResourceType.ANY, anything, ResourcePatternType.ANY)
    return AclBindingFilter(*kinds, "User:app", anything, AclOperation.ANY, AclPermissionType.ANY)


@pytest.fixture
def access(secured: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Access]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Access(secured)
    try:
        yield made
    finally:
        made.forbid_everything()
        made.rig.end()


def a_life(access: Access) -> None:
    """Everything that a pipeline does with the sink, from the check before the start to the sweep after a crash."""
    sink = access.sink(**{"batch.size": "100"})
    sink.check(RECORD)
    with started(sink) as participant:
        for committable in prepare(participant, sink, attempt(0), records_of(1), records_of(2)):
            assert participant.commit(committable) is Outcome.COMMITTED
        for committable in prepare(participant, sink, attempt(1)):
            assert participant.commit(committable) is Outcome.COMMITTED
        stage(sink, attempt(2), records_of(3))
        cut_short = sink.writer(Branch(attempt(2), sink.name, 1, 0))
        cut_short.write(records_of(*range(10, 100)))
        wait_until(lambda: len(access.rig.open_ids()) == 2, 20)
    release_all()
    with started(sink, context(2)) as participant:
        remains = participant.recover()
        assert (len(remains.branches), remains.newest_batch) == (1, 1)
        participant.abort(remains.branches)
        assert access.rig.open_ids() == []
        again = prepare_one(participant, sink, attempt(2, 1, 2), records_of(3))
        assert participant.commit(again) is Outcome.COMMITTED


def refusal(call: Callable[[], object], kind: type[SemelError] = ConfigError) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < 5.0
    return str(caught.value)


def start(access: Access) -> None:
    with started(access.sink()):
        pass


def rows(*, by_row: bool) -> pa.RecordBatch:
    """One row, for the quick producer or for the other."""
    batch = records_of(1)
    return batch.append_column("timestamp", pa.array([None], pa.timestamp("us"))) if by_row else batch


def check_and_start(access: Access) -> None:
    access.sink().check(RECORD)
    start(access)


# ACLs -------------------------------------------------------------------------------------------------------------


def test_what_the_documentation_says_suffices_does(access: Access) -> None:
    access.create_topics(control=True)
    access.allow(*access.needed.values())
    a_life(access)
    assert access.rig.visible(access.topic) == [1, 2, 3]


def test_what_this_user_may_not_look_at_is_said_to_be_unknown(access: Access, caplog: pytest.LogCaptureFixture) -> None:
    """Whether an election may lose rows and markers; nothing is assumed of it."""
    access.create_topics(control=True)
    access.allow(*access.needed.values())
    start(access)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "semel"]
    state, refused = "__transaction_state", "TOPIC_AUTHORIZATION_FAILED"
    what, now, remedy = said.splitlines()
    assert what == (
        f"Nobody told us how safely {access.rig.servers} keeps {access.topic} ({refused}), {state} ({refused})."
    )
    assert now.startswith("  the data now: nothing is known to be lost. Whether an election may lose rows or markers (")
    assert remedy.startswith("  what to do: Allow Describe and DescribeConfigs on these topics, or make sure of ")
    caplog.clear()
    look = [(state, AclOperation.DESCRIBE), (state, AclOperation.DESCRIBE_CONFIGS)]
    look += [(access.topic, AclOperation.DESCRIBE_CONFIGS)]
    access.forbid_everything()
    access.allow(*access.needed.values(), *((ResourceType.TOPIC, *rule) for rule in look))
    start(access)
    assert [r.getMessage() for r in caplog.records if r.name == "semel"] == []


def test_with_the_right_to_create_it_the_control_topic_is_created(access: Access) -> None:
    access.create_topics(control=False)
    access.allow(*access.needed.values(), (ResourceType.TOPIC, access.control, AclOperation.CREATE))
    start(access)
    assert access.rig.world.wire.partitions(access.control) == 8


def test_each_of_them_is_needed(access: Access) -> None:
    """The first line of what is said when one is missing, and none of them passes."""
    access.create_topics(control=True)
    said = {}
    for missing in access.needed:
        access.allow(*(rule for name, rule in access.needed.items() if name != missing))
        said[missing] = refusal(lambda: check_and_start(access)).splitlines()[0]
        release_all()
        access.forbid_everything()
    at = f"at {access.rig.servers}"
    ids = f"{access.prefix}-orders_{access.rig.suffix}"
    assert said == {
        "topic: Write": f"This user may not write to topic {access.topic} {at}.",
        "control: Read": f"Kafka {at} does not allow Fetch of {access.control}: TOPIC_AUTHORIZATION_FAILED.",
        "control: Write": f"This user may not write to the control topic {access.control}.",
        "control: DescribeConfigs": f"The settings of the control topic {access.control} {at} cannot be read "
        "(DescribeConfigs): Topic authorization failed.",
        "ids: Write": f"Kafka topic {access.topic} {at} does not let us use transactional ids beginning with {ids}: "
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED.",
    }


def test_a_topic_that_the_user_may_not_write_is_refused_before_the_start(access: Access) -> None:
    """With Describe alone the topic can be seen, and only the broker's list of what is allowed says no."""
    access.create_topics(control=True)
    expected = f"This user may not write to topic {access.topic} at {access.rig.servers}.\n{NOTHING_STARTED}{BY_ACL}"
    assert refusal(lambda: access.sink().check(RECORD)) == expected
    access.allow((ResourceType.TOPIC, access.topic, AclOperation.DESCRIBE))
    assert refusal(lambda: access.sink().check(RECORD)) == expected


@PATHS
def test_a_right_that_is_taken_away_fails_the_batch(access: Access, by_row: bool) -> None:
    """librdkafka reports that the rows were purged, and keeps to itself why."""
    batch = rows(by_row=by_row)
    access.create_topics(control=True)
    access.allow(*access.needed.values())
    sink = access.sink()
    with started(sink) as participant:
        for committable in prepare(participant, sink, attempt(0), batch):
            participant.commit(committable)
        settle_all()
        access.forbid_everything()
        access.allow(*(rule for name, rule in access.needed.items() if name != "topic: Write"))
        how = "did not let a task write: Failed to add partition(s) to transaction on broker TxnCoordinator/0"
        assert refusal(lambda: stage(sink, attempt(1), batch), BatchFailed) == (
            f"Kafka topic {access.topic} at {access.rig.servers} {how if by_row else 'did not take a row'}: "
            f"Broker: Topic authorization failed.\n{ROLLED_BACK}"
            "  what to do: Allow Write on the topic with an ACL, then start the pipeline again."
        )


def test_ids_that_the_user_may_not_use_are_refused_at_start(access: Access) -> None:
    access.create_topics(control=True)
    access.allow(*(rule for name, rule in access.needed.items() if name != "ids: Write"))
    ids = f"{access.prefix}-orders_{access.rig.suffix}"
    assert refusal(lambda: start(access)) == (
        f"Kafka topic {access.topic} at {access.rig.servers} does not let us use transactional ids beginning with "
        f"{ids}: TRANSACTIONAL_ID_AUTHORIZATION_FAILED.\n{NOTHING_STARTED}"
        f"  what to do: Allow Write and Describe on transactional ids with the prefix {ids}."
    )


def test_a_control_topic_that_is_missing_and_may_not_be_created_is_told_with_the_command(access: Access) -> None:
    access.create_topics(control=False)
    access.allow(*access.needed.values())
    assert refusal(lambda: start(access)) == (
        f"semel's control topic {access.control} is missing at {access.rig.servers} and cannot be created: "
        f"Authorization failed.\n{NOTHING_STARTED}"
        f"  what to do: Create it: kafka-topics.sh --create --topic {access.control} --partitions 8 "
        "--replication-factor 1 --config cleanup.policy=compact --config compression.type=uncompressed "
        "--config segment.bytes=16777216 --config segment.ms=3600000 --config min.cleanable.dirty.ratio=0.1 "
        "--config delete.retention.ms=3600000 "
        "--config unclean.leader.election.enable=false"
    )


def test_a_control_topic_that_the_user_may_not_see_is_not_taken_for_missing(access: Access) -> None:
    access.create_topics(control=True)
    access.allow(access.needed["topic: Write"], access.needed["ids: Write"])
    assert refusal(lambda: start(access)) == (
        f"This user may not read and write semel's control topic {access.control} at {access.rig.servers}.\n"
        f"{NOTHING_STARTED}{BY_ACL}"
    )


# TLS --------------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> Tls:
    """A key for 127.0.0.1 that vouches for itself. keytool comes with the Java that the broker runs on."""
    folder.mkdir()
    store, trusted, secret = folder / "broker.p12", folder / "ca.pem", "changeit"
    common = [str(Path(java()).with_name("keytool")), "-keystore", str(store), "-storepass", secret, "-alias", "broker"]
    key = ["-genkeypair", "-keyalg", "EC", "-storetype", "PKCS12", "-dname", "CN=semel", "-ext", "SAN=IP:127.0.0.1"]
    for command in ([*common, *key], [*common, "-exportcert", "-rfc", "-file", str(trusted)]):
        subprocess.run(command, check=True, capture_output=True)
    return Tls(store, secret, trusted)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    folder = tmp_path_factory.mktemp("encrypted")
    security = Security({"admin": PASSWORD}, tls=certificates(folder / "certs"), mechanisms=("PLAIN", SCRAM))
    with kafka(folder / "kafka", security=security, quick=True, say=print) as cluster:
        yield cluster


def test_tls_with_a_login_on_the_way_of_the_rows_and_on_that_of_the_commits(
    encrypted: KafkaCluster, tmp_path: Path
) -> None:
    """A certificate that the user did not name is refused on both ways, at once, with the reason."""
    options = {k: v for k, v in encrypted.client_options("admin").items() if k != "bootstrap.servers"}
    assert options["security.protocol"] == "SASL_SSL"
    rig = Rig(encrypted.bootstrap, options)
    try:
        topic = rig.topic()
        scram = UserScramCredentialUpsertion("admin", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), b"other")
        admin = AdminClient({**encrypted.client_options("admin"), "log_level": 0})
        admin.alter_user_scram_credentials([scram])["admin"].result(20)
        by_scram = {**options, "sasl.mechanism": SCRAM, "sasl.password": "other"}
        for number, login in enumerate((options, by_scram)):
            for by_row in (False, True):
                sink = rig.sink(topic, options=login, name=f"sink_{number}_{by_row}_{rig.suffix}".lower())
                sink.check(RECORD)
                with started(sink) as participant:
                    one = prepare_one(participant, sink, attempt(), rows(by_row=by_row))
                    assert participant.commit(one) is Outcome.COMMITTED
        assert rig.visible(topic) == [1, 1, 1, 1]

        other = certificates(tmp_path / "other").trusted
        wrong = rig.sink(topic, options={**options, "ssl.ca.location": str(other)})
        for call in (lambda: wrong.check(RECORD), lambda: wrong.participant(context())):
            first, now, then = refusal(call).splitlines()
            assert first.startswith(f"Kafka at {rig.servers} cannot be reached: its certificate is not trusted: ")
            assert "certificate verify failed" in first
            assert (f"{now}\n", then) == (
                NOTHING_STARTED,
                "  what to do: Name the certificate of whoever signed that of the brokers: kafka.ssl.ca.location.",
            )
        with pytest.raises(KafkaError):
            KafkaAdminClient(
                **_python(encrypted, {**options, "ssl.ca.location": str(other)}), bootstrap_timeout_ms=2000
            )
        KafkaAdminClient(**_python(encrypted, options), bootstrap_timeout_ms=5000).close()
    finally:
        rig.end()


def _python(cluster: KafkaCluster, options: dict[str, str]) -> dict[str, Any]:
    """kafka-python by itself: on the sink's way of the commits librdkafka has looked at the certificate first."""
    return {"bootstrap_servers": cluster.bootstrap, **to_kafka_python(options)}


# Logins -----------------------------------------------------------------------------------------------------------

WRONG = "wrong-one"


@pytest.mark.parametrize("path", ["check", "participant"])
def test_a_wrong_password_is_told_at_once(access: Access, path: str) -> None:
    """On the way of the rows and on the way of the commits. Neither client gives up by itself."""
    sink = access.sink(**{"sasl.password": WRONG})
    text = refusal(lambda: sink.check(RECORD) if path == "check" else sink.participant(context()))
    assert text == (
        f"Kafka at {access.rig.servers} cannot be reached: the login was refused: SASL authentication error: "
        f"Authentication failed: Invalid username or password.\n{NOTHING_STARTED}"
        "  what to do: Correct the kafka.sasl.* options of the sink."
    )
    assert WRONG not in text


@PATHS
def test_a_password_that_is_no_longer_right_fails_a_task_at_once(access: Access, by_row: bool) -> None:
    """librdkafka would go on trying for a minute, and then say that it took too long."""
    sink = access.sink(**{"sasl.password": WRONG})
    why = "SASL authentication error: Authentication failed: Invalid username or password."
    remedy = "  what to do: Correct the kafka.sasl.* options of the sink."
    expected = f"Kafka at {access.rig.servers} cannot be reached: the login was refused: {why}\n{ROLLED_BACK}{remedy}"
    if by_row:
        who = f"Kafka topic {access.topic} at {access.rig.servers}"
        expected = f"{who} did not let a task write: {why}\n{ROLLED_BACK}{remedy} Then start the pipeline again."
    assert refusal(lambda: stage(sink, attempt(), rows(by_row=by_row)), BatchFailed) == expected


def test_a_login_that_the_broker_does_not_offer_is_told(access: Access) -> None:
    sink = access.sink(**{"sasl.mechanism": "SCRAM-SHA-256"})
    assert refusal(lambda: sink.check(RECORD)).splitlines()[0] == (
        f"Kafka at {access.rig.servers} cannot be reached: the login was refused: SASL SCRAM-SHA-256 mechanism "
        "handshake failed: Broker: Unsupported SASL mechanism: broker's supported mechanisms: PLAIN."
    )


def test_javas_way_to_name_the_login_works_as_well(access: Access) -> None:
    access.create_topics(control=True)
    access.allow(*access.needed.values())
    quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    java = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": f'{module} required username="app" password="{quoted}";',
    }
    access.options = java
    sink = access.sink()
    sink.check(RECORD)
    with started(sink) as participant:
        assert participant.commit(prepare_one(participant, sink, attempt(), records_of(1))) is Outcome.COMMITTED


def test_the_password_is_in_no_log(access: Access, caplog: pytest.LogCaptureFixture) -> None:
    """At level DEBUG kafka-python writes its settings to the log, and every byte that it sends."""
    access.create_topics(control=True)
    access.allow(*access.needed.values())
    # The first connection keeps the level that it finds, unless that would show the password.
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "kafka"):
        start(access)
    # The sink warns of what it may not look at. It asks Spark whether speculation is on, and py4j logs that where an
    # earlier test has left a session.
    assert {record.name.split(".")[0] for record in caplog.records} - {"py4j"} == {"kafka", "semel"}
    assert TELLING not in caplog.text
