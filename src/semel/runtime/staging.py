"""One Spark job that writes a batch to every sink, and the questions that are asked of its rows before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel import failpoints
from semel.errors import ConfigError, SchemaMismatch, SemelError
from semel.ids import Attempt
from semel.runtime.arrow import ArrowLimit
from semel.runtime.fingerprint import IN_ORDER, with_hashes
from semel.runtime.interpreter import error_of_worker
from semel.runtime.phases import Only
from semel.runtime.task import PARTS, ROW_BYTES, VERSIONS, TaskWriter, decode_parts, error_of_task
from semel.runtime.versions import own_versions, require_same, sealed
from semel.sinks.base import NUMBER_OF_TASKS, Sink, StagedPart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def stage_rows(
    df: DataFrame,
    sinks: Sequence[Sink],
    attempt: Attempt,
    limit: ArrowLimit,
    *,
    durable: bool,
    tuned: bool = True,
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
    writer = TaskWriter(tuple(wanted), views, hashes, attempt, durable, points, plan, tuned)
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
