"""Logins by a token or by Kerberos: which client can do which, and how kafka-python does both."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semel.errors import ConfigError, MissingExtra, SemelError, SinkUnavailable
from semel.kafka.tokens import OAUTH_CB, TokenSource, token_source

OAUTHBEARER, KERBEROS = "OAUTHBEARER", "GSSAPI"

KERBEROS_REMEDY = (
    "Correct sasl.kerberos.principal and sasl.kerberos.keytab, or get a ticket with kinit where the driver and the "
    "executors run. KRB5_CONFIG names another krb5.conf."
)
#: RFC 4752: which layers of protection may follow. Kafka knows none.
_NO_LAYER = b"\x01"


def login_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """What KafkaAdminClient is told of a login by a token or by Kerberos; nothing for other logins."""
    mechanism = mechanism_of(options)
    if mechanism == OAUTHBEARER:
        _register_tokens()
        return {"sasl_oauth_token_provider": _provider(token_source(options))}
    if mechanism == KERBEROS:
        _register_kerberos()
        return {"sasl_kerberos_name": _kerberos(options)}
    return {}


def mechanism_of(options: Mapping[str, Any]) -> str:
    """Java and librdkafka take Kerberos for meant where a login has no name. Without a login there is none."""
    with_login = str(options.get("security.protocol", "")).upper().startswith("SASL")
    return str(options.get("sasl.mechanism", KERBEROS if with_login else "")).upper()


def check_login(options: Mapping[str, Any]) -> None:
    """Get a token or a ticket, before a broker is asked: what fails here is told in its own words."""
    mechanism = mechanism_of(options)
    if mechanism == OAUTHBEARER and (source := token_source(options)) is not None:
        source.token()
    if mechanism == KERBEROS:
        _kerberos(options).check()


def telling_client(**settings: Any) -> Any:
    """A KafkaAdminClient. Where none can be made, the error says why: kafka-python itself tells only its log.

    It also gives up as soon as a login is refused. Without that it asks until the time is up.
    """
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError
    from kafka.net.compat import KafkaNetClient

    heard: list[Exception] = []
    made: list[Any] = []

    def net_client(**config: Any) -> Any:
        made.append(KafkaNetClient(**config))
        manager = made[0]._manager
        connect = manager.get_connection

        def get_connection(*arguments: Any, **words: Any) -> Any:
            connection = connect(*arguments, **words)
            connection.init_future.add_errback(hear)
            return connection

        def hear(error: Exception) -> None:
            heard.append(error)
            if is_refused(error):
                manager.close()

        manager.get_connection = get_connection
        return made[0]

    try:
        client = KafkaAdminClient(**settings, kafka_client=net_client)
    except KafkaError as error:
        for one in made:
            one._manager.close()
            one._manager._net.close()
        raise next((e for e in heard if is_refused(e)), heard[-1] if heard else error) from None
    del made[0]._manager.get_connection
    return client


def is_refused(error: Any) -> bool:
    """Whether a broker said no to the login. Asking again would not help."""
    from kafka.errors import SaslAuthenticationFailedError, UnsupportedSaslMechanismError

    return isinstance(error, (SaslAuthenticationFailedError, UnsupportedSaslMechanismError))


# Tokens -------------------------------------------------------------------------------------------------------------


def _provider(source: TokenSource | None) -> Any:
    from kafka.net.sasl.oauth import AbstractTokenProvider

    if source is None:
        raise RuntimeError("there is no source of tokens")
    fetch = source.token

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        """kafka-python asks in the thread of its connections, which waits. Mostly the token is there already."""

        is_of_semel = True

        def token(self) -> str:
            try:
                return fetch().text
            except SemelError as error:
                raise _in_words_of_kafka_python(error) from None

    return Provider()


@functools.cache
def _register_tokens() -> None:
    """Put ours in the place of kafka-python's, which it is for logins that are not semel's."""
    from kafka.errors import SaslAuthenticationFailedError
    from kafka.net.sasl import SASL_MECHANISMS, register_sasl_mechanism

    theirs: Any = SASL_MECHANISMS[OAUTHBEARER]

    class Telling(theirs):  # type: ignore[misc]
        """A broker says in its first answer that it refuses. After the next one it hangs up, often too soon to be
        heard.
        """

        def receive(self, said: bytes) -> None:
            if said and getattr(self.token_provider, "is_of_semel", False):
                raise SaslAuthenticationFailedError(said.decode(errors="replace"))
            super().receive(said)

    register_sasl_mechanism(OAUTHBEARER, Telling, overwrite=True)


def _in_words_of_kafka_python(error: SemelError) -> Exception:
    """What may pass is asked for again; what the settings are to blame for is not."""
    from kafka.errors import KafkaConnectionError, SaslAuthenticationFailedError

    kind = KafkaConnectionError if isinstance(error, SinkUnavailable) else SaslAuthenticationFailedError
    said: Exception = kind(error.what)
    return said


# Kerberos -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kerberos:
    """Who we are. Without a keytab it is the user of the ticket: from kinit, or from KRB5_CLIENT_KTNAME."""

    service: str = "kafka"
    principal: str = ""
    keytab: str = ""

    def check(self) -> None:
        """Raise unless there is a ticket, or one can be had."""
        gssapi = _gssapi()
        try:
            credentials = self.credentials() or gssapi.Credentials(usage="initiate")
            # It is looked for only when somebody asks.
            _ = credentials.lifetime
        except gssapi.exceptions.GSSError as error:
            raise _no_ticket(error) from None

    def credentials(self) -> Any:
        """None for what this process has anyway. With a keytab, MIT's library gets tickets, and new ones in time."""
        gssapi = _gssapi()
        if not self.keytab:
            return None
        name = gssapi.Name(self.principal, gssapi.NameType.kerberos_principal) if self.principal else None
        own = hashlib.sha256(f"{self.principal} {self.keytab}".encode()).hexdigest()[:16]
        store = {"client_keytab": f"FILE:{self.keytab}", "ccache": f"MEMORY:semel-{own}"}
        return gssapi.Credentials(name=name, usage="initiate", store=store)


