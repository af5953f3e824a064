"""The glue to Spark: the function that `foreachBatch` calls, and what it needs to know of the running query."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from semel import failpoints
from semel.decisions.base import RecordStore, StoreUnanswered
from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog, Identity
from semel.decisions.stores import open_store
from semel.errors import (
    BatchFailed,
    CheckpointUnusable,
    ConfigError,
    Fenced,
    QueryStopped,
    Refused,
    SchemaMismatch,
    SemelError,
)
from semel.ids import Attempt, PipelineId, pipeline_id
from semel.runtime.arrow import ArrowLimit
from semel.runtime.batch import Coordinator, Limits, Only, Report
from semel.runtime.checks import Guarantee, check_checkpoint, check_executors, check_options, check_sources
from semel.runtime.commits import Waiting
from semel.runtime.durability import NOT_PROMISED, CheckpointSync
from semel.runtime.fingerprint import IN_ORDER, with_hashes
from semel.runtime.hadoop_durability import hadoop_durability_warning
from semel.runtime.handover import wait_for_older
from semel.runtime.interpreter import error_of_worker, require_python
from semel.runtime.offsets import NO_OFFSET, is_same_offset, offsets_in, offsets_of
from semel.runtime.plans import SparkPlans
from semel.runtime.startup import start_exactly_once, start_weaker
from semel.runtime.task import PARTS, ROW_BYTES, VERSIONS, TaskWriter, decode_parts, error_of_task
from semel.runtime.versions import own_versions, require_same, sealed
from semel.sinks.base import NUMBER_OF_TASKS, Sink, StagedPart
from semel.sources.kafka_progress import KafkaProgress
from semel.sources.plan import known_by, planned_sources, scala_dict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG_FOLDER = "semel"
#: As Spark compares it, which takes any case.
CHECKPOINT_OPTION = "checkpointlocation"
CHECKPOINT_DEFAULT = "spark.sql.streaming.checkpointLocation"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_LOG = logging.getLogger("semel")
Listener = Callable[[Report], None]


class Checkpoint:
    """What Spark keeps in a checkpoint folder, as far as semel reads it."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        self.store: RecordStore = open_store(spark, location)
        self.log = DecisionLog(open_store(spark, f"{location.rstrip('/')}/{LOG_FOLDER}"))
        self.plans = SparkPlans(self.store)

    def query_id(self) -> PipelineId | None:
        """Spark's id of the query, or None before its first start."""
        content = self.store.read("metadata")
        if content is None:
            return None
        try:
            return pipeline_id(json.loads(content)["id"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointUnusable(
                f"The file metadata in {self.location} does not hold a Spark query id.",
                remedy="Restore the checkpoint folder from a copy, or name a fresh checkpointLocation.",
            ) from None

    def ensure_query_id(self) -> PipelineId:
        """Spark's id of the query. A fresh checkpoint gets one where Spark looks for it, in Spark's own form.

        So the id is known before the first start, and everything can be claimed and recovered before Spark begins.
        """
        known = self.query_id()
        if known is None:
            # A checkpoint whose log is there has lost the file, in a power cut for one: it is the same query.
            found = self.log.identity()
            query_id = found.pipeline if found is not None else str(uuid.uuid4())
            with self._writing():
                self.store.create("metadata", json.dumps({"id": query_id}).encode())
            known = self.query_id()  # somebody else's, had they been quicker
        if known is None:
            raise CheckpointUnusable(f"The file metadata in {self.location} was written and is not there.")
        return known

    def keep_query_id(self, sync: CheckpointSync) -> None:
        """Spark gives itself another id when it has lost this one, and our log would be that of another query."""
        with self._writing():
            sync.keep("metadata")

    def require_writable(self) -> None:
        """Raise now rather than in the middle of the first batch."""
        probe = f"probe-{uuid.uuid4().hex}"
        with self._writing():
            self.log.store.create(probe, b"")
            self.log.store.delete(probe)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StoreUnanswered) as error:
            raise CheckpointUnusable(f"The checkpoint folder {self.location} cannot be written: {error}.") from None

    def offsets(self, batch: int) -> bytes | None:
        """What Spark has planned a batch to read, as it stands in Spark's log."""
        return self.store.read(offsets_of(batch))


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
        power_loss_safe: bool = True,
    ) -> None:
        self.power_loss_safe = power_loss_safe
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
        self.draining = False
        #: Whether the sinks were asked about the rows before the query was started.
        self.rows_checked = False
        #: What a pipeline is called that has no name: by what it reads.
        self.known_by = ""
        #: Why the query was stopped from inside: another incarnation has taken the pipeline over.
        self.fenced: Fenced | None = None
        self._busy = threading.Lock()
        self._claimed = 0
        self._run_id = ""
        self._checkpoint: Checkpoint | None = None
        self._coordinator: Coordinator | None = None
        #: As above, but still known when it is closed.
        self._latest: Coordinator | None = None
        self._ending = threading.Lock()
        self._progress: KafkaProgress | None = None
        self._limit = ArrowLimit()

    def begin(self, spark: SparkSession, location: str, query_id: PipelineId, under_way: int | None = None) -> None:
        """Claim and recover: before the query starts, or with `semel.sink` at its first batch, which is under way."""
        require_python(spark, self.sinks)
        checkpoint = Checkpoint(spark, location)
        identity = Identity(query_id, self.name or self._query_name, self.known_by)
        self._limit = ArrowLimit()
        self.end()
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
            self._coordinator = start_weaker(log, self.sinks, identity, plans=checkpoint.plans, wait=wait_for_older)
            self._coordinator.tell = self.waiting
        self._latest = self._coordinator
        self._claimed = self._coordinator.context.incarnation

    def _keep_through_power_loss(self, spark: SparkSession, checkpoint: Checkpoint) -> None:
        """What a decision presupposes is on disk before it, or we say what is not promised."""
        if not self.power_loss_safe:
            _LOG.warning("%s", NOT_PROMISED)
        elif isinstance(checkpoint.store, FileStore):
            self._sync = CheckpointSync(checkpoint.store.root)
            checkpoint.keep_query_id(self._sync)
            checkpoint.plans.make_durable = self._sync.settle
        elif warning := hadoop_durability_warning(spark, checkpoint.location):
            _LOG.warning("%s", warning)

    def end(self) -> None:
        """Let go of the sinks, and of the broker that is told how far we came; and say that we have left."""
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
        if (self.fenced is None or batch is not None) and self._checkpoint is not None and self._claimed:
            log = self._checkpoint.log
            # A log that does not answer now is asked again.
            with suppress(Exception):
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
        with self._busy:
            if self.draining:
                raise self.fenced or QueryStopped(f"Batch {batch_id} was not begun: the query is being stopped.")
            try:
                report = self._work(df, batch_id)
            except BaseException as error:
                # The query ends with this error; an open transaction must not outlive it.
                self.end()
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
        query = RunningQuery(df)
        coordinator = self._coordinator_for(query, df, batch_id)
        coordinator.in_hand = partial(self._in_hand, query, batch_id)
        coordinator.is_stopped = lambda: not query.is_active
        progress = self._progress_of(query)
        progress.began(batch_id)
        report = self._run(coordinator, df, batch_id)
        if not report.staged and plan_must_run(query):
            df.write.format("noop").mode("append").save()
            # Its tasks wrote the state anew, over what was synced.
            coordinator.make_durable(batch_id)
        coordinator.tidy(batch_id)
        progress.ended(batch_id)
        return replace(report, lag=progress.lag(batch_id), warning=progress.warning)

    def _in_hand(self, query: RunningQuery, batch_id: int) -> Mapping[str, str]:
        """Nothing while `offsets/N` says what Spark has in memory; otherwise what no decision was taken for."""
        content = (self._checkpoint and self._checkpoint.offsets(batch_id)) or b""
        planned, in_hand = offsets_in(content), query.offsets_in_hand()
        # A form that we do not know has another number of lines, and says nothing.
        if len(planned) != len(in_hand) or all(map(is_same_offset, planned, in_hand)):
            return {}
        return {offsets_of(batch_id): f"in memory: {in_hand}"}

    def _run(self, coordinator: Coordinator, df: DataFrame, batch_id: int) -> Report:
        def stage(attempt: Attempt, only: Only = None, plan: str = "") -> Mapping[str, Sequence[StagedPart]]:
            durable = coordinator.context.marked
            return stage_rows(df, self.sinks, attempt, self._limit, durable=durable, only=only, plan=plan)

        if self.guarantee == "exactly-once":
            return coordinator.exactly_once(batch_id, stage)
        if self.guarantee == "at-least-once":
            return coordinator.at_least_once(batch_id, stage)
        return coordinator.at_most_once(batch_id, stage)

    def _coordinator_for(self, query: RunningQuery, df: DataFrame, batch_id: int) -> Coordinator:
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


