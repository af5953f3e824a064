"""What the Kafka sink refuses, in three lines each, and how soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from semel.dev.ports import free_port
from semel.errors import BatchFailed, ConfigError, SchemaMismatch, SemelError, SinkUnavailable
from semel.ids import Branch
from semel.sinks.kafka import Kafka
from semel.sinks.kafka.reach import Reach
from semel.sinks.kafka.topics import ensure_control_topic
from semel.testing.harness import attempt, context
from tests.sinks.kafka_rig import RECORD, Rig, records_of, stage, started

NOTHING_STARTED = "  the data now: nothing was started and no row was written\n"
ROLLED_BACK = "  the data now: the batch was rolled back: nothing of it is visible in any sink\n"
NOT_CHANGED = "  the data now: nothing was changed by this call\n"
RUNS_AGAIN = "  what to do: Mend the cause and start the pipeline again: the batch runs again from the same offsets."

PATHS = pytest.mark.parametrize("by_row", [False, True], ids=["quick", "by-row"])


def one_row(*, by_row: bool, **columns: Any) -> pa.RecordBatch:
    row = {"key": pa.array(["7"]), "value": pa.array(["v"]), **columns}
    if by_row:
        row["timestamp"] = pa.array([None], pa.timestamp("us"))
    return pa.RecordBatch.from_arrays(list(row.values()), names=list(row))


def refusal(kind: type[SemelError], call: Any, seconds_max: float = 5.0) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < seconds_max
    return str(caught.value)


# Topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_that_does_not_exist_is_named_before_the_start(rig: Rig) -> None:
    sink = rig.sink("nowhere")
    assert refusal(ConfigError, lambda: sink.check(RECORD)) == (
        f"There is no topic nowhere at {rig.servers}.\n{NOTHING_STARTED}"
        "  what to do: Create it first, or correct its name: semel creates none."
    )
    assert rig.world.wire.partitions("nowhere") == 0


@PATHS
def test_a_topic_of_the_column_that_does_not_exist_fails_the_batch(rig: Rig, by_row: bool) -> None:
    rig.topic()
    sink = rig.sink(options={"topic.metadata.propagation.max.ms": "300"})
    row = ", key '7', 1 bytes" if by_row else ""
    batch = one_row(by_row=by_row, topic=pa.array(["nowhere"]))
    assert refusal(BatchFailed, lambda: stage(sink, attempt(), batch)) == (
        f"Kafka at {rig.servers} did not take a row (topic nowhere{row}): Broker: Unknown topic or partition.\n"
        f"{ROLLED_BACK}"
        "  what to do: Create the topic, then start the pipeline again."
    )


def test_a_name_that_no_topic_can_have_is_refused(rig: Rig) -> None:
    assert refusal(ConfigError, lambda: rig.sink("no where").check(RECORD)) == (
        f"Topic no where at {rig.servers} cannot be used: Broker: Invalid topic.\n{NOTHING_STARTED}"
        "  what to do: Correct the pipeline and start it again."
    )
    rig.topic()
    batch = one_row(by_row=False, topic=pa.array(["no where"]))
    assert refusal(BatchFailed, lambda: stage(rig.sink(), attempt(), batch)) == (
        f"Kafka at {rig.servers} did not take a row (topic no where): Broker: Invalid topic.\n{ROLLED_BACK}"
        "  what to do: Correct the name of the topic, then start the pipeline again."
    )


def test_rows_without_a_topic_fail_the_batch(rig: Rig) -> None:
    rig.topic()
    batch = pa.RecordBatch.from_pydict({"topic": pa.array([None, "x", None], pa.string()), "value": ["a", "b", "c"]})
    assert refusal(BatchFailed, lambda: stage(rig.sink(), attempt(), batch)) == (
        f"Kafka at {rig.servers}: 2 rows have no topic.\n{ROLLED_BACK}{RUNS_AGAIN}"
    )


def test_rows_cannot_go_to_the_control_topic() -> None:
    assert refusal(ConfigError, lambda: Kafka("h:1", "semel-control")) == (
        f"The topic semel-control is semel's own: rows cannot go there.\n{NOTHING_STARTED}"
        "  what to do: Correct the pipeline and start it again."
    )


@PATHS
@pytest.mark.parametrize("partition", [2, 99, -5])
def test_a_partition_that_the_topic_does_not_have_fails_the_batch_at_once(
    rig: Rig, by_row: bool, partition: int
) -> None:
    """librdkafka would keep the row in the transaction, and then wait for it when it aborts."""
    topic = rig.topic(partitions=2)
    batch = one_row(by_row=by_row, partition=pa.array([partition], pa.int32()))
    assert refusal(BatchFailed, lambda: stage(rig.sink(topic), attempt(), batch), 3.0) == (
        f"Kafka topic {topic} at {rig.servers} did not take a row (partition {partition}, key '7', 1 bytes): "
        f"Local: Unknown partition.\n{ROLLED_BACK}"
        "  what to do: Write to partitions that the topic has, or leave the column partition out."
    )
    assert rig.open_ids() == []


# Rows -------------------------------------------------------------------------------------------------------------


@PATHS
def test_a_row_that_is_larger_than_a_request_may_be_fails_the_batch(rig: Rig, by_row: bool) -> None:
    """The client's own limit; test_kafka_bugs.py has the broker's."""
    topic = rig.topic()
    batch = one_row(by_row=by_row, value=pa.array(["ü" * 600_000]))
    assert refusal(BatchFailed, lambda: stage(rig.sink(topic), attempt(), batch)) == (
        f"Kafka topic {topic} at {rig.servers} did not take a row (key '7', 1200000 bytes): "
        f"Broker: Message size too large.\n{ROLLED_BACK}"
        "  what to do: Raise max.message.bytes of the topic and kafka.max.request.size of the sink, or make the row "
        "smaller; the batch runs again from the same offsets."
    )


def test_a_larger_row_passes_when_both_limits_are_raised(rig: Rig) -> None:
    """What the error above says."""
    topic = rig.topic(config={"max.message.bytes": "3000000"})
    sink = rig.sink(topic, options={"kafka.max.request.size": "3000000"})
    (part,) = stage(sink, attempt(), one_row(by_row=False, value=pa.array(["x" * 2_000_000])))
    assert part.rows == 1


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"x"}], ids=["null", "null-key"])
def test_a_header_without_a_key_fails_the_batch(rig: Rig, header: Any) -> None:
    topic = rig.topic()
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = one_row(by_row=False, headers=pa.array([[header]], kind))
    assert refusal(BatchFailed, lambda: stage(rig.sink(topic), attempt(), batch)) == (
        f"Kafka topic {topic} at {rig.servers}: a header has no key.\n{ROLLED_BACK}{RUNS_AGAIN}"
    )


def test_columns_that_are_not_those_of_a_record_are_all_named() -> None:
    schema = pa.schema(
        [
            ("key", pa.int64()),
            ("amount", pa.float64()),
            ("headers", pa.string()),
            ("partition", pa.int64()),
            ("timestamp", pa.date32()),
            ("note", pa.string()),
        ]
    )
    assert refusal(SchemaMismatch, lambda: Kafka("h:1", "orders").check(schema)) == (
        "Kafka topic orders at h:1 cannot take these rows: key is int64, not string or binary; headers is string, not "
        "array<struct<key string, value binary>>; partition is int64, not int; timestamp is date32[day], not "
        f"timestamp; amount, note would be dropped; there is no column value.\n{NOTHING_STARTED}"
        "  what to do: Select the record's columns: key, value, headers, topic, partition, timestamp; for example "
        'select=["CAST(id AS STRING) AS key", "to_json(struct(*)) AS value"].'
    )


def test_a_sink_without_a_topic_needs_the_column() -> None:
    text = refusal(SchemaMismatch, lambda: Kafka("h:1").check(RECORD))
    assert text.splitlines()[0] == (
        "Kafka at h:1 cannot take these rows: there is no column topic, and the sink names none."
    )


# Brokers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["check", "participant"])
def test_a_broker_that_is_away_is_told_within_the_time_limit(path: str) -> None:
    """On the way of the rows and on the way of the commits."""
    address = f"127.0.0.1:{free_port()}"
    sink = Kafka(address, "orders", timeout_s=1.5)
    call = (lambda: sink.check(RECORD)) if path == "check" else (lambda: sink.participant(context()))
    assert refusal(SinkUnavailable, call, 3.0) == (
        f"Kafka at {address} cannot be reached: Connect to ipv4#{address} failed: Connection refused.\n{NOT_CHANGED}"
        "  what to do: Bring the brokers back, or correct the address and kafka.security.protocol of the sink, then "
        "start it again."
    )


@pytest.mark.parametrize("path", ["check", "participant"])
def test_a_host_that_does_not_exist_is_told_within_the_time_limit(path: str) -> None:
    sink = Kafka("no-such-host.invalid:9092", "orders", timeout_s=1.5)
    call = (lambda: sink.check(RECORD)) if path == "check" else (lambda: sink.participant(context()))
    first = refusal(SinkUnavailable, call, 4.0).splitlines()[0]
    assert first.startswith(
        "Kafka at no-such-host.invalid:9092 cannot be reached: Failed to resolve 'no-such-host.invalid:9092': "
    )


@pytest.mark.parametrize("servers", ["", "localhost:port", "http://h:1", "a:1,,b:2", "a b:1", "h:1:2"])
def test_what_is_not_an_address_is_refused_when_the_sink_is_made(servers: str) -> None:
    assert refusal(ConfigError, lambda: Kafka(servers, "orders"), 0.5) == (
        f"A Kafka sink needs addresses of brokers, not {servers!r}.\n{NOTHING_STARTED}"
        '  what to do: Write Kafka("host:9092", "topic"), or several addresses with commas between them.'
    )


@pytest.mark.parametrize("servers", ["localhost", "a:1, b:2", "[::1]:9092", "kafka-0.kafka.svc.cluster.local:9092"])
def test_what_is_an_address_is_taken(servers: str) -> None:
    assert Kafka(servers, "orders").servers == servers


# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("transactional.id", "mine", "transactional_id_prefix of the sink"),
        ("kafka.transactional.id", "mine", "transactional_id_prefix of the sink"),
        ("acks", "1", "the default"),
        ("kafka.acks", 0, "the default"),
        ("request.required.acks", "1", "the default"),
        ("enable.idempotence", "false", "the default"),
        ("kafka.enable.idempotence", False, "the default"),
    ],
)
def test_options_that_break_the_guarantee_are_refused(option: str, value: Any, instead: str) -> None:
    bare, text = option.removeprefix("kafka."), str(value).lower() if isinstance(value, bool) else value
    assert refusal(ConfigError, lambda: Kafka("h:1", "orders", options={option: value}), 0.5) == (
        f"The Kafka option {bare}={text} breaks the guarantee.\n{NOTHING_STARTED}  what to do: Use {instead}."
    )


@pytest.mark.parametrize("options", [{"acks": "all"}, {"acks": "-1"}, {"kafka.enable.idempotence": "true"}])
def test_options_that_say_what_is_so_anyway_are_taken(options: dict[str, str]) -> None:
    assert Kafka("h:1", "orders", options=options).producer_settings()["acks"] == "all"


@pytest.mark.parametrize(
    ("option", "value", "argument"),
    [("transaction.timeout.ms", "5000", "transaction_timeout_ms"), ("kafka.bootstrap.servers", "other:1", "servers")],
)
def test_options_that_the_sink_has_an_argument_for_are_refused(option: str, value: str, argument: str) -> None:
    bare = option.removeprefix("kafka.")
    assert refusal(ConfigError, lambda: Kafka("h:1", "orders", options={option: value}), 0.5) == (
        f"The Kafka option {bare}={value} does not count: the sink has an argument for it.\n{NOTHING_STARTED}"
        f"  what to do: Give it as {argument}."
    )
    assert Kafka("h:1", "orders", options={"bootstrap.servers": "h:1"}).servers == "h:1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nonsense": "5"}, 'No such configuration property: "nonsense"'),
        ({"socket.nonsense": "5"}, 'No such configuration property: "socket.nonsense"'),
        ({"compression.type": "rar"}, 'Invalid value "rar" for configuration property "compression.codec"'),
        (
            {"max.in.flight.requests.per.connection": "10"},
            "Failed to create producer: `max.in.flight` must be set <= 5 when `enable.idempotence` is true",
        ),
        (
            {"delivery.timeout.ms": "1000000"},
            "Failed to create producer: `message.timeout.ms` must be set <= `transaction.timeout.ms`",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_librdkafka_refuses_are_told_before_the_start(
    rig: Rig, options: dict[str, str], said: str
) -> None:
    sink = rig.sink(rig.topic(), options=options)
    assert refusal(ConfigError, lambda: sink.check(RECORD)) == (
        f"The options of the Kafka sink cannot be used: {said}.\n{NOTHING_STARTED}"
        "  what to do: Correct the options of the sink; their names are those of Kafka's producer or of librdkafka."
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sasl.mechanism": "DIGEST-MD5"}, "sasl.mechanism=DIGEST-MD5"),
        (
            {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": "/x.p12"},
            "ssl.keystore.location, ssl.keystore.pass",
        ),
    ],
    ids=["digest", "pkcs12"],
)
def test_logins_that_cannot_end_transactions_are_refused_without_a_try(options: dict[str, str], said: str) -> None:
    """librdkafka could write the rows, and then nobody could commit them."""
    sink = Kafka("127.0.0.1:1", "orders", options={"security.protocol": "SASL_SSL", **options})
    text = refusal(ConfigError, lambda: sink.participant(context()), 0.5)
    assert text.startswith(f"The Kafka sink's control path cannot do what {said}")
    assert text.splitlines()[1:] == [
        NOTHING_STARTED.rstrip(),
        "  what to do: Log in by PLAIN, SCRAM, OAUTHBEARER or GSSAPI, and name certificates as PEM files: "
        "ssl.ca.location and so on.",
    ]


@pytest.mark.parametrize("call", ["check", "participant"])
def test_a_login_by_token_that_names_no_source_of_tokens_is_refused_without_a_try(call: str) -> None:
    options = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.client.id": "x"}
    sink = Kafka("127.0.0.1:1", "orders", options=options)
    calls: dict[str, Callable[[], object]] = {
        "check": lambda: sink.check(RECORD),
        "participant": lambda: sink.participant(context()),
    }
    assert refusal(ConfigError, calls[call], 0.5) == (
        f"A login by OAUTHBEARER does not say where its tokens come from.\n{NOTHING_STARTED}"
        "  what to do: Give the sink a token_provider, or set sasl.oauthbearer.method=oidc with "
        "sasl.oauthbearer.token.endpoint.url, sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret."
    )


def test_a_transaction_timeout_above_the_brokers_maximum_is_refused_at_start(rig: Rig) -> None:
    topic = rig.topic()
    sink = rig.sink(topic, transaction_timeout_ms=900_001)

    def start() -> None:
        with started(sink):
            pass

    assert refusal(ConfigError, start) == (
        f"Kafka topic {topic} at {rig.servers}: transaction_timeout_ms=900001 is above what the broker allows.\n"
        f"{NOTHING_STARTED}  what to do: Lower it, or raise transaction.max.timeout.ms of the brokers."
    )
    assert rig.world.marker_log(sink.name).fences.get((context().pipeline, sink.name)) is None


@pytest.mark.parametrize("settings", [{"transaction_timeout_ms": 0}, {"timeout_s": 0.0}, {"timeout_s": -1.0}])
def test_times_must_be_greater_than_zero(settings: dict[str, Any]) -> None:
    assert refusal(ConfigError, lambda: Kafka("h:1", "orders", **settings)) == (
        f"transaction_timeout_ms and timeout_s of a Kafka sink must be greater than zero.\n{NOTHING_STARTED}"
        "  what to do: Correct the pipeline and start it again."
    )


# The control topic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "partitions", "first", "remedy"),
    [
        (
            {"cleanup.policy": "delete", "compression.type": "uncompressed"},
            8,
            "has cleanup.policy=delete: it would forget what proves a batch",
            "Set cleanup.policy=compact on {}, or name another topic with control_topic.",
        ),
        (
            {"cleanup.policy": "compact,delete", "compression.type": "uncompressed"},
            8,
            "has cleanup.policy=compact,delete: it would forget what proves a batch",
            "Set cleanup.policy=compact on {}, or name another topic with control_topic.",
        ),
        (
            {"cleanup.policy": "compact"},
            8,
            "has compression.type=producer: semel could not read what pipelines with another compression write there",
            "Set compression.type=uncompressed on {}, or name another topic with control_topic.",
        ),
        (
            {"cleanup.policy": "compact", "compression.type": "uncompressed"},
            3,
            "has 3 partitions and must have 8",
            "Name another topic with control_topic, and let semel create it.",
        ),
    ],
    ids=["delete", "compact-delete", "compression", "partitions"],
)
def test_a_control_topic_that_proves_nothing_is_refused(
    rig: Rig, config: dict[str, str], partitions: int, first: str, remedy: str
) -> None:
    topic = rig.topic()
    control = rig.topic("control", partitions, config)
    sink = rig.sink(topic, control_topic=control)

    def start() -> None:
        with started(sink):
            pass

    assert refusal(ConfigError, start) == (
        f"The control topic {control} {first}.\n{NOTHING_STARTED}  what to do: {remedy.format(control)}"
    )


def test_a_control_topic_that_a_broker_has_not_heard_of_yet_is_looked_at_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody created it a moment ago, so that it is missing first, and there already when it is to be created."""
    control = rig.topic("control", 8, {"cleanup.policy": "delete"})
    unheard = SimpleNamespace(error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    answers: list[Any] = [SimpleNamespace(topics={control: unheard}, brokers={1: None})]
    metadata = Reach.metadata

    def late(reach: Reach, topic: str, timeout_s: float) -> Any:
        return answers.pop() if answers else metadata(reach, topic, timeout_s)

    monkeypatch.setattr(Reach, "metadata", late)
    with pytest.raises(ConfigError, match=r"has cleanup\.policy=delete"):
        ensure_control_topic(rig.servers, {}, control, 10)
    assert not answers


def test_rows_that_vanish_before_the_decision_say_which(rig: Rig) -> None:
    topic = rig.topic()
    sink = rig.sink(topic)
    with started(sink) as participant:
        parts = stage(sink, attempt(4), records_of(1), records_of(2))
        rig.world.end_by_branch(str(Branch(attempt(4), sink.name, 1, 0)))
        assert refusal(BatchFailed, lambda: participant.prepare(attempt(4), parts)) == (
            f"Kafka topic {topic} at {rig.servers}: the transaction of task 1 in batch 4 vanished before the decision; "
            f"did it take longer than transaction_timeout_ms=900000?\n{ROLLED_BACK}{RUNS_AGAIN}"
        )
        participant.abort(part.branch for part in parts)