def _kerberos(options: Mapping[str, Any]) -> Kerberos:
    of = {word: str(options.get(f"sasl.kerberos.{word}", "")) for word in ("service.name", "principal", "keytab")}
    return Kerberos(of["service.name"] or "kafka", of["principal"], of["keytab"])


def _gssapi() -> Any:
    try:
        import gssapi
    except ImportError:
        raise MissingExtra(
            "A login to Kafka by Kerberos needs gssapi, which is not installed.",
            remedy="Install it: apt-get install libkrb5-dev gcc python3-dev, then pip install 'semel[kafka-kerberos]'.",
        ) from None
    except OSError as error:
        raise ConfigError(f"The library gssapi cannot be used: {error}.") from None
    return gssapi


def _no_ticket(error: Any) -> SemelError:
    why = "; ".join(word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in _reasons(error))
    if "contact any KDC" in why:
        return SinkUnavailable(f"Kerberos gave no ticket: {why}.", remedy="Bring the KDC back, then start again.")
    return ConfigError(f"Kerberos gave no ticket: {why}.", remedy=KERBEROS_REMEDY)


def _reasons(error: Any) -> list[Any]:
    """What the Kerberos library says, and of GSSAPI's own words nothing more than where they are all there is."""
    minor = error.get_all_statuses(error.min_code, False)
    return list(minor) if error.min_code else list(error.get_all_statuses(error.maj_code, True))


@functools.cache
def _register_kerberos() -> None:
    """Put ours in the place of kafka-python's, which it is for logins that are not semel's.

    kafka-python's takes no keytab. And as the user it wants to be it names the service that it talks to.
    """
    from kafka.net.sasl import SASL_MECHANISMS, register_sasl_mechanism

    theirs: Any = SASL_MECHANISMS[KERBEROS]

    def make(**config: Any) -> Any:
        who = config.get("sasl_kerberos_name")
        return Exchange(who, config["host"]) if isinstance(who, Kerberos) else theirs(**config)

    register_sasl_mechanism(KERBEROS, make, overwrite=True)


class Exchange:
    """One login by RFC 4752, in the steps in which kafka-python asks for it."""

    def __init__(self, who: Kerberos, host: str) -> None:
        self._gssapi = _gssapi()
        self._context: Any = None
        self._who = f"Kerberos as {who.principal or 'the owner of the ticket'}"
        self._authenticated = self._done = False
        name = self._gssapi.Name(f"{who.service}@{host}", self._gssapi.NameType.hostbased_service)
        self._context = self._try(
            lambda: self._gssapi.SecurityContext(
                name=name, creds=who.credentials(), mech=self._gssapi.MechType.kerberos, usage="initiate"
            )
        )
        self._next = self._try(self._context.step)

    def _try(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._gssapi.exceptions.GSSError as error:
            raise _in_words_of_kafka_python(_no_ticket(error)) from None

    def auth_bytes(self) -> bytes:
        # The last word is ours. What the broker answers to it is empty.
        self._done = self._authenticated
        return self._next or b""

    def receive(self, said: bytes) -> None:
        if not self._context.complete:
            self._next = self._try(self._context.step, said)
        elif not self._done:
            offered = self._try(self._context.unwrap, said).message
            # No name: we are who the ticket says.
            self._next = self._try(self._context.wrap, _NO_LAYER + offered[1:4], False).message
            self._authenticated = True

    def is_done(self) -> bool:
        return self._done

    def is_authenticated(self) -> bool:
        return self._authenticated

    def auth_details(self) -> str:
        return self._who


# What librdkafka can do ----------------------------------------------------------------------------------------------


def needs_stand_in(settings: Mapping[str, Any]) -> bool:
    return OAUTH_CB in settings or not can_log_in(settings)


def can_log_in(settings: Mapping[str, Any]) -> bool:
    """Whether librdkafka is able to log in as these settings of it say."""
    return mechanism_of(settings) != KERBEROS or _knows_kerberos()


@functools.cache
def _knows_kerberos() -> bool:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    try:
        AdminClient({"sasl.mechanism": KERBEROS, "security.protocol": "SASL_PLAINTEXT", "log_level": "0"})
    except KafkaException:
        return False
    return True


def without_login(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that librdkafka can still look at when it cannot log in."""
    login = ("sasl.", "security.protocol", OAUTH_CB, "enable.sasl.")
    return {name: value for name, value in settings.items() if not name.startswith(login)}


def no_kerberos_in_librdkafka(what: str) -> ConfigError:
    return ConfigError(
        f"{what} need librdkafka, and the one that is installed was built without Kerberos (GSSAPI).",
        remedy="Install one that has it: apt-get install librdkafka-dev libsasl2-modules-gssapi-mit (of Confluent's "
        "repository, as new as confluent-kafka), then pip install --no-binary confluent-kafka --force-reinstall "
        "confluent-kafka. Without it semel writes rows that have no headers and no timestamp.",
    )
