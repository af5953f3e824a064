"""An admin client for logins that librdkafka cannot do by itself: it asks and answers like librdkafka's own.

librdkafka in the wheel of confluent-kafka knows no Kerberos. And a client of confluent-kafka whose tokens come from
Python takes a second to be made, and ten to find out that there is no token. kafka-python does both logins at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.errors import MissingExtra, SemelError, SinkUnavailable
from semel.kafka.answers import error_of
from semel.kafka.login import check_login, is_refused, needs_stand_in, without_login

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException

#: A login by Kerberos takes several steps, and the first one after a start of the broker takes long.
CONNECT_S_MIN = 3.0
#: What librdkafka calls it when a broker lets nobody in, and when there is none.
LOCKED_OUT, AWAY = -169, -195


def admin_client(
    settings: Mapping[str, Any],
    whose: str,
    refused: Callable[[Any], SemelError],
    unavailable: type[SemelError] = SinkUnavailable,
) -> Any:
    """librdkafka's, or the stand-in. Raises what `refused` says of settings that librdkafka does not take.

    The stand-in raises `unavailable` where nobody gives a token or a ticket.
    """
    try:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
    except ImportError:
        raise MissingExtra(f"{whose} needs confluent-kafka, which is not installed.", extra="kafka") from None
    try:
        return StandIn(settings, unavailable) if needs_stand_in(settings) else AdminClient(dict(settings))
    except KafkaException as error:
        raise refused(error) from None


@dataclass(frozen=True)
class _Number:
    id: int


@dataclass(frozen=True)
class _Described:
    partitions: Sequence[_Number]
    authorized_operations: set[Any] | None


@dataclass(frozen=True)
class _Value:
    value: str | None


@dataclass(frozen=True)
class _Place:
    topic: str
    partition: int
    offset: int = -1
    error: KafkaError | None = None


@dataclass(frozen=True)
class _Places:
    topic_partitions: Sequence[_Place]


class StandIn:
    """The questions that semel asks of an admin client. It connects with the first one."""

    def __init__(self, settings: Mapping[str, Any], unavailable: type[SemelError]) -> None:
        from confluent_kafka.admin import AdminClient

        own = ("error_cb", "log_level")
        self._settings = {name: value for name, value in settings.items() if name not in own}
        self._tell: Callable[[KafkaError], Any] = settings.get("error_cb", lambda _: None)
        # librdkafka looks at the settings, and nobody is asked yet.
        AdminClient({**without_login(self._settings), "log_level": "0"})
        self._connected: Any = None
        self._unavailable = unavailable

    def poll(self, _timeout: float = 0) -> int:
        return 0

    # Questions --------------------------------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = 10.0) -> Any:
        """Asks about one topic, about none where its name is empty, about all without a name."""
        from confluent_kafka.admin import BrokerMetadata, ClusterMetadata  # type: ignore[attr-defined]

        wanted = None if topic is None else [topic] if topic else []
        said = self._ask(lambda c: c._manager.send(_metadata_request(wanted)), timeout)
        found = ClusterMetadata()
        for broker in said.brokers:
            found.brokers[broker.node_id] = BrokerMetadata()
        found.topics = {t.name: _topic_metadata(t) for t in said.topics}
        return found

    def describe_topics(self, topics: Any, *, request_timeout: float, **_: Any) -> dict[str, Future[_Described]]:
        names = list(topics.topic_names)

        def ask() -> dict[str, Any]:
            said = self._ask(lambda c: c._manager.send(_metadata_request(names)), request_timeout)
            return {t.name: self._error(t.error_code) or _described(t) for t in said.topics}

        return _futures(names, ask)

    def describe_configs(self, resources: Sequence[Any], *, request_timeout: float) -> dict[Any, Future[Any]]:
        from kafka.protocol.admin import DescribeConfigsRequest

        by_name = {resource.name: resource for resource in resources}
        topic = 2  # the number of that kind of resource

        def ask() -> dict[Any, Any]:
            request = DescribeConfigsRequest(
                resources=[(topic, name, None) for name in by_name], include_synonyms=False
            )
            said = self._ask(lambda c: c._manager.send(request), request_timeout)
            return {
                by_name[r.resource_name]: self._error(r.error_code) or {c.name: _Value(c.value) for c in r.configs}
                for r in said.results
            }

        return _futures(resources, ask)

    def create_topics(self, topics: Sequence[Any], *, operation_timeout: float) -> dict[str, Future[None]]:
        def ask() -> dict[str, Any]:
            said = self._ask(lambda c: _create(c, topics, operation_timeout), operation_timeout)
            return {t.name: self._error(t.error_code) for t in said.topics}

        return _futures([new.topic for new in topics], ask)

    def list_consumer_group_offsets(self, asked: Sequence[Any], *, request_timeout: float) -> dict[str, Future[Any]]:
        (wanted,) = asked

        def ask() -> dict[str, Any]:
            from kafka.structs import TopicPartition

            places = [TopicPartition(p.topic, p.partition) for p in wanted.topic_partitions]
            said = self._ask(lambda c: c._async_list_group_offsets({wanted.group_id: places}), request_timeout)
            found = said[wanted.group_id].items()
            return {wanted.group_id: _Places([_Place(p.topic, p.partition, at.offset) for p, at in found])}

        return _futures([wanted.group_id], ask)

    def alter_consumer_group_offsets(self, asked: Sequence[Any], *, request_timeout: float) -> dict[str, Future[Any]]:
        (wanted,) = asked

        def ask() -> dict[str, Any]:
            from kafka.structs import OffsetAndMetadata, TopicPartition

            new = {
                TopicPartition(p.topic, p.partition): OffsetAndMetadata(p.offset, "", None)
                for p in wanted.topic_partitions
            }
            said = self._ask(lambda c: c._async_alter_group_offsets(wanted.group_id, new), request_timeout)
            places = [_Place(p.topic, p.partition, error=self._kafka_error(kind.errno)) for p, kind in said.items()]
            return {wanted.group_id: _Places(places)}

        return _futures([wanted.group_id], ask)

    def list_offsets(self, asked: Mapping[Any, Any], *, request_timeout: float, **_: Any) -> dict[Any, Future[_Place]]:
        """The last stable offset of each, which is all that is asked for."""

        def ask() -> dict[Any, Any]:
            from kafka.admin import OffsetSpec
            from kafka.protocol.consumer import IsolationLevel
            from kafka.structs import TopicPartition

            ends = {TopicPartition(p.topic, p.partition): OffsetSpec.LATEST for p in asked}
            level = IsolationLevel.READ_COMMITTED
            said = self._ask(lambda c: c._async_list_partition_offsets(ends, level), request_timeout)
            return {p: _Place(p.topic, p.partition, said[p.topic, p.partition].offset) for p in asked}

        return _futures(asked, ask)

    # The connection ---------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Any], Any], timeout_s: float) -> Any:
        """Raises KafkaException, as librdkafka does, but where there is no token or no ticket."""
        from kafka.errors import KafkaError as TheirError

        deadline = time.monotonic() + max(timeout_s, CONNECT_S_MIN)
        try:
            client = self._client(deadline - time.monotonic())

            async def ask() -> Any:
                return await question(client)

            async def within() -> Any:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                return await client._manager.wait_for(client._manager.call_soon(ask), left_ms)

            return client._manager.run(within)
        except SinkUnavailable as error:
            raise self._unavailable(error.what, remedy=error.remedy) from None
        except TheirError as error:
            raise self._told(_code_of(error), _words_of(error)) from None

    def _client(self, timeout_s: float) -> Any:
        from semel.kafka.connection import connect

        if self._connected is None:
            check_login(self._settings)
            self._connected = connect(self._settings["bootstrap.servers"], self._settings, timeout_s)
            # Garbage may be collected in the client's own thread, which cannot wait for itself to end.
            closing = threading.Thread(target=self._connected.close, name="semel-kafka-close", daemon=True)
            weakref.finalize(self, closing.start).atexit = False
        return self._connected

    def _told(self, code: int, words: str) -> KafkaException:
        from confluent_kafka import KafkaError, KafkaException

        error = KafkaError(code, words)
        if code in (LOCKED_OUT, AWAY):
            self._tell(error)
        return KafkaException(error)

    def _error(self, code: int) -> KafkaException | None:
        from confluent_kafka import KafkaException

        error = self._kafka_error(code)
        return None if error is None else KafkaException(error)

    def _kafka_error(self, code: int) -> KafkaError | None:
        from confluent_kafka import KafkaError

        return KafkaError(code) if code else None


def _futures(keys: Iterable[Any], ask: Callable[[], Mapping[Any, Any]]) -> dict[Any, Future[Any]]:
    """As librdkafka answers: one for each, with what came of it. These have their answers already."""
    from confluent_kafka import KafkaException

    made: dict[Any, Future[Any]] = {key: Future() for key in keys}
    try:
        answers: Mapping[Any, Any] = ask()
    except KafkaException as error:
        answers = dict.fromkeys(made, error)
    for key, future in made.items():
        answer = answers.get(key)
        if isinstance(answer, KafkaException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    return made


def _code_of(error: Any) -> int:
    if is_refused(error):
        return LOCKED_OUT
    code = getattr(error, "errno", None)
    return code if isinstance(code, int) and code > 0 else AWAY


def _words_of(error: Any) -> str:
    """Without the name of the class, which kafka-python puts before what was said."""
    return str(error.args[0]).removeprefix("SaslAuthenticationFailedError: ") if error.args else str(error)


def _metadata_request(topics: Sequence[str] | None) -> Any:
    from kafka.protocol.metadata import MetadataRequest

    wanted = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    return MetadataRequest(topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=True)


def _topic_metadata(said: Any) -> Any:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import PartitionMetadata, TopicMetadata  # type: ignore[attr-defined]

    found = TopicMetadata()
    found.topic = said.name
    found.error = KafkaError(said.error_code) if said.error_code else None
    for partition in said.partitions:
        one = PartitionMetadata()
        one.id, one.leader = partition.partition_index, partition.leader_id
        one.replicas, one.isrs = list(partition.replica_nodes), list(partition.isr_nodes)
        found.partitions[one.id] = one
    return found


def _described(said: Any) -> _Described:
    from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]

    known = {operation.value: operation for operation in AclOperation}
    numbers = said.authorized_operations
    allowed = None if numbers is None else {known[n] for n in numbers if n in known}
    return _Described([_Number(p.partition_index) for p in said.partitions], allowed)


async def _create(client: Any, topics: Sequence[Any], timeout_s: float) -> Any:
    """By the controller, which may have just moved: then the answer is an error, and the start is tried again."""
    from kafka.protocol.admin import CreateTopicsRequest

    of = CreateTopicsRequest.CreatableTopic
    wanted = [
        of(
            name=new.topic,
            num_partitions=new.num_partitions,
            replication_factor=new.replication_factor,
            assignments=[],
            configs=[of.CreatableTopicConfig(name=name, value=value) for name, value in new.config.items()],
        )
        for new in topics
    ]
    request = CreateTopicsRequest(topics=wanted, timeout_ms=int(timeout_s * 1000), validate_only=False)

    def errors(answer: Any) -> list[Any]:
        return [error_of(topic.error_code) for topic in answer.topics]

    return await client._send_request_to_controller(request, errors, False)
