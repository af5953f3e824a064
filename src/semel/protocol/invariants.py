"""Named properties. The runtime checks some before it writes; audits and the model checker reuse the rest.

Each returns a list of violations, in words; an empty list means that the property holds. `require` raises on the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from semel.protocol.events import Decided, Journal
from semel.protocol.step import ProtocolError


def require(violations: list[str]) -> None:
    """Raise before a durable write rather than record something false."""
    if violations:
        raise ProtocolError("; ".join(violations))


# Before a decision is written ---------------------------------------------------------------------------------------


def decision_covers_every_sink(decision: Decided, sinks: Iterable[str]) -> list[str]:
    """A batch is decided only when all of its sinks have prepared."""
    missing = set(sinks) - {c.sink for c in decision.committables}
    return [f"sink {name} has not prepared" for name in sorted(missing)]


def decision_carries_its_plan(decision: Decided) -> list[str]:
    """A driver that commits the batch later can tell for which rows it was decided."""
    if decision.plan is None:
        return ["the decision does not say which plan it was taken for"]
    digest = decision.plan.digest
    return [f"{c.key} was prepared for another plan" for c in decision.committables if c.plan != digest]


def decision_names_one_attempt(decision: Decided) -> list[str]:
    """Every committable was prepared under the attempt that is being decided, and under a key of its own."""
    keys = Counter(c.key for c in decision.committables)
    return [f"two committables share the key {key}" for key, n in keys.items() if n > 1] + [
        f"{c.key} was prepared under {c.attempt}, not {decision.attempt}"
        for c in decision.committables
        if c.attempt != decision.attempt
    ]


def decision_takes_the_next_slot(decision: Decided, journal: Journal) -> list[str]:
    """Attempt a is decided in slot a, and slot a is the first free one."""
    if decision.attempt.attempt == len(journal):
        return []
    return [f"attempt {decision.attempt.attempt} cannot be decided in slot {len(journal)}"]


# Over what can be seen from outside -----------------------------------------------------------------------------------


def nothing_lost(expected: Counter[Hashable], actual: Counter[Hashable]) -> list[str]:
    """Every row that went in is visible."""
    return [f"{row!r} is missing {n} time(s)" for row, n in (expected - actual).items()]


def nothing_duplicated(expected: Counter[Hashable], actual: Counter[Hashable]) -> list[str]:
    """No row is visible more often than it went in."""
    return [f"{row!r} is visible {n} time(s) too often" for row, n in (actual - expected).items()]


def nothing_torn(batches: Iterable[tuple[int, int, int]]) -> list[str]:
    """A store shows all or nothing of each batch (id, rows decided, rows visible)."""
    return [
        f"batch {batch}: {visible} of {rows} rows are visible"
        for batch, rows, visible in batches
        if visible not in (0, rows)
    ]


def nothing_early(visible: Iterable[int], decided: Iterable[int]) -> list[str]:
    """Nothing of a batch is visible before the batch is decided."""
    return [f"batch {batch} is visible and was not decided" for batch in sorted(set(visible) - set(decided))]
