"""Small batches that the driver writes itself: the same rows, of the same types, in the same order, as tasks would."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import semel
from semel.errors import BatchFailed
from semel.ids import Attempt, Branch, Incarnation, PipelineId
from semel.runtime import by_driver
from semel.runtime.arrow import ArrowLimit
from semel.runtime.by_driver import rows_of
from semel.runtime.hands import Hands
from semel.runtime.phases import Report
from semel.runtime.pipeline import StreamWriter
from semel.runtime.staging import Staged, Staging
from semel.sinks.base import Capabilities, Sink, StagedPart, Writer
from semel.sinks.memory import memory_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark35

ATTEMPT = Attempt(PipelineId("11111111-2222-3333-4444-555555555555"), 4, 0, Incarnation(2))
BY_DRIVER = Hands(2, on_driver=True)

EVERY_TYPE = """SELECT 1Y AS a, 2S AS b, id AS c, CAST(id AS INT) AS d, 1.5F AS e, 2.5D AS f, 3.25BD AS g, 'text' AS h,
    X'00FF' AS i, id = 1 AS j, DATE'2026-11-19' AS k, TIMESTAMP'2026-11-19 12:00:00.123456' AS l,
    TIMESTAMP_NTZ'2026-11-19 12:00:00.5' AS m, array(1, NULL) AS n, map('k', 1L) AS o, struct(1 AS x, 'y' AS y) AS p,
    CAST(NULL AS STRING) AS q, INTERVAL '1 02' DAY TO HOUR AS r, array(struct(map(1, array('z')) AS deep)) AS s
    FROM range(3)"""


def types(batches: Iterable[Any]) -> Iterable[Any]:
    """Runs in a task. It says what it got, as text."""
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"said": [str(batch.schema.remove_metadata()), str(batch.to_pylist())]})


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_the_driver_gets_what_a_task_would_get(spark: SparkSession, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = spark.sql(EVERY_TYPE).coalesce(1)
        schema, content = (row.said for row in df.mapInArrow(types, "said string").collect())
        (batch,) = rows_of(df)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    # Whether Spark says that a column has no nulls differs. No sink asks, because types are checked before.
    assert str(batch.schema.remove_metadata()).replace(" not null", "") == schema.replace(" not null", "")
    assert str(batch.to_pylist()) == content


def staged(df: DataFrame, *sinks: Sink) -> Staged:
    return Staging(df, sinks, ATTEMPT).stage(BY_DRIVER, ArrowLimit())


def rows_in(table: str) -> list[list[dict[str, Any]]]:
    """What is staged, by branch; it is let go of."""
    found = list(memory_table(table).staged.values())
    memory_table(table).staged.clear()
    return [list(rows) for rows in found]


def test_the_rows_of_all_partitions_are_one_part_in_their_order(spark: SparkSession) -> None:
    sinks = (semel.Memory("d", name="all"), semel.Memory("d2", name="few", where="id > 7", select=["id * 2 AS twice"]))
    found = staged(spark.range(0, 10, 1, 5), *sinks)
    (part,), (few,) = found.parts["all"], found.parts["few"]
    assert (part.rows, few.rows, found.hands) == (10, 2, BY_DRIVER)
    assert found.row_bytes > 0
    sinks[0].participant(semel_context()).prepare(ATTEMPT, [part])
    sinks[1].participant(semel_context()).prepare(ATTEMPT, [few])
    assert rows_in("d") == [[{"id": n} for n in range(10)]]
    assert rows_in("d2") == [[{"twice": 16}, {"twice": 18}]]


def semel_context() -> Any:
    from semel.sinks.base import Context

    return Context(ATTEMPT.pipeline, "orders", ATTEMPT.incarnation)


def test_each_try_has_a_name_of_its_own_that_no_task_has(spark: SparkSession) -> None:
    one, two = (staged(spark.range(1), semel.Memory("d")).parts["memory_d"][0].branch for _ in range(2))
    assert one.retry != two.retry
    assert min(one.retry, two.retry) >= 1_000_000_000
    memory_table("d").staged.clear()


def test_no_rows_leave_a_part_without_any(spark: SparkSession) -> None:
    (part,) = staged(spark.range(0), semel.Memory("d")).parts["memory_d"]
    assert part.rows == 0


def test_more_than_the_driver_takes_is_written_by_tasks(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(by_driver, "HELD_BYTES_MAX", 50)
    with caplog.at_level(logging.WARNING, "semel"):
        found = staged(spark.range(0, 10, 1, 2), semel.Memory("d"))
    assert not found.hands.on_driver
    assert [part.rows for part in found.parts["memory_d"]] == [5, 5]
    assert "the driver got 10 rows of 80 bytes, which is more than it takes; tasks write them." in caplog.text


@dataclass(frozen=True)
class Failing(semel.Memory):
    """Its writer refuses the second batch of rows, and what it staged before must not be left."""

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        return FailingWriter(semel.Memory.writer(self, branch, durable=durable, plan=plan))


class FailingWriter(Writer):
    aborted = 0

    def __init__(self, real: Writer) -> None:
        self.real = real

    def write(self, batch: pa.RecordBatch) -> None:
        self.real.write(batch)
        raise BatchFailed("The store does not take row 3.", remedy="Correct row 3.")

    def prepare(self) -> StagedPart:
        return self.real.prepare()

    def abort(self) -> None:
        FailingWriter.aborted += 1
        self.real.abort()


def test_what_fails_is_told_as_it_is_and_leaves_nothing_behind(spark: SparkSession) -> None:
    before = FailingWriter.aborted
    with pytest.raises(BatchFailed) as caught:
        staged(spark.range(3), Failing("d"))
    assert (caught.value.what, caught.value.remedy) == ("The store does not take row 3.", "Correct row 3.")
    assert FailingWriter.aborted == before + 1
    assert rows_in("d") == []


# In a query ---------------------------------------------------------------------------------------------------------


def feed(folder: Path, batch: int, ids: range) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{batch}.json").write_text("".join(json.dumps({"id": n, "key": n % 7}) + "\n" for n in ids))


def run(spark: SparkSession, tmp_path: Path, sink: Sink, sql: str, **options: object) -> list[Report]:
    source = spark.readStream.schema("id long, key long").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    source.createOrReplaceTempView("fed")
    reports: list[Report] = []
    made: StreamWriter = semel.write(spark.sql(sql)).to(sink).trigger(availableNow=True).outputMode("update")
    made = made.options(**options).option("checkpointLocation", str(tmp_path / "checkpoint"))
    made.launch(reports.append).query.awaitTermination()
    return reports


ROWS, COUNTS = "SELECT id FROM fed", "SELECT key, count(*) AS n FROM fed GROUP BY key"


def test_a_query_hands_small_batches_to_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    for batch in range(2):
        feed(tmp_path / "in", batch, range(batch * 10, batch * 10 + 10))
    reports = run(spark, tmp_path, semel.Memory("q"), ROWS)
    assert [(r.rows, r.hands) for r in reports] == [(10, "the driver")] * 2
    assert sorted(row["id"] for row in memory_table("q").visible) == list(range(20))


def test_a_stateful_query_begins_with_few_tasks_because_nobody_knows_what_comes_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    for batch in range(2):
        feed(tmp_path / "in", batch, range(14))
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "9")
    try:
        reports = run(spark, tmp_path, semel.Memory("s"), COUNTS)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before or "2")
    cores = spark.sparkContext.defaultParallelism
    assert [r.hands for r in reports] == [f"{2 * cores} tasks", "the driver"]
    last = {row["key"]: row["n"] for row in memory_table("s").visible}
    assert last == dict.fromkeys(range(7), 4)


@pytest.mark.parametrize(
    ("options", "hands"),
    [
        ({"semel.tasks": "partitions"}, "one task a partition"),
        ({"semel.driverRows": 0}, "one task a partition"),
        ({"semel.driverRows": 1}, "one task a partition"),
        ({"semel.driverRows": 20}, "the driver"),
    ],
    ids=["a task for each partition", "never the driver", "more rows than the driver may", "few"],
)
def test_the_user_says_who_writes(spark: SparkSession, tmp_path: Path, options: dict[str, object], hands: str) -> None:
    feed(tmp_path / "in", 0, range(3))
    feed(tmp_path / "in", 1, range(10))
    assert [r.hands for r in run(spark, tmp_path, semel.Memory("u"), ROWS, **options)][-1] == hands


@dataclass(frozen=True)
class OnExecutors(semel.Memory):
    """A sink that says no."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(driver_writes=False)


def test_a_sink_may_say_no(spark: SparkSession, tmp_path: Path) -> None:
    feed(tmp_path / "in", 0, range(3))
    assert [r.hands for r in run(spark, tmp_path, OnExecutors("n"), ROWS)] == ["one task a partition"]
