"""What the journal of a batch decided, and what in it contradicts itself. Pure.

The protocol's own reading raises when a journal holds two decisions. An audit bears it: a driver that slept through the
end of its batch may record a decision that nobody acts on any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from semel.protocol.events import Committable, Decided, Journal, Started
from semel.protocol.invariants import decision_names_one_attempt, decision_takes_the_next_slot
from semel.sinks.evidence import Mark


@dataclass(frozen=True)
class Decision:
    """The first decision of a batch and its mends; `late` are further decisions, on which nobody acts.

    `versions` has every committable that was decided under a key, the one that counts last.
    """

    chain: tuple[Decided, ...] = ()
    late: tuple[Decided, ...] = ()
    problems: tuple[str, ...] = ()
    begun_weaker: bool = False

    @property
    def is_taken(self) -> bool:
        return bool(self.chain)

    @property
    def mended(self) -> bool:
        return len(self.chain) > 1

    def versions(self, sink: str) -> dict[str, list[Committable]]:
        """The committables of one sink, by their keys."""
        found: dict[str, list[Committable]] = {}
        for record in self.chain:
            for committable in record.committables:
                if committable.sink == sink:
                    found.setdefault(committable.key, []).append(committable)
        return found

    def everything(self, sink: str) -> Iterator[Committable]:
        """Whatever was ever decided for a sink."""
        return (c for record in (*self.chain, *self.late) for c in record.committables if c.sink == sink)

    @property
    def sinks(self) -> list[str]:
        return sorted({c.sink for record in self.chain for c in record.committables})


def read_decision(journal: Journal) -> Decision:
    chain: list[Decided] = []
    late: list[Decided] = []
    problems: list[str] = []
    for slot, record in enumerate(journal):
        if not isinstance(record, Decided):
            continue
        problems += decision_takes_the_next_slot(record, journal[:slot]) + decision_names_one_attempt(record)
        if record.mends and not chain:
            problems.append(f"slot {slot} mends a batch that was not decided")
        elif late or (chain and not record.mends):
            late.append(record)
        else:
            chain.append(record)
    begun = any(isinstance(record, Started) for record in journal)
    return Decision(tuple(chain), tuple(late), tuple(problems), begun)


def is_marked_by_the_sink(committable: Committable) -> bool:
    """Whether a commit of it leaves a marker. A task without rows, beside others, has nothing to commit."""
    return committable.key == committable.sink or bool(committable.payload)


def proves(mark: Mark, committable: Committable) -> bool:
    """Whether the marker is that of this committable. One that stands for a whole batch must be of the same attempt,
    where the store keeps that."""
    if mark.part:
        return mark.part in committable.branches
    return mark.attempt in (committable.attempt.attempt, -1) and is_marked_by_the_sink(committable)
