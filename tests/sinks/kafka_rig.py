"""A Kafka sink with topics of its own on a shared broker: what the tests of this folder drive it with."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer

from semel.ids import Attempt, Branch
from semel.protocol.events import Committable
from semel.sinks.base import Context, Participant, StagedPart
from semel.sinks.kafka.markers import Marker
from semel.sinks.kafka.participant import KafkaParticipant
from semel.sinks.kafka.pool import release_all
from semel.sinks.kafka.sink import CONTROL_TOPIC, Kafka
from semel.sinks.kafka.wire.requests import LogRecord, Transaction
from semel.testing.harness import attempt, context
from tests.kafka_world import KafkaWorld

TIMEOUT_S = 5.0

_INIT_PRODUCER_ID, _VERSION, _AT_A_TIME = 22, 1, 200
#: Length, correlation, throttling; then the error, the producer id and the epoch.
_ANSWER = struct.Struct(">iiihqh")
_CONCURRENT_TRANSACTIONS = 51

RECORD = pa.schema([("key", pa.string()), ("value", pa.string())])


def records_of(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"key": [str(i) for i in ids], "value": [f"row {i}" for i in ids]}, schema=RECORD)


class Rig:
    """Tests share a broker, so each has a suffix for its topics and sinks.

    `producer` is that of all sinks, unless a test chooses another for one.
    """

    def __init__(self, servers: str, options: dict[str, str] | None = None, control_topic: str = CONTROL_TOPIC) -> None:
        self.servers = servers
        self.producer = "auto"
        self.suffix = uuid.uuid4().hex[:8]
        self.world = KafkaWorld(servers, options, control_topic)

    def end(self) -> None:
        release_all()
        self.world.close()

    def topic(self, name: str = "orders", partitions: int = 2, config: dict[str, str] | None = None) -> str:
        """Create a topic; its full name."""
        full = f"{name}_{self.suffix}"
        self.world.create_topics(full, partitions=partitions, config=config)
        return full

    def sink(self, topic: str = "", **settings: Any) -> Kafka:
        own = {"name": f"orders_{self.suffix}", "timeout_s": TIMEOUT_S, "producer": self.producer}
        chosen = {**own, **settings}
        return Kafka(self.servers, topic, **chosen)

    # One batch --------------------------------------------------------------------------------------------------------

    def marker(self, branch: str) -> Marker:
        """What a reader of the control topic learns of a branch."""
        sink = branch.split("-")[6]
        return self.world.marker_log(sink).markers[branch]

    def transaction(self, committable: Committable) -> Transaction:
        found = self.marker(committable.branches[0]).transaction
        assert found is not None
        return found

    def open_ids(self) -> list[str]:
        """The transactional ids of this test that have a transaction open."""
        return [name for name in self.world.open_transactions() if self.suffix in name]

    def initialise(self, transactional_id: str, times: int = 1) -> Transaction:
        """Give an id a new epoch, as each use of it does; the newest one.

        Over a plain socket, with requests sent ahead of answers: through a client each would take ten times as long.
        """
        name = transactional_id.encode()
        body = struct.pack(">hhihh", _INIT_PRODUCER_ID, _VERSION, 0, 0, len(name)) + name + struct.pack(">i", 60_000)
        request = struct.pack(">i", len(body)) + body
        host, port = self.servers.split(":")
        with closing(socket.create_connection((host, int(port)), timeout=30)) as connection:
            while times:
                ahead = min(times, _AT_A_TIME)
                connection.sendall(request * ahead)
                answers = [_ANSWER.unpack(_exactly(connection, _ANSWER.size)) for _ in range(ahead)]
                # While what was open under the id is being ended, the broker puts us off.
                done = [answer for answer in answers if answer[3] != _CONCURRENT_TRANSACTIONS]
                assert {error for _, _, _, error, _, _ in done} <= {0}
                times -= len(done)
        return Transaction(transactional_id, *done[-1][4:])

    def fill_control_topic(self, partition: int, records: int, size: int) -> None:
        """Records of somebody else, each under a key of its own."""
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": "20"})
        for number in range(records):
            key = f"{self.suffix}/{number}".encode()
            producer.produce(self.world.control_topic, key=key, value=bytes(size), partition=partition)
        assert producer.flush(20) == 0

    # What is in a topic -----------------------------------------------------------------------------------------------

    def raw(self, topic: str) -> dict[int, list[LogRecord]]:
        """Every record by partition, in its order, of open, committed and aborted transactions alike."""
        return {p: list(self._log(topic, p)) for p in range(self.world.wire.partitions(topic))}

    def _log(self, topic: str, partition: int) -> Iterator[LogRecord]:
        position, end = 0, self.world.wire.log_end(topic, partition)
        while position < end:
            found = self.world.wire.read(topic, partition, position)
            assert found.next_offset > position
            position = found.next_offset
            yield from (entry for entry in found.entries if isinstance(entry, LogRecord))

    def visible(self, topic: str) -> list[int]:
        """The keys that a read_committed reader sees, sorted."""
        return sorted(int(record.key) for record in self.world.committed(topic))


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found


@contextmanager
def started(sink: Kafka, who: Context | None = None) -> Iterator[KafkaParticipant]:
    """A participant as a start of the pipeline leaves it: its store asked, fenced, and closed in the end."""
    who = who or context()
    sink.check_store(who.pipeline)
    participant = sink.participant(who)
    assert isinstance(participant, KafkaParticipant)
    try:
        participant.fence()
        yield participant
    finally:
        participant.close()


def stage(sink: Kafka, which: Attempt, *tasks: pa.RecordBatch, retry: int = 0) -> list[StagedPart]:
    """One task per batch, as executors do it."""
    return [stage_one(sink, Branch(which, sink.name, task, retry), batch) for task, batch in enumerate(tasks)]


def stage_one(sink: Kafka, branch: Branch, batch: pa.RecordBatch) -> StagedPart:
    writer = sink.writer(branch)
    try:
        writer.write(batch)
        return writer.prepare()
    except BaseException:
        writer.abort()
        raise


def prepare(participant: Participant, sink: Kafka, which: Attempt, *tasks: pa.RecordBatch) -> tuple[Committable, ...]:
    return participant.prepare(which, stage(sink, which, *tasks))


def prepare_one(participant: Participant, sink: Kafka, which: Attempt, batch: pa.RecordBatch) -> Committable:
    (committable,) = prepare(participant, sink, which, batch)
    return committable


def write(sink: Kafka, *batches: pa.RecordBatch) -> None:
    """Every batch is a batch of the stream, through prepare and commit."""
    with started(sink) as participant:
        for number, batch in enumerate(batches):
            for committable in prepare(participant, sink, attempt(number), batch):
                participant.commit(committable)
