"""Requests of Kafka's own protocol: the only module that knows kafka-python.

A task leaves its transaction open; the driver ends it with EndTxn, from another process and over another connection.
The broker asks for nothing but the transactional id, the producer id and the epoch. All of it is the transaction
protocol from before KIP-890, which librdkafka speaks, too, and every broker: from EndTxn version 5 on, the answer moves
the epoch on, and from Produce version 12 on, rows add their partition to the transaction by themselves.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from semel.errors import ConfigError, MissingExtra, SinkUnavailable
from semel.kafka_options import connection_options
from semel.sinks.kafka_reach import ACL_REMEDY, LOGIN_REMEDY, Reach

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient

REQUEST_TIMEOUT_MS = 10_000
RETRY_PAUSE_S = 0.02
RETRY_PAUSE_S_MAX = 0.5
FETCH_BYTES_MAX = 8 * 1024 * 1024
END_TXN_VERSION_MAX = 4
INIT_PRODUCER_VERSION_MAX = 4
ADD_PARTITIONS_VERSION_MAX = 3
PRODUCE_VERSION_MAX = 11
ALL_REPLICAS = -1
#: Topic names are in fetch requests up to this version, topic ids after it.
FETCH_VERSION_MAX = 12
#: From this version on topics have ids.
METADATA_VERSION_MIN = 10
#: From this version on a leader may say that it does not know the end yet.
LIST_OFFSETS_VERSION_MIN = 5
LATEST = -1

#: Settings of librdkafka that change nothing about who we are and whom we trust.
HARMLESS = frozenset(
    {"ssl.cipher.suites", "ssl.curves.list", "ssl.sigalgs.list", "ssl.endpoint.identification.algorithm"}
)

#: What kafka-python can do without further libraries.
LOGINS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

T = TypeVar("T")


@dataclass(frozen=True)
class Transaction:
    """A transaction of the broker's own. No two of ours ever share a producer id and epoch (KAFKA-17754)."""

    id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class LogRecord:
    """One record as it lies in the log, of an open, a committed or an aborted transaction, or of none."""

    offset: int
    producer_id: int
    epoch: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class LogEnd:
    """The record with which the broker ends the transaction of a producer in this partition."""

    offset: int
    producer_id: int
    committed: bool


@dataclass(frozen=True)
class Slice:
    """Part of a log. `next_offset` is where the next slice begins, `end` what the leader took for the end."""

    entries: Sequence[LogRecord | LogEnd]
    next_offset: int
    end: int


#: What a request comes to when the connection breaks, or nothing comes back in time.
NO_ANSWER = "NO_ANSWER"


@dataclass(frozen=True)
class Answer:
    """What a broker says to rows, partition by partition. `failed` is why it says nothing."""

    codes: Mapping[tuple[str, int], str]
    failed: str = ""

    def of(self, topic: str, partition: int) -> str:
        return self.codes.get((topic, partition), self.failed or NO_ANSWER)


