"""The query that runs, as Spark knows it."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from semel.errors import Refused
from semel.ids import pipeline_id
from semel.runtime.checks import Guarantee, check_checkpoint, check_options, check_sources
from semel.runtime.offsets import NO_OFFSET
from semel.sources.plan import scala_dict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: As Spark compares it, which takes any case.
CHECKPOINT_OPTION = "checkpointlocation"
#: The property of a thread of Spark that says which run of a query it works for.
RUN = "spark.jobGroup.id"
CHECKPOINT_DEFAULT = "spark.sql.streaming.checkpointLocation"
#: Of files only the size is known. A row takes about so much in one, or more.
FILE_ROW_BYTES = 16
#: Spark takes what it knows nothing of for as large as can be.
UNKNOWN_BYTES = 2**50
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def query_of(df: DataFrame, known: RunningQuery | None) -> RunningQuery:
    """The query that is calling us: the one that we know while it is the same run. To ask for it takes milliseconds."""
    run = df.sparkSession.sparkContext.getLocalProperty(RUN)
    return known if known is not None and run == known.run_id else RunningQuery(df)


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
        self._is_shuffled: bool | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._execution.isActive())

    @cached_property
    def run_id(self) -> str:
        return str(self._execution.runId().toString())

    @cached_property
    def name(self) -> str:
        """What `queryName` says, or nothing."""
        return str(self._execution.name() or "")

    @cached_property
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
        return self._lines(self._execution.availableOffsets())

    def offsets_behind(self) -> list[str]:
        """Where the batch at hand begins, likewise: up to there the batch before it went."""
        return self._lines(self._execution.committedOffsets())

    def _lines(self, progress: Any) -> list[str]:
        found = map(progress.get, self._sources)
        return [str(offset.get().json()) if offset.isDefined() else NO_OFFSET for offset in found]

    @cached_property
    def _sources(self) -> list[Any]:
        sources = self._execution.sources()
        return [sources.apply(index) for index in range(sources.size())]

    @cached_property
    def cores(self) -> int:
        """How many tasks run at a time."""
        return int(self._execution.sparkSession().sparkContext().defaultParallelism())

    def is_shuffled(self, rdd: Any) -> bool:
        """Whether the rows of a batch come out of a shuffle, as the first one of this run did.

        Spark may join otherwise in another batch. So only the number of tasks goes by this, and no fingerprint.
        """
        if self._is_shuffled is None:
            self._is_shuffled = is_shuffled(rdd)
        return self._is_shuffled

    def rows_of_files(self) -> int | None:
        """About how many rows the batch at hand reads, by the size that Spark knows; None where it knows none."""
        size = int(str(self._execution.lastExecution().optimizedPlan().stats().sizeInBytes()))
        return size // FILE_ROW_BYTES if size < UNKNOWN_BYTES else None

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


def is_shuffled(rdd: Any) -> bool:
    return "Shuffle" in rdd.toDebugString()


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
