"""Fingerprints as Spark and the tasks make them: the same for the same rows, and for no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import semel
from semel.ids import Attempt, Incarnation, PipelineId
from semel.runtime.arrow import ArrowLimit
from semel.runtime.hands import AS_PLANNED
from semel.runtime.staging import Staging, keeps_order
from semel.sinks.base import Capabilities, Context, Sink, StagedPart
from semel.sinks.memory import memory_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark35

ATTEMPT = Attempt(PipelineId("11111111-2222-3333-4444-555555555555"), 4, 0, Incarnation(2))
CONTEXT = Context(ATTEMPT.pipeline, "orders", ATTEMPT.incarnation)


@dataclass(frozen=True)
class ByTask(semel.Memory):
    """A sink of which fingerprints are wanted."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(commits_by_task=True)


def staged(df: DataFrame, *sinks: Sink, durable: bool = True) -> dict[str, list[StagedPart]]:
    return Staging(df, sinks, ATTEMPT, durable).stage(AS_PLANNED, ArrowLimit()).parts


def prints(df: DataFrame, sink: Sink) -> list[str]:
    """The fingerprints of the tasks, sorted: which task has which number does not count."""
    return sorted(part.fingerprint for part in staged(df, sink)[sink.name])


def tasks(spark: SparkSession, *sql: str) -> DataFrame:
    """A frame with a task for each of these lists of rows."""
    frames = (spark.sql(f"SELECT * FROM VALUES {rows}").coalesce(1) for rows in sql)  # noqa: S608 - our own text
    return reduce(lambda whole, frame: whole.union(frame), frames)


ORDERED = ("(1, 'a'), (2, 'b'), (3, NULL)", "(4, 'd'), (5, 'e')")
TURNED = ("(5, 'e'), (4, 'd')", "(3, NULL), (1, 'a'), (2, 'b')")
OTHER = ("(1, 'a'), (2, 'b'), (4, 'd')", "(3, NULL), (5, 'e')")


@pytest.mark.parametrize(
    "sink",
    [
        ByTask("t"),
        ByTask("t", select=["upper(col2) AS value", "col1 * 2 AS twice"]),
        ByTask("t", where="col1 % 2 = 1"),
        ByTask("t", select=["col1"], where="col2 IS NOT NULL"),
    ],
    ids=["as they are", "select", "where", "select and where"],
)
def test_order_and_numbers_of_tasks_do_not_count_and_the_rows_do(spark: SparkSession, sink: Sink) -> None:
    expected = prints(tasks(spark, *ORDERED), sink)
    assert len(set(expected)) == 2
    assert prints(tasks(spark, *TURNED), sink) == expected
    other = prints(tasks(spark, *OTHER), sink)
    assert set(other).isdisjoint(expected)
    rows = [int(text.partition(":")[0]) for text in expected]
    assert rows == sorted(part.rows for part in staged(tasks(spark, *ORDERED), sink)[sink.name])


def test_rows_that_are_left_out_do_not_count(spark: SparkSession) -> None:
    sink = ByTask("t", where="col1 < 3")
    assert prints(tasks(spark, "(1, 'a'), (7, 'x')", "(8, 'y')"), sink) == prints(
        tasks(spark, "(9, 'z')", "(5, 'v'), (1, 'a')"), sink
    )
    assert prints(tasks(spark, "(8, 'y')"), sink) == ["0:0000000000000000"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("('a', NULL)", "(NULL, 'a')"),
        ("('', NULL)", "(NULL, NULL)"),
        ("('ab', 'c')", "('a', 'bc')"),
        ("(array('a', 'b'), array('c'))", "(array('a'), array('b', 'c'))"),
        (
            "(1, array(struct('a' AS k, 'b' AS v)))",
            "(1, array(struct('a' AS k, NULL AS v), struct('b' AS k, NULL AS v)))",
        ),
        ("('a', 'b'), ('a', 'b')", "('a', 'b')"),
    ],
)
def test_what_xxhash64_takes_for_the_same_is_told_apart(spark: SparkSession, one: str, two: str) -> None:
    for sink in (ByTask("t"), ByTask("t", where="true")):
        assert prints(tasks(spark, one), sink) != prints(tasks(spark, two), sink)


