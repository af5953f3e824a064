"""When Spark's limit on the bytes of an Arrow batch is lifted, and when it comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.runtime.arrow import NO_LIMIT, SETTING, SMALL_ROW_BYTES, ArrowLimit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_limit_is_lifted_after_small_rows_and_comes_back_after_large_ones(spark: SparkSession) -> None:
    session = spark.newSession()
    limit = ArrowLimit()
    limit.apply(session)
    assert session.conf.get(SETTING, None) is None
    limit.saw(SMALL_ROW_BYTES)
    for _ in range(2):
        limit.apply(session)
        assert session.conf.get(SETTING, None) == NO_LIMIT
    assert session.range(20_000).mapInArrow(lambda batches: batches, "id long").count() == 20_000
    limit.saw(SMALL_ROW_BYTES + 1)
    limit.apply(session)
    assert session.conf.get(SETTING, None) is None


def test_what_the_user_has_set_stays(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set(SETTING, "1000000")
    limit = ArrowLimit()
    for row_bytes in (10, 10**6, 10):
        limit.saw(row_bytes)
        limit.apply(session)
        assert session.conf.get(SETTING) == "1000000"
