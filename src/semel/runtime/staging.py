"""One Spark job that writes a batch to every sink, and the questions that are asked of its rows before."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel import failpoints
from semel.errors import ConfigError, SchemaMismatch, SemelError
from semel.ids import Attempt
from semel.runtime.arrow import ArrowLimit
from semel.runtime.by_driver import TooMuch, write_by_driver
from semel.runtime.fingerprint import IN_ORDER, Hashed, with_hashes
from semel.runtime.hands import AS_PLANNED, Hands
from semel.runtime.interpreter import error_of_worker
from semel.runtime.query import is_shuffled
from semel.runtime.task import PARTS, ROW_BYTES, VERSIONS, TaskWriter, decode_parts, error_of_task
from semel.runtime.versions import own_versions, require_same, sealed
from semel.sinks.base import NUMBER_OF_TASKS, Sink, StagedPart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("semel")


@dataclass(frozen=True)
class Staged:
    """What was staged, by sink; by whose hands; and of how many bytes a row is at the most."""

    parts: dict[str, list[StagedPart]]
    hands: Hands
    row_bytes: int = 0


@dataclass(frozen=True)
class Staging:
    """A batch that is to be staged: its rows, and in which sinks, under which names.

    `durable` is off below exactly-once. `tuned` spares the workers what `worker` spares them. `plan` is the digest of
    what Spark planned.
    """

    df: DataFrame
    sinks: Sequence[Sink]
    attempt: Attempt
    durable: bool = True
    tuned: bool = True
    plan: str = ""

    def stage(self, hands: Hands, limit: ArrowLimit) -> Staged:
        """One Spark job that computes the batch, whose rows its tasks write to every sink, or the driver does."""
        limit.apply(self.df.sparkSession)
        if hands.on_driver:
            try:
                return self._by_driver(hands)
            except TooMuch as error:
                _LOG.warning(
                    "%s: the driver got %s, which is more than it takes; tasks write them.", self.attempt, error
                )
        return self._by_tasks(AS_PLANNED if hands.on_driver else hands, limit)

    def _by_driver(self, hands: Hands) -> Staged:
        frame, views = combined_view(self.df, self.sinks)
        # One part of each sink is there whole or not at all, so that nobody looks for it by its rows.
        writer = self._writer(views, Hashed(("",) * len(self.sinks)))
        parts, row_bytes = write_by_driver(in_few(frame, hands), writer)
        return Staged(self._by_sink(parts), hands, row_bytes)

    def _by_tasks(self, hands: Hands, limit: ArrowLimit) -> Staged:
        frame, views = combined_view(self.df, self.sinks)
        # Below exactly-once nothing is written again, so nobody asks for fingerprints. One task leaves one part of each
        # sink, which is there whole or not at all.
        asking = [self.durable and hands.tasks != 1 and sink.capabilities.commits_by_task for sink in self.sinks]
        if any(asking) and not (hands.tasks or hands.by_hash) and keeps_order(self.df):
            hashed = Hashed(tuple(IN_ORDER if asks else "" for asks in asking))
        else:
            frame, hashed = with_hashes(frame, views, asking, joined=hands.tasks > 1)
        versions = own_versions()
        job = in_few(frame, hands).mapInArrow(sealed(self._writer(views, hashed), versions), _returns())
        try:
            rows = job.collect()
        except Exception as error:
            cause = error_of_task(str(error)) or error_of_worker(str(error), self.df.sparkSession)
            if cause is None:
                raise
            raise _with_number_of_tasks(cause, self.df) from error
        row_bytes = max((row[ROW_BYTES] for row in rows), default=0)
        limit.saw(row_bytes)
        parts = []
        for row in rows:
            require_same(versions, json.loads(row[VERSIONS]))
            parts += decode_parts(row[PARTS])
        return Staged(self._by_sink(parts), hands, row_bytes)

    def _writer(self, views: tuple[str | None, ...], hashed: Hashed) -> TaskWriter:
        points = os.environ.get(failpoints.VARIABLE, "")
        return TaskWriter(tuple(self.sinks), views, hashed, self.attempt, self.durable, points, self.plan, self.tuned)

    def _by_sink(self, parts: Sequence[StagedPart]) -> dict[str, list[StagedPart]]:
        staged: dict[str, list[StagedPart]] = {sink.name: [] for sink in self.sinks}
        for part in parts:
            staged[part.branch.sink].append(part)
        return staged


def in_few(frame: DataFrame, hands: Hands) -> DataFrame:
    """The partitions as they are, in few tasks: each takes some of them, one after the other. Nothing is shuffled."""
    return frame.coalesce(hands.tasks) if hands.tasks else frame


def _with_number_of_tasks(cause: SemelError, df: DataFrame) -> SemelError:
    """An error that says that something must be as large as the number of tasks says how large that is."""
    made_of = rdd_of(df)
    if NUMBER_OF_TASKS in cause.remedy and made_of is not None:
        told = f"{NUMBER_OF_TASKS}, here {made_of.getNumPartitions()},"
        cause.remedy = cause.remedy.replace(NUMBER_OF_TASKS, told)
    return cause


def keeps_order(df: DataFrame) -> bool:
    """Whether the rows of each task are in the same order whenever the batch is run: nothing has shuffled them."""
    made_of = rdd_of(df)
    return made_of is not None and not is_shuffled(made_of)


def rdd_of(df: DataFrame) -> Any:
    """Spark hands a batch over as an RDD, which knows what it was made of. A frame of the user's own gives None."""
    plan = df._jdf.queryExecution().analyzed()
    return plan.rdd() if plan.getClass().getSimpleName() == "LogicalRDD" else None


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
