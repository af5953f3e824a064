"""The function that `foreachBatch` calls: one object for each query, which hands every batch to a coordinator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from semel.decisions.files import FileStore
from semel.decisions.log import Identity
from semel.errors import BatchFailed, Fenced, QueryStopped, SemelError
from semel.ids import Attempt, PipelineId
from semel.runtime.arrow import ArrowLimit
from semel.runtime.batch import Coordinator
from semel.runtime.checkpoint import Checkpoint
from semel.runtime.checks import Guarantee, check_executors
from semel.runtime.commits import Waiting
from semel.runtime.durability import NOT_PROMISED, CheckpointSync
from semel.runtime.hadoop_durability import hadoop_durability_warning
from semel.runtime.handover import wait_for_older
from semel.runtime.hands import AS_PLANNED, Allowed, BatchSize, Hands, Pace, Written, choose_hands, hands_again
from semel.runtime.interpreter import require_python
from semel.runtime.offsets import is_same_offset, offsets_in, offsets_of, rows_between
from semel.runtime.options import PARTITIONS, Switches
from semel.runtime.phases import Limits, Only, Parts, Phases, Report
from semel.runtime.query import RunningQuery, plan_must_run, query_of
from semel.runtime.staging import Staging, check_rows, rdd_of
from semel.runtime.startup import start_exactly_once, start_weaker
from semel.sinks.base import Sink, StagedPart
from semel.sources.kafka_progress import KafkaProgress
from semel.sources.plan import known_by, planned_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOG = logging.getLogger("semel")
Listener = Callable[[Report], None]


class BatchFunction:
    """What `foreachBatch` calls. It starts a coordinator for each run of the query and hands it every batch."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        guarantee: Guarantee,
        *,
        name: str = "",
        limits: Limits = Limits(),
        listener: Listener | None = None,
        waiting: Callable[[Waiting], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
        switches: Switches = Switches(),
    ) -> None:
        self.switches = switches
        self._sync: CheckpointSync | None = None
        #: What the running query is called, where the pipeline itself was given no name.
        self._query_name = ""
        self.sinks = tuple(sink.among(sinks) for sink in sinks)
        self.guarantee: Guarantee = guarantee
        self.name = name
        self.limits = limits
        self.listener = listener
        #: Hears of a decided batch that waits for a sink.
        self.waiting = waiting
        #: Whether a start that waits should give up. Of a query that runs, Spark knows it.
        self.is_stopped = is_stopped
        #: What the guarantee does not cover here, in words.
        self.not_promised = ""
        self.draining = False
        #: Whether the sinks were asked about the rows before the query was started.
        self.rows_checked = False
        #: What a pipeline is called that has no name: by what it reads.
        self.known_by = ""
        #: Why the query was stopped from inside: another incarnation has taken the pipeline over.
        self.fenced: Fenced | None = None
        #: Held while a batch is worked on: nobody else closes what it uses.
        self._busy = threading.Lock()
        self._is_over = False
        self._claimed = 0
        self._run_id = ""
        self._checkpoint: Checkpoint | None = None
        self._coordinator: Phases | None = None
        #: As above, but still known when it is closed.
        self._latest: Phases | None = None
        self._ending = threading.Lock()
        self._progress: KafkaProgress | None = None
        self._limit = ArrowLimit()
        self._pace = Pace()
        self._query: RunningQuery | None = None
        self._rows_in: int | None = None

    def begin(self, spark: SparkSession, location: str, query_id: PipelineId, under_way: int | None = None) -> None:
        """Claim and recover: before the query starts, or with `semel.sink` at its first batch, which is under way."""
        require_python(spark, self.sinks, durable=self.guarantee == "exactly-once")
        checkpoint = Checkpoint(spark, location)
        identity = Identity(query_id, self.name or self._query_name, self.known_by)
        self._limit, self._pace = ArrowLimit(), Pace()
        self._let_go()
        self._is_over = False
        # The same function may have served a query that was fenced. This start has a claim of its own.
        self.fenced, self._claimed = None, 0
        self._checkpoint = checkpoint
        if self.guarantee == "exactly-once":
            self._keep_through_power_loss(spark, checkpoint)
            self._coordinator = start_exactly_once(
                checkpoint.log,
                checkpoint.plans,
                self.sinks,
                identity,
                limits=self.limits,
                under_way=under_way,
                tell=self.waiting,
                is_stopped=self.is_stopped,
                wait=wait_for_older,
            )
        else:
            log = checkpoint.log if self.guarantee == "at-most-once" else None
            self._coordinator = start_weaker(
                log,
                self.sinks,
                identity,
                plans=checkpoint.plans,
                wait=wait_for_older,
                under_way=under_way,
                decisions=checkpoint.log,
            )
            self._coordinator.tell = self.waiting
        self._latest = self._coordinator
        self._claimed = self._coordinator.context.incarnation

    def _keep_through_power_loss(self, spark: SparkSession, checkpoint: Checkpoint) -> None:
        """What a decision presupposes is on disk before it, or we say what is not promised."""
        self.not_promised = ""
        if not self.switches.power_loss_safe:
            self.not_promised = NOT_PROMISED
        elif isinstance(checkpoint.store, FileStore):
            self._sync = CheckpointSync(checkpoint.store.root)
            checkpoint.keep_query_id(self._sync)
            checkpoint.plans.make_durable = self._sync.settle
        else:
            self.not_promised = hadoop_durability_warning(spark, checkpoint.location)
        if self.not_promised:
            _LOG.warning("%s", self.not_promised)

    def end(self) -> None:
        """Let go of everything and say that we have left: now, or when the batch that is being worked on has ended.

        What a batch uses is not closed under its hands. A SQLite connection that is closed in the middle of a statement
        takes the whole process along.
        """
        self._is_over = True
        if self._busy.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._busy.release()
        else:
            self.abandon()

    def _let_go(self) -> None:
        """Of the sinks, and of the broker that is told how far we came."""
        # Whoever stops the query and the batch that fails meanwhile may both come here.
        with self._ending:
            progress, self._progress = self._progress, None
            coordinator, self._coordinator = self._coordinator, None
            sync, self._sync = self._sync, None
        if progress is not None:
            progress.close()
        if sync is not None:
            sync.close()
        if coordinator is not None:
            coordinator.close()
            if coordinator.log is not None:
                # Nobody depends on it: without it the next driver waits a little longer.
                with suppress(Exception):
                    coordinator.log.leave(coordinator.context.incarnation)

    def find_newer(self, batch: int | None = None) -> Fenced | None:
        """Whether a newer incarnation has claimed the pipeline. Also asked between batches, and after the last.

        `batch` is one that has just been rolled back for it.
        """
        # A log that does not answer now is asked again.
        with suppress(Exception):
            self.look_for_newer(batch)
        return self.fenced

    def look_for_newer(self, batch: int | None = None) -> Fenced | None:
        """The same for whoever must know: raises when the log does not answer."""
        if (self.fenced is None or batch is not None) and self._checkpoint is not None and self._claimed:
            log = self._checkpoint.log
            newest = log.newest_claim() if log.superseded(self._claimed) else 0
            if newest > self._claimed:
                self.fenced = Fenced(
                    f"Incarnation {self._claimed} stopped{'' if batch is None else f' at batch {batch}'}: "
                    f"incarnation {newest} claimed this pipeline ({log.holder(newest)}).",
                    data_now="" if batch is not None else "every batch is whole or unseen; the newer one goes on",
                )
        return self.fenced

    def drain(self, grace_s: float) -> bool:
        """Let the batch that is being worked on come to its end and begin no other. False when it took too long."""
        self.draining = True
        whole = self._busy.acquire(timeout=grace_s)
        if whole:
            self._busy.release()
        return whole

    def abandon(self) -> None:
        """Wait for no commit any more: what is decided stays decided, and the next start completes it."""
        if self._latest is not None:
            self._latest.abandon()

    def undone(self) -> SemelError | None:
        """What must be said of a batch that is decided and not visible everywhere, if this process ends now."""
        return self._latest.undone() if self._latest is not None else None

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        try:
            self._whole(df, batch_id)
        finally:
            if self._is_over:
                self.end()

    def _whole(self, df: DataFrame, batch_id: int) -> None:
        with self._busy:
            if self.draining:
                raise self.fenced or QueryStopped(f"Batch {batch_id} was not begun: the query is being stopped.")
            try:
                report = self._work(df, batch_id)
            except BaseException as error:
                # The query ends with this error; an open transaction must not outlive it.
                self._let_go()
                if _comes_from_stopping(error, df):
                    raise Interrupted from None
                # A store knows the number of a newer incarnation, the log knows who it is.
                told = self.find_newer(batch_id) if isinstance(error, Fenced) else None
                if told is not None:
                    raise told from error
                raise
        if self.listener is not None:
            self.listener(report)
        newer = self.find_newer()
        if newer is not None:
            # The batch stays committed. Spark must not write that it is over: the newer driver has the batch in hand,
            # or has read the checkpoint, and of two Sparks that write one file the second fails.
            self.end()
            raise newer

    def _work(self, df: DataFrame, batch_id: int) -> Report:
        query = self._query = query_of(df, self._query)
        coordinator = self._coordinator_for(query, df, batch_id)
        if isinstance(coordinator, Coordinator):
            coordinator.in_hand = partial(self._in_hand, query, batch_id)
            coordinator.begins_behind = partial(self._begins_behind, query, batch_id)
        coordinator.is_stopped = lambda: not query.is_active
        progress = self._progress_of(query)
        progress.began(batch_id)
        report = self._run(coordinator, query, df, batch_id)
        if not report.staged and plan_must_run(query):
            df.write.format("noop").mode("append").save()
            coordinator.make_state_durable(batch_id)
        coordinator.tidy(batch_id)
        progress.ended(batch_id)
        return replace(report, lag=progress.lag(batch_id), warning=progress.warning)

    def _in_hand(self, query: RunningQuery, batch_id: int) -> Mapping[str, str]:
        """Nothing while `offsets/N` says what Spark has in memory; otherwise what no decision was taken for."""
        return self._unlike(batch_id, query.offsets_in_hand())

    def _begins_behind(self, query: RunningQuery, batch_id: int) -> Mapping[str, str]:
        """The same of the batch before, behind which Spark begins the first one that it hands over."""
        return self._unlike(batch_id - 1, query.offsets_behind())

    def _unlike(self, batch_id: int, in_hand: list[str]) -> Mapping[str, str]:
        planned = offsets_in(self._offsets_of(batch_id))
        # A form that we do not know has another number of lines, and says nothing.
        if len(planned) != len(in_hand) or all(map(is_same_offset, planned, in_hand)):
            return {}
        return {offsets_of(batch_id): f"in memory: {in_hand}"}

    def _run(self, coordinator: Phases, query: RunningQuery, df: DataFrame, batch_id: int) -> Report:
        used: list[Hands] = []

        def stage(attempt: Attempt, only: Only = None, plan: str = "", again: Written | None = None) -> Parts:
            sinks = [sink for sink in self.sinks if only is None or sink.name in only]
            durable, tuned = coordinator.context.marked, self.switches.tuned_workers
            hands = hands_again(again) if again else self._hands_for(query, df, batch_id)
            staged = Staging(df, sinks, attempt, durable, tuned, plan).stage(hands, self._limit)
            used.append(staged.hands)
            self._pace.saw(self._rows_in, max(map(_rows_of, staged.parts.values()), default=0), staged.row_bytes)
            return staged.parts

        report = coordinator.run(batch_id, stage)
        return replace(report, hands=str(used[-1])) if used else report

    def _hands_for(self, query: RunningQuery, df: DataFrame, batch_id: int) -> Hands:
        """Who writes the batch, by what is known of it."""
        made_of = rdd_of(df)
        if made_of is None or self.switches.tasks == PARTITIONS:
            # Of a frame that is the user's own making nobody knows what is behind it.
            return AS_PLANNED
        self._rows_in, shuffled = self._rows_of_input(query, batch_id), query.is_shuffled(made_of)
        rows = self._pace.expects(self._rows_in, is_shuffled=shuffled)
        batch = BatchSize(made_of.getNumPartitions(), shuffled, rows, self._pace.row_bytes, self._pace.is_first)
        by_driver = self.switches.driver_rows if all(s.capabilities.driver_writes for s in self.sinks) else 0
        return choose_hands(batch, Allowed(query.cores, self.switches.tasks_max, by_driver))

    def _rows_of_input(self, query: RunningQuery, batch_id: int) -> int | None:
        """About how many rows go into a batch; None where nothing says it.

        The offsets of Kafka do, at the most: some records are no rows, but marks of transactions. Of files Spark knows
        the size.
        """
        since, upto = (offsets_in(self._offsets_of(n)) for n in (batch_id - 1, batch_id))
        rows = rows_between(since, upto)
        return query.rows_of_files() if rows is None else rows

    def _offsets_of(self, batch: int) -> bytes:
        return (self._checkpoint and self._checkpoint.offsets(batch)) or b""

    def _coordinator_for(self, query: RunningQuery, df: DataFrame, batch_id: int) -> Phases:
        """The coordinator of this run; a restarted query is a new run and claims anew."""
        if self._coordinator is None or self._run_id not in ("", query.run_id):
            query.refuse_what_breaks_the_guarantee(self.guarantee)
            check_executors(self.sinks, df.sparkSession)
            if not self.rows_checked:
                check_rows(df, self.sinks)
            self.known_by, self._query_name = known_by(planned_sources(query.analyzed)), query.name
            self.is_stopped = lambda: not query.is_active
            self.begin(df.sparkSession, query.checkpoint, query.id, under_way=batch_id)
        self._run_id = query.run_id
        if self._coordinator is None:
            raise RuntimeError("begin() left no coordinator")
        return self._coordinator

    def _progress_of(self, query: RunningQuery) -> KafkaProgress:
        if self._checkpoint is None:
            raise RuntimeError("begin() left no checkpoint")
        if self._progress is None:
            self._progress = KafkaProgress(planned_sources(query.analyzed), self._checkpoint.offsets)
        return self._progress


def _rows_of(parts: Sequence[StagedPart]) -> int:
    return sum(part.rows for part in parts)


class Interrupted(Exception):
    """Ends a query that `query.stop()` met within a batch, which was rolled back.

    Spark looks for these words in the text of an error to know that it is none. In the text of the error that tasks
    ended with it does not find them, or that is so long that the search overflows the stack.
    """

    def __init__(self) -> None:
        super().__init__("An error occurred while calling a batch that was stopped.\n: java.lang.InterruptedException")


Interrupted.__module__, Interrupted.__qualname__ = "py4j.protocol", "Py4JJavaError"


def _comes_from_stopping(error: BaseException, df: DataFrame) -> bool:
    """Whether a batch failed because its query is being stopped. What concerns a decided batch is told anyway."""
    if isinstance(error, SemelError) and not isinstance(error, BatchFailed):
        return False
    try:
        return not RunningQuery(df).is_active
    except Exception:  # noqa: BLE001 - then it has another cause, which is being raised
        return False