class RunningQuery:
    """The query that is calling us, found through the properties that Spark sets on its thread."""

    def __init__(self, df: DataFrame) -> None:
        spark = df.sparkSession
        found = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not found:
            raise Refused(
                "semel.sink(...) was called outside of a streaming query.",
                remedy="Pass it to df.writeStream.foreachBatch(...).",
            )
        self.id = pipeline_id(found)
        # `spark.streams` is of no use: a query runs in a clone of the session that started it.
        jvm: Any = spark.sparkContext._jvm
        active = spark._jsparkSession.sharedState().activeStreamingQueries()
        self._execution = active.get(jvm.java.util.UUID.fromString(found))

    @property
    def is_active(self) -> bool:
        return bool(self._execution.isActive())

    @property
    def run_id(self) -> str:
        return str(self._execution.runId().toString())

    @property
    def name(self) -> str:
        """What `queryName` says, or nothing."""
        return str(self._execution.name() or "")

    @property
    def checkpoint(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    @property
    def plan(self) -> Any:
        return self._execution.lastExecution().logical()

    @property
    def analyzed(self) -> Any:
        return self._execution.analyzedPlan()

    def offsets_in_hand(self) -> list[str]:
        """Up to where the batch at hand goes, one line for each source, as Spark read or wrote it in `offsets/N`."""
        progress, sources = self._execution.availableOffsets(), self._execution.sources()
        found = [progress.get(sources.apply(index)) for index in range(sources.size())]
        return [str(offset.get().json()) if offset.isDefined() else NO_OFFSET for offset in found]

    def refuse_what_breaks_the_guarantee(self, guarantee: Guarantee) -> None:
        if "Async" in self._execution.getClass().getSimpleName():
            check_options({"asyncProgressTrackingEnabled": "true"})
        check_sources(self.analyzed, guarantee)
        check_checkpoint(is_temporary=self._is_temporary(), guarantee=guarantee)

    def _is_temporary(self) -> bool:
        """Whether Spark made the checkpoint for this start alone: nobody named it, so nobody finds it again."""
        given = self._private("extraOptions")
        if given is not None and CHECKPOINT_OPTION in map(str.lower, scala_dict(given)):
            return False
        if self._private("deleteCheckpointOnStop"):
            return True
        # What is left is the name that Spark gives such folders. Under the default folder of a session it is a bare id.
        folder = self.checkpoint.rstrip("/").rpartition("/")[2]
        under_the_default = bool(self._execution.sparkSession().conf().get(CHECKPOINT_DEFAULT, ""))
        prefix = "" if under_the_default and not self.name else "temporary-"
        return folder.startswith(prefix) and _UUID.fullmatch(folder.removeprefix(prefix)) is not None

    def _private(self, name: str) -> Any:
        """A field of the execution that has no accessor; None in another Spark, which has no such field."""
        kind = self._execution.getClass()
        while kind is not None:
            with suppress(Exception):  # a class without the field
                field = kind.getDeclaredField(name)
                field.setAccessible(True)
                return field.get(self._execution)
            kind = kind.getSuperclass()
        return None


def plan_must_run(query: RunningQuery) -> bool:
    """Whether a batch that is not written again must be computed all the same.

    Spark moves the event-time watermark by what it saw while a batch ran: a batch that is skipped would hold it back
    until the next one. State needs no second run, the tasks stored it before the decision; but Spark 4.1 checks that
    every state store committed in the batch.
    """
    import pyspark

    text = str(query.plan.toString())
    stateful_needs_it = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 1)
    return "EventTimeWatermark" in text or (stateful_needs_it and "Aggregate" in text)


