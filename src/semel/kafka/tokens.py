"""Tokens for a login by OAUTHBEARER: where one comes from, how long it lasts, and when the next one is fetched.

A provider is a function without arguments. It returns a token and the seconds that the token lasts. Every client of a
process shares one token of a provider. The next one is fetched when three quarters of that time are over.

Nothing in here shows a token or a secret: not in a repr, not in an error, not in a log.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from semel.errors import ConfigError, MissingExtra, SinkUnavailable

#: Returns a token and how many seconds it lasts.
TokenProvider = Callable[[], tuple[str, float]]

#: The setting under which a source of tokens travels among the others. It is confluent-kafka's own word.
OAUTH_CB = "oauth_cb"
#: librdkafka asks again after four fifths of the time, and is to get a new one then.
REFRESH_AT = 0.75
#: A token that is handed over must still be good when the broker looks at it, which a busy machine delays.
MARGIN_S = 1.0
#: A function that returns more has returned a point in time.
LIFETIME_S_MAX = 10 * 365 * 24 * 3600.0
ENDPOINT_TIMEOUT_S = 10.0
ENDPOINT_BYTES_MAX = 1 << 20
#: How long a token is taken to last when the endpoint does not say (RFC 6749 leaves it open).
UNSAID_LIFETIME_S = 300.0
UNSECURED_LIFETIME_S = 3600.0

#: What a bearer token is made of (RFC 6750, section 2.1).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")

REMEDY = "Mend the token provider, then start the pipeline again."


@dataclass(frozen=True)
class Token:
    """`until` and `refresh_at` are seconds since 1970, as librdkafka wants them."""

    text: str = field(repr=False)
    until: float
    refresh_at: float


@dataclass(frozen=True)
class TokenSource:
    """A provider as the clients use it. Two are the same when their `identity` is.

    A function that travels to a worker with each task is another object each time. The identity is made once, by the
    driver, so that the worker finds its clients and its token again.
    """

    provider: TokenProvider = field(repr=False, compare=False)
    identity: str
    name: str = ""

    @classmethod
    def of(cls, provider: TokenProvider) -> TokenSource:
        if not callable(provider):
            raise ConfigError(
                f"A token_provider must be a function without arguments, not {type(provider).__name__}.",
                remedy="Give it one that returns a token and the seconds that it lasts.",
            )
        return cls(provider, hashlib.sha256(_pickled(provider)).hexdigest(), _name_of(provider))

    def __call__(self, _config: str = "") -> tuple[str, float]:
        """As librdkafka asks for it: the token, and until when it is good."""
        token = self.token()
        return token.text, token.until

    def token(self) -> Token:
        """The one that this process has, or a new one."""
        with _LOCKS_LOCK:
            lock = _LOCKS.setdefault(self.identity, threading.Lock())
        with lock:
            known = _TOKENS.get(self.identity)
            if known is not None and time.time() < known.refresh_at:
                return known
            _TOKENS[self.identity] = made = self._fetch()
            return made

    def _fetch(self) -> Token:
        try:
            said: Any = self.provider()
        except (ConfigError, SinkUnavailable):
            raise
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            # Its words may hold what it sent. The kind of error holds nothing secret.
            raise SinkUnavailable(
                f"The token provider {self.name} failed: {type(error).__name__}.", remedy=REMEDY
            ) from None
        now = time.time()
        lifetime_s = self._checked(said)
        kept_s = max(lifetime_s / 2, min(REFRESH_AT * lifetime_s, lifetime_s - MARGIN_S))
        return Token(said[0], now + lifetime_s, now + kept_s)

    def _checked(self, said: Any) -> float:
        if not isinstance(said, tuple) or len(said) != 2 or not isinstance(said[0], str):
            raise self._wrong(f"returned {type(said).__name__}, not a token and the seconds that it lasts")
        text, lifetime = said
        if isinstance(lifetime, bool) or not isinstance(lifetime, (int, float)) or not lifetime > 0:
            raise self._wrong("did not return a number of seconds above zero with its token")
        if lifetime > LIFETIME_S_MAX:
            raise self._wrong("returned a point in time with its token, not the seconds that the token lasts")
        if not _TOKEN.fullmatch(text):
            raise self._wrong("returned a token with characters that no bearer token has")
        return float(lifetime)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"The token provider {self.name} {what}.", remedy=REMEDY)


_TOKENS: dict[str, Token] = {}
_LOCKS: dict[str, threading.Lock] = {}
_LOCKS_LOCK = threading.Lock()


def token_source(options: Mapping[str, Any]) -> TokenSource | None:
    """Where the tokens for these settings of librdkafka come from; None unless they ask for OAUTHBEARER."""
    if options.get("sasl.mechanism", "").upper() != "OAUTHBEARER":
        return None
    if OAUTH_CB in options:
        found: TokenSource = options[OAUTH_CB]
        return found
    if options.get("enable.sasl.oauthbearer.unsecure.jwt", "false").lower() in ("true", "t", "1"):
        return TokenSource.of(_unsecured(options))
    if options.get("sasl.oauthbearer.method", "").lower() == "oidc":
        return TokenSource.of(_client_credentials(options))
    raise ConfigError(
        "A login by OAUTHBEARER does not say where its tokens come from.",
        remedy="Give the sink a token_provider, or set sasl.oauthbearer.method=oidc with "
        "sasl.oauthbearer.token.endpoint.url, sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret.",
    )


def _pickled(provider: TokenProvider) -> bytes:
    """As Spark sends it to its workers: what plain pickle cannot do, cloudpickle may."""
    with suppress(Exception):
        return pickle.dumps(provider)
    try:
        from pyspark import cloudpickle

        dumps: Any = cloudpickle.dumps
        pickled: bytes = dumps(provider)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        raise ConfigError(
            f"The token provider {_name_of(provider)} cannot be sent to executors: {type(error).__name__}.",
            remedy="Give a function of a module, which makes its connections when it is called.",
        ) from None
    return pickled


def _name_of(provider: TokenProvider) -> str:
    """Not its repr: that of a partial shows its arguments."""
    named: Any = provider if hasattr(provider, "__qualname__") else type(provider)
    return f"{named.__module__}.{named.__qualname__}"


# Client credentials -------------------------------------------------------------------------------------------------

#: What a request for client credentials is made of. Anything else of the group is refused by name.
_OIDC = ("method", "client.id", "client.secret", "scope", "token.endpoint.url", "grant.type")


@dataclass(frozen=True)
class ClientCredentials:
    """The OAuth 2 grant of that name (RFC 6749, section 4.4), as librdkafka's own method `oidc` asks for it."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""
    ca_file: str = ""

    def __call__(self) -> tuple[str, float]:
        import ssl
        from urllib.error import HTTPError, URLError
        from urllib.parse import quote, urlencode
        from urllib.request import Request, urlopen

        scope = {"scope": self.scope} if self.scope else {}
        body = urlencode({"grant_type": "client_credentials", **scope}).encode()
        login = f"{quote(self.client_id, safe='')}:{quote(self.client_secret, safe='')}".encode()
        headers = {"Accept": "application/json", "Authorization": f"Basic {base64.b64encode(login).decode()}"}
        trusted = ssl.create_default_context(cafile=self.ca_file or None)
        try:
            request = Request(self.url, body, headers)  # noqa: S310 - the scheme was checked
            with urlopen(request, timeout=ENDPOINT_TIMEOUT_S, context=trusted) as answer:  # noqa: S310
                said = json.loads(answer.read(ENDPOINT_BYTES_MAX))
            return said["access_token"], float(said.get("expires_in", UNSAID_LIFETIME_S))
        except HTTPError as error:
            if error.code in (400, 401, 403):
                raise ConfigError(
                    f"The token endpoint {self.url} refused the client {self.client_id}: HTTP {error.code}.",
                    remedy="Correct sasl.oauthbearer.client.id, sasl.oauthbearer.client.secret and the scope.",
                ) from None
            raise self._silent(f"HTTP {error.code}") from None
        except URLError as error:
            raise self._silent(str(error.reason)) from None
        except OSError as error:
            raise self._silent(str(error)) from None
        except (ValueError, TypeError, KeyError):
            raise self._silent("its answer is not that of an OAuth 2 token endpoint") from None

    def _silent(self, why: str) -> SinkUnavailable:
        return SinkUnavailable(
            f"The token endpoint {self.url} gave no token: {why}.",
            remedy="Bring the endpoint back, or correct sasl.oauthbearer.token.endpoint.url, then start again.",
        )