def test_what_is_hashed_is_what_is_written_although_the_plan_gives_other_rows_each_time(spark: SparkSession) -> None:
    sink = ByTask("t", select=["uuid() AS value"])
    (part,) = staged(tasks(spark, "(1)"), sink)[sink.name]
    participant = sink.participant(CONTEXT)
    participant.prepare(ATTEMPT, [part])
    ((row,),) = memory_table("t").staged.values()
    memory_table("t").staged.clear()
    (written,) = staged(tasks(spark, f"('{row['value']}')").toDF("value"), replace(sink, select=["value"]))[sink.name]
    assert written.fingerprint == part.fingerprint


@pytest.mark.parametrize("column", ["map('a', 1)", "array(map('a', 1))", "named_struct('m', map('a', 1))"])
def test_what_spark_cannot_hash_has_no_fingerprint_and_is_written(spark: SparkSession, column: str) -> None:
    df = spark.sql(f"SELECT 1 AS id, {column} AS m").coalesce(1)
    plain, view, without_map = ByTask("t"), ByTask("t", name="v", where="id = 1"), ByTask("t", name="w", select=["id"])
    assert [(p.rows, p.fingerprint) for p in staged(df, plain)[plain.name]] == [(1, "")]
    found = staged(df, view, without_map)
    assert [(p.rows, bool(p.fingerprint)) for name in ("v", "w") for p in found[name]] == [(1, False), (1, True)]


def test_columns_of_the_user_that_look_like_ours_are_left_alone(spark: SparkSession) -> None:
    df = spark.sql("SELECT 1 AS _semel_1, 2 AS _SEMEL_2, 3 AS `odd name`").coalesce(1)
    sink = ByTask("t")
    (part,) = staged(df, sink)[sink.name]
    assert part.fingerprint.startswith("1:")
    sink.participant(CONTEXT).prepare(ATTEMPT, [part])
    assert list(memory_table("t").staged.values()) == [[{"_semel_1": 1, "_SEMEL_2": 2, "odd name": 3}]]
    memory_table("t").staged.clear()


@pytest.mark.parametrize("views", [[], ["id"]], ids=["as they are", "select"])
def test_only_sinks_that_commit_task_by_task_have_one_and_only_at_exactly_once(
    spark: SparkSession, views: Sequence[str]
) -> None:
    df = spark.sql("SELECT 1 AS id").coalesce(1)
    sinks = (semel.Memory("t", name="a", select=views), ByTask("t", name="b"), ByTask("t", name="c"))
    found = staged(df, *sinks)
    a, b, c = (found[name][0] for name in "abc")
    assert (a.fingerprint, b.fingerprint) == ("", c.fingerprint)
    assert b.fingerprint.startswith("1:")
    assert {part.fingerprint for parts in staged(df, *sinks, durable=False).values() for part in parts} == {""}


@pytest.mark.parametrize(
    ("sql", "kept"),
    [
        ("SELECT upper(value) AS value FROM lines WHERE value > 'a'", True),
        ("SELECT value, count(*) AS n FROM lines GROUP BY value", False),
        ("SELECT /*+ MERGE(few) */ lines.value FROM lines JOIN few USING (value)", False),
    ],
    ids=["rows as they come", "state", "a join that shuffles"],
)
def test_hashes_are_asked_for_only_where_a_shuffle_makes_the_order_a_matter_of_chance(
    spark: SparkSession, tmp_path: Path, sql: str, kept: bool
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lines").write_text("a\nb\nb\nc\n")
    spark.readStream.text(str(tmp_path / "in")).createOrReplaceTempView("lines")
    spark.range(3).selectExpr("chr(97 + id) AS value").createOrReplaceTempView("few")
    seen: list[tuple[bool, set[bool]]] = []

    def look(df: DataFrame, batch: int) -> None:
        parts = staged(df, ByTask("t"))["memory_t"]
        memory_table("t").staged.clear()
        seen.append((keeps_order(df), {"in-order" in part.fingerprint for part in parts}))

    writer = spark.sql(sql).writeStream.foreachBatch(look).outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    assert seen == [(kept, {kept})]


def test_a_frame_that_the_user_made_of_a_batch_is_hashed(spark: SparkSession) -> None:
    assert not keeps_order(spark.range(4).selectExpr("id * 2 AS twice"))
