"""Tokens: what a provider may return, when the next one is fetched, how an endpoint is asked, and what is not shown."""

from __future__ import annotations

import base64
import functools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from semel.errors import ConfigError, MissingExtra, SemelError, SinkUnavailable
from semel.kafka import tokens as kafka_tokens
from semel.kafka.options import java_to_librdkafka, with_tokens
from semel.kafka.tokens import ClientCredentials, MskIam, TokenSource, Unsecured, msk_region, token_source
from semel.sinks.kafka import Kafka

SECRET = "hunter2"  # noqa: S105 - what the tests look for
NOT_STARTED = "  the data now: nothing was started and no row was written\n"
MEND = "  what to do: Mend the token provider, then start the pipeline again."


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_tokens, "_TOKENS", {})


def answering(said: Any) -> tuple[str, float]:
    if isinstance(said, Exception):
        raise said
    return said  # type: ignore[no-any-return]


# What a provider returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (SECRET, "returned str, not a token and the seconds that it lasts"),
        ((SECRET, 1.0, {}), "returned tuple, not a token and the seconds that it lasts"),
        ((b"x", 1.0), "returned tuple, not a token and the seconds that it lasts"),
        ((SECRET, 0), "did not return a number of seconds above zero with its token"),
        ((SECRET, float("nan")), "did not return a number of seconds above zero with its token"),
        ((SECRET, "3600"), "did not return a number of seconds above zero with its token"),
        ((SECRET, time.time() + 900), "returned a point in time with its token, not the seconds that the token lasts"),
        ((SECRET, time.time() * 1000), "returned a point in time with its token, not the seconds that the token lasts"),
        ((f"{SECRET}\n", 900), "returned a token with characters that no bearer token has"),
        (("", 900), "returned a token with characters that no bearer token has"),
    ],
)
def test_what_is_no_token_is_refused_and_not_shown(said: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenSource.of(functools.partial(answering, said)).token()
    assert str(caught.value) == f"The token provider functools.partial {what}.\n{NOT_STARTED}{MEND}"


def test_of_an_error_of_a_provider_only_its_kind_is_told() -> None:
    """Its text may be the request that failed, with the secret in it."""
    with pytest.raises(SinkUnavailable) as caught:
        TokenSource.of(functools.partial(answering, ValueError(SECRET))).token()
    assert caught.value.what == "The token provider functools.partial failed: ValueError."
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_what_is_no_function_is_refused() -> None:
    options = {"security.protocol": "SASL_SSL"}
    text: Any = "a.token"
    with pytest.raises(ConfigError, match="must be a function without arguments, not str"):
        Kafka("h:1", "orders", options=options, token_provider=text)


def test_what_cannot_travel_to_a_worker_is_refused_when_the_sink_is_made() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to executors: TypeError"):
        Kafka("h:1", "o", options={"security.protocol": "SASL_SSL"}, token_provider=lambda: (str(lock), 1.0))


# When it is asked ---------------------------------------------------------------------------------------------------


class Counting:
    """Each token is another one."""

    def __init__(self, lifetime_s: float) -> None:
        self.lifetime_s = lifetime_s
        self.asked = 0

    def __call__(self) -> tuple[str, float]:
        self.asked += 1
        return f"token-{self.asked}", self.lifetime_s


def test_a_token_serves_until_three_quarters_of_its_time_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    source = TokenSource.of(Counting(100.0))
    assert source() == ("token-1", now + 100.0)
    now += 74.0
    assert source() == ("token-1", 1_000_100.0)
    now += 2.0
    assert source() == ("token-2", now + 100.0)


def test_copies_in_a_worker_share_one_token() -> None:
    source = TokenSource.of(Unsecured("app"))
    copies = [pickle.loads(pickle.dumps(source)) for _ in range(2)]  # noqa: S301 - our own bytes
    assert copies == [source, source]
    assert len({source, *copies}) == 1
    assert len({copy.token().text for copy in copies}) == 1


def test_many_threads_fetch_one_token() -> None:
    provider = Counting(100.0)
    source = TokenSource.of(provider)
    threads = [threading.Thread(target=source.token) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert provider.asked == 1


# What is shown ------------------------------------------------------------------------------------------------------


def test_neither_tokens_nor_secrets_are_shown() -> None:
    provider = functools.partial(answering, (SECRET, 100.0))
    sink = Kafka("h:1", "orders", options={"security.protocol": "SASL_SSL"}, token_provider=provider)
    source = sink.options["oauth_cb"]
    credentials = ClientCredentials("https://id", "me", SECRET)
    shown = [sink, source, source.token(), credentials, TokenSource.of(credentials)]
    assert [text for text in map(repr, shown) if SECRET in text] == []
    assert "'oauth_cb': '***'" in repr(sink)
    assert sink.options["sasl.mechanism"] == "OAUTHBEARER"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "security.protocol=PLAINTEXT and sasl.mechanism=."),
        (
            {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN"},
            "SASL_SSL and sasl.mechanism=PLAIN.",
        ),
    ],
)
def test_a_provider_goes_with_no_other_login(options: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Kafka("h:1", "orders", options=options, token_provider=Unsecured("app"))
    assert what in caught.value.what


def test_with_a_provider_a_handler_of_java_is_for_java_alone() -> None:
    java = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.jaas.config": "com.example.OurOwnLoginModule required;",
        "kafka.sasl.login.callback.handler.class": "com.example.OurOwnCallbackHandler",
    }
    told = java_to_librdkafka(with_tokens(java, "h:1", Unsecured("app")))
    assert told.pop("oauth_cb") == TokenSource.of(Unsecured("app"))
    assert told == {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}


