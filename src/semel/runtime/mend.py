"""Which rows of a replay take the place of those that are gone. Pure.

A sink that commits task by task may show some tasks of a decided batch while others are gone. When Spark runs the batch
again it may number its tasks otherwise (SPARK-28650; its Kafka source does), so what is gone is found by its content:
by the fingerprint that the decision keeps of each committable. Where a task wrote several partitions the replay writes
each of them for itself, and several parts take the place of one committable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from semel.errors import BatchFailed
from semel.protocol.events import Committable
from semel.protocol.step import ProtocolError
from semel.runtime.fingerprint import prints_in
from semel.sinks.base import StagedPart

DATA_NOW = "the batch is decided; what is named here is not visible, the rest is"


@dataclass(frozen=True)
class Mend:
    """What to do with the parts that a replay staged for one sink.

    `wanted` are prepared; `spare` are aborted, because their rows are visible. `keys` says which committable each
    branch replaces; it is empty when all of them are replaced.
    """

    wanted: tuple[StagedPart, ...]
    spare: tuple[StagedPart, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)


def choose_parts(decided: Sequence[Committable], gone: Collection[str], parts: Sequence[StagedPart]) -> Mend:
    """The parts that bring back what is gone of one sink. Raises BatchFailed when the replay has not what it takes.

    `decided` are all committables of the sink in this batch, `gone` the keys of those that are gone. What has no rows
    is neither visible nor missing.
    """
    lost = [c for c in decided if c.key in gone]
    visible = [c for c in decided if c.key not in gone and c.rows]
    if not visible:
        _require_layout(decided, parts)
        return Mend(tuple(parts))
    written = [p for p in parts if p.rows]
    if not all([*(c.fingerprint for c in (*lost, *visible)), *(p.fingerprint for p in written)]):
        raise _cannot_mend(lost, "they cannot be told apart in a replay")
    missing = {c.key: prints_in(c.fingerprint) for c in lost}
    keys: dict[str, str] = {}
    spare: list[StagedPart] = []
    for part in written:
        found = prints_in(part.fingerprint)
        key = next((key for key, prints in missing.items() if found <= prints), None)
        if key is None:
            spare.append(part)
        else:
            missing[key] -= found
            keys[str(part.branch)] = _free(key, keys.values())
    if any(missing.values()) or _contents(spare) != _contents(visible):
        raise _cannot_mend(lost, "a replay did not bring them again")
    return Mend(tuple(p for p in written if str(p.branch) in keys), tuple(spare), keys)


def _free(key: str, taken: Collection[str]) -> str:
    """The key of a committable for the first part that takes its place, and one made of it for each other."""
    return next(name for n in count() if (name := f"{key}+{n}" if n else key) not in taken)


def replace_gone(mend: Mend, decided: Sequence[Committable], prepared: Sequence[Committable]) -> list[Committable]:
    """The prepared committables, each under the key of the one that it replaces.

    Where only some are replaced the sink gives one for each branch, in an order of its own.
    """
    mended = [replace(c, key=mend.keys.get(" ".join(c.branches), c.key), mends=True) for c in prepared]
    wanted = sorted(mend.keys.values()) or sorted(c.key for c in decided)
    named = sorted(c.key for c in mended)
    if named != wanted if mend.keys else not set(named).issuperset(wanted):
        raise ProtocolError(f"what is gone are {wanted}, what was prepared are {named}")
    return mended


def _contents(of: Iterable[StagedPart | Committable]) -> Counter[str]:
    return sum((prints_in(x.fingerprint) for x in of), Counter())


def _require_layout(decided: Sequence[Committable], parts: Sequence[StagedPart]) -> None:
    """Every key must be replaced, and where there is one for each task there must be as many tasks as before."""
    before, now = sum(len(c.branches) for c in decided), len(parts)
    if now < before:
        raise BatchFailed(
            f"Batch {decided[0].attempt.batch} has another task layout than when it was decided: "
            f"{now} tasks for {decided[0].sink}, not {before}.",
            data_now=DATA_NOW,
            remedy="Start with the number of partitions that the batch was decided with.",
        )


def _cannot_mend(lost: Sequence[Committable], why: str) -> BatchFailed:
    names = ", ".join(sorted(c.key for c in lost))
    return BatchFailed(
        f"Of batch {lost[0].attempt.batch} the rows of {names} are gone from {lost[0].sink}, and {why}.",
        data_now=DATA_NOW,
        remedy="Write the missing rows by hand from the offsets of the batch.",
    )
