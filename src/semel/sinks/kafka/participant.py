"""The driver's side of the Kafka sink: which open transactions are ours, what markers prove, and how each is ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from semel.deadline import limited
from semel.errors import BatchFailed, ConfigError, SinkUnavailable
from semel.failpoints import failpoint
from semel.ids import Attempt, Branch, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.sinks.base import Context, Participant, Remains, Sight, StagedPart, committable_for
from semel.sinks.kafka.ids import id_pattern
from semel.sinks.kafka.markers import Fate, Fence, MarkerLog, fence_record, marker_record, partition_of
from semel.sinks.kafka.pool import release_pool
from semel.sinks.kafka.topics import write_record
from semel.sinks.kafka.wire.client import Wire
from semel.sinks.kafka.wire.requests import Transaction

if TYPE_CHECKING:
    from semel.sinks.kafka.sink import Kafka

_LOG = logging.getLogger("semel")

#: How often the driver looks for transactions that nobody will end: they hold up readers.
SWEEP_EVERY_S = 10.0
#: How long a batch waits for that. What is not done by then is done with a later one.
SWEEP_S_MAX = 2.0
SETTLE_PAUSE_S = 0.05
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


class KafkaParticipant(Participant):
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
        log = self._caught_up()
        self._refuse_if_older(log)
        self._refuse_a_taken_prefix(log)
        key, value = fence_record(self._fence())
        self._write(log.partition, key, value)
        try:
            # Somebody with the same prefix may have come between: then both give way.
            self._refuse_a_taken_prefix(self._caught_up())
        except ConfigError:
            self._write(log.partition, key, None)
            raise

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
        self.context.refuse_if_older(self._newest_incarnation(log), self.sink.describe())

    def _refuse_a_taken_prefix(self, log: MarkerLog) -> None:
        for fence in log.fences.values():
            if fence.prefix == self.prefix and fence.pipeline != self.context.pipeline:
                raise ConfigError(
                    f"The transactional id prefix {self.sink.transactional_id_prefix!r} belongs to pipeline "
                    f"{fence.name!r} (query {fence.pipeline}) already: two that share it abort each other's batches.",
                    remedy="Give each pipeline a transactional_id_prefix of its own, or none.",
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
        """What is visible. Our own commits count at once: EndTxn is answered before the control topic shows them."""
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
        newest = log.newest_committed(self.context.pipeline, self.sink.name)
        # Sinks of other names have their markers in other partitions. A first start reads them all.
        logs = [log] if newest is not None else [log, *self._other_logs()]
        writers = {writer for one in logs for writer in self._writers(one)}
        # EndTxn is answered before the end is in the control topic.
        ended = [branch.attempt.batch for branch in self._ended.values()]
        newest = max([*ended, *([] if newest is None else [newest])], default=None)
        return Remains.of(branches, newest, writers, self.context)

    def in_sight(self) -> Sight:
        """What the brokers show that answer soon. One that is away would hold up each batch after which we tidy."""
        listed, silent = self.wire.open_transactions_in_sight(self._is_ours, limited(SWEEP_S_MAX))
        branches, self._nameless = self._told_apart(listed)
        return Sight(tuple(branches), f"no answer from {silent}" if silent else "")

    def _writers(self, log: MarkerLog) -> Iterator[tuple[str, PipelineId]]:
        """Other pipelines with rows in this topic, by name, whatever they call the sink.

        Where the rows name their topics, nobody knows which: there the name of the sink tells. All of them lie in this
        cluster, by whichever addresses they came to it.
        """
        for fence in log.fences.values():
            is_here = self.sink.is_in(fence.target) and (self.sink.topic or fence.sink == self.sink.name)
            is_ours = fence.pipeline == self.context.pipeline
            if is_here and not is_ours and log.newest_committed(fence.pipeline, fence.sink) is not None:
                yield fence.name, fence.pipeline

    def _other_logs(self) -> Iterator[MarkerLog]:
        """The other partitions of the control topic, each read to its end."""
        who = self.context.pipeline, self.sink.name
        for partition in range(self.wire.partitions(self.sink.control_topic)):
            if partition != partition_of(self.sink.name):
                log = MarkerLog(self.sink.control_topic, partition, who)
                log.catch_up(self.wire)
                yield log

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
        """Roll back these, and what was last found open and never prepared, by `recover` or `in_sight`: no decision can
        name that.

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
            self.wire.raise_epoch(name, self.sink.transaction_timeout_ms)
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
        release_pool(self.prefix)
        self.wire.close()


def _transaction(payload: Mapping[str, Any]) -> Transaction:
    return Transaction(payload["id"], payload["producer_id"], payload["epoch"])


def _branch(committable: Committable) -> Branch:
    branch = parse_branch(committable.branches[0])
    if branch is None:
        raise ValueError(f"not the name of a branch: {committable.branches[0]}")
    return branch


def _speculation_is_on() -> bool:
    """Whether Spark starts copies of slow tasks. The copy that loses may leave a transaction behind."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return False
    spark = SparkContext._active_spark_context
    return spark is not None and spark._conf.get("spark.speculation", "false") == "true"