def test_the_word_of_confluent_kafka_is_refused_for_it_means_another_time() -> None:
    with pytest.raises(ConfigError, match="oauth_cb does not count"):
        Kafka("h:1", "orders", options={"security.protocol": "SASL_SSL", "oauth_cb": Unsecured("app")})


# An endpoint --------------------------------------------------------------------------------------------------------


class Endpoint:
    """One that knows a client, and answers what the test says."""

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[int, Any]] = lambda: (200, {"access_token": "abc", "expires_in": 60})
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                login = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
                endpoint.asked.append((login, parse_qs(body)))
                status, said = endpoint.answer()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/token"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def options(self, **more: str) -> dict[str, str]:
        of = "sasl.oauthbearer."
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            f"{of}method": "oidc",
            f"{of}token.endpoint.url": self.url,
            f"{of}client.id": "me",
            f"{of}client.secret": SECRET,
            **more,
        }


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.end()


def asked(options: dict[str, Any]) -> TokenSource:
    found = token_source(java_to_librdkafka(options))
    assert found is not None
    return found


def test_an_endpoint_is_asked_with_the_credentials_of_the_client(endpoint: Endpoint) -> None:
    source = asked(endpoint.options(**{"sasl.oauthbearer.scope": "read write"}))
    assert (source()[0], round(source()[1] - time.time())) == ("abc", 60)
    assert endpoint.asked == [(f"me:{SECRET}", {"grant_type": ["client_credentials"], "scope": ["read write"]})]
    assert asked(endpoint.options(**{"sasl.oauthbearer.scope": "read write"})) == source
    assert asked(endpoint.options()) != source


def test_java_says_the_same_in_its_own_words(endpoint: Endpoint) -> None:
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    java = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.oauthbearer.token.endpoint.url": endpoint.url,
        "kafka.sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.secured"
        ".OAuthBearerLoginCallbackHandler",
        "kafka.sasl.jaas.config": f'{module} required clientId="me" clientSecret="{SECRET}" scope="all";',
    }
    assert asked(java)()[0] == "abc"
    assert endpoint.asked == [(f"me:{SECRET}", {"grant_type": ["client_credentials"], "scope": ["all"]})]


def test_an_endpoint_that_says_no_more_is_taken_to_mean_five_minutes(endpoint: Endpoint) -> None:
    endpoint.answer = lambda: (200, {"access_token": "abc"})
    assert round(asked(endpoint.options())()[1] - time.time()) == 300


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ((401, {"error": SECRET}), ConfigError, "refused the client me: HTTP 401."),
        ((503, b""), SinkUnavailable, "gave no token: HTTP 503."),
        ((200, b"<html>"), SinkUnavailable, "gave no token: its answer is not that of an OAuth 2 token endpoint."),
        ((200, ["abc"]), SinkUnavailable, "gave no token: its answer is not that of an OAuth 2 token endpoint."),
        ((200, {}), SinkUnavailable, "gave no token: its answer is not that of an OAuth 2 token endpoint."),
    ],
    ids=["refused", "broken", "no JSON", "no object", "no token"],
)
def test_what_an_endpoint_answers_instead_is_told(
    endpoint: Endpoint, answer: tuple[int, Any], kind: type[SemelError], why: str
) -> None:
    endpoint.answer = lambda: answer
    with pytest.raises(kind) as caught:
        asked(endpoint.options()).token()
    assert caught.value.what == f"The token endpoint {endpoint.url} {why}"
    assert SECRET not in str(caught.value)


