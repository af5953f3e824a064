"""Kafka's settings come in two dialects: Java's, which Spark speaks, and librdkafka's, which our own clients speak.

Pure. A setting may be written either way, with or without Spark's prefix `kafka.`. What is written librdkafka's way is
taken as it stands and wins; what is written Java's way is translated. A setting that only a JVM understands is dropped
when that can do no harm. It is refused by name when it is part of how the client proves who it is or whom it trusts:
a client that leaves out such a setting in silence would be less secure than it was told to be.

The names are from the pages "Consumer Configs" and "Producer Configs" of Kafka and CONFIGURATION.md of librdkafka.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from semel.errors import ConfigError
from semel.kafka.tokens import OAUTH_CB, MskIam, TokenProvider, TokenSource, msk_region

PREFIX = "kafka."
HIDDEN = "***"

#: The same thing under another name: Java -> librdkafka.
RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "max.request.size": "message.max.bytes",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.truststore.certificates": "ssl.ca.pem",
}

#: The same value under another name: (setting, Java) -> librdkafka.
REVALUED = {
    ("auto.offset.reset", "none"): "error",
    ("ssl.endpoint.identification.algorithm", ""): "none",
}

#: Java settings without a counterpart that can be left out: they are about the JVM, its threads, metrics and memory, or
#: about how often a login is renewed.
DROPPED = re.compile(
    r"(key|value)\.(de)?serializer|interceptor\.classes|metric\.reporters|metrics\..*|auto\.include\.jmx\.reporter"
    r"|buffer\.memory|default\.api\.timeout\.ms|exclude\.internal\.topics|max\.block\.ms|max\.poll\.records"
    r"|metadata\.max\.idle\.ms|partition\.assignment\.strategy|partitioner\..*|share\..*"
    r"|sasl\.kerberos\.(kinit\.cmd|min\.time\.before\.relogin|ticket\.renew\..*)|sasl\.login\.(refresh|retry)\..*"
    r"|sasl\.login\.(connect|read)\.timeout\.ms|ssl\.(keymanager|trustmanager)\.algorithm"
)

#: What librdkafka knows of what proves who a client is and whom it trusts. Anything else there is refused.
SECURITY = re.compile(r"(security|sasl|ssl)\..*")
SECURITY_KNOWN = re.compile(
    r"security\.protocol|sasl\.mechanism|sasl\.(username|password)|sasl\.kerberos\.(service\.name|principal|keytab)"
    r"|sasl\.oauthbearer\.(config|method|client\.id|client\.secret|scope|extensions|token\.endpoint\.url|grant\.type)"
    r"|sasl\.oauthbearer\.(assertion|metadata)\..*|ssl\.(ca|certificate|crl)\..*|ssl\.key\.(location|password|pem)"
    r"|ssl\.(curves|sigalgs)\.list|ssl\.engine\.(id|location)|ssl\.providers|ssl\.cipher\.suites"
    r"|ssl\.endpoint\.identification\.algorithm"
)

#: What a client needs to reach a broker, as opposed to what it does there.
CONNECTION = re.compile(
    r"bootstrap\.servers|client\.(id|rack|dns\.lookup)|(security|sasl|ssl|socket|reconnect|https|broker)\..*"
    r"|connections\.max\.idle\.ms|metadata\.max\.age\.ms|api\.version\..*|debug"
    r"|enable\.(ssl\.certificate\.verification|sasl\.oauthbearer\.unsecure\.jwt)|oauth_cb"
)

SECRET = re.compile(
    r"password|passphrase|secret|jaas|credential|token|private\.key|keystore\.key|\.pem|bearer\.config|oauth_cb"
)
PUBLIC = re.compile(r"token\.endpoint\.url|client\.id$")

#: The handlers that come with Kafka and do what librdkafka's own `oidc` method does.
OIDC_HANDLER = re.compile(r"org\.apache\.kafka\..*\.oauthbearer\.(secured\.)?OAuthBearerLoginCallbackHandler")
#: Those of Amazon's library. Its brokers take the same login as a token, too.
MSK_HANDLER = re.compile(r"software\.amazon\.msk\.auth\.iam\.IAM(OAuthBearerLogin|Client)CallbackHandler")
MSK_MECHANISM = "AWS_MSK_IAM"
_TOKENS_FROM_ELSEWHERE = re.compile(r"sasl\.oauthbearer\..*|enable\.sasl\.oauthbearer\.unsecure\.jwt")
#: What Java's own handler without a server puts into a token that nobody signs: the user.
UNSECURED = "unsecuredLoginStringClaim_sub"


def java_to_librdkafka(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a librdkafka client. Raises ConfigError for those that cannot be left out nor translated.

    All are text, but for a source of tokens.
    """
    given: dict[str, Any] = _bare(options)
    if _is_msk(given):
        given = _msk(given)
    # A user who gives tokens has said how to log in; what is left is for Java.
    found: dict[str, Any] = _stores(given) | ({} if OAUTH_CB in options else _login(given))
    for spelled, value in _without_what_was_read(given).items():
        name = RENAMED.get(spelled, spelled)
        if DROPPED.fullmatch(name):
            continue
        if SECURITY.fullmatch(name) and not SECURITY_KNOWN.fullmatch(name):
            raise _untranslatable(name)
        found[name] = REVALUED.get((name, value), value)
    _require_openssl_ciphers(found)
    if OAUTH_CB in options:
        found[OAUTH_CB] = options[OAUTH_CB]
    if OAUTH_CB in found:
        # With a source of tokens none are asked for at an endpoint: librdkafka takes one way or the other.
        return {name: value for name, value in found.items() if not _TOKENS_FROM_ELSEWHERE.fullmatch(name)}
    return found