class Wire:
    """Connections to the brokers. Every call answers or raises within `timeout_s`."""

    def __init__(self, servers: str, options: Mapping[str, Any], timeout_s: float) -> None:
        self.servers = servers
        self.timeout_s = timeout_s
        self._client = _connect(servers, options, timeout_s)
        self._manager: Any = self._client._manager
        self._known_leaders: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        self._client.close()

    # Transactions -----------------------------------------------------------------------------------------------------

    def end(self, transaction: Transaction, *, commit: bool) -> str:
        """Ask the coordinator to commit or abort; its answer by name, "NO_ERROR" for done or done before."""
        from kafka.protocol.producer.transaction import EndTxnRequest

        async def ask() -> str:
            request = EndTxnRequest(
                transactional_id=transaction.id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.epoch,
                committed=commit,
                max_version=END_TXN_VERSION_MAX,
            )
            return _answer(await self._to_coordinator(transaction.id, request))

        return self._until_answered(f"EndTxn of {transaction.id}", ask)

    def fence(self, transactional_id: str, transaction_timeout_ms: int) -> str:
        """Give the id a new epoch: what is open under it is aborted, and whoever had it can write no more."""
        return self.start_producer(transactional_id, transaction_timeout_ms)[0]

    def start_producer(self, transactional_id: str | None, transaction_timeout_ms: int) -> tuple[str, int, int]:
        """The answer by name, a producer id and an epoch under which nobody has written yet."""
        from kafka.errors import TransactionalIdAuthorizationFailedError
        from kafka.protocol.producer.transaction import InitProducerIdRequest

        async def ask() -> tuple[str, int, int]:
            request = InitProducerIdRequest(
                transactional_id=transactional_id,
                transaction_timeout_ms=transaction_timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
                max_version=INIT_PRODUCER_VERSION_MAX,
            )
            try:
                response = await self._to_coordinator(transactional_id, request)
            except TransactionalIdAuthorizationFailedError as error:
                return str(error.message), -1, -1
            return _answer(response), response.producer_id, response.producer_epoch

        return self._until_answered(f"InitProducerId of {transactional_id}", ask)

    def add_partitions(self, transaction: Transaction, places: Mapping[str, Sequence[int]]) -> tuple[str, str]:
        """Tell the coordinator where the transaction will have rows, by topic.

        Returns the worst of its answers by name, and the topic that it is about.
        """
        from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

        async def ask() -> tuple[str, str]:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=transaction.id,
                v3_and_below_producer_id=transaction.producer_id,
                v3_and_below_producer_epoch=transaction.epoch,
                v3_and_below_topics=[
                    AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=list(partitions))
                    for topic, partitions in places.items()
                ],
                max_version=ADD_PARTITIONS_VERSION_MAX,
            )
            response = await self._to_coordinator(transaction.id, request)
            codes = [
                (p.partition_error_code, t.name)
                for t in response.results_by_topic_v3_and_below
                for p in t.results_by_partition
            ]
            for code, _ in codes:
                if code and _error(code).retriable:
                    _raise_for(code)
            # Where one is refused, the others are said not to have been tried.
            refused = [(str(_error(code).message), topic) for code, topic in codes if code]
            return min(refused, key=lambda one: one[0] == "OPERATION_NOT_ATTEMPTED", default=("NO_ERROR", ""))

        return self._until_answered(f"AddPartitionsToTxn of {transaction.id}", ask)

    def open_transactions(self, ours: Callable[[str], bool]) -> list[tuple[str, int]]:
        """The transactional ids and producer ids of what is open, of those ids that are ours."""
        from kafka.protocol.admin.transactions import ListTransactionsRequest

        async def ask() -> list[tuple[str, int]]:
            found = []
            for broker in self._manager.cluster.brokers():
                request = ListTransactionsRequest(state_filters=["Ongoing"], producer_id_filters=[])
                response = await self._manager.send(request, node_id=broker.node_id)
                _raise_for(response.error_code)
                found += [(t.transactional_id, t.producer_id) for t in response.transaction_states]
            return sorted(entry for entry in found if ours(entry[0]))

        return self._until_answered("ListTransactions", ask)

    async def _to_coordinator(self, transactional_id: str | None, request: Any) -> Any:
        """Send to the coordinator of the id. After any trouble the next look-up asks anew: it may have moved."""
        from kafka.protocol.metadata import CoordinatorType

        kind = CoordinatorType.TRANSACTION
        try:
            node = None
            if transactional_id is not None:  # without one, any broker will do
                node = await self._client._find_coordinator_id(transactional_id, key_type=kind)
            response = await self._manager.send(request, node_id=node)
            if _error(getattr(response, "error_code", 0)).retriable:
                _raise_for(response.error_code)
        except Exception:
            self._manager.cluster._coordinators.pop((kind, transactional_id), None)
            raise
        return response

    # Rows -------------------------------------------------------------------------------------------------------------

    def produce(
        self,
        node: int,
        transactional_id: str | None,
        batches: Mapping[str, Mapping[int, bytes]],
        then: Callable[[Answer], None],
    ) -> None:
        """Send record batches, by topic and partition, to the broker that leads them. Does not wait for the answer."""
        self._manager.call_soon(self._produce, node, _produce_request(transactional_id, batches), then)

    async def _produce(self, node: int, request: Any, then: Callable[[Answer], None]) -> None:
        from kafka.errors import KafkaError, UnknownBrokerIdError

        try:
            response = await self._manager.send(request, node_id=node)
        except KafkaError as error:
            transient = error.retriable or isinstance(error, UnknownBrokerIdError)
            then(Answer({}, "" if transient else str(getattr(error, "message", error))))
        except BaseException as error:
            then(Answer({}, f"{type(error).__name__}: {error}"))
            raise
        else:
            then(
                Answer(
                    {
                        (topic.name, partition.index): str(_error(partition.error_code).message)
                        for topic in response.responses
                        for partition in topic.partition_responses
                    }
                )
            )

    def is_transient(self, answer: str) -> bool:
        """Whether the same request may have another answer later; none at all is such an answer."""
        return answer == NO_ANSWER or answer in _transient_answers()

    def leaders(self, topic: str) -> tuple[str, dict[int, int]]:
        """The answer by name, and partition -> the broker that leads it, -1 for none."""

        async def ask() -> tuple[str, dict[int, int]]:
            found = await self._described(topic)
            # A broker that was added lately is to be known before rows are sent to it.
            if any(self._manager.cluster.broker_metadata(p.leader_id) is None for p in found.partitions):
                await self._manager.cluster.refresh_metadata()
            return str(_error(found.error_code).message), {p.partition_index: p.leader_id for p in found.partitions}

        return self._until_answered(f"Metadata of {topic}", ask)

    # Logs -------------------------------------------------------------------------------------------------------------

    def partitions(self, topic: str) -> int:
        """How many partitions the topic has; none when it does not exist."""
        return len(self._until_answered(f"Metadata of {topic}", lambda: self._leaders(topic)))

    def topic_id(self, topic: str) -> str:
        """Which topic of that name it is: one that was deleted and created again is another (KIP-516)."""

        async def ask() -> str:
            found = await self._described(topic)
            _raise_for(found.error_code)
            return str(found.topic_id)

        return self._until_answered(f"Metadata of {topic}", ask)

    async def _leaders(self, topic: str) -> dict[int, int]:
        """partition -> the broker that leads it."""
        found = await self._described(topic)
        if _error(found.error_code).message == "UNKNOWN_TOPIC_OR_PARTITION":
            return {}
        _raise_for(found.error_code)
        return {p.partition_index: p.leader_id for p in found.partitions}

    async def _described(self, topic: str) -> Any:
        from kafka.protocol.metadata import MetadataRequest

        wanted = [MetadataRequest.MetadataRequestTopic(name=topic)]
        response = await self._manager.send(
            MetadataRequest(topics=wanted, allow_auto_topic_creation=False, min_version=METADATA_VERSION_MIN)
        )
        (found,) = response.topics
        return found

    def log_end(self, topic: str, partition: int) -> int:
        """Where the log ends: everything that was acknowledged by now lies before that.

        The high watermark that comes with a fetch does not say so. A new leader may answer with one from before its
        election; asked for the end, it answers only once it knows better (KIP-207).
        """
        return self._of_leader(
            f"ListOffsets of {topic}", topic, partition, _list_offsets(topic, partition), then=_log_end
        )

    def read(self, topic: str, partition: int, offset: int) -> Slice:
        """Everything from an offset on, uncommitted records and the ends of transactions included."""
        request = _fetch(topic, partition, offset)
        return self._of_leader(f"Fetch of {topic}", topic, partition, request, then=lambda said: _found(said, offset))

    def tail(self, topic: str, partition: int, offset: int) -> tuple[int, Slice]:
        """`log_end` and `read` at once: a broker answers the requests of one connection in turn."""
        requests = _list_offsets(topic, partition), _fetch(topic, partition, offset)
        return self._of_leader(
            f"Fetch of {topic}",
            topic,
            partition,
            *requests,
            then=lambda end, said: (_log_end(end), _found(said, offset)),
        )

    def _of_leader(self, what: str, topic: str, partition: int, *requests: Any, then: Callable[..., T]) -> T:
        """Ask the leader of a partition. After any trouble the next one is looked up: it may have moved."""
        place = topic, partition

        async def ask() -> T:
            try:
                if place not in self._known_leaders:
                    self._known_leaders[place] = await self._leader(topic, partition)
                leader = self._known_leaders[place]
                under_way = [self._manager.send(request, node_id=leader) for request in requests]
                return then(*[await answer for answer in under_way])
            except Exception:
                self._known_leaders.pop(place, None)
                raise

        return self._until_answered(what, ask)

    async def _leader(self, topic: str, partition: int) -> int:
        from kafka.errors import LeaderNotAvailableError

        leader = (await self._leaders(topic)).get(partition, -1)
        if leader < 0:
            raise LeaderNotAvailableError(f"partition {partition} of {topic} has no leader")
        return leader

    # Asking again -----------------------------------------------------------------------------------------------------

    def _until_answered(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer that means something. Asking twice is safe for every request in here."""
        from kafka.errors import KafkaError

        deadline, pause_s = time.monotonic() + self.timeout_s, RETRY_PAUSE_S
        while True:
            try:
                answer: T = self._manager.run(self._within, ask, deadline - time.monotonic())
                return answer
            except KafkaError as error:
                _raise_unless_transient(what, self.servers, error)
                if time.monotonic() + pause_s > deadline:
                    raise SinkUnavailable(f"Kafka at {self.servers} gave no answer to {what}: {error}.") from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_PAUSE_S_MAX)

    async def _within(self, ask: Callable[[], Awaitable[T]], seconds: float) -> T:
        """One asking may take several requests, each with a limit of its own."""
        answer: T = await self._manager.wait_for(self._manager.call_soon(ask), max(1, int(seconds * 1000)))
        return answer


def to_kafka_python(options: Mapping[str, str]) -> dict[str, Any]:
    """Settings of librdkafka that say how to reach the brokers, in kafka-python's words."""
    words = {
        "security.protocol": "security_protocol",
        "sasl.mechanism": "sasl_mechanism",
        "sasl.username": "sasl_plain_username",
        "sasl.password": "sasl_plain_password",
        "ssl.ca.location": "ssl_cafile",
        "ssl.certificate.location": "ssl_certfile",
        "ssl.key.location": "ssl_keyfile",
        "ssl.key.password": "ssl_password",
    }
    found: dict[str, Any] = {words[name]: value for name, value in options.items() if name in words}
    if "security_protocol" in found:
        found["security_protocol"] = found["security_protocol"].upper()
    if options.get("ssl.endpoint.identification.algorithm") == "none":
        found["ssl_check_hostname"] = False
    unknown = sorted(n for n in options if n.startswith(("sasl.", "ssl.")) and n not in words and n not in HARMLESS)
    mechanism = options.get("sasl.mechanism", "PLAIN")
    if mechanism not in LOGINS:
        unknown.insert(0, f"sasl.mechanism={mechanism}")
    if unknown:
        raise ConfigError(
            f"The Kafka sink's control path cannot do what {', '.join(unknown)} says.",
            remedy="Log in by PLAIN or SCRAM, and name certificates as PEM files: ssl.ca.location and so on.",
        )
    return found


def _connect(servers: str, options: Mapping[str, Any], timeout_s: float) -> KafkaAdminClient:
    try:
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError
    except ImportError:
        other = getattr(sys.modules.get("kafka"), "__file__", None)
        if other is not None:
            raise ConfigError(f"{other} hides the library kafka-python.", remedy="Give it another name.") from None
        raise MissingExtra("The Kafka sink needs kafka-python, which is not installed.", extra="kafka") from None
    settings = to_kafka_python(connection_options(options))
    # kafka-python tells nobody why it cannot connect; and at level DEBUG it tells its log all, the password included.
    Reach(servers, options).metadata("", timeout_s)
    logging.getLogger("kafka").setLevel(max(logging.INFO, logging.getLogger("kafka").level))
    try:
        return KafkaAdminClient(
            bootstrap_servers=[server.strip() for server in servers.split(",")],
            client_id=connection_options(options).get("client.id", "semel"),
            request_timeout_ms=min(REQUEST_TIMEOUT_MS, int(timeout_s * 1000)),
            bootstrap_timeout_ms=int(timeout_s * 1000),
            reconnect_backoff_max_ms=1000,
            **settings,
        )
    except KafkaError as error:
        _raise_unless_transient("the connection", servers, error)
        raise SinkUnavailable(f"Kafka at {servers} cannot be reached: {error}.") from None


# What brokers answer ------------------------------------------------------------------------------------------------


def _error(code: int) -> Any:
    from kafka.errors import for_code

    return for_code(code)


def _answer(response: Any) -> str:
    """The name of an answer, such as NO_ERROR or INVALID_PRODUCER_EPOCH."""
    return str(_error(response.error_code).message)


def _raise_for(code: int) -> None:
    if code:
        raise _error(code)()


def _raise_unless_transient(what: str, servers: str, error: Any) -> None:
    """A refusal is final; so is whatever neither the network nor a moving coordinator can have caused."""
    from kafka.errors import AuthorizationError, SaslAuthenticationFailedError, UnknownBrokerIdError

    if isinstance(error, SaslAuthenticationFailedError):
        raise ConfigError(f"Kafka at {servers} refused the login: {error}.", remedy=LOGIN_REMEDY) from None
    if isinstance(error, AuthorizationError):
        raise ConfigError(f"Kafka at {servers} does not allow {what}: {error.message}.", remedy=ACL_REMEDY) from None
    if not (error.retriable or isinstance(error, UnknownBrokerIdError)):
        raise SinkUnavailable(f"Kafka at {servers} refused {what}: {error}.") from error


@functools.cache
def _transient_answers() -> frozenset[str]:
    from kafka import errors

    known: list[Any] = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return frozenset(
        str(kind.message) for kind in known if getattr(kind, "retriable", False) and hasattr(kind, "message")
    )


def _produce_request(transactional_id: str | None, batches: Mapping[str, Mapping[int, bytes]]) -> Any:
    from kafka.protocol.producer import ProduceRequest

    topic = ProduceRequest.TopicProduceData
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=ALL_REPLICAS,
        timeout_ms=REQUEST_TIMEOUT_MS,
        topic_data=[
            topic(
                name=name,
                partition_data=[
                    topic.PartitionProduceData(index=number, records=data) for number, data in partitions.items()
                ],
            )
            for name, partitions in batches.items()
        ],
        max_version=PRODUCE_VERSION_MAX,
    )


