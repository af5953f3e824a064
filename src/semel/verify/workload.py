"""The input of a verified run: how row 0, 1, 2 ... is made, what tells rows apart, and what is expected of each.

A pipeline file that reads something else than the default rows says so beside its pipeline:

    @semel.workload(orders, identity="order_id")
    def made(n: int) -> dict[str, Any]:
        return {"order_id": f"o-{n}", "cents": n % 500}

A row is a function of its number and of nothing else, so that a run can be replayed, and so that a reader who finds an
identity in a store can tell which row it is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import ModuleType
from typing import Any, overload

from semel.errors import ConfigError, SemelError
from semel.runtime.pipeline import Pipeline

#: The n-th row of the input: the fields of a JSON object, or the bytes or the text of a record as they are.
Row = Mapping[str, Any] | bytes | str

KEYS = 97
FIRST_AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def one_of_97(n: int) -> str:
    """So few keys that each has many rows, whose order can be compared."""
    return str(n % KEYS)


def once(n: int, sink: str) -> int:  # noqa: ARG001 - whatever they are
    return 1


@dataclass(frozen=True)
class Workload:
    """What `@semel.workload` makes of a function.

    `identity` names the field of the input, and the column of every sink, that tells rows apart. `key` gives the Kafka
    key of a row: rows of one key keep their order. `expect` says how often row n is to be in the sink of that name.
    `pipeline` is the name of the pipeline that it is for; empty for any in the file. `identify` gives the identity of
    row n where rows are bytes or text.
    """

    row: Callable[[int], Row]
    identity: str = "id"
    key: Callable[[int], str] = one_of_97
    expect: Callable[[int, str], int] = once
    pipeline: str = ""
    identify: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.identity, str) or not self.identity:
            raise ConfigError(
                f"The identity of a workload is the name of a field, not {self.identity!r}.",
                remedy='Name the field that tells rows apart: @semel.workload(identity="id").',
            )
        _require_call("The function of a workload", self.row, 0, usage="def row(n): return {...}")
        _require_call("`key` of a workload", self.key, 0, usage="key=lambda n: str(n % 97)")
        _require_call("`expect` of a workload", self.expect, 0, "sink", usage="expect=lambda n, sink: 1")
        if self.identify is not None:
            _require_call("`identify` of a workload", self.identify, 0, usage="identify=lambda n: str(n)")

    def made(self, n: int) -> Row:
        """Row n. Whatever the user's function raises is an error of the pipeline file."""
        try:
            return self.row(n)
        except SemelError:
            raise
        except Exception as error:
            raise ConfigError(
                f"Row {n} of the workload cannot be made: {type(error).__name__}: {error}.",
                data_now="rows before it may have been fed",
                remedy="Mend the function under @semel.workload: it must make a row of any number.",
            ) from error

    def identity_of(self, n: int) -> str:
        """The identity of row n, as readers spell it."""
        if self.identify is not None:
            return identity_text(self.identify(n))
        row = self.made(n)
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"Row {n} of the workload is {type(row).__name__}, which has no field {self.identity}.",
                remedy="Say how its identity is made: @semel.workload(identify=lambda n: ...).",
            )
        if row.get(self.identity) is None:
            fields = ", ".join(map(str, row)) or "none"
            raise ConfigError(
                f"Row {n} of the workload has no field {self.identity}, which is to tell rows apart.",
                remedy=f'Add it to the row, or name another: @semel.workload(identity="..."). Its fields: {fields}.',
            )
        return identity_text(row[self.identity])

    def encode(self, n: int) -> bytes:
        """Row n as bytes: the JSON of its fields, or what it is."""
        row = self.made(n)
        if isinstance(row, bytes):
            return row
        if isinstance(row, str):
            return row.encode()
        try:
            return json.dumps(dict(row), ensure_ascii=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Row {n} of the workload cannot be written as JSON: {error}.",
                remedy="Use text, numbers, lists and the like; write a time as text. Or return the bytes yourself.",
            ) from None

    def check(self) -> None:
        """Try the first rows. When it was made they could not be tried: what they need may stand below them."""
        if self.identity_of(0) == self.identity_of(1):
            raise ConfigError(
                f"Rows 0 and 1 of the workload have the same {self.identity}: {self.identity_of(0)!r}.",
                remedy="Make it differ from row to row, of n alone.",
            )
        self.encode(0)
        for what, given, kind in (("key", self.key(0), str), ("expect", self.expect(0, "sink"), int)):
            if not isinstance(given, kind):
                raise ConfigError(f"`{what}` of the workload gave {given!r}, which is not {kind.__name__}.")


