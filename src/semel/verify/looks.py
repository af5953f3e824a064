"""The looks at one sink played in their order: what it showed batch by batch, and what no reader should see. Pure.

A look brings only what changed since the one before, so a look costs as much as it changes, however large the sink is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from semel.verify.history import NO_BATCH, Look, Sights


@dataclass(frozen=True)
class Wanted:
    """What one sink is to show: how often each row, and how many rows of each batch that makes."""

    copies: array[int]
    batch_of: Sequence[int]
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, copies: array[int], batch_of: Sequence[int]) -> Wanted:
        sizes = dict.fromkeys(batch_of, 0)
        for batch, n in zip(batch_of, copies, strict=True):
            sizes[batch] += n
        return cls(copies, batch_of, sizes)

    @property
    def rows(self) -> int:
        return sum(self.sizes.values())

    def visible(self, rows: Mapping[int, int]) -> dict[int, int]:
        """How many of the wanted rows of each batch are among these. Copies beyond that make up for none."""
        visible = dict.fromkeys(self.sizes, 0)
        for number, (batch, n) in enumerate(zip(self.batch_of, self.copies, strict=True)):
            visible[batch] += min(rows.get(number, 0), n)
        return visible


@dataclass
class Played:
    """What the looks at one sink amount to. All times are those at which a look had ended."""

    sink: str
    looks: Sequence[Look]
    #: Batch -> the first look that showed any row of it.
    seen: dict[int, float] = field(default_factory=dict)
    #: Batch -> how many rows, and when, where a look showed a part of it.
    in_part: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: Row -> how often, and when, where a look showed it too often.
    too_often: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: Row -> when it was no longer there. A row that came back is not in here.
    vanished: dict[int, float] = field(default_factory=dict)
    #: Batches as they appeared and disappeared: (number of the look, batch, whether it is there).
    changes: list[tuple[int, int, bool]] = field(default_factory=list)


def play(sights: Sights, wanted: Wanted) -> Played:
    """Go through all looks once.

    A row that is expected nowhere at the end may be there once for a while: a later row may have taken its place.
    """
    played = Played(sights.sink, sights.looks)
    shown = dict.fromkeys(wanted.sizes, 0)
    copies = array("i", bytes(4 * len(wanted.copies)))
    for index, look in enumerate(sights.looks):
        # What each batch that this look changes showed before it.
        before: dict[int, int] = {}
        _take_away(look, wanted, copies, shown, before, played)
        _add(look, wanted, copies, shown, before, played)
        for batch, n in before.items():
            if batch == NO_BATCH:
                continue
            played.seen.setdefault(batch, look.ended_s)
            if sights.snapshots and 0 < shown[batch] < wanted.sizes[batch]:
                played.in_part.setdefault(batch, (shown[batch], look.ended_s))
            if (n > 0) != (shown[batch] > 0):
                played.changes.append((index, batch, shown[batch] > 0))
    return played


def _take_away(
    look: Look, wanted: Wanted, copies: array[int], shown: dict[int, int], before: dict[int, int], played: Played
) -> None:
    for number in look.gone:
        if not 0 <= number < len(copies) or not copies[number]:
            continue
        batch = wanted.batch_of[number]
        before.setdefault(batch, shown[batch])
        if copies[number] <= wanted.copies[number]:
            shown[batch] -= 1
        copies[number] -= 1
        if not copies[number]:
            played.vanished[number] = look.ended_s


def _add(
    look: Look, wanted: Wanted, copies: array[int], shown: dict[int, int], before: dict[int, int], played: Played
) -> None:
    batch_of, limit, rows, vanished = wanted.batch_of, wanted.copies, len(copies), played.vanished
    for number in look.added:
        if not 0 <= number < rows:
            continue
        batch, already = batch_of[number], copies[number]
        copies[number] = already + 1
        if batch not in before:
            before[batch] = shown[batch]
        if already < limit[number]:
            shown[batch] += 1
        elif already:
            played.too_often[number] = already + 1, look.ended_s
        if vanished:
            vanished.pop(number, None)


@dataclass(frozen=True)
class Lag:
    """A sink had nothing of a batch when another one had shown a later batch before."""

    batch: int
    looked_s: float
    later_batch: int
    other: str
    other_s: float


def lags(behind: Played, wanted: Mapping[int, int], others: Sequence[Played]) -> Iterator[Lag]:
    """Where a sink, whose looks are snapshots, was behind by a whole batch; each batch once.

    A batch is not begun before the one before it is committed everywhere. So whoever has seen a row of batch N + 1 in
    one sink, and looks at another after that, finds batch N there. `wanted` has how many rows the sink expects of each.
    """
    ahead = sorted((at_s, batch, other.sink) for other in others for batch, at_s in other.seen.items())
    newest, newest_sink, newest_s = NO_BATCH, "", 0.0
    there: set[int] = set()
    told: set[int] = set()
    checked = taken = changed = 0
    for index, look in enumerate(behind.looks):
        while taken < len(ahead) and ahead[taken][0] < look.began_s:
            at_s, batch, sink = ahead[taken]
            if batch > newest:
                newest, newest_sink, newest_s = batch, sink, at_s
            taken += 1
        suspects = list(range(checked, newest))
        checked = max(checked, newest)
        while changed < len(behind.changes) and behind.changes[changed][0] == index:
            _, batch, is_there = behind.changes[changed]
            (there.add if is_there else there.discard)(batch)
            suspects.append(batch)
            changed += 1
        for batch in suspects:
            if batch < newest and wanted.get(batch) and batch not in there and batch not in told:
                told.add(batch)
                yield Lag(batch, look.ended_s, newest, newest_sink, newest_s)
