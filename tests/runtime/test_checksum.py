"""The checksum of rows in their order, without Spark: whatever batches they come in, and for no other rows."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.runtime.fingerprint import Checksum

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("number", pa.int32()),
        ("truth", pa.bool_()),
        ("price", pa.decimal128(9, 2)),
        ("nothing", pa.null()),
        ("list", pa.list_(pa.list_(pa.string()))),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("struct", pa.struct([("x", pa.float64()), ("words", pa.list_(pa.string()))])),
    ]
)

TEXTS = st.none() | st.text(max_size=3)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": TEXTS,
            "bytes": st.none() | st.binary(max_size=3),
            "number": st.none() | st.integers(-3, 3),
            "truth": st.none() | st.booleans(),
            "price": st.none() | st.integers(-9, 9).map(lambda cents: Decimal(cents).scaleb(-2)),
            "nothing": st.none(),
            "list": st.none() | st.lists(st.none() | st.lists(TEXTS, max_size=2), max_size=2),
            "map": st.none() | st.dictionaries(st.text(max_size=2), st.none() | st.integers(0, 3), max_size=2),
            "struct": st.none()
            | st.fixed_dictionaries(
                {"x": st.none() | st.floats(0, 1), "words": st.none() | st.lists(TEXTS, max_size=2)}
            ),
        }
    ),
    max_size=8,
)


def checksum(rows: list[dict[str, Any]], cuts: tuple[int, ...] = ()) -> str:
    """Of rows that are cut into batches. Each is a slice of a larger one, as it may be in reality."""
    whole = pa.RecordBatch.from_pylist(rows, SCHEMA)
    ends = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    check = Checksum()
    for start, end in pairwise(ends):
        check.add(whole.slice(start, end - start))
    return str(check)


@given(ROWS, st.lists(st.integers(0, 8), max_size=3).map(tuple))
def test_how_rows_are_cut_into_batches_does_not_count(rows: list[dict[str, Any]], cuts: tuple[int, ...]) -> None:
    assert checksum(rows, cuts) == checksum(rows)


@given(ROWS, ROWS)
def test_other_rows_have_another_checksum(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    same = pa.RecordBatch.from_pylist(one, SCHEMA).equals(pa.RecordBatch.from_pylist(two, SCHEMA))
    assert (checksum(one) == checksum(two)) == same


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["", None], [None, ""]),
        (["a", "b"], ["b", "a"]),
        ([["a", "b"], ["c"]], [["a"], ["b", "c"]]),
        ([[None], []], [[], [None]]),
        ([None, []], [[], None]),
    ],
)
def test_what_holds_the_same_bytes_is_told_apart(one: list[Any], two: list[Any]) -> None:
    kind = pa.list_(pa.string()) if any(isinstance(value, list) for value in one) else pa.string()
    sums = set()
    for values in (one, two):
        check = Checksum()
        check.add(pa.RecordBatch.from_arrays([pa.array(values, kind)], ["x"]))
        sums.add(str(check))
    assert len(sums) == 2
    assert all(text.startswith("2:in-order-") for text in sums)