def _client_credentials(options: Mapping[str, Any]) -> ClientCredentials:
    of = "sasl.oauthbearer."
    strange = sorted(
        name
        for name in options
        if name.startswith((of, "https.")) and name.removeprefix(of) not in _OIDC and name != "https.ca.location"
    )
    if options.get(f"{of}grant.type", "client_credentials") != "client_credentials":
        strange.append(f"{of}grant.type={options[f'{of}grant.type']}")
    if strange:
        raise ConfigError(
            f"semel's way to the token endpoint cannot do what {', '.join(strange)} says.",
            remedy="Fetch the token in a function of your own, and give it to the sink as token_provider.",
        )
    url, client = (options.get(f"{of}{name}", "") for name in ("token.endpoint.url", "client.id"))
    if not re.match(r"https?://", url) or not client:
        raise ConfigError(
            "A login by OAUTHBEARER with sasl.oauthbearer.method=oidc lacks the address of its endpoint or its client.",
            remedy="Set sasl.oauthbearer.token.endpoint.url (http or https) and sasl.oauthbearer.client.id.",
        )
    secret, scope = (options.get(f"{of}{name}", "") for name in ("client.secret", "scope"))
    return ClientCredentials(url, client, secret, scope, options.get("https.ca.location", ""))


# Tokens that nobody has signed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unsecured:
    """A token that names a user and that nobody has signed. Brokers take it in development only."""

    principal: str
    lifetime_s: float = UNSECURED_LIFETIME_S

    def __call__(self) -> tuple[str, float]:
        now = time.time()
        claims = {"sub": self.principal, "iat": now, "exp": now + self.lifetime_s}
        parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in ({"alg": "none"}, claims))
        return ".".join(part.rstrip("=") for part in parts) + ".", self.lifetime_s


