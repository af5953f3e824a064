"""Every error says three things, travels between processes, and is in the tree that errors.py draws."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from semel import errors
from semel.errors import MissingExtra, SemelError

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, SemelError) and kind.__module__ == errors.__name__
]


def drawn() -> dict[str, str]:
    """The tree of the docstring, as class -> its parent. Four characters are one level."""
    tree: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r" {4}(?P<branches>(?:[│├└─ ]{4})*)(?P<name>[A-Z]\w+)(?: +.+)?", line)
        if match:
            depth = len(match["branches"]) // 4
            above = [*above[:depth], match["name"]]
            tree[match["name"]] = above[depth - 1] if depth else "Exception"
    return tree


def test_the_tree_lists_exactly_the_classes_that_exist() -> None:
    assert drawn() == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}


def test_the_tree_explains_every_class_but_the_root() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if "──" in line]
    assert len(lines) == len(CLASSES) - 1
    assert [line for line in lines if not re.search(r"── \w+ +\S+ \S+", line)] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_three_lines(kind: type[SemelError]) -> None:
    what, data_now, remedy = str(kind("Batch 42 failed.")).splitlines()
    assert what == "Batch 42 failed."
    assert re.fullmatch(r"  the data now: \w.+", data_now)
    assert re.fullmatch(r"  what to do: [A-Z].+", remedy)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_raiser_may_know_better(kind: type[SemelError]) -> None:
    error = kind("What failed.", data_now="all visible", remedy="Do this.")
    assert str(error) == "What failed.\n  the data now: all visible\n  what to do: Do this."


@pytest.mark.parametrize("kind", CLASSES)
def test_one_error_does_not_change_the_next(kind: type[SemelError]) -> None:
    before = str(kind("What failed."))
    kind("Other.", data_now="all visible", remedy="Do this.")
    assert str(kind("What failed.")) == before


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_pickles(kind: type[SemelError], protocol: int) -> None:
    for error in (kind("What failed."), kind("What failed.", data_now="all visible", remedy="Do this.")):
        copy = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  we pickled it ourselves
        assert (type(copy), str(copy), copy.args) == (kind, str(error), error.args)


def test_a_missing_extra_names_the_command_and_keeps_it_when_pickled() -> None:
    error = MissingExtra("Kafka needs confluent-kafka.", extra="kafka")
    assert error.remedy == "Install it: pip install 'semel[kafka]'"
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  we pickled it ourselves
    assert str(copy) == str(error)
