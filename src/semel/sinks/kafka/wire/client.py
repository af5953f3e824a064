"""Connections to the brokers: whom to ask, for how long, and when to ask again.

A task leaves its transaction open; the driver ends it with EndTxn, from another process and over another connection.
The broker asks for nothing but the transactional id, the producer id and the epoch. kafka_requests makes the
requests and reads the answers, and kafka_login says how to log in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from semel.deadline import limited
from semel.errors import ConfigError, SinkUnavailable
from semel.kafka.answers import error_of, name_of, raise_for
from semel.kafka.login import check_login
from semel.kafka.options import connection_options
from semel.sinks.kafka.reach import ACL_REMEDY, LOGIN_REMEDY, Reach
from semel.sinks.kafka.wire.requests import (
    Answer,
    Batches,
    Slice,
    Transaction,
    add_partitions_request,
    added,
    describe_request,
    end_request,
    fetch_request,
    fetched,
    list_offsets_request,
    log_end,
    open_transactions_request,
    produce_request,
    produced,
    start_producer_request,
)

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient
from semel.kafka.connection import client_for, request_timeout_ms, require_kafka_python, to_kafka_python

RETRY_PAUSE_S = 0.02
RETRY_PAUSE_S_MAX = 0.5
#: A broker that has not listed its transactions by then, or within a third of all time, is asked again if it is still
#: in the cluster.
LISTING_S = 3.0


T = TypeVar("T")


class Wire:
    """Connections to the brokers. Every call answers or raises within `timeout_s`."""

    def __init__(self, servers: str, options: Mapping[str, Any], timeout_s: float) -> None:
        self.servers = servers
        self.timeout_s = timeout_s
        self._request_timeout_ms = request_timeout_ms(options)
        self._client = _connect(servers, options, timeout_s)
        self._manager: Any = self._client._manager
        self._known_leaders: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        self._client.close()

    # Transactions -----------------------------------------------------------------------------------------------------

    def end(self, transaction: Transaction, *, commit: bool) -> str:
        """Ask the coordinator to commit or abort; its answer by name, "NO_ERROR" for done or done before."""

        async def ask() -> str:
            response = await self._to_coordinator(transaction.id, end_request(transaction, commit=commit))
            return name_of(response.error_code)

        return self._until_answered(f"EndTxn of {transaction.id}", ask)

    def raise_epoch(self, transactional_id: str, transaction_timeout_ms: int) -> str:
        """Give the id a new epoch: what is open under it is aborted, and whoever had it can write no more."""
        return self.start_producer(transactional_id, transaction_timeout_ms)[0]

    def start_producer(self, transactional_id: str | None, transaction_timeout_ms: int) -> tuple[str, int, int]:
        """The answer by name, a producer id and an epoch under which nobody has written yet."""
        from kafka.errors import TransactionalIdAuthorizationFailedError

        async def ask() -> tuple[str, int, int]:
            request = start_producer_request(transactional_id, transaction_timeout_ms)
            try:
                response = await self._to_coordinator(transactional_id, request)
            except TransactionalIdAuthorizationFailedError as error:
                return str(error.message), -1, -1
            return name_of(response.error_code), response.producer_id, response.producer_epoch

        return self._until_answered(f"InitProducerId of {transactional_id}", ask)

    def add_partitions(self, transaction: Transaction, places: Mapping[str, Sequence[int]]) -> tuple[str, str]:
        """Tell the coordinator where the transaction will have rows, by topic.

        Returns the worst of its answers by name, and the topic that it is about.
        """

        async def ask() -> tuple[str, str]:
            return added(await self._to_coordinator(transaction.id, add_partitions_request(transaction, places)))

        return self._until_answered(f"AddPartitionsToTxn of {transaction.id}", ask)

    def open_transactions(self, ours: Callable[[str], bool]) -> list[tuple[str, int]]:
        """The transactional ids and producer ids of what is open, of those ids that are ours. Every broker answers."""

        async def ask() -> list[tuple[str, int]]:
            listed, silent = await self._list_transactions(max(LISTING_S, self.timeout_s / 3))
            for error in silent.values():
                # Once the cluster has given it up nobody needs to ask it: others have taken over what it had.
                await self._manager.cluster.refresh_metadata()
                raise error
            return listed

        return [entry for entry in self._until_answered("ListTransactions", ask) if ours(entry[0])]

    def open_transactions_in_sight(
        self, ours: Callable[[str], bool], within_s: float
    ) -> tuple[list[tuple[str, int]], str]:
        """The same of the brokers that answer in time; and why the others do not."""
        listed, silent = self._manager.run(self._list_transactions, within_s)
        why = ", ".join(f"broker {node}: {error}" for node, error in sorted(silent.items()))
        return [entry for entry in listed if ours(entry[0])], why

    async def _list_transactions(self, within_s: float) -> tuple[list[tuple[str, int]], dict[int, Exception]]:
        """What the brokers have open, and why some of them did not say. All are asked at once."""
        from kafka.errors import KafkaError

        async def ask(node: int) -> list[tuple[str, int]]:
            response = await self._manager.send(open_transactions_request(), node_id=node)
            raise_for(response.error_code)
            return [(t.transactional_id, t.producer_id) for t in response.transaction_states]

        until = time.monotonic() + within_s
        nodes = [broker.node_id for broker in self._manager.cluster.brokers()]
        under_way = {node: self._manager.call_soon(ask, node) for node in nodes}
        listed: list[tuple[str, int]] = []
        silent: dict[int, Exception] = {}
        for node, answer in under_way.items():
            try:
                listed += await self._manager.wait_for(answer, max(1, int((until - time.monotonic()) * 1000)))
            except KafkaError as error:
                silent[node] = error
        return sorted(listed), silent

    async def _to_coordinator(self, transactional_id: str | None, request: Any) -> Any:
        """Send to the coordinator of the id. After any trouble the next look-up asks anew: it may have moved."""
        from kafka.protocol.metadata import CoordinatorType

        kind = CoordinatorType.TRANSACTION
        try:
            node = None
            if transactional_id is not None:  # without one, any broker will do
                node = await self._client._find_coordinator_id(transactional_id, key_type=kind)
            response = await self._manager.send(request, node_id=node)
            if error_of(getattr(response, "error_code", 0)).retriable:
                raise_for(response.error_code)
        except Exception:
            self._manager.cluster._coordinators.pop((kind, transactional_id), None)
            raise
        return response

    # Rows -------------------------------------------------------------------------------------------------------------

    def produce(
        self, node: int, transactional_id: str | None, batches: Batches, then: Callable[[Answer], None]
    ) -> None:
        """Send record batches, by topic and partition, to the broker that leads them. Does not wait for the answer."""
        request = produce_request(transactional_id, batches, self._request_timeout_ms)
        self._manager.call_soon(self._produce, node, request, then)

    async def _produce(self, node: int, request: Any, then: Callable[[Answer], None]) -> None:
        from kafka.errors import KafkaError

        try:
            response = await self._manager.send(request, node_id=node)
        except KafkaError as error:
            then(Answer({}, "" if _may_pass(error) else str(getattr(error, "message", error))))
        except BaseException as error:
            then(Answer({}, f"{type(error).__name__}: {error}"))
            raise
        else:
            then(produced(response))

    def leaders(self, topic: str) -> tuple[str, dict[int, int]]:
        """The answer by name, and partition -> the broker that leads it, -1 for none."""

        async def ask() -> tuple[str, dict[int, int]]:
            found = await self._described(topic)
            # A broker that was added lately is to be known before rows are sent to it.
            if any(self._manager.cluster.broker_metadata(p.leader_id) is None for p in found.partitions):
                await self._manager.cluster.refresh_metadata()
            return name_of(found.error_code), {p.partition_index: p.leader_id for p in found.partitions}

        return self._until_answered(f"Metadata of {topic}", ask)

    # Logs -------------------------------------------------------------------------------------------------------------

    def partitions(self, topic: str) -> int:
        """How many partitions the topic has; none when it does not exist."""
        return len(self._until_answered(f"Metadata of {topic}", lambda: self._leaders(topic)))

    def topic_id(self, topic: str) -> str:
        """Which topic of that name it is: one that was deleted and created again is another (KIP-516)."""

        async def ask() -> str:
            found = await self._described(topic)
            raise_for(found.error_code)
            return str(found.topic_id)

        return self._until_answered(f"Metadata of {topic}", ask)

    async def _leaders(self, topic: str) -> dict[int, int]:
        """partition -> the broker that leads it."""
        found = await self._described(topic)
        if name_of(found.error_code) == "UNKNOWN_TOPIC_OR_PARTITION":
            return {}
        raise_for(found.error_code)
        return {p.partition_index: p.leader_id for p in found.partitions}

    async def _described(self, topic: str) -> Any:
        (found,) = (await self._manager.send(describe_request(topic))).topics
        return found

    def log_end(self, topic: str, partition: int) -> int:
        """Where the log ends: everything that was acknowledged by now lies before that.

        The high watermark that comes with a fetch does not say so. A new leader may answer with one from before its
        election; asked for the end, it answers only once it knows better (KIP-207).
        """
        request = list_offsets_request(topic, partition)
        return self._of_leader(f"ListOffsets of {topic}", topic, partition, request, then=log_end)

    def read(self, topic: str, partition: int, offset: int) -> Slice:
        """Everything from an offset on, uncommitted records and the ends of transactions included."""
        request = fetch_request(topic, partition, offset)
        return self._of_leader(f"Fetch of {topic}", topic, partition, request, then=lambda said: fetched(said, offset))

    def tail(self, topic: str, partition: int, offset: int) -> tuple[int, Slice]:
        """`log_end` and `read` at once: a broker answers the requests of one connection in turn."""
        both = list_offsets_request(topic, partition), fetch_request(topic, partition, offset)
        return self._of_leader(
            f"Fetch of {topic}", topic, partition, *both, then=lambda end, said: (log_end(end), fetched(said, offset))
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

        deadline, pause_s = time.monotonic() + limited(self.timeout_s), RETRY_PAUSE_S
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


def _connect(servers: str, options: Mapping[str, Any], timeout_s: float) -> KafkaAdminClient:
    from_librdkafka = connection_options(options)
    require_kafka_python()
    settings = to_kafka_python(from_librdkafka)
    check_login(from_librdkafka)
    # kafka-python tells nobody why it cannot connect.
    Reach(servers, options).metadata("", timeout_s)
    from kafka.errors import KafkaError

    try:
        made: KafkaAdminClient = client_for(servers, settings, request_timeout_ms(options), timeout_s)
        return made
    except KafkaError as error:
        _raise_unless_transient("the connection", servers, error)
        raise SinkUnavailable(f"Kafka at {servers} cannot be reached: {error}.") from None


def _raise_unless_transient(what: str, servers: str, error: Any) -> None:
    """A refusal is final; so is whatever neither the network nor a moving coordinator can have caused."""
    from kafka.errors import AuthorizationError, SaslAuthenticationFailedError

    if isinstance(error, SaslAuthenticationFailedError):
        raise ConfigError(f"Kafka at {servers} refused the login: {error}.", remedy=LOGIN_REMEDY) from None
    if isinstance(error, AuthorizationError):
        raise ConfigError(f"Kafka at {servers} does not allow {what}: {error.message}.", remedy=ACL_REMEDY) from None
    if not _may_pass(error):
        raise SinkUnavailable(f"Kafka at {servers} refused {what}: {error}.") from error


def _may_pass(error: Any) -> bool:
    """Whether asking again may help. A broker that is not known yet may have been added lately."""
    from kafka.errors import UnknownBrokerIdError

    return bool(error.retriable) or isinstance(error, UnknownBrokerIdError)