def _unsecured(options: Mapping[str, Any]) -> Unsecured:
    """As librdkafka makes them: `sasl.oauthbearer.config` says `principal=app lifeSeconds=600`."""
    said = options.get("sasl.oauthbearer.config", "")
    words = dict(word.partition("=")[::2] for word in said.split())
    if "principal" not in words or words.keys() - {"principal", "lifeSeconds"}:
        raise ConfigError(
            "sasl.oauthbearer.config must name a principal, perhaps lifeSeconds, and nothing else.",
            remedy='Write it as: "principal=app lifeSeconds=600".',
        )
    return Unsecured(words["principal"], float(words.get("lifeSeconds", UNSECURED_LIFETIME_S)))


# Amazon MSK ---------------------------------------------------------------------------------------------------------

_MSK_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


@dataclass(frozen=True)
class MskIam:
    """`Kafka(..., token_provider=MskIam("eu-west-1"))`: tokens that brokers of Amazon MSK take for an IAM login.

    The credentials are those that AWS's own libraries find where it is called: environment, profile, instance role.
    """

    region: str = ""

    def __call__(self) -> tuple[str, float]:
        try:
            from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
        except ImportError:
            raise MissingExtra(
                "A login to Amazon MSK needs aws-msk-iam-sasl-signer-python, which is not installed.", extra="kafka-msk"
            ) from None
        region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not region:
            raise ConfigError(
                "The region of an Amazon MSK cluster is not known: its address does not show it.",
                remedy="Set AWS_REGION, or give the sink token_provider=MskIam(region).",
            )
        try:
            token, until_ms = MSKAuthTokenProvider.generate_auth_token(region)
        except Exception as error:  # noqa: BLE001 - without credentials its library raises what it comes across
            raise SinkUnavailable(
                f"AWS's library made no token for Amazon MSK in {region}: {type(error).__name__}.",
                remedy="Give the driver and the executors credentials where that library looks for them: environment, "
                "profile or role.",
            ) from None
        return token, until_ms / 1000 - time.time()


def msk_region(servers: str) -> str:
    """The region in the addresses of the brokers; empty where they do not show one."""
    found = _MSK_HOST.search(servers)
    return found[1] if found else ""