def connection_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of a librdkafka client that say how to reach the broker: enough for an admin client."""
    return {name: value for name, value in java_to_librdkafka(options).items() if CONNECTION.fullmatch(name)}


def with_tokens(options: Mapping[str, Any], servers: str, provider: TokenProvider | None) -> dict[str, Any]:
    """The same settings, with the source of the tokens among them where there is one."""
    found, given = dict(options), _bare(options)
    if not isinstance(found.get(OAUTH_CB), TokenSource | None):
        raise ConfigError(
            f"The Kafka option {OAUTH_CB} does not count: there is an argument for it.",
            remedy="Give a function without arguments as token_provider. It returns a token and how many seconds it "
            "lasts, not the time at which it ends.",
        )
    if provider is None:
        if _is_msk(given) and OAUTH_CB not in found:
            found[OAUTH_CB] = TokenSource.of(MskIam(msk_region(servers)))
        return found
    protocol = given.get("security.protocol", "PLAINTEXT")
    named = next((given[name] for name in ("sasl.mechanism", "sasl.mechanisms") if name in given), "")
    if not protocol.upper().startswith("SASL_") or named.upper() not in ("", "OAUTHBEARER", MSK_MECHANISM):
        raise ConfigError(
            f"A token_provider does not go with security.protocol={protocol} and sasl.mechanism={named}.",
            remedy="Set security.protocol to SASL_SSL, and leave sasl.mechanism out or set it to OAUTHBEARER.",
        )
    mechanism = {} if named else {"sasl.mechanism": "OAUTHBEARER"}
    return {**found, **mechanism, OAUTH_CB: TokenSource.of(provider)}


def login_for_java(options: Mapping[str, Any]) -> dict[str, str]:
    """The `sasl.jaas.config` that says what `sasl.username` and `sasl.password` say; empty where they are not given."""
    given = _bare(options)
    if "sasl.jaas.config" in given or not {"sasl.username", "sasl.password"} <= given.keys():
        return {}
    mechanism = given.get("sasl.mechanism", given.get("sasl.mechanisms", ""))
    module = "scram.ScramLoginModule" if mechanism.upper().startswith("SCRAM") else "plain.PlainLoginModule"
    words = (f'{key}="{_escaped(given[f"sasl.{key}"])}"' for key in ("username", "password"))
    return {"sasl.jaas.config": f"org.apache.kafka.common.security.{module} required {' '.join(words)};"}


def hide_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings, fit for a log, a repr or an error."""
    return {name: HIDDEN if is_secret(name) else value for name, value in options.items()}