def identity_text(value: Any) -> str:
    """One spelling for a value, wherever it was found: a number is 7 in JSON, Decimal("7") or 7.0 in a table."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, Decimal) and _is_whole(value)
    return str(int(value)) if whole else str(value)


def _is_whole(value: Decimal) -> bool:
    return value.is_finite() and value == value.to_integral_value()


def _default_row(n: int) -> dict[str, Any]:
    at = (FIRST_AT + timedelta(seconds=n)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"id": n, "key": f"k{one_of_97(n)}", "amount": n % 1000, "at": at}


@overload
def workload(row: Callable[[int], Row], /) -> Workload: ...
@overload
def workload(
    pipeline: Pipeline | str | None = None,
    *,
    identity: str = "id",
    key: Callable[[int], str] | None = None,
    expect: Callable[[int, str], int] | None = None,
    identify: Callable[[int], str] | None = None,
) -> Callable[[Callable[[int], Row]], Workload]: ...
def workload(
    pipeline: Pipeline | str | Callable[[int], Row] | None = None,
    *,
    identity: str = "id",
    key: Callable[[int], str] | None = None,
    expect: Callable[[int, str], int] | None = None,
    identify: Callable[[int], str] | None = None,
) -> Workload | Callable[[Callable[[int], Row]], Workload]:
    """Mark the function that makes row n of the input, for one pipeline of the file or for all of them.

    `semel verify` feeds these rows. See Workload for the rest.
    """
    if callable(pipeline) and not isinstance(pipeline, Pipeline):
        return Workload(pipeline)
    name = pipeline.name if isinstance(pipeline, Pipeline) else pipeline or ""
    if not isinstance(name, str):
        raise ConfigError(
            f"A workload is for a pipeline, and {name!r} is none.",
            remedy="Give the pipeline or its name: @semel.workload(orders).",
        )

    def decorate(row: Callable[[int], Row]) -> Workload:
        return Workload(row, identity, key or one_of_97, expect or once, name, identify)

    return decorate


def find_workload(module: ModuleType, pipeline_name: str) -> Workload:
    """The workload of a pipeline file for this pipeline, else the one for any, else the default."""
    found = {id(value): value for value in vars(module).values() if isinstance(value, Workload)}
    for wanted in (pipeline_name, ""):
        chosen = [one for one in found.values() if one.pipeline == wanted]
        if len(chosen) > 1:
            whom = f"pipeline {wanted}" if wanted else "any pipeline"
            raise ConfigError(
                f"The pipeline file has {len(chosen)} workloads for {whom}.",
                remedy="Keep one, or say which is for which: @semel.workload(orders).",
            )
        if chosen:
            chosen[0].check()
            return chosen[0]
    return DEFAULT


def _require_call(what: str, function: Any, *arguments: Any, usage: str) -> None:
    """Functions are not called before they are needed, but how many arguments they take can be seen."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        return  # some functions that are not written in Python do not tell
    except TypeError:
        raise ConfigError(
            f"{what} does not take {len(arguments)} argument{'s' * (len(arguments) > 1)}: {function!r}.",
            remedy=f"Write it as: {usage}.",
        ) from None


#: What is fed to a pipeline that says nothing of its input.
DEFAULT = Workload(_default_row)