def stage_rows(
    df: DataFrame,
    sinks: Sequence[Sink],
    attempt: Attempt,
    limit: ArrowLimit,
    *,
    durable: bool,
    only: Only = None,
    plan: str = "",
) -> dict[str, list[StagedPart]]:
    """One Spark job that writes the batch to every sink, and what its tasks staged."""
    wanted = [s for s in sinks if only is None or s.name in only]
    frame, views = combined_view(df, wanted)
    # Below exactly-once nothing is written again, so nobody asks for fingerprints.
    asking = [durable and sink.capabilities.commits_by_task for sink in wanted]
    if any(asking) and keeps_order(df):
        hashes = tuple(IN_ORDER if asks else "" for asks in asking)
    else:
        frame, hashes = with_hashes(frame, views, asking)
    points = os.environ.get(failpoints.VARIABLE, "")
    writer = TaskWriter(tuple(wanted), views, hashes, attempt, durable, points, plan)
    versions = own_versions()
    staged: dict[str, list[StagedPart]] = {sink.name: [] for sink in wanted}
    limit.apply(df.sparkSession)
    try:
        rows = frame.mapInArrow(sealed(writer, versions), _returns()).collect()
    except Exception as error:
        cause = error_of_task(str(error)) or error_of_worker(str(error), df.sparkSession)
        if cause is None:
            raise
        raise _with_number_of_tasks(cause, df) from error
    limit.saw(max((row[ROW_BYTES] for row in rows), default=0))
    for row in rows:
        require_same(versions, json.loads(row[VERSIONS]))
        for part in decode_parts(row[PARTS]):
            staged[part.branch.sink].append(part)
    return staged


