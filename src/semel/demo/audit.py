"""Input against output: by id, and by aggregate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from semel.demo.orders import Order
from semel.protocol.invariants import nothing_duplicated, nothing_lost


@dataclass(frozen=True)
class Verdict:
    """`delivered` counts visible rows; `lost` and `duplicated` count orders and surplus rows."""

    produced: int
    delivered: int
    lost: int
    duplicated: int
    aggregates_wrong: int
    evidence: tuple[str, ...] = ()

    @property
    def exactly_once(self) -> bool:
        return self.produced > 0 and self.lost == self.duplicated == self.aggregates_wrong == 0


def audit(orders: Sequence[Order], rows: Iterable[tuple[Any, ...]], totals: Iterable[tuple[Any, ...]]) -> Verdict:
    """Whole rows are compared, not only their ids: a damaged row is lost once and there once too often."""
    expected: Counter[Hashable] = Counter((o.id, o.customer, o.cents, o.item, o.at) for o in orders)
    actual: Counter[Hashable] = Counter(rows)
    lost, duplicated = nothing_lost(expected, actual), nothing_duplicated(expected, actual)
    wrong = wrong_totals(orders, totals)
    return Verdict(
        produced=len(orders),
        delivered=actual.total(),
        lost=(expected - actual).total(),
        duplicated=(actual - expected).total(),
        aggregates_wrong=len(wrong),
        evidence=tuple([*lost, *duplicated, *wrong][:10]),
    )


def wrong_totals(orders: Iterable[Order], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """The customers whose row in the table of totals is not what the input adds up to."""
    count: Counter[str] = Counter()
    cents: Counter[str] = Counter()
    for order in orders:
        count[order.customer] += 1
        cents[order.customer] += order.cents
    found: dict[str, list[tuple[int, int]]] = {}
    for customer, n, total in rows:
        found.setdefault(customer, []).append((n, total))
    return [
        f"{customer}: the table says {found.get(customer)}, the input {(count[customer], cents[customer])}"
        for customer in sorted(count.keys() | found.keys())
        if found.get(customer) != [(count[customer], cents[customer])]
    ]