def _list_offsets(topic: str, partition: int) -> Any:
    from kafka.protocol.consumer.offsets import ListOffsetsRequest

    wanted = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
        partition_index=partition, current_leader_epoch=-1, timestamp=LATEST
    )
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=0,
        topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[wanted])],
        min_version=LIST_OFFSETS_VERSION_MIN,
    )


def _fetch(topic: str, partition: int, offset: int) -> Any:
    from kafka.protocol.consumer.fetch import FetchRequest

    wanted = FetchRequest.FetchTopic.FetchPartition(
        partition=partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES_MAX
    )
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=FETCH_BYTES_MAX,
        isolation_level=0,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        max_version=FETCH_VERSION_MAX,
    )


def _log_end(response: Any) -> int:
    found = response.topics[0].partitions[0]
    _raise_for(found.error_code)
    return int(found.offset)


def _found(response: Any, offset: int) -> Slice:
    _raise_for(response.error_code)
    found = response.responses[0].partitions[0]
    if _error(found.error_code).message == "OFFSET_OUT_OF_RANGE" and offset < found.log_start_offset:
        return Slice((), found.log_start_offset, found.high_watermark)
    _raise_for(found.error_code)
    return _slice(found.records, offset, found.high_watermark)


def _slice(records: bytes | None, offset: int, end: int) -> Slice:
    """What a fetch brought. A batch may begin before the offset that was asked for."""
    from kafka.record import MemoryRecords

    entries: list[LogRecord | LogEnd] = []
    next_offset = offset
    for batch in MemoryRecords(records or b""):
        entries += (entry for entry in _entries(batch) if entry.offset >= offset)
        next_offset = batch.next_offset
    return Slice(entries, max(next_offset, offset), end)


def _entries(batch: Any) -> Iterator[LogRecord | LogEnd]:
    for record in batch:
        if batch.is_control_batch:
            yield LogEnd(record.offset, batch.producer_id, bool(record.commit))
        else:
            yield LogRecord(record.offset, batch.producer_id, batch.producer_epoch, record.key, record.value)
