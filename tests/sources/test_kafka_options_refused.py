"""What `read_kafka` refuses without a look at the broker, and what it tells Spark. No Spark in here."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import pytest

from semel.errors import ConfigError, MissingExtra, Refused
from semel.sources.kafka import KafkaSource, connector, offsets_as_json
from semel.sources.kafka_broker import Broker

SERVERS = "127.0.0.1:9092"
SECRET = "s3cr3t"  # noqa: S105 - the secret that no message may hold
JAAS = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="alice" password="{SECRET}";'


def source(**arguments: Any) -> KafkaSource:
    return KafkaSource(**{"servers": SERVERS, "topics": ("orders",), **arguments})


BREAKS_THE_GUARANTEE = {
    "isolation": ("kafka.isolation.level", "read_uncommitted", "records of aborted transactions would be read"),
    "isolation, other case": ("Kafka.Isolation.Level", "READ_UNCOMMITTED", "records of aborted transactions"),
    "data loss": ("failOnDataLoss", False, "which is loss"),
    "data loss, other case": ("FAILONDATALOSS", "False", "which is loss"),
}


@pytest.mark.parametrize(("option", "value", "why"), BREAKS_THE_GUARANTEE.values(), ids=BREAKS_THE_GUARANTEE.keys())
def test_settings_that_break_the_guarantee_are_refused(option: str, value: Any, why: str) -> None:
    with pytest.raises(Refused, match=f"^The option {option}={value} breaks the guarantee: .*{why}") as caught:
        source(options={option: value})
    assert f"Leave {option} out: read_kafka sets it to " in str(caught.value)


NOT_HERE = {
    "subscribe": 'use read_kafka(spark, "orders", ...)',
    "subscribePattern": "use read_kafka(spark, pattern=",
    "assign": '.where("partition = 0")',
    "startingOffsets": 'use start="earliest"',
    "startingTimestamp": "use start=datetime(...)",
    "endingOffsets": "Leave endingOffsets out.",
    "semel.group": 'use group="billing"',
    "kafka.group.id": 'use group="billing"',
    "kafka.enable.auto.commit": "Leave kafka.enable.auto.commit out.",
    "kafka.auto.offset.reset": 'use start="earliest"',
    "kafka.value.deserializer": '"CAST(value AS STRING)" in the query',
    "kafka.interceptor.classes": "Leave kafka.interceptor.classes out.",
}


@pytest.mark.parametrize(("option", "remedy"), NOT_HERE.items(), ids=NOT_HERE.keys())
def test_options_that_are_not_for_the_source_say_what_is(option: str, remedy: str) -> None:
    with pytest.raises(Refused, match=f"^The option {option} cannot be given to read_kafka: ") as caught:
        source(options={option: SECRET})
    assert remedy in str(caught.value).splitlines()[2]
    assert SECRET not in str(caught.value)


WRONG = {
    "no topic": ({"topics": ()}, "needs topics or a pattern, and not both"),
    "topic and pattern": ({"pattern": "a.*"}, "needs topics or a pattern, and not both"),
    "topics in one text": ({"topics": ("a,b",)}, "A Kafka topic cannot be named 'a,b'"),
    "no name": ({"topics": ("",)}, "A Kafka topic cannot be named ''"),
    "a broken pattern": ({"topics": (), "pattern": "a("}, "is not a regular expression"),
    "a start that is none": ({"start": "beginning"}, "A stream cannot start at 'beginning'"),
    "a fallback that is none": ({"fallback": "none"}, "The fallback cannot be 'none'"),
    "no group": ({"start": "group-offsets"}, "start='group-offsets' needs a group"),
    "no time zone": ({"start": datetime(2024, 1, 1)}, "has no time zone"),
    "offsets by topic only": ({"start": {"orders": 3}}, "not made of offsets by topic and partition"),
    "other servers": ({"options": {"kafka.bootstrap.servers": "b:1"}}, f"servers says {SERVERS} and the option"),
    "the prefix forgotten": ({"options": {"security.protocol": "SSL"}}, "has no option security.protocol"),
}


@pytest.mark.parametrize(("arguments", "what"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_is_refused_in_three_lines(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source(**arguments)
    assert what in caught.value.what
    assert len(str(caught.value).splitlines()) == 3


def test_spark_is_told_what_the_guarantee_rests_on() -> None:
    options = {"maxOffsetsPerTrigger": 1000, "includeHeaders": True, "failondataloss": "TRUE", "minPartitions": None}
    assert source(options=options, group="billing").settings() == {
        "subscribe": "orders",
        "maxOffsetsPerTrigger": "1000",
        "includeHeaders": "true",
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
        "kafka.bootstrap.servers": SERVERS,
        "kafka.max.poll.records": "20000",
        "semel.group": "billing",
    }
    assert source(options={"kafka.max.poll.records": 7}).settings()["kafka.max.poll.records"] == "7"
    assert source(topics=(), pattern="o.*").settings()["subscribePattern"] == "o.*"
    assert source(topics=("a", "b")).settings()["subscribe"] == "a,b"


def test_options_of_the_client_are_spelled_as_kafka_spells_them() -> None:
    made = source(options={"Kafka.Security.Protocol": "SSL", "KAFKA.BOOTSTRAP.SERVERS": SERVERS}).settings()
    assert made["kafka.security.protocol"] == "SSL"
    assert [name for name in made if name.lower() == "kafka.bootstrap.servers"] == ["kafka.bootstrap.servers"]


def test_a_login_in_librdkafkas_words_is_told_to_java_as_well() -> None:
    options = {"kafka.sasl.mechanism": "PLAIN", "kafka.sasl.username": "alice", "kafka.sasl.password": SECRET}
    assert source(options=options).settings()["kafka.sasl.jaas.config"] == JAAS


def test_secrets_are_not_shown() -> None:
    made = source(options={"kafka.sasl.jaas.config": JAAS, "kafka.security.protocol": "SASL_SSL"})
    assert SECRET not in repr(made)
    assert "SASL_SSL" in repr(made)


def test_offsets_are_written_as_spark_reads_them() -> None:
    assert offsets_as_json({("b", 1): 2, ("a", 10): -2, ("a", 2): 3}) == '{"a": {"2": 3, "10": -2}, "b": {"1": 2}}'


@pytest.mark.parametrize(
    ("spark", "scala", "expected"),
    [
        ("4.0.5", "", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"),
        ("3.5.7", "", "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7"),
        ("3.5.3", "2.13", "org.apache.spark:spark-sql-kafka-0-10_2.13:3.5.7"),
        ("4.1.0", "", "org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.0"),
    ],
)
def test_the_connector_fits_the_spark(spark: str, scala: str, expected: str) -> None:
    assert connector(spark, scala) == expected


def test_by_default_the_connector_fits_the_pyspark_that_is_installed() -> None:
    import pyspark

    assert connector() == connector(pyspark.__version__)


def test_the_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra, match="pip install 'semel\\[kafka\\]'"):
        Broker({"kafka.bootstrap.servers": SERVERS}, 1.0)


def test_an_option_that_no_client_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^The Kafka options do not make a client: .*socket\.novelty"):
        Broker({"kafka.bootstrap.servers": SERVERS, "kafka.socket.novelty": SECRET}, 1.0)
