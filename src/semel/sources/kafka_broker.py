"""What a source asks of a Kafka cluster. Every question has a time limit, and errors are semel's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NoReturn

from semel.errors import ConfigError, SemelError, SourceUnavailable
from semel.kafka.options import connection_options, with_tokens
from semel.kafka.stand_in import admin_client
from semel.kafka.tokens import OAUTH_CB, TokenProvider, TokenSource
from semel.sources.java_pattern import matcher

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

#: (topic, partition). An offset is that of the next record to read, for Spark and for Kafka alike.
Partition = tuple[str, int]
Offsets = Mapping[Partition, int]

#: Kafka's own topics, which a pattern never means.
INTERNAL = frozenset({"__consumer_offsets", "__share_group_state", "__transaction_state"})
LOOK_EVERY_S = 0.05
#: What a coordinator answers while it is not ready. It is soon.
COORDINATOR_BUSY = ("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR")
#: What a broker answers to a client that knows an older leader of a partition.
LEADER_MOVED = ("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "NOT_LEADER_FOR_PARTITION")
#: Errors that no patience mends: the client is not let in.
LOCKED_OUT = ("_AUTHENTICATION", "_SSL")


#: servers -> where the tokens for questions come from. Spark keeps only text about a source, and no function.
_TOKENS: dict[str, TokenSource] = {}


def with_its_tokens(options: Mapping[str, Any], provider: TokenProvider | None = None) -> dict[str, Any]:
    """The options of a source with the provider of tokens, or with that of the `read_kafka` that made the source."""
    servers = str(options.get("kafka.bootstrap.servers", ""))
    known = with_tokens(options, servers, provider)
    if provider is not None:
        _TOKENS[servers] = known[OAUTH_CB]
    elif servers in _TOKENS and OAUTH_CB not in known:
        known[OAUTH_CB] = _TOKENS[servers]
    return known


class Broker:
    """A Kafka cluster, reached with the options of a source."""

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._limit: dict[str, Any] = {"request_timeout": timeout_s}
        self._heard: dict[str, str] = {}
        self._servers = str(options.get("kafka.bootstrap.servers", ""))
        # What the client would write to stderr is heard through the callback, and told in our own words.
        settings: dict[str, Any] = {**connection_options(options), "error_cb": self._hear}
        if "debug" not in settings:
            settings["log_level"] = 0
        self._client: AdminClient = admin_client(settings, "Kafka", _bad_options, SourceUnavailable)

    # Questions --------------------------------------------------------------------------------------------------------

    def partitions(self, topics: Collection[str]) -> list[Partition]:
        """All partitions of these topics. Raises ConfigError for topics that do not exist."""
        from confluent_kafka import TopicCollection

        answers = self._client.describe_topics(TopicCollection(list(topics)), **self._limit)
        missing, found = [], []
        for topic, described in self._answers(answers).items():
            if _code(described) == "UNKNOWN_TOPIC_OR_PART":
                missing.append(topic)
            else:
                found += [(topic, partition.id) for partition in self._require(described).partitions]
        if missing:
            raise ConfigError(
                f"There is no topic {', '.join(sorted(missing))} on {self._servers}.",
                remedy="Correct the name, or create the topic before the pipeline starts.",
            )
        return sorted(found)

    def partitions_like(self, pattern: str) -> list[Partition]:
        """All partitions of the topics whose whole name matches; perhaps none, for topics may be created later."""
        from confluent_kafka import KafkaException

        try:
            topics = self._client.list_topics(timeout=self.timeout_s).topics
        except KafkaException as error:
            self._fail(error)
        matches = matcher(pattern)
        matching = [topic for name, topic in topics.items() if matches(name) and name not in INTERNAL]
        return sorted((str(topic.topic), int(number)) for topic in matching for number in topic.partitions)

    def group_offsets(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """What a consumer group has committed, where it has."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted:
            return {}
        asked = [ConsumerGroupTopicPartitions(group, wanted)]
        listed = self._of_group(group, lambda: self._client.list_consumer_group_offsets(asked, **self._limit))
        return {(p.topic, p.partition): p.offset for p in listed if p.error is None and p.offset >= 0}

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Up to where a read_committed consumer can read now: the last stable offset."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition, admin

        specs: Any = admin
        asked = {TopicPartition(*partition): specs.OffsetSpec.latest() for partition in partitions}
        if not asked:
            return {}
        level = {"isolation_level": IsolationLevel.READ_COMMITTED, **self._limit}
        answers = self._answers(self._client.list_offsets(asked, **level))
        if any(_code(answer) in LEADER_MOVED for answer in answers.values()):
            # The client goes by what it knew of the leaders before they were restarted, until it is made to look.
            try:
                for topic in sorted({str(p.topic) for p in asked}):
                    self._client.list_topics(topic, timeout=self.timeout_s)
            except KafkaException as error:
                self._fail(error)
            answers = self._answers(self._client.list_offsets(asked, **level))
        return {(p.topic, p.partition): self._require(a).offset for p, a in answers.items()}

    def report(self, group: str, offsets: Offsets) -> None:
        """Commit offsets under the name of a group."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        reached = [TopicPartition(*partition, offset) for partition, offset in offsets.items()]
        if not reached:
            return
        asked = [ConsumerGroupTopicPartitions(group, reached)]
        self._of_group(group, lambda: self._client.alter_consumer_group_offsets(asked, **self._limit))

    def _of_group(self, group: str, ask: Callable[[], Mapping[str, Future[Any]]]) -> list[Any]:
        """The partitions in the answer of a group's coordinator, which may have just moved or be reading its log."""
        from confluent_kafka import KafkaException

        end = time.monotonic() + self.timeout_s
        while True:
            answer = self._answers(ask())[group]
            found = [] if isinstance(answer, Exception) else answer.topic_partitions
            failed = next((KafkaException(p.error) for p in found if p.error is not None), None)
            if failed is None and not isinstance(answer, Exception):
                return list(found)
            if _code(failed or answer) not in COORDINATOR_BUSY or time.monotonic() > end:
                self._fail(failed or answer)
            time.sleep(LOOK_EVERY_S)

    # Answers ----------------------------------------------------------------------------------------------------------

    def _answers(self, asked: Mapping[Any, Future[Any]]) -> dict[Any, Any]:
        """What came of each question: a result, or the exception. Gives up early when the client is locked out."""
        self._client.poll(0)
        # What was heard while nobody asked is no answer to this question.
        self._heard.clear()
        end = time.monotonic() + self.timeout_s + 1.0
        while wait(asked.values(), timeout=LOOK_EVERY_S).not_done:
            self._client.poll(0)
            if time.monotonic() > end or self._heard.keys() & set(LOCKED_OUT):
                self._fail(TimeoutError())
        self._client.poll(0)
        return {key: future.exception() or future.result() for key, future in asked.items()}

    def _require(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            self._fail(answer)
        return answer

    def _hear(self, error: Any) -> None:
        """The last words of each kind. That all brokers are down says less than why one is."""
        if error.name() != "_ALL_BROKERS_DOWN":
            self._heard[error.name()] = str(error.str())

    def _fail(self, error: Exception) -> NoReturn:
        raise self._error(error) from None

    def _error(self, error: Exception) -> SemelError:
        self._client.poll(0)
        code, heard = _code(error), dict(self._heard)
        self._heard.clear()
        refused = next((heard[name] for name in LOCKED_OUT if name in heard), "")
        if refused or "AUTHORIZATION_FAILED" in code or code in LOCKED_OUT:
            return ConfigError(
                f"Kafka at {self._servers} did not let us in: {_plain(refused or _words(error))}.",
                remedy="Correct the login or the certificates, or let this user read the topic and the group.",
            )
        if code in ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", ""):
            why = next(reversed(heard.values()), f"no answer within {self.timeout_s:g} s")
            return SourceUnavailable(f"Kafka at {self._servers} cannot be reached: {_plain(why)}.")
        return SourceUnavailable(f"Kafka at {self._servers} refused: {_plain(_words(error))}.")


def _bad_options(error: Exception) -> ConfigError:
    return ConfigError(
        f"The Kafka options do not make a client: {_plain(_words(error))}.",
        remedy="Correct the options that begin with kafka.",
    )


def _code(error: object) -> str:
    """Kafka's name of an error; empty for what is none of Kafka's."""
    from confluent_kafka import KafkaException

    return str(error.args[0].name()) if isinstance(error, KafkaException) else ""


def _words(error: Exception) -> str:
    return str(error.args[0].str()) if _code(error) else str(error)


def _plain(words: str) -> str:
    """Without librdkafka's notes on its own state, which end in a duration that differs each time."""
    return re.sub(r" \((after|in state) .*\)$", "", words).rstrip(". ")