def is_secret(name: str) -> bool:
    return bool(SECRET.search(name.lower())) and not PUBLIC.search(name.lower())


# Reading ------------------------------------------------------------------------------------------------------------


def _bare(options: Mapping[str, Any]) -> dict[str, str]:
    """Names without Spark's prefix, values as text. A setting that is given twice must be given once."""
    found: dict[str, str] = {}
    for option, value in options.items():
        name = option.removeprefix(PREFIX)
        if name == OAUTH_CB:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if value is None:
            continue
        if found.setdefault(name, text) != text:
            raise ConfigError(f"The Kafka option {name} is given twice, with different values.", remedy="Give it once.")
    return found


def _without_what_was_read(given: Mapping[str, str]) -> dict[str, str]:
    """What `_login` and `_stores` have not dealt with. TLS versions can be left out: both ends choose the highest."""
    read = re.compile(
        r"sasl\.jaas\.config|sasl\.(login|client)\.callback\.handler\.class|ssl\.(protocol|enabled\.protocols)"
        r"|ssl\.(truststore|keystore)\.(location|password|type)"
    )
    return {name: value for name, value in given.items() if not read.fullmatch(name)}


# The login ----------------------------------------------------------------------------------------------------------


def _login(given: Mapping[str, str]) -> dict[str, str]:
    """What `sasl.jaas.config` says, in librdkafka's words."""
    for name in ("sasl.login.callback.handler.class", "sasl.client.callback.handler.class"):
        if (handler := given.get(name, "")) and not OIDC_HANDLER.fullmatch(handler):
            raise _untranslatable(name)
    text = given.get("sasl.jaas.config", "").strip()
    if not text or {"sasl.username", "sasl.password"} <= given.keys():
        return {}
    module = re.match(r"[\w.$]+", text)
    words = {key: _unquoted(value) for key, value in _JAAS_WORD.findall(text)}
    for ending, read in _MODULES.items():
        if module and module[0].endswith(ending):
            return {name: value for name, value in read(words).items() if value}
    raise ConfigError(
        "The login module of the Kafka option sasl.jaas.config is not one that librdkafka can stand in for.",
        remedy="Use PlainLoginModule, ScramLoginModule, OAuthBearerLoginModule or Krb5LoginModule, "
        "or give sasl.username and sasl.password.",
    )


_JAAS_WORD = re.compile(r"""(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;]+)""")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "\"'" else text


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _password_login(words: Mapping[str, str]) -> dict[str, str]:
    if words.get("tokenauth", "").lower() == "true":
        raise ConfigError(
            "The Kafka option sasl.jaas.config logs in by delegation token, which librdkafka cannot.",
            remedy="Log in by name and password.",
        )
    if not {"username", "password"} <= words.keys():
        raise ConfigError(
            "The Kafka option sasl.jaas.config names no username and password.",
            remedy='Write it as: ...LoginModule required username="..." password="...";',
        )
    return {"sasl.username": words["username"], "sasl.password": words["password"]}


def _oauth_login(words: Mapping[str, str]) -> dict[str, str]:
    if UNSECURED in words:
        of = {"sasl.oauthbearer.config": f"principal={words[UNSECURED]}"}
        return {"enable.sasl.oauthbearer.unsecure.jwt": "true", **of}
    if "clientId" not in words:
        # Kafka 4.1 and newer name the client in settings of its own. Java has one method less to choose from.
        return {"sasl.oauthbearer.method": "oidc"}
    extensions = (f"{k.removeprefix('extension_')}={v}" for k, v in words.items() if k.startswith("extension_"))
    return {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": words.get("clientId", ""),
        "sasl.oauthbearer.client.secret": words.get("clientSecret", ""),
        "sasl.oauthbearer.scope": words.get("scope", ""),
        "sasl.oauthbearer.extensions": ",".join(extensions),
    }


