"""Tasks hand rows to a database in the order of their keys, where nothing depends on it but the work it takes."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.sql.sink import in_order_of


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_rows_are_sorted_by_all_columns_of_the_key_and_those_of_one_key_stay_in_their_order() -> None:
    given = batch(a=[2, 1, 2, 1, 2], b=[Decimal(n) for n in (15, 0, 5, 0, 15)], text=["p", "q", "r", "s", "t"])
    assert in_order_of(["a", "b"], given)["text"].to_pylist() == ["q", "s", "r", "p", "t"]
    assert in_order_of(["b", "a"], given)["text"].to_pylist() == ["q", "s", "r", "p", "t"]


def test_many_rows_of_few_keys_stay_in_their_order() -> None:
    given = batch(a=[n * 7919 % 10 for n in range(10_000)], n=list(range(10_000)))
    pairs = list(zip(*in_order_of(["a"], given).to_pydict().values(), strict=True))
    assert pairs == sorted(pairs)
    assert len({n for _, n in pairs}) == 10_000


def test_rows_in_order_are_not_copied() -> None:
    given = batch(a=[1, 2, 2, 3])
    assert in_order_of(["a"], given) is given


MOMENTS = [dt.datetime(2024, 1, 1, 0, 0, 0, n) for n in (2, 1, 3)]


@pytest.mark.parametrize("values", [["b", "a", "B"], [b"b", b"a", b"B"], [True, False, True], [2.5, 1.5, 3.5], MOMENTS])
def test_what_only_the_database_can_compare_is_left_alone(values: list[Any]) -> None:
    """It may fold letters, and round what it has fewer digits for."""
    given = batch(a=values, n=[2, 1, 0])
    assert in_order_of(["a"], given) is given
    assert in_order_of(["n", "a"], given) is given
