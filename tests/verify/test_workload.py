"""What `@semel.workload` takes, refuses, and makes of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest

import semel
from semel.errors import ConfigError
from semel.runtime.pipeline import Pipeline
from semel.verify.workload import DEFAULT, Workload, find_workload, identity_text


def row(n: int) -> dict[str, Any]:
    return {"id": n, "text": f"row {n}"}


def module(**values: Any) -> ModuleType:
    made = ModuleType("a pipeline file")
    vars(made).update(values)
    return made


def refused(make: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value


# Making one ---------------------------------------------------------------------------------------------------------


def test_a_bare_decorator_makes_a_workload_for_any_pipeline() -> None:
    made = semel.workload(row)
    assert made == Workload(row)
    assert (made.pipeline, made.identity, made.expect(7, "orders")) == ("", "id", 1)


def test_a_decorator_with_arguments_keeps_them() -> None:
    orders = Pipeline(lambda _: None, "orders")  # type: ignore[arg-type, return-value]

    @semel.workload(orders, identity="text", key=lambda n: f"k{n % 3}", expect=lambda n, _: n % 2)
    def made(n: int) -> dict[str, Any]:
        return row(n)

    assert made.pipeline == "orders"
    assert made.identity_of(4) == "row 4"
    assert [made.key(n) for n in range(4)] == ["k0", "k1", "k2", "k0"]
    assert [made.expect(n, "any") for n in range(3)] == [0, 1, 0]


def test_a_pipeline_may_be_given_by_its_name() -> None:
    assert semel.workload("orders")(row).pipeline == "orders"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Workload(lambda: {"id": 1}), "does not take 1 argument"),  # type: ignore[arg-type, misc]
        (lambda: Workload("row"), "does not take 1 argument"),  # type: ignore[arg-type]
        (lambda: Workload(row, identity=""), "name of a field"),
        (lambda: Workload(row, key=lambda: "k"), "`key`"),  # type: ignore[arg-type, misc]
        (lambda: Workload(row, expect=len), "`expect`"),  # type: ignore[arg-type]
        (lambda: Workload(row, identify=7), "`identify`"),  # type: ignore[arg-type]
        (lambda: semel.workload(7), "7 is none"),  # type: ignore[call-overload]
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(make: Any, says: str) -> None:
    assert says in refused(make).what


def test_the_function_is_not_called_when_it_is_made() -> None:
    def not_yet(n: int) -> dict[str, Any]:
        raise NameError("what it needs stands further below in the file")

    assert semel.workload(not_yet).row is not_yet


# Rows ---------------------------------------------------------------------------------------------------------------


def test_the_default_rows_differ_in_id_and_come_in_97_keys() -> None:
    assert json.loads(DEFAULT.encode(1098)) == {"id": 1098, "key": "k31", "amount": 98, "at": "2026-01-01T00:18:18Z"}
    assert len({DEFAULT.identity_of(n) for n in range(1000)}) == 1000
    assert len({DEFAULT.key(n) for n in range(1000)}) == 97


def test_bytes_and_text_are_fed_as_they_are() -> None:
    as_bytes = Workload(lambda n: b"\xff%d" % n, identify=str)
    as_text = Workload(lambda n: f"größe {n}", identify=str)
    assert (as_bytes.encode(3), as_text.encode(3)) == (b"\xff3", "größe 3".encode())
    assert as_bytes.identity_of(3) == "3"


def test_a_row_without_the_identity_is_refused_with_the_fields_that_it_has() -> None:
    error = refused(lambda: Workload(row, identity="order_id").identity_of(5))
    assert error.what == "Row 5 of the workload has no field order_id, which is to tell rows apart."
    assert "Its fields: id, text." in error.remedy


def test_bytes_without_identify_are_refused_with_what_to_add() -> None:
    assert "identify=" in refused(lambda: Workload(lambda _: b"x").identity_of(0)).remedy


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    assert "cannot be written as JSON" in refused(lambda: Workload(lambda n: {"id": n, "at": object()}).encode(0)).what


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (7.0, "7"),
        (7.5, "7.5"),
        (Decimal("7.00"), "7"),
        (Decimal("1E+40"), "1" + "0" * 40),
        (float("nan"), "nan"),
        (Decimal("NaN"), "NaN"),
        (b"o-7", "o-7"),
        (memoryview(b"\xff"), "\\xff"),
        ("7", "7"),
        (None, "None"),
    ],
)
def test_a_value_is_spelled_the_same_wherever_it_was_found(value: Any, text: str) -> None:
    assert identity_text(value) == text


# Finding one --------------------------------------------------------------------------------------------------------


def test_the_workload_of_the_pipeline_wins_over_the_one_for_any() -> None:
    any_, orders = semel.workload(row), semel.workload("orders")(row)
    file = module(a=any_, b=orders, again=orders)
    assert find_workload(file, "orders") is orders
    assert find_workload(file, "bills") is any_


def test_a_file_without_a_workload_gets_the_default() -> None:
    assert find_workload(module(other=7, bills=semel.workload("bills")(row)), "orders") is DEFAULT


def test_two_workloads_for_one_pipeline_are_refused() -> None:
    file = module(a=semel.workload("orders")(row), b=semel.workload("orders")(row))
    assert "2 workloads for pipeline orders" in refused(lambda: find_workload(file, "orders")).what
    both = module(a=semel.workload(row), b=semel.workload(row))
    assert "2 workloads for any pipeline" in refused(lambda: find_workload(both, "orders")).what


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Workload(row, identity="order_id"), "no field order_id"),
        (Workload(lambda _: {"id": 1}), "Rows 0 and 1"),
        (Workload(row, key=lambda n: n), "`key`"),  # type: ignore[arg-type, return-value]
        (Workload(row, expect=lambda *_: "1"), "`expect`"),  # type: ignore[arg-type]
    ],
)
def test_a_workload_whose_first_rows_are_wrong_is_refused_when_it_is_found(made: Workload, says: str) -> None:
    assert says in refused(lambda: find_workload(module(made=made), "orders")).what


def test_semel_is_imported_without_spark_or_clients() -> None:
    code = "import semel, sys; print([m for m in ('pyspark', 'confluent_kafka', 'psycopg') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
