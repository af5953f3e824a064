"""Whether the brokers can be reached, and if not, why.

librdkafka is the one to ask. It tells the reason of a failed connection through a callback, and then only that it took
too long; kafka-python, which the driver also uses, tells it to its log and to nobody else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semel.errors import ConfigError, SinkUnavailable
from semel.kafka.options import connection_options
from semel.kafka.stand_in import admin_client

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ClusterMetadata  # type: ignore[attr-defined]

#: After so long without an answer it is asked why. A login that was refused once will be refused again.
PATIENCE_S = 1.0

LOGIN_REMEDY = "Correct the kafka.sasl.* options of the sink."
TRUST_REMEDY = "Name the certificate of whoever signed that of the brokers: kafka.ssl.ca.location."
ACL_REMEDY = "Allow it with an ACL (docs/sinks/kafka.md lists what the sink needs), then start the pipeline again."
OPTIONS_REMEDY = "Correct the options of the sink; their names are those of Kafka's producer or of librdkafka."
UNREACHABLE_REMEDY = (
    "Bring the brokers back, or correct the address and kafka.security.protocol of the sink, then start it again."
)

#: Where and when it happened, which librdkafka puts around what happened.
_AROUND = re.compile(r"^\S+/(bootstrap|\d+): | \(after \d+ ?ms( in state .*)?\)$|\.$")


class Reach:
    """An admin client of librdkafka that can say why there is no answer."""

    def __init__(self, servers: str, options: Mapping[str, Any]) -> None:
        self.servers = servers
        self._errors: list[Any] = []
        settings: dict[str, Any] = {**connection_options(options), "bootstrap.servers": servers, "log_level": "2"}
        settings["error_cb"] = self._errors.append
        self.admin: AdminClient = admin_client(settings, "The Kafka sink", bad_options)

    def metadata(self, topic: str, timeout_s: float) -> ClusterMetadata:
        """The brokers and one topic, or none. Raises within the time limit, and sooner when the login fails."""
        from confluent_kafka import KafkaException

        began = time.monotonic()
        while True:
            now = time.monotonic()
            patience_s = max(0.1, min(PATIENCE_S, began + timeout_s - now))
            try:
                return self.admin.list_topics(topic, timeout=patience_s)
            except KafkaException as error:
                self.admin.poll(0)
                waited_in_vain = time.monotonic() - now > 0.9 * patience_s
                if (
                    self._refusal()
                    or self._distrust()
                    or not waited_in_vain
                    or time.monotonic() > began + timeout_s - 0.1
                ):
                    raise self.explain(error, f"Kafka at {self.servers} cannot be reached") from None

    def _refusal(self) -> str:
        return next((tidy(e.str()) for e in self._errors if e.name() == "_AUTHENTICATION"), "")

    def _distrust(self) -> str:
        """A handshake may also fail because the broker is just being started; a certificate stays what it is."""
        failed = (tidy(e.str()) for e in self._errors if e.name() == "_SSL")
        return next((text for text in failed if "certificate verify failed" in text), "")

    def explain(self, error: Any, what: str) -> ConfigError | SinkUnavailable:
        """The error to raise for one of librdkafka's."""
        said = error.args[0]
        if refusal := self._refusal():
            return ConfigError(f"{what}: the login was refused: {refusal}.", remedy=LOGIN_REMEDY)
        if distrust := self._distrust():
            return ConfigError(f"{what}: its certificate is not trusted: {distrust}.", remedy=TRUST_REMEDY)
        if "AUTHORIZATION" in said.name():
            return ConfigError(f"{what}: {tidy(said.str())}.", remedy=ACL_REMEDY)
        causes = (e for e in (*self._errors, said) if e.name() != "_ALL_BROKERS_DOWN")
        return SinkUnavailable(f"{what}: {tidy(next(causes).str())}.", remedy=UNREACHABLE_REMEDY)


def bad_options(error: Any) -> ConfigError:
    """For a client that librdkafka did not want to make."""
    return ConfigError(f"The options of the Kafka sink cannot be used: {error.args[0].str()}.", remedy=OPTIONS_REMEDY)


def tidy(text: str) -> str:
    """librdkafka's words without what changes from run to run, fit to be a part of a sentence."""
    return _AROUND.sub("", text)