def _kerberos_login(words: Mapping[str, str]) -> dict[str, str]:
    return {
        "sasl.kerberos.keytab": words.get("keyTab", ""),
        "sasl.kerberos.principal": words.get("principal", ""),
        "sasl.kerberos.service.name": words.get("serviceName", ""),
    }


def _is_msk(given: Mapping[str, str]) -> bool:
    handlers = (given.get(f"sasl.{side}.callback.handler.class", "") for side in ("login", "client"))
    return given.get("sasl.mechanism") == MSK_MECHANISM or any(MSK_HANDLER.fullmatch(handler) for handler in handlers)


def _msk(given: Mapping[str, str]) -> dict[str, Any]:
    """An IAM login as a token. Amazon's Java library finds its credentials where AWS's library for Python does."""
    words = dict(_JAAS_WORD.findall(given.get("sasl.jaas.config", "")))
    if words:
        raise ConfigError(
            f"The Kafka option sasl.jaas.config logs in to Amazon MSK with {', '.join(sorted(words))}, which semel's "
            "own clients cannot.",
            remedy="Name the profile or the role in the environment of AWS, or give the sink a token_provider.",
        )
    read = re.compile(r"sasl\.(mechanism|jaas\.config|(login|client)\.callback\.handler\.class)")
    kept = {name: value for name, value in given.items() if not read.fullmatch(name)}
    region = msk_region(given.get("bootstrap.servers", ""))
    return {**kept, "sasl.mechanism": "OAUTHBEARER", OAUTH_CB: TokenSource.of(MskIam(region))}


_MODULES: dict[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "PlainLoginModule": _password_login,
    "ScramLoginModule": _password_login,
    "OAuthBearerLoginModule": _oauth_login,
    "Krb5LoginModule": _kerberos_login,
}


# Certificates -------------------------------------------------------------------------------------------------------


def _stores(given: Mapping[str, str]) -> dict[str, str]:
    """Java's stores of certificates, as far as OpenSSL can read them."""
    found: dict[str, str] = {}
    trusted, own = given.get("ssl.truststore.location"), given.get("ssl.keystore.location")
    if trusted and not {"ssl.ca.location", "ssl.ca.pem"} & given.keys():
        _require_type(given, "ssl.truststore", "ssl.ca.location", "PEM")
        found["ssl.ca.location"] = trusted
    if own and not {"ssl.certificate.location", "ssl.certificate.pem"} & given.keys():
        if _require_type(given, "ssl.keystore", "ssl.certificate.location", "PEM", "PKCS12") == "PEM":
            # Java's PEM store is one file with the key and the chain, and OpenSSL takes from it what it looks for.
            found |= {"ssl.certificate.location": own, "ssl.key.location": own}
        else:
            found |= {"ssl.keystore.location": own, "ssl.keystore.password": given.get("ssl.keystore.password", "")}
    return found


def _require_type(given: Mapping[str, str], store: str, instead: str, *types: str) -> str:
    kind = given.get(f"{store}.type", "JKS").upper()
    if kind not in types:
        raise ConfigError(
            f"The Kafka option {store}.location names a {kind} store, which only Java can read.",
            remedy=f"Set {store}.type to {' or '.join(types)} with a file of that kind, "
            f"or name the same certificates in a PEM file besides: {instead}.",
        )
    return kind


def _require_openssl_ciphers(found: Mapping[str, str]) -> None:
    if re.search(r"\b(TLS|SSL)_", found.get("ssl.cipher.suites", "")):
        raise ConfigError(
            "The Kafka option ssl.cipher.suites holds Java's names of ciphers, which librdkafka does not know.",
            remedy="Leave it out, or use OpenSSL's names, such as ECDHE-RSA-AES256-GCM-SHA384.",
        )


def _untranslatable(name: str) -> ConfigError:
    return ConfigError(
        f"The Kafka option {name} has no counterpart in librdkafka, and without it the client would not be as secure.",
        remedy="Leave it out, or say the same with the options of librdkafka.",
    )
