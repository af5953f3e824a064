"""Breadth-first search over all worlds, so that the first violation found has the shortest way to it.

Worlds are kept whole and compared whole: no fingerprint can hide one behind another. They share their parts, so that a
world costs a few hundred bytes. For each one only the number of the world is kept from which it was first reached.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from semel.model.adversary import Model
from semel.model.properties import Observer, expected
from semel.model.world import Label, World, first_world

TELL_EVERY_S = 2.0

#: Told every two seconds: states so far, depth, states waiting.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Violation:
    """What is wrong and the shortest way to it."""

    name: str
    text: str
    trace: tuple[Label, ...]


@dataclass(frozen=True)
class Result:
    """`complete` is false when the search was cut short by `states_max`: then nothing is proven."""

    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool
    violations: tuple[Violation, ...] = ()
    reached: frozenset[tuple[str, str]] = frozenset()
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def holds(self) -> bool:
        return self.complete and not self.violations and not self.missing


@dataclass
class Search:
    """The worlds seen so far, by number in the order in which they were met."""

    model: Model
    progress: Progress | None = None
    states_max: int = 0
    #: Stop at the first step of this name, as if it were a violation: the shortest way to it is wanted.
    wanted_step: str = ""
    numbers: dict[World, int] = field(default_factory=dict)
    parents: array[int] = field(default_factory=lambda: array("q"))
    verbs: set[str] = field(default_factory=set)
    transitions: int = 0
    depth: int = 0
    _shared: dict[Any, Any] = field(default_factory=dict)
    _told_at: float = 0.0

    def run(self) -> Result:
        began = self._told_at = time.monotonic()
        observer = Observer(self.model)
        first = first_world(self.model.bounds)
        self._add(first, -1)
        level, violation, cut = [first], None, False
        with _no_collection():
            while level and violation is None and not cut:
                level, violation, cut = self._expand(level, observer)
        return self._result(violation, time.monotonic() - began, complete=violation is None and not cut)

    def _expand(self, level: list[World], observer: Observer) -> tuple[list[World], Violation | None, bool]:
        """The worlds one step further. Stops at the first violation, or when there are too many."""
        following: list[World] = []
        numbers, verbs, successors = self.numbers, self.verbs, self.model.successors
        for world in level:
            self._tell(len(level))
            for label, reached in successors(world):
                self.transitions += 1
                verbs.add(str(label[0]))
                if label[0] == self.wanted_step:
                    self.depth += 1
                    return [], Violation("reached", str(label[0]), (*self.way_to(world), label)), False
                if reached in numbers:
                    continue
                shared = self._add(reached, numbers[world])
                if broken := observer.verdict(shared):
                    self.depth += 1
                    return [], self._violation(shared, broken), False
                following.append(shared)
            if self.states_max and len(numbers) >= self.states_max:
                return [], None, True
        if following:
            self.depth += 1
        return following, None, False

    def _add(self, world: World, parent: int) -> World:
        share = self._shared.setdefault
        stores = share(world.stores, world.stores)
        if stores is world.stores:
            stores = tuple(share(store, store) for store in stores)
            self._shared[stores] = stores
        shared = world._replace(
            stores=stores,
            drivers=share(world.drivers, world.drivers),
            journals=share(world.journals, world.journals),
            requests=share(world.requests, world.requests),
            left=share(world.left, world.left),
        )
        self.numbers[shared] = len(self.parents)
        self.parents.append(parent)
        return shared

    def _tell(self, waiting: int) -> None:
        if self.progress is not None and time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._told_at = time.monotonic()
            self.progress(len(self.numbers), self.depth, waiting)

    def _violation(self, world: World, broken: str) -> Violation:
        name, _, text = broken.partition(": ")
        return Violation(name, text, self.way_to(world))

    def way_to(self, world: World) -> tuple[Label, ...]:
        """The labels from the first world to this one: the worlds by their parents, the labels by stepping again."""
        worlds = list(self.numbers)
        chain = [self.numbers[world]]
        while self.parents[chain[-1]] >= 0:
            chain.append(self.parents[chain[-1]])
        way = [worlds[number] for number in reversed(chain)]
        labels: list[Label] = []
        for here, there in pairwise(way):
            labels.append(next(label for label, reached in self.model.successors(here) if reached == there))
        return tuple(labels)

    def _result(self, violation: Violation | None, seconds: float, *, complete: bool) -> Result:
        reached = {*self.model.rules.seen, *self.model.truth.seen, *(("step", verb) for verb in self.verbs)}
        wanted = expected(self.model.bounds)
        return Result(
            states=len(self.numbers),
            transitions=self.transitions,
            depth=self.depth,
            seconds=seconds,
            complete=complete,
            violations=() if violation is None else (violation,),
            reached=frozenset(reached & wanted),
            missing=tuple(sorted(wanted - reached)) if complete else (),
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Worlds refer to no one that refers to them, so there is nothing to collect, and to look for it takes long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check(model: Model, progress: Progress | None = None, states_max: int = 0) -> Result:
    """Explore every world within the model's bounds."""
    return Search(model, progress, states_max).run()


def way_to_step(model: Model, step: str, progress: Progress | None = None) -> tuple[Label, ...]:
    """The shortest way to a step of this name; empty when it cannot be reached within the model's bounds."""
    result = Search(model, progress, wanted_step=step).run()
    return next((v.trace for v in result.violations if v.name == "reached"), ())