def test_an_endpoint_that_is_away_is_told(endpoint: Endpoint) -> None:
    # While somebody still waits for connections, the kernel takes one more and then resets it.
    endpoint.server.shutdown()
    endpoint.server.server_close()
    with pytest.raises(SinkUnavailable, match=r"gave no token: .*Connection refused") as caught:
        asked(endpoint.options()).token()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"sasl.oauthbearer.grant.type": "urn:x"}, "cannot do what sasl.oauthbearer.grant.type=urn:x says"),
        ({"sasl.oauthbearer.extensions": "a=b"}, "cannot do what sasl.oauthbearer.extensions says"),
        ({"https.ca.pem": "-----BEGIN"}, "cannot do what https.ca.pem says"),
        ({"sasl.oauthbearer.token.endpoint.url": "file:///etc/passwd"}, "lacks the address of its endpoint"),
        ({"sasl.oauthbearer.client.id": ""}, "lacks the address of its endpoint or its client"),
        ({"sasl.oauthbearer.method": "default"}, "does not say where its tokens come from"),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(endpoint: Endpoint, more: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        asked({**endpoint.options(), **more})
    assert endpoint.asked == []


# Unsigned tokens and Amazon MSK -------------------------------------------------------------------------------------


def test_an_unsigned_token_says_who_and_until_when() -> None:
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": 'x.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="app";',
    }
    text, until = asked(options)()
    header, claims, signature = (part + "=" * (-len(part) % 4) for part in text.split("."))
    assert (json.loads(base64.urlsafe_b64decode(header)), signature) == ({"alg": "none"}, "")
    said = json.loads(base64.urlsafe_b64decode(claims))
    assert said["sub"] == "app"
    assert said["exp"] == pytest.approx(until, abs=1.0)


@pytest.mark.parametrize(
    ("servers", "region"),
    [
        ("b-1.shop.a1b2c3.c4.kafka.eu-west-1.amazonaws.com:9098,b-2.shop", "eu-west-1"),
        ("boot-x.c1.kafka-serverless.us-gov-east-1.amazonaws.com:9098", "us-gov-east-1"),
        ("127.0.0.1:9092", ""),
    ],
)
def test_the_addresses_of_msk_name_its_region(servers: str, region: str) -> None:
    assert msk_region(servers) == region


@pytest.mark.parametrize(
    "login",
    [
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;",
            "sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
        },
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;",
            "sasl.login.callback.handler.class": "software.amazon.msk.auth.iam.IAMOAuthBearerLoginCallbackHandler",
        },
    ],
    ids=["IAM", "OAUTHBEARER"],
)
def test_an_iam_login_of_java_is_one_by_token_here(login: dict[str, str]) -> None:
    servers = "b-1.shop.a1.c4.kafka.eu-west-1.amazonaws.com:9098"
    sink = Kafka(servers, "orders", options={"kafka.security.protocol": "SASL_SSL", **login})
    told = sink.producer_settings()
    assert (told["sasl.mechanism"], told["oauth_cb"].provider) == ("OAUTHBEARER", MskIam("eu-west-1"))
    assert not any("callback" in name or "jaas" in name for name in told)
    of_the_source = java_to_librdkafka({"security.protocol": "SASL_SSL", "bootstrap.servers": servers, **login})
    assert of_the_source["oauth_cb"] == told["oauth_cb"]


def test_what_an_iam_login_of_java_says_besides_is_refused() -> None:
    jaas = 'software.amazon.msk.auth.iam.IAMLoginModule required awsProfileName="prod";'
    with pytest.raises(ConfigError, match="logs in to Amazon MSK with awsProfileName"):
        java_to_librdkafka({"sasl.mechanism": "AWS_MSK_IAM", "sasl.jaas.config": jaas})


def test_the_library_of_amazon_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aws_msk_iam_sasl_signer", None)
    with pytest.raises(MissingExtra, match=r"semel\[kafka-msk\]"):
        TokenSource.of(MskIam("eu-west-1")).token()
