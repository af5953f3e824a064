"""The settings of a connection in kafka-python's words, and what it may write to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from semel.errors import ConfigError
from semel.kafka.connection import keep_passwords_out_of_logs, request_timeout_ms, to_kafka_python
from semel.kafka.options import connection_options


def translated(**java: str) -> dict[str, object]:
    """Of settings as Spark's users write them."""
    return to_kafka_python(connection_options({f"kafka.{k.replace('_', '.')}": v for k, v in java.items()}))


def test_tls_with_a_login_and_certificates_as_spark_names_them() -> None:
    found = translated(
        security_protocol="sasl_ssl",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_jaas_config='x.ScramLoginModule required username="app" password="p w";',
        ssl_truststore_location="/certs/ca.pem",
        ssl_truststore_type="PEM",
        ssl_keystore_location="/certs/own.pem",
        ssl_keystore_type="PEM",
        ssl_key_password="k",  # noqa: S106 - nobody's
        ssl_endpoint_identification_algorithm="",
    )
    assert found == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "app",
        "sasl_plain_password": "p w",
        "ssl_cafile": "/certs/ca.pem",
        "ssl_certfile": "/certs/own.pem",
        "ssl_keyfile": "/certs/own.pem",
        "ssl_password": "k",
        "ssl_check_hostname": False,
    }


def test_tls_as_librdkafka_names_it() -> None:
    found = translated(
        security_protocol="SSL",
        ssl_ca_location="ca.pem",
        ssl_crl_location="crl.pem",
        ssl_certificate_location="c.pem",
        ssl_key_location="k.pem",
        ssl_endpoint_identification_algorithm="https",
        enable_ssl_certificate_verification="true",
    )
    files = {"ssl_cafile": "ca.pem", "ssl_crlfile": "crl.pem", "ssl_certfile": "c.pem", "ssl_keyfile": "k.pem"}
    assert found == {"security_protocol": "SSL", **files}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.ssl.certificate.verification", "false"),
        ("ssl.cipher.suites", "ECDHE-RSA-AES256-GCM-SHA384"),
        ("ssl.curves.list", "X25519"),
        ("ssl.sigalgs.list", "ECDSA+SHA256"),
        ("ssl.ca.pem", "-----BEGIN CERTIFICATE-----"),
        ("sasl.mechanism", "DIGEST-MD5"),
    ],
)
def test_what_would_make_it_less_secure_than_it_was_told_to_be_is_refused_by_name(name: str, value: str) -> None:
    """Those that say not to be secure, too: one way must not trust whom the other does not."""
    with pytest.raises(ConfigError, match=f"control path cannot do what {name}") as caught:
        to_kafka_python(connection_options({name: value}))
    assert "BEGIN" not in str(caught.value)


def test_numbers_of_the_connection() -> None:
    assert translated(
        connections_max_idle_ms="0", reconnect_backoff_ms="7", send_buffer_bytes="65536", client_id="shop"
    ) == {
        "connections_max_idle_ms": 2**31 - 1,
        "reconnect_backoff_ms": 7,
        "send_buffer_bytes": 65536,
        "client_id": "shop",
    }
    assert (request_timeout_ms({}), request_timeout_ms({"kafka.request.timeout.ms": "25000"})) == (10_000, 25_000)


@pytest.fixture
def levels() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """The root's logger and kafka-python's."""
    loggers = logging.getLogger(), logging.getLogger("kafka")
    before = [logger.level for logger in loggers]
    yield loggers
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("root", "own", "effective"),
    [
        (logging.WARNING, logging.NOTSET, logging.WARNING),
        (logging.ERROR, logging.INFO, logging.INFO),
        (logging.DEBUG, logging.NOTSET, logging.INFO),
        (logging.WARNING, logging.DEBUG, logging.INFO),
    ],
)
def test_kafka_python_says_no_more_than_the_user_wants_and_nothing_at_level_debug(
    levels: tuple[logging.Logger, logging.Logger], root: int, own: int, effective: int
) -> None:
    levels[0].setLevel(root)
    levels[1].setLevel(own)
    keep_passwords_out_of_logs()
    assert levels[1].getEffectiveLevel() == effective
    assert logging.getLogger("kafka.net.connection").getEffectiveLevel() == effective