def _with_number_of_tasks(cause: SemelError, df: DataFrame) -> SemelError:
    """An error that says that something must be as large as the number of tasks says how large that is."""
    plan = df._jdf.queryExecution().analyzed()
    if NUMBER_OF_TASKS in cause.remedy and plan.getClass().getSimpleName() == "LogicalRDD":
        told = f"{NUMBER_OF_TASKS}, here {plan.rdd().getNumPartitions()},"
        cause.remedy = cause.remedy.replace(NUMBER_OF_TASKS, told)
    return cause


def keeps_order(df: DataFrame) -> bool:
    """Whether the rows of each task are in the same order whenever the batch is run: nothing has shuffled them.

    Spark hands a batch over as an RDD, which knows what it was made of. Any other frame was made by the user.
    """
    plan = df._jdf.queryExecution().analyzed()
    if plan.getClass().getSimpleName() != "LogicalRDD":
        return False
    return "Shuffle" not in plan.rdd().toDebugString()


def _returns() -> Any:
    """The schema of what tasks return. As text it would be parsed by the JVM in every batch."""
    from pyspark.sql.types import LongType, StringType, StructType

    return StructType().add(PARTS, StringType()).add(ROW_BYTES, LongType()).add(VERSIONS, StringType())


def combined_view(df: DataFrame, sinks: Sequence[Sink]) -> tuple[DataFrame, tuple[str | None, ...]]:
    """One DataFrame that carries every sink's rows, so that they are computed and moved once.

    Sinks that take the rows as they are share them. Otherwise each sink gets a struct column of its own, null where its
    `where` leaves a row out.
    """
    if not any(s.select or s.where for s in sinks):
        return df, tuple(None for _ in sinks)
    from pyspark.sql import functions as F  # noqa: N812 - the name that every PySpark user knows

    columns = []
    for index, sink in enumerate(sinks):
        struct = F.struct(*(F.expr(e) for e in sink.select)) if sink.select else F.struct("*")
        view = F.when(F.expr(sink.where), struct) if sink.where else struct
        columns.append(view.alias(f"_semel_{index}"))
    return df.select(*columns), tuple(f"_semel_{index}" for index in range(len(sinks)))


def check_rows(df: DataFrame, sinks: Sequence[Sink]) -> None:
    """Ask each sink whether it can take the rows of this DataFrame, before there are any."""
    for sink in sinks:
        sink.check(arrow_schema(df, sink))


def arrow_schema(df: DataFrame, sink: Sink) -> Any:
    """The columns that one sink gets."""
    from pyspark.errors import AnalysisException, PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        view = df.where(sink.where) if sink.where else df
        return to_arrow_schema((view.selectExpr(*sink.select) if sink.select else view).schema)
    except AnalysisException as error:
        raise ConfigError(
            f"The select or where of sink {sink.name} does not fit the rows: {_first_line(error)}"
        ) from None
    except PySparkException as error:
        raise SchemaMismatch(f"Sink {sink.name} gets a column that Arrow cannot carry: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
