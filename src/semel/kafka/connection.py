"""A client of kafka-python for settings of librdkafka: it follows, translates or refuses each of them by name."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from semel.errors import ConfigError, MissingExtra
from semel.kafka.login import KERBEROS, OAUTHBEARER, login_words, mechanism_of, telling_client
from semel.kafka.options import java_to_librdkafka
from semel.kafka.tokens import OAUTH_CB

REQUEST_TIMEOUT_MS = 10_000
#: librdkafka's setting -> kafka-python's, where both take the same text.
WORDS = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.crl.location": "ssl_crlfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
    "client.dns.lookup": "client_dns_lookup",
    "client.id": "client_id",
}
#: The same for numbers.
NUMBERS = {
    "connections.max.idle.ms": "connections_max_idle_ms",
    "metadata.max.age.ms": "metadata_max_age_ms",
    "reconnect.backoff.max.ms": "reconnect_backoff_max_ms",
    "reconnect.backoff.ms": "reconnect_backoff_ms",
    "socket.receive.buffer.bytes": "receive_buffer_bytes",
    "socket.send.buffer.bytes": "send_buffer_bytes",
}
#: The largest idle time that kafka-python takes; librdkafka's 0 is for ever.
FOR_EVER_MS = 2**31 - 1
HOSTNAME_CHECK, VERIFICATION = "ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification"
#: A producer does not care for its rack.
CONNECTION_FOLLOWED = frozenset({"bootstrap.servers", "client.rack", VERIFICATION, OAUTH_CB})
#: What kafka-python can do. Kerberos needs a further library.
LOGINS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER, KERBEROS)
#: What of these logins has other words there; see `login`.
OTHER_LOGINS = re.compile(r"sasl\.(oauthbearer\..*|kerberos\.(service\.name|principal|keytab))")


def follows(name: str) -> bool:
    """Whether a setting of the connection means here what it means to librdkafka, or is refused by name."""
    known = name in WORDS or name in NUMBERS or name in CONNECTION_FOLLOWED
    return known or name.startswith(("sasl.", "ssl.", "https.", "enable.sasl."))


def request_timeout_ms(options: Mapping[str, Any]) -> int:
    """How long one request may take before it is sent again."""
    return int(java_to_librdkafka(options).get("request.timeout.ms", REQUEST_TIMEOUT_MS))


def to_kafka_python(options: Mapping[str, str]) -> dict[str, Any]:
    """Settings of librdkafka that say how to reach the brokers, in kafka-python's words.

    Of those that say who we are and whom we trust none is left out: what kafka-python cannot do is refused.
    """
    found: dict[str, Any] = {WORDS[name]: value for name, value in options.items() if name in WORDS}
    found |= {NUMBERS[name]: int(value) for name, value in options.items() if name in NUMBERS}
    if found.get("connections_max_idle_ms") == 0:
        found["connections_max_idle_ms"] = FOR_EVER_MS
    if "security_protocol" in found:
        found["security_protocol"] = found["security_protocol"].upper()
    if options.get(HOSTNAME_CHECK) == "none":
        found["ssl_check_hostname"] = False
    known = {*WORDS, HOSTNAME_CHECK}
    unknown = sorted(name for name in options if name.startswith(("sasl.", "ssl.")) and name not in known)
    mechanism = mechanism_of(options) or "PLAIN"
    if mechanism in (OAUTHBEARER, KERBEROS):
        unknown = [name for name in unknown if not OTHER_LOGINS.fullmatch(name)]
        found |= {"sasl_mechanism": mechanism, **login_words(options)}
    if mechanism not in LOGINS:
        unknown.insert(0, f"sasl.mechanism={mechanism}")
    if options.get(VERIFICATION, "true").lower() not in ("true", "t", "1"):
        unknown.append(f"{VERIFICATION}={options[VERIFICATION]}")
    if unknown:
        raise ConfigError(
            f"The Kafka sink's control path cannot do what {', '.join(unknown)} says.",
            remedy="Log in by PLAIN, SCRAM, OAUTHBEARER or GSSAPI, and name certificates as PEM files: ssl.ca.location "
            "and so on.",
        )
    return found


def connect(servers: str, options: Mapping[str, Any], timeout_s: float) -> Any:
    """A client of kafka-python, for the settings of librdkafka. Raises the errors of kafka-python."""
    require_kafka_python()
    return client_for(servers, to_kafka_python(options), request_timeout_ms(options), timeout_s)


def require_kafka_python() -> None:
    try:
        import kafka.admin  # noqa: F401 - asked for here, so that its absence is said in our words
    except ImportError:
        other = getattr(sys.modules.get("kafka"), "__file__", None)
        if other is not None:
            raise ConfigError(f"{other} hides the library kafka-python.", remedy="Give it another name.") from None
        raise MissingExtra("The Kafka sink needs kafka-python, which is not installed.", extra="kafka") from None


def client_for(servers: str, settings: Mapping[str, Any], request_ms: int, timeout_s: float) -> Any:
    keep_passwords_out_of_logs()
    usual = {"client_id": "semel", "reconnect_backoff_max_ms": 1000}
    return telling_client(
        bootstrap_servers=[server.strip() for server in servers.split(",")],
        request_timeout_ms=min(request_ms, int(timeout_s * 1000)),
        bootstrap_timeout_ms=int(timeout_s * 1000),
        **{**usual, **settings},
    )


def keep_passwords_out_of_logs() -> None:
    """At level DEBUG kafka-python tells its log all, the password included. Otherwise the user's levels stay."""
    logger = logging.getLogger("kafka")
    logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
