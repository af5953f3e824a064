"""Kafka: a true two-phase participant.

A task writes its rows and its marker in one transaction and leaves it open: prepared. The driver reads the markers
back, which proves that they are in the log and tells the producer id and epoch of each; it decides; then it ends every
transaction with EndTxn. If it dies in between, the next driver reads the same markers and ends what the decision names.

An answer that does not say what happened ("fenced", "unknown id", "invalid state") is never taken for success nor for
failure: the marker tells. A transaction that the broker aborted, after its timeout for example, is *gone*: the batch is
run again, and the transaction with the same rows takes its place, whichever task has written it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from semel.deadline import limited
from semel.errors import BatchFailed, ConfigError, Fenced, SinkUnavailable
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, PipelineId, parse_branch, to_sink_name
from semel.kafka.options import hide_secrets, java_to_librdkafka, with_tokens
from semel.kafka.tokens import OAUTH_CB, TokenProvider
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import (
    Capabilities,
    Context,
    Evidence,
    Participant,
    Remains,
    Sink,
    StagedPart,
    Writer,
    committable_for,
)
from semel.sinks.kafka.login import check_login
from semel.sinks.kafka.markers import (
    Fate,
    Fence,
    MarkerLog,
    fence_record,
    marker_record,
    partition_of,
)
from semel.sinks.kafka.pool import BY_ITSELF, LIBRDKAFKA, PRODUCERS, id_pattern
from semel.sinks.kafka.rows import check_columns
from semel.sinks.kafka.stand_in import can_log_in, no_kerberos_in_librdkafka
from semel.sinks.kafka.topics import (
    TRANSACTION_STATE,
    check_keeping,
    check_options,
    check_target,
    ensure_control_topic,
    write_record,
)
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.requests import Transaction
from semel.sinks.kafka.writer import KafkaWriter

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("semel")

CONTROL_TOPIC = "semel-control"
#: What a broker allows unless told otherwise (transaction.max.timeout.ms).
TRANSACTION_TIMEOUT_MS = 900_000
DELIVERY_TIMEOUT_MS = 120_000
#: How often the driver looks for transactions that nobody will end: they hold up readers.
SWEEP_EVERY_S = 10.0
#: How long a batch waits for that. What is not done by then is done with a later one.
SWEEP_S_MAX = 2.0
SETTLE_PAUSE_S = 0.05

#: Settings that the guarantee depends on: setting -> (the values that keep it, what to use instead).
FIXED = {
    "transactional.id": ((), "transactional_id_prefix of the sink"),
    "enable.idempotence": (("true",), "the default"),
    "acks": (("all", "-1"), "the default"),
    "request.required.acks": (("all", "-1"), "the default"),
}

#: Settings that the sink has an argument for.
ARGUMENTS = {"bootstrap.servers": "servers", "transaction.timeout.ms": "transaction_timeout_ms"}

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+)(:[0-9]{1,5})?")

#: Answers to EndTxn that do not say what became of the transaction (design page, section 2; FLINK-8086).
AMBIGUOUS = frozenset(
    {
        "INVALID_TXN_STATE",
        "INVALID_PRODUCER_EPOCH",
        "PRODUCER_FENCED",
        "INVALID_PRODUCER_ID_MAPPING",
        "TRANSACTIONAL_ID_NOT_FOUND",
        "UNKNOWN_PRODUCER_ID",
    }
)


@dataclass(frozen=True)
class Kafka(Sink):
    """`Kafka("127.0.0.1:9092", "orders")`: rows with the columns of Spark's own Kafka sink.

    Without a `topic` the rows have a column of that name. `options` are Kafka's producer settings, with or without
    Spark's prefix `kafka.`, for SASL and TLS as well. `transactional_id_prefix` must be this pipeline's alone; by
    default it is made of its id. `transaction_timeout_ms` should exceed batch time plus restart time; when it does not,
    nothing is lost, but the batch is run again. `timeout_s` is how long to wait for a broker's answer.
    `accept_unclean_elections` starts the pipeline although an election may lose what the guarantee rests on.
    `producer="librdkafka"` sends every row by librdkafka, in place of semel's own quicker producer. `token_provider` is
    a function that returns a token and the seconds that it lasts, for a login by OAUTHBEARER.
    """

    servers: str
    topic: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    transactional_id_prefix: str = ""
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    control_topic: str = CONTROL_TOPIC
    timeout_s: float = 15.0
    accept_unclean_elections: bool = False
    producer: str = BY_ITSELF
    token_provider: TokenProvider | None = field(default=None, repr=False, compare=False)

    kind: ClassVar[str] = "kafka"
    modules: ClassVar[tuple[str, ...]] = ("confluent_kafka", "crc32c", "kafka", "numpy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(_ADDRESS.fullmatch(server.strip()) for server in self.servers.split(",")):
            raise ConfigError(
                f"A Kafka sink needs addresses of brokers, not {self.servers!r}.",
                remedy='Write Kafka("host:9092", "topic"), or several addresses with commas between them.',
            )
        if self.topic == self.control_topic:
            raise ConfigError(f"The topic {self.topic} is semel's own: rows cannot go there.")
        if self.transaction_timeout_ms <= 0 or self.timeout_s <= 0:
            raise ConfigError("transaction_timeout_ms and timeout_s of a Kafka sink must be greater than zero.")
        if self.producer not in PRODUCERS:
            raise ConfigError(
                f"A Kafka sink knows no producer {self.producer!r}.", remedy=f"Use {' or '.join(map(repr, PRODUCERS))}."
            )
        object.__setattr__(self, "options", with_tokens(self.options, self.servers, self.token_provider))
        self._check_options(java_to_librdkafka(self.options))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name == OAUTH_CB:
                continue
            allowed, instead = FIXED.get(name, ((value.lower(),), ""))
            if value.lower() not in allowed:
                raise ConfigError(f"The Kafka option {name}={value} breaks the guarantee.", remedy=f"Use {instead}.")
            if name in ARGUMENTS and value != str(getattr(self, ARGUMENTS[name])):
                raise ConfigError(
                    f"The Kafka option {name}={value} does not count: the sink has an argument for it.",
                    remedy=f"Give it as {ARGUMENTS[name]}.",
                )

    def __repr__(self) -> str:
        return f"Kafka({self.servers!r}, {self.topic!r}, options={hide_secrets(self.options)!r}, name={self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(native_prepare=True, commits_by_task=True, expires=True)

    def default_name(self) -> str:
        return to_sink_name(f"kafka_{self.topic}" if self.topic else "kafka")

    def describe(self) -> str:
        return f"Kafka topic {self.topic} at {self.servers}" if self.topic else f"Kafka at {self.servers}"

    def prefix(self, pipeline: PipelineId) -> str:
        """What every transactional id of this sink begins with."""
        return f"{self.transactional_id_prefix or f'semel-{pipeline}'}-{self.name}"

    def producer_settings(self) -> dict[str, Any]:
        """Settings of librdkafka. Rows land in the partitions that a Java producer would choose."""
        return {
            "linger.ms": "5",
            # A fresh connection is wanted at once; after failures the pause doubles each time, up to ten seconds.
            "reconnect.backoff.ms": "1",
            "partitioner": "murmur2_random",
            # librdkafka wants a row to be delivered before its transaction runs out of time.
            "delivery.timeout.ms": str(min(DELIVERY_TIMEOUT_MS, self.transaction_timeout_ms)),
            # A topic that was created a moment ago may be unknown to a broker for so long.
            "topic.metadata.propagation.max.ms": "5000",
            # The writer itself waits when much is under way, so librdkafka's own limits are never met.
            "queue.buffering.max.messages": "10000000",
            "queue.buffering.max.kbytes": "2097151",
            "batch.num.messages": "100000",
            **java_to_librdkafka(self.options),
            "bootstrap.servers": self.servers,
            "acks": "all",
            "enable.idempotence": "true",
        }

    def check(self, schema: pa.Schema) -> None:
        check_columns(schema, topic=self.topic, target=self.describe())
        check_login(self.producer_settings())
        check_target(self.servers, self.options, self.topic, self.timeout_s)
        own = {"transaction.timeout.ms": str(self.transaction_timeout_ms), "transactional.id": "semel-check"}
        check_options({**self.producer_settings(), **own})
        if self.producer == LIBRDKAFKA and not can_log_in(self.producer_settings()):
            raise no_kerberos_in_librdkafka(f"All rows of {self.describe()}, because of producer={LIBRDKAFKA!r},")

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        return KafkaWriter(
            branch,
            self.producer_settings(),
            topic=self.topic,
            target=self.describe(),
            prefix=self.prefix(branch.attempt.pipeline) if durable else "",
            plan=plan,
            transaction_timeout_ms=self.transaction_timeout_ms,
            control_topic=self.control_topic,
            producer=self.producer,
        )

    def participant(self, context: Context) -> Participant:
        return _KafkaParticipant(self, context)

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:
        from semel.sinks.kafka.evidence import evidence

        return evidence(self, pipeline, batches)


class _KafkaParticipant(Participant):
    def __init__(self, sink: Kafka, context: Context) -> None:
        self.sink = sink
        self.context = context
        self.prefix = sink.prefix(context.pipeline)
        self.wire = Wire(sink.servers, sink.options, sink.timeout_s)
        self._ours = id_pattern(self.prefix).fullmatch
        # Commits of several tasks run in threads of their own; one at a time reads the markers.
        self._lock = threading.RLock()
        self._log: MarkerLog | None = None
        self._control_id = ""
        #: Branches that this driver prepared and has not asked to commit; and those of the batch that it committed.
        self._fresh: set[str] = set()
        self._ended: dict[str, Branch] = {}
        self._nameless: list[str] = []
        self._swept_at = time.monotonic()
        #: There is something to sweep; and the last try did not get to its end.
        self._sweep_is_owed = self._sweep_failed = False
        self._tasks_are_copied = _speculation_is_on()

    # Start ------------------------------------------------------------------------------------------------------------

    def fence(self) -> None:
        ensure_control_topic(self.sink.servers, self.sink.options, self.sink.control_topic, self.sink.timeout_s)
        log = self._caught_up()
        self._refuse_if_older(log)
        self._refuse_a_taken_prefix(log)
        self._refuse_what_the_broker_refuses()
        self._check_keeping()
        key, value = fence_record(self._fence())
        self._write(log.partition, key, value)
        try:
            # Somebody with the same prefix may have come between: then both give way.
            self._refuse_a_taken_prefix(self._caught_up())
        except ConfigError:
            self._write(log.partition, key, None)
            raise

    def _check_keeping(self) -> None:
        """The topics that rows name themselves are known only with the rows."""
        sink = self.sink
        topics = [topic for topic in (sink.topic, sink.control_topic, TRANSACTION_STATE) if topic]
        accept = sink.accept_unclean_elections
        check_keeping(sink.servers, sink.options, topics, sink.timeout_s, accept_unclean=accept)

    def _write(self, partition: int, key: bytes, value: bytes | None) -> None:
        """A record of the driver's own in the control topic."""
        sink = self.sink
        write_record(sink.producer_settings(), sink.control_topic, partition, key, value, limited(sink.timeout_s))

    def _fence(self) -> Fence:
        c = self.context
        return Fence(c.pipeline, self.sink.name, c.incarnation, c.name, self.sink.describe(), self.prefix)

    def _newest_incarnation(self, log: MarkerLog) -> int:
        known = log.fences.get((self.context.pipeline, self.sink.name))
        return self.context.incarnation if known is None else max(known.incarnation, self.context.incarnation)

    def _refuse_if_older(self, log: MarkerLog) -> None:
        newest = self._newest_incarnation(log)
        if newest > self.context.incarnation:
            raise Fenced(
                f"Incarnation {self.context.incarnation} is older than {newest}, which {self.sink.describe()} knows."
            )

    def _refuse_a_taken_prefix(self, log: MarkerLog) -> None:
        for fence in log.fences.values():
            if fence.prefix == self.prefix and fence.pipeline != self.context.pipeline:
                raise ConfigError(
                    f"The transactional id prefix {self.sink.transactional_id_prefix!r} belongs to pipeline "
                    f"{fence.name!r} (query {fence.pipeline}) already: two that share it abort each other's batches.",
                    remedy="Give each pipeline a transactional_id_prefix of its own, or none.",
                )

    def _refuse_what_the_broker_refuses(self) -> None:
        """May we use these ids, and is the timeout allowed: asked with an id that no task uses."""
        answer = self.wire.fence(f"{self.prefix}-probe", self.sink.transaction_timeout_ms)
        if answer == "INVALID_TRANSACTION_TIMEOUT":
            raise ConfigError(
                f"{self.sink.describe()}: transaction_timeout_ms={self.sink.transaction_timeout_ms} is above what "
                "the broker allows.",
                remedy="Lower it, or raise transaction.max.timeout.ms of the brokers.",
            )
        if answer != "NO_ERROR":
            raise ConfigError(
                f"{self.sink.describe()} does not let us use transactional ids beginning with {self.prefix}: {answer}.",
                remedy=f"Allow Write and Describe on transactional ids with the prefix {self.prefix}.",
            )

    def _caught_up(self) -> MarkerLog:
        """The marker log, read to its end. Without a control topic it is empty, and is looked for again."""
        with self._lock:
            if self._log is None:
                who = self.context.pipeline, self.sink.name
                log = MarkerLog(self.sink.control_topic, partition_of(self.sink.name), who)
                if not self.wire.partitions(self.sink.control_topic):
                    return log
                self._control_id = self.wire.topic_id(self.sink.control_topic)
                self._log = log
            self._log.catch_up(self.wire)
            return self._log

    # One batch --------------------------------------------------------------------------------------------------------

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        written = [p for p in parts if p.payload]
        if not (self.context.marked or written):
            # Below exactly-once the rows are visible already.
            return (committable_for(self.sink.name, attempt, parts, {}),)
        log = self._caught_up()
        if self.context.marked:
            self._refuse_if_older(log)
        named = {str(p.branch): self._prepared(log, p) for p in written}
        self._sweep_if_due(set(named), retried=any(p.payload["retried"] for p in written))
        self._ended = {name: branch for name, branch in self._ended.items() if branch.attempt.batch == attempt.batch}
        visible = max((b.attempt.batch for b in self._committed(log)), default=-1)
        self._fresh = set() if visible >= attempt.batch else set(named)
        empty = [p for p in parts if not p.payload]
        committables = [
            self._committable(attempt, [p], str(p.branch.task), self._payload(named[str(p.branch)])) for p in written
        ]
        committables += [self._committable(attempt, [p], str(p.branch.task), {}) for p in empty]
        if not written and self.context.marked:
            # No task marks a batch without rows, so the driver does, when it commits.
            committables.append(self._committable(attempt, [], "empty", {"mark": True}))
        return tuple(committables)

    def _committable(
        self, attempt: Attempt, parts: Sequence[StagedPart], key: str, payload: Mapping[str, Any]
    ) -> Committable:
        """One per task: each is ended for itself, so each may be gone for itself."""
        return committable_for(self.sink.name, attempt, parts, payload, key=f"{self.sink.name}/{key}")

    def _payload(self, transaction: Transaction) -> dict[str, Any]:
        """What it takes to end the transaction, and which control topic its marker is in."""
        ending = {"id": transaction.id, "producer_id": transaction.producer_id, "epoch": transaction.epoch}
        return {**ending, "control": self._control_id}

    def _prepared(self, log: MarkerLog, part: StagedPart) -> Transaction:
        marker = log.markers.get(str(part.branch))
        if marker is None or marker.transaction is None or marker.fate is not Fate.OPEN:
            raise BatchFailed(
                f"{self.sink.describe()}: the transaction of task {part.branch.task} in batch "
                f"{part.branch.attempt.batch} vanished before the decision; did it take longer than "
                f"transaction_timeout_ms={self.sink.transaction_timeout_ms}?"
            )
        return marker.transaction

    def commit(self, committable: Committable) -> Outcome:
        if committable.payload.get("mark"):
            return self._mark_empty(committable)
        if "id" not in committable.payload:
            return Outcome.ALREADY_COMMITTED if self.context.marked else Outcome.COMMITTED
        (name,) = committable.branches
        if name in self._ended:
            return Outcome.ALREADY_COMMITTED
        if name in self._fresh:
            # Prepared by this very driver and asked for the first time: nothing can be known yet.
            self._fresh.discard(name)
        elif (outcome := self._known_outcome(committable, name)) is not None:
            return outcome
        answer = self.wire.end(_transaction(committable.payload), commit=True)
        failpoint("kafka.committed")
        if answer == "NO_ERROR":
            self._ended[name] = _branch(committable)
            return Outcome.COMMITTED
        if answer not in AMBIGUOUS:
            raise SinkUnavailable(f"{self.sink.describe()} answered {answer} to the commit of {name}.")
        return self._settle(committable, name, answer)

    def _committed(self, log: MarkerLog) -> Iterator[Branch]:
        """What is visible. Of this driver's own at once: EndTxn is answered before the end is in the control topic."""
        marked = log.of(self.context.pipeline, self.sink.name)
        yield from (m.branch for m in marked if m.fate is Fate.COMMITTED)
        # A copy: commits run in threads of their own.
        yield from list(self._ended.values())

    def _is_a_replay(self, log: MarkerLog, committable: Committable) -> bool:
        """Whether a later batch is visible, or an earlier attempt at this one.

        Of a mend nothing else can be visible: it has the rows of a branch that is proven gone.
        """
        if committable.mends or not self.context.marked:
            return False
        batch, number = committable.attempt.batch, committable.attempt.attempt
        seen = (branch.attempt for branch in self._committed(log))
        return any(a.batch > batch or (a.batch == batch and a.attempt < number) for a in seen)

    def _known_outcome(self, committable: Committable, name: str) -> Outcome | None:
        """What the markers say; None when the transaction is still to be ended, or the broker is to be asked first."""
        with self._lock:
            log = self._caught_up()
            marker = log.markers.get(name)
            replay = self._is_a_replay(log, committable)
        if marker is not None and marker.fate is Fate.COMMITTED:
            return Outcome.ALREADY_COMMITTED
        if replay:
            self.wire.end(_transaction(committable.payload), commit=False)
            return Outcome.ALREADY_COMMITTED
        return Outcome.GONE if marker is not None and marker.fate is Fate.ABORTED else None

    def _without_a_marker(self, committable: Committable) -> Outcome:
        """Compaction drops the markers of aborted transactions, and no others that are still asked for."""
        same = committable.payload.get("control", self._control_id) == self._control_id
        # In a control topic that was created anew the marker may never have been: then nobody can say.
        return Outcome.GONE if same and self._control_id else Outcome.IN_DOUBT

    def _settle(self, committable: Committable, name: str, answer: str) -> Outcome:
        """The broker did not say what happened: wait until the marker does."""
        deadline = time.monotonic() + limited(self.sink.timeout_s)
        while time.monotonic() < deadline:
            outcome = self._known_outcome(committable, name)
            if outcome is not None:
                return outcome
            if self._log is None or name not in self._log.markers:
                return self._without_a_marker(committable)
            time.sleep(SETTLE_PAUSE_S)
        raise SinkUnavailable(
            f"{self.sink.describe()} answered {answer} to the commit of {name}, and its marker is still open.",
        )

    def _mark_empty(self, committable: Committable) -> Outcome:
        log = self._caught_up()
        batch = committable.attempt.batch
        newest = log.newest_committed(self.context.pipeline, self.sink.name)
        if newest is not None and newest >= batch:
            return Outcome.ALREADY_COMMITTED
        branch = Branch(committable.attempt, self.sink.name, 0, 0)
        self._write(log.partition, *marker_record(branch, 0, "", committable.plan))
        failpoint("kafka.committed")
        return Outcome.COMMITTED

    # Leftovers --------------------------------------------------------------------------------------------------------

    def recover(self) -> Remains:
        branches, self._nameless = self._leftovers()
        if not self.context.marked:
            return Remains(tuple(branches))
        log = self._caught_up()
        # All of them lie in this cluster, by whichever addresses they came to it.
        writers = {
            (fence.name, fence.pipeline)
            for fence in log.fences.values()
            if fence.sink == self.sink.name
            and self.sink.is_in(fence.target)
            and fence.pipeline != self.context.pipeline
            and log.newest_committed(fence.pipeline, fence.sink) is not None
        }
        newest = log.newest_committed(self.context.pipeline, self.sink.name)
        # EndTxn is answered before the end is in the control topic.
        ended = [branch.attempt.batch for branch in self._ended.values()]
        newest = max([*ended, *([] if newest is None else [newest])], default=None)
        return Remains.of(branches, newest, writers, self.context)

    def _leftovers(self) -> tuple[list[Branch], list[str]]:
        """Open transactions of ours: the branches of those that are prepared, the ids of those that are not."""
        return self._told_apart(self.wire.open_transactions(self._is_ours))

    def _is_ours(self, transactional_id: str) -> bool:
        return self._ours(transactional_id) is not None

    def _told_apart(self, listed: Sequence[tuple[str, int]]) -> tuple[list[Branch], list[str]]:
        """First the transactions, then the markers: what was prepared before they were listed has its marker in the log
        by then.
        """
        log = self._caught_up()
        prepared = {
            (m.transaction.id, m.transaction.producer_id): m.branch
            for m in log.of(self.context.pipeline, self.sink.name)
            if m.fate is Fate.OPEN and m.transaction is not None
        }
        named = [prepared[entry] for entry in listed if entry in prepared]
        return sorted(named), [name for name, producer in listed if (name, producer) not in prepared]

    def abort(self, branches: Iterable[Branch]) -> None:
        """Roll back these, and what `recover` last found open and never prepared: no decision can name that.

        A newer incarnation fences before its first task writes. So its fence is in the log by now, where one of its
        tasks was found, and all that has no name is left to it.
        """
        self._abort(list(branches))

    def _abort(self, wanted: Sequence[Branch], until: float = math.inf) -> bool:
        """Returns whether there was time for all of it. What was begun is not left in the middle: a request that comes
        late could end what the next batch has under the same id.
        """
        log = self._caught_up()
        nameless, self._nameless = self._nameless, []
        for branch in wanted:
            marker = log.markers.get(str(branch))
            if marker is not None and marker.transaction is not None and marker.fate is Fate.OPEN:
                if time.monotonic() > until:
                    return False
                self.wire.end(marker.transaction, commit=False)
        if self._newest_incarnation(log) > self.context.incarnation:
            return True
        for name in nameless:
            if time.monotonic() > until:
                return False
            # Its task may still be writing: a new epoch ends the transaction and shuts the task out.
            self.wire.fence(name, self.sink.transaction_timeout_ms)
        return True

    def _sweep_if_due(self, named: set[str], *, retried: bool) -> None:
        """End what tasks left behind that died or were copied. All tasks of this batch have ended by now.

        The batch itself does not need it. So what a broker that is away keeps from being done is done with a later one.
        """
        self._sweep_is_owed = self._sweep_is_owed or retried or self._tasks_are_copied
        is_wanted = self._sweep_is_owed and not self._sweep_failed
        if not is_wanted and time.monotonic() - self._swept_at < SWEEP_EVERY_S:
            return
        try:
            undone = self._sweep(named)
        except (SinkUnavailable, ConfigError) as error:
            undone = error.what
            # What was found is found anew: by then the tasks of another batch may use these ids.
            self._nameless = []
        self._swept_at = time.monotonic()
        self._sweep_is_owed = self._sweep_failed = bool(undone)
        if undone:
            _LOG.warning(
                "%s: what lost tasks have left open is not ended yet, and may hold back readers: %s "
                "Nothing of the batch depends on it; it is tried again in %.0f s.",
                self.sink.describe(),
                undone,
                SWEEP_EVERY_S,
            )

    def _sweep(self, named: set[str]) -> str:
        """End what is in sight and not of this batch. Returns what kept it from being complete."""
        until = time.monotonic() + SWEEP_S_MAX
        listed, silent = self.wire.open_transactions_in_sight(self._is_ours, SWEEP_S_MAX)
        branches, self._nameless = self._told_apart(listed)
        mine = self.context.incarnation
        lost = [b for b in branches if str(b) not in named and b.attempt.incarnation <= mine]
        if not self._abort(lost, until):
            return f"there was no more time than {SWEEP_S_MAX:.0f} s."
        return f"no answer from {silent}." if silent else ""

    def close(self) -> None:
        self.wire.close()


def _transaction(payload: Mapping[str, Any]) -> Transaction:
    return Transaction(payload["id"], payload["producer_id"], payload["epoch"])


def _branch(committable: Committable) -> Branch:
    branch = parse_branch(committable.branches[0])
    if branch is None:
        raise ValueError(f"not the name of a branch: {committable.branches[0]}")
    return branch


def _speculation_is_on() -> bool:
    """Whether Spark starts copies of slow tasks; of the one that loses, a transaction may be left over."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return False
    spark = SparkContext._active_spark_context
    return spark is not None and spark._conf.get("spark.speculation", "false") == "true"
