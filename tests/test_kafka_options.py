"""Java's Kafka settings in librdkafka's words, and secrets that stay hidden."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from semel.errors import ConfigError
from semel.kafka.options import (
    RENAMED,
    REVALUED,
    connection_options,
    hide_secrets,
    java_to_librdkafka,
    login_for_java,
)

SCRAM = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="s3cr3t";'
LOGIN = {"sasl.username": "alice", "sasl.password": "s3cr3t"}

TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing": ({}, {}),
    "the same in both": (
        {"security.protocol": "SASL_SSL", "linger.ms": 20, "enable.idempotence": True},
        {"security.protocol": "SASL_SSL", "linger.ms": "20", "enable.idempotence": "true"},
    ),
    "Spark's prefix": ({"kafka.security.protocol": "SSL"}, {"security.protocol": "SSL"}),
    "prefixed and bare alike": ({"kafka.client.id": "a", "client.id": "a"}, {"client.id": "a"}),
    "nothing given": ({"kafka.client.id": None}, {}),
    "renamed": (
        {"fetch.max.wait.ms": 500, "max.request.size": "1000000", "sasl.mechanisms": "PLAIN"},
        {"fetch.wait.max.ms": "500", "message.max.bytes": "1000000", "sasl.mechanism": "PLAIN"},
    ),
    "no host name check": (
        {"ssl.endpoint.identification.algorithm": ""},
        {"ssl.endpoint.identification.algorithm": "none"},
    ),
    "what only a JVM needs": (
        {
            "key.serializer": "org.apache.kafka.common.serialization.StringSerializer",
            "max.poll.records": "500",
            "metrics.num.samples": "2",
            "sasl.login.refresh.window.factor": "0.8",
            "ssl.protocol": "TLSv1.3",
        },
        {},
    ),
    "SCRAM": (
        {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": SCRAM},
        {"sasl.mechanism": "SCRAM-SHA-512", **LOGIN},
    ),
    "PLAIN, other quotes and spaces": (
        {"sasl.jaas.config": " org.x.PlainLoginModule  required\n username = 'al\\'ice'\n password=plain ;"},
        {"sasl.username": "al'ice", "sasl.password": "plain"},
    ),
    "a password with everything in it": (
        {"sasl.jaas.config": r'PlainLoginModule required username="a" password="x=\"1\"; y\\z";'},
        {"sasl.username": "a", "sasl.password": r'x="1"; y\z'},
    ),
    "librdkafka's own way": (dict(LOGIN), LOGIN),
    "librdkafka's own way wins": ({**LOGIN, "sasl.jaas.config": "strange.Module required;"}, LOGIN),
    "OAuth": (
        {
            "sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.secured"
            ".OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": "https://id/token",
            "sasl.jaas.config": "x.OAuthBearerLoginModule required clientId='me' clientSecret='s' scope='all' "
            "extension_pool='p';",
        },
        {
            "sasl.oauthbearer.token.endpoint.url": "https://id/token",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": "me",
            "sasl.oauthbearer.client.secret": "s",
            "sasl.oauthbearer.scope": "all",
            "sasl.oauthbearer.extensions": "pool=p",
        },
    ),
    "Kerberos": (
        {"sasl.jaas.config": 'com.sun.Krb5LoginModule required keyTab="/k" principal="me@X" serviceName="kafka";'},
        {"sasl.kerberos.keytab": "/k", "sasl.kerberos.principal": "me@X", "sasl.kerberos.service.name": "kafka"},
    ),
    "PEM stores": (
        {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "/ca.pem",
            "ssl.keystore.type": "pem",
            "ssl.keystore.location": "/me.pem",
            "ssl.key.password": "k",
        },
        {
            "ssl.ca.location": "/ca.pem",
            "ssl.certificate.location": "/me.pem",
            "ssl.key.location": "/me.pem",
            "ssl.key.password": "k",
        },
    ),
    "PEM text": (
        {"ssl.truststore.certificates": "CA", "ssl.keystore.key": "KEY", "ssl.keystore.certificate.chain": "CHAIN"},
        {"ssl.ca.pem": "CA", "ssl.key.pem": "KEY", "ssl.certificate.pem": "CHAIN"},
    ),
    "PKCS12 key": (
        {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": "/me.p12", "ssl.keystore.password": "p"},
        {"ssl.keystore.location": "/me.p12", "ssl.keystore.password": "p"},
    ),
    "a JKS store for Java beside PEM for us": (
        {"ssl.truststore.location": "/ca.jks", "ssl.truststore.password": "p", "ssl.ca.location": "/ca.pem"},
        {"ssl.ca.location": "/ca.pem"},
    ),
    "what nobody here knows is for librdkafka to judge": ({"no.such.thing": "1"}, {"no.such.thing": "1"}),
}


@pytest.mark.parametrize(("options", "expected"), TRANSLATED.values(), ids=TRANSLATED.keys())
def test_translation(options: dict[str, Any], expected: dict[str, str]) -> None:
    assert java_to_librdkafka(options) == expected


@pytest.mark.parametrize("expected", [e for _, e in TRANSLATED.values() if "ssl.keystore.location" not in e])
def test_what_comes_out_is_not_translated_again(expected: dict[str, str]) -> None:
    assert java_to_librdkafka(expected) == expected


REFUSED = {
    "JKS trust": ({"ssl.truststore.location": "/ca.jks"}, "ssl.truststore.location names a JKS store"),
    "PKCS12 trust": (
        {"ssl.truststore.location": "/ca.p12", "ssl.truststore.type": "PKCS12"},
        "ssl.truststore.location names a PKCS12 store",
    ),
    "JKS key": ({"ssl.keystore.location": "/me.jks"}, "ssl.keystore.location names a JKS store"),
    "a login handler": (
        {"sasl.login.callback.handler.class": "com.example.OurOwnCallbackHandler"},
        "sasl.login.callback.handler.class has no counterpart",
    ),
    "an unknown setting of TLS": ({"ssl.engine.factory.class": "x.Y"}, "ssl.engine.factory.class has no counterpart"),
    "an unknown setting of SASL": ({"sasl.novelty": "s3cr3t"}, "sasl.novelty has no counterpart"),
    "security providers": ({"security.providers": "x.Y"}, "security.providers has no counterpart"),
    "a login module": ({"sasl.jaas.config": "s3cr3t.IAMLoginModule required;"}, "login module of the Kafka option"),
    "no login module": ({"sasl.jaas.config": "s3cr3t"}, "login module of the Kafka option"),
    "no password": ({"sasl.jaas.config": "x.PlainLoginModule required username='s3cr3t';"}, "names no username and"),
    "a token": ({"sasl.jaas.config": SCRAM.replace(";", ' tokenauth="true";')}, "delegation token"),
    "Java's ciphers": ({"ssl.cipher.suites": "TLS_AES_128_GCM_SHA256"}, "Java's names of ciphers"),
    "twice": ({"kafka.sasl.password": "s3cr3t", "sasl.password": "other"}, "sasl.password is given twice"),
}


@pytest.mark.parametrize(("options", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_what_matters_and_cannot_be_translated_is_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        java_to_librdkafka(options)
    assert len(str(caught.value).splitlines()) == 3
    assert "s3cr3t" not in str(caught.value)


def test_librdkafka_takes_all_that_comes_out() -> None:
    """But for the name that nobody here knows, which shows that this test can fail."""
    made = [expected for _, expected in TRANSLATED.values()]
    made += [{name: "1000"} for name in RENAMED.values()]
    made += [{name: value} for (name, _), value in REVALUED.items()]
    refused = [said for settings in made if (said := refusal_of_librdkafka(settings))]
    assert refused == ['No such configuration property: "no.such.thing"']


def refusal_of_librdkafka(settings: dict[str, str]) -> str:
    try:
        AdminClient({**LOGIN, "sasl.mechanism": "PLAIN", "log_level": "0", **settings})
    except KafkaException as error:
        return str(error.args[0].str())
    return ""


def test_an_admin_client_gets_what_it_needs_to_reach_the_broker() -> None:
    options = {
        "bootstrap.servers": "a:1",
        "acks": "all",
        "isolation.level": "read_committed",
        "client.id": "me",
        **LOGIN,
    }
    assert connection_options(options) == {"bootstrap.servers": "a:1", "client.id": "me", **LOGIN}


@pytest.mark.parametrize("password", ["s3cr3t", 'with "quotes"; and \\ more'])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_login_by_name_and_password_reads_the_same_in_java(password: str, mechanism: str) -> None:
    login = {"sasl.mechanism": mechanism, "sasl.username": "alice", "sasl.password": password}
    jaas = login_for_java({f"kafka.{name}": value for name, value in login.items()})
    assert ("ScramLoginModule" in jaas["sasl.jaas.config"]) == mechanism.startswith("SCRAM")
    assert java_to_librdkafka({"sasl.mechanism": mechanism, **jaas}) == login


def test_a_login_that_java_understands_is_left_alone() -> None:
    assert login_for_java({"sasl.jaas.config": SCRAM, **LOGIN}) == {}
    assert login_for_java({"security.protocol": "SSL"}) == {}


def test_secrets_are_hidden() -> None:
    open_ = {
        "kafka.security.protocol": "SASL_SSL",
        "sasl.username": "alice",
        "sasl.oauthbearer.token.endpoint.url": "https://id",
        "sasl.oauthbearer.client.id": "me",
        "ssl.key.location": "/me.pem",
        "linger.ms": 5,
    }
    secret = {
        "kafka.sasl.jaas.config": SCRAM,
        "sasl.password": "s3cr3t",
        "ssl.key.password": "s3cr3t",
        "kafka.ssl.keystore.password": "s3cr3t",
        "ssl.keystore.key": "s3cr3t",
        "ssl.key.pem": "s3cr3t",
        "sasl.oauthbearer.client.secret": "s3cr3t",
        "SASL.PASSWORD": "s3cr3t",
    }
    hidden = hide_secrets({**open_, **secret})
    assert hidden == {**open_, **dict.fromkeys(secret, "***")}
    assert "s3cr3t" not in repr(hidden)
