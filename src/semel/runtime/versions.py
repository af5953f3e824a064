"""Tasks and the driver are of one release, or no row is written.

What a task stages and how it names it is read by the driver, so both must be the same semel. An executor may have
another one, or none: then it cannot even unpickle what Spark sends it. So a task is sent *sealed*: in a function that
goes by value, needs nothing of semel, compares the versions, and unpickles the task when they match.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from semel.errors import ConfigError

#: Raised when tasks and drivers of one version number would not understand each other: between two releases.
WIRE = 2

#: What of a version must be the same on both sides: how many of its parts, 0 for all of them.
#: Spark itself asks for the same Python, later and with other words. The driver asks its own pyarrow which types a sink
#: can take, and notes their names, by which it knows the columns again; another major version may name or encode them
#: in another way.
COMPARED = {"semel": 0, "wire": 0, "python": 2, "pyarrow": 1}

NOTHING_WRITTEN = "nothing of this batch was written; what was committed before stays visible"


def own_versions() -> dict[str, str]:
    """Those of this process, and which interpreter it is."""
    import pyarrow as pa

    import semel

    python = ".".join(map(str, sys.version_info[:3]))
    own = {"semel": semel.__version__, "wire": str(WIRE), "python": python, "pyarrow": pa.__version__}
    return {**own, "interpreter": sys.executable}


def require_same(driver: Mapping[str, str], task: Mapping[str, str]) -> None:
    """The driver's own look at what a task has told; the task has compared as well, before it wrote."""
    differing = _differing(dict(driver), dict(task), COMPARED)
    if differing:
        what, remedy = _tell(dict(driver), dict(task), differing)
        raise ConfigError(what, data_now=NOTHING_WRITTEN, remedy=remedy)


def sealed(task: Callable[..., Any], driver: Mapping[str, str]) -> Callable[..., Any]:
    """A function for `mapInArrow` that compares versions on the executor, then runs this task there."""
    from pyspark import cloudpickle

    rules = by_value(_differing), by_value(_tell), NOTHING_WRITTEN
    content = cloudpickle.dumps(task)  # type: ignore[no-untyped-call]
    opened: Callable[..., Any] = by_value(_opened)(content, dict(driver), dict(COMPARED), rules)
    return opened


# Sent by value: these functions use no name of any module, only what they are given or import themselves -------------


def by_value(function: Callable[..., Any]) -> Any:
    """The function as pickle sends it by its code. What belongs to the main program is sent so."""
    return FunctionType(function.__code__, {"__name__": "__main__", "__builtins__": __builtins__}, function.__name__)


def _differing(driver: dict[str, str], other: dict[str, str], compared: dict[str, int]) -> list[str]:
    return [
        name
        for name, parts in compared.items()
        if driver[name].split(".")[: parts or None] != other.get(name, "none").split(".")[: parts or None]
    ]


def _tell(driver: dict[str, str], other: dict[str, str], differing: list[str]) -> tuple[str, str]:
    """What differs, and the command that mends it."""
    words = {"wire": "semel's wire format", "python": "Python"}
    told = [f"{words.get(n, n)} {other.get(n, 'unknown')} there, {driver[n]} on the driver" for n in differing]
    python = ".".join(driver["python"].split(".")[:2])
    interpreter = other.get("interpreter", "python3")
    packages = [f"'{name}=={driver[name]}'" for name in ("semel", "pyarrow") if name == "semel" or name in differing]
    install = f"{interpreter} -m pip install --force-reinstall --no-deps {' '.join(packages)}"
    remedy = (
        f"Set PYSPARK_PYTHON to a Python {python} of the executors that has semel, then start again."
        if "python" in differing
        else f"Run on every executor: {install}, then start again."
    )
    return f"The executors ({interpreter}) run other versions than the driver: {'; '.join(told)}.", remedy


def _opened(content: bytes, driver: dict[str, str], compared: dict[str, int], rules: Any) -> Any:
    differing_of, tell, nothing_written = rules

    def run(batches: Any) -> Any:
        import importlib
        import pickle
        import sys

        what = remedy = ""
        other = {"python": ".".join(map(str, sys.version_info[:3])), "interpreter": sys.executable}
        try:
            import pyarrow

            import semel

            other.update(semel=semel.__version__, pyarrow=pyarrow.__version__)
        except ImportError as error:
            what = f"The Python of an executor, {sys.executable}, lacks what tasks need: {error}."
            remedy = f"Run there: {sys.executable} -m pip install 'semel=={driver['semel']}', or set PYSPARK_PYTHON to "
            remedy += "a Python that has it, then start again."
        try:
            other["wire"] = str(importlib.import_module("semel.runtime.versions").WIRE)
        except ImportError:
            other["wire"] = "1"  # 0.1.0 had no such module
        differing = [] if what else differing_of(driver, other, compared)
        if differing:
            what, remedy = tell(driver, other, differing)
        if what:
            # The driver finds these lines in the stack trace that Spark makes of it.
            raise RuntimeError(
                f"semel.errors.ConfigError: {what}\n  the data now: {nothing_written}\n  what to do: {remedy}"
            )
        yield from pickle.loads(content)(batches)  # noqa: S301 - made by our own driver

    return run
