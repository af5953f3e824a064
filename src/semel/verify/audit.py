"""What went in, what Spark planned and what was decided, held against what readers saw. Pure.

Each rule is one function that adds what it finds. Which rules apply to which sink is said first (`unchecked`), so that
a rule that was not applied is never taken for one that held. Nothing here rests on what a sink says of itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from semel.protocol.invariants import nothing_duplicated, nothing_early, nothing_lost, nothing_torn
from semel.verify.anomalies import NAMES, OF_BATCHES, Anomaly, Findings, json_key
from semel.verify.claims import not_proven, proven, reasons_for_doubt
from semel.verify.history import NO_BATCH, BatchSeen, History, Sights
from semel.verify.looks import Played, Wanted, lags, play

Verdict = bool | Literal["unknown"]

#: The time of a decision is that of its file, which the kernel takes from a clock that ticks every few milliseconds.
CLOCK_S = 0.010


@dataclass(frozen=True)
class Audit:
    """The verdict and all that it rests on.

    `counts` are by JSON key and complete; `anomalies` has only the first of each kind and sink. `compared` is
    the number of rows times the number of sinks that could be read. `seen` says per sink when each batch first showed.
    """

    verdict: Verdict
    counts: Mapping[str, int]
    compared: int
    batches: int
    proven: Sequence[str] = ()
    not_proven: Sequence[str] = ()
    reasons: Sequence[str] = ()
    anomalies: Sequence[Anomaly] = ()
    strangers: Sequence[str] = ()
    by_sink: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Sink -> kind -> why it was not looked for there.
    unchecked: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seen: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def audit(history: History) -> Audit:
    """Compare everything; say what was found, what that proves, and what it does not."""
    found = Findings()
    skipped = unchecked(history)
    batch_of = _batch_of_all(history)
    sinks = [_audit_sink(history, sights, batch_of, skipped[sights.sink], found) for sights in _readable(history)]
    if history.batch_of and history.guarantee == "exactly-once":
        _find_split(history, sinks, found)
    strangers = _strangers(history)
    reasons = [*reasons_for_doubt(history), *_reasons_of_rows(history, sinks, strangers)]
    verdict: Verdict = False if found.kept else "unknown" if reasons else True
    numbers = {batch for batch in batch_of if batch != NO_BATCH}
    return Audit(
        verdict=verdict,
        counts={json_key(kind): found.count(kind) for kind in NAMES},
        compared=history.rows * len(sinks),
        batches=len(numbers) or sum(1 for b in history.batches.values() if b.decided_s or b.checkpointed),
        proven=proven(history, found, skipped, len(numbers)),
        not_proven=not_proven(history, skipped),
        reasons=reasons,
        anomalies=tuple(found.kept),
        strangers=strangers,
        by_sink={s.sink: {kind: found.count(kind, s.sink) for kind in NAMES} for s in history.sights},
        unchecked=skipped,
        seen={sink.played.sink: sink.played.seen for sink in sinks},
    )


# What is looked for ---------------------------------------------------------------------------------------------------


def unchecked(history: History) -> dict[str, dict[str, str]]:
    """For each sink the kinds of anomalies that are not looked for, with the reason."""
    return {s.sink: _unchecked_in(history, s) for s in history.sights}


def _unchecked_in(history: History, sights: Sights) -> dict[str, str]:
    if sights.error:
        return dict.fromkeys(NAMES, f"the sink could not be read at the end: {sights.error}")
    why: dict[str, str] = {}
    if history.guarantee != "exactly-once":
        why |= dict.fromkeys(OF_BATCHES, f"under {history.guarantee} no decision makes a batch visible at once")
    elif not history.batch_of:
        unknown = history.why_no_batches or "nobody can tell which batch a row belongs to"
        why |= dict.fromkeys(OF_BATCHES, unknown)
    elif not history.batches:
        why["early"] = "no decision could be read"
    if history.broken:
        why["orphan"] = "the run broke off, so something may be under way"
    if len(_readable(history)) < 2:
        why.setdefault("split", "it takes two sinks that can be read")
    if not sights.in_order:
        why["reordered"] = "the store keeps no order that a reader could rely on"
    elif history.key_of is None:
        why["reordered"] = "the rows have no key whose order is to be kept"
    return why


def _readable(history: History) -> list[Sights]:
    return [s for s in history.sights if not s.error]


def _batch_of_all(history: History) -> array[int]:
    """The batch of every row. Rows that were fed after the last plan was read have none."""
    known = array("i", history.batch_of[: history.rows])
    return known + array("i", [NO_BATCH]) * (history.rows - len(known))


# One sink -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sink:
    """What is kept of a sink once its own rules were applied: what the others are compared with."""

    sights: Sights
    played: Played
    sizes: Mapping[int, int]
    #: Batch -> how many of its rows are there at the end.
    visible: Mapping[int, int]
    rows_wanted: int


def _audit_sink(
    history: History, sights: Sights, batch_of: Sequence[int], skipped: Mapping[str, str], found: Findings
) -> _Sink:
    copies = array("i", (history.expected(number, sights.sink) for number in range(history.rows)))
    wanted = Wanted.of(copies, batch_of)
    played = play(sights, wanted)
    sink = _Sink(sights, played, wanted.sizes, wanted.visible(sights.rows), wanted.rows)
    _find_lost(history, sink, wanted, found)
    _find_duplicated(history, sink, wanted, found)
    if "torn" not in skipped:
        _find_torn(history, sink, batch_of, found)
    if "early" not in skipped:
        _find_early(history, sink, found)
    if "reordered" not in skipped:
        _find_reordered(history, sights, found)
    if "orphan" not in skipped:
        found.add_all("orphan", sights.sink, sights.left)
    return sink


def _is_over(history: History, batch: int) -> bool:
    """Whether the last look must show the batch. Where a run broke off, what was under way may still come."""
    return not history.broken or history.batches.get(batch, BatchSeen(batch)).checkpointed


def _find_lost(history: History, sink: _Sink, wanted: Wanted, found: Findings) -> None:
    rows, vanished = sink.sights.rows, sink.played.vanished
    for number, n in enumerate(wanted.copies):
        have = rows.get(number, 0)
        if have < n and _is_over(history, wanted.batch_of[number]):
            [missing] = nothing_lost(Counter({number: n}), Counter({number: have}))
            at_s = vanished.get(number, 0.0)
            how = f"; it was visible and vanished by {_clock(history, at_s)}" if at_s else ""
            found.add("lost", sink.sights.sink, f"row {missing}{_in_batch(wanted, number)}{how}", at_s)


def _find_duplicated(history: History, sink: _Sink, wanted: Wanted, found: Findings) -> None:
    """At the end, or at any look: a reader who acts on what he sees has acted twice by the time one copy is gone."""
    rows, earlier = sink.sights.rows, sink.played.too_often
    for number, n in enumerate(wanted.copies):
        have = rows.get(number, 0)
        if have > n:
            [extra] = nothing_duplicated(Counter({number: n}), Counter({number: have}))
            found.add("duplicated", sink.sights.sink, f"row {extra}{_in_batch(wanted, number)}")
        elif number in earlier:
            seen, at_s = earlier[number]
            evidence = f"row {number} was visible {seen} times at {_clock(history, at_s)}, {have} time(s) at the end"
            found.add("duplicated", sink.sights.sink, evidence + _in_batch(wanted, number), at_s)


def _find_torn(history: History, sink: _Sink, batch_of: Sequence[int], found: Findings) -> None:
    """Each batch once: by a look that showed a part of it, by the last look, or by its place between other batches."""
    torn: dict[int, tuple[str, float]] = {}
    for batch, (n, at_s) in sink.played.in_part.items():
        for part in nothing_torn([(batch, sink.sizes[batch], n)]):
            torn[batch] = f"{part} at {_clock(history, at_s)}", at_s
    for batch, n in sink.visible.items():
        if batch != NO_BATCH and _is_over(history, batch):
            for part in nothing_torn([(batch, sink.sizes[batch], n)]):
                torn.setdefault(batch, (f"{part} at the end", 0.0))
    for partition, numbers in sink.sights.in_order.items():
        newest = NO_BATCH
        for number in _first_of_each(numbers, history.rows):
            batch = batch_of[number]
            if NO_BATCH < batch < newest:
                after = f"batch {batch}: row {number} comes after rows of batch {newest} in partition {partition}"
                torn.setdefault(batch, (after, 0.0))
            newest = max(newest, batch)
    for batch in sorted(torn):
        found.add("torn", sink.sights.sink, *torn[batch])


def _find_early(history: History, sink: _Sink, found: Findings) -> None:
    """A batch that Spark has checkpointed was decided: if the decision is not known, it was not read in time."""
    seen, name = sink.played.seen, sink.sights.sink
    visible = {batch for batch, n in sink.visible.items() if n and batch != NO_BATCH} | set(seen)
    known = {number for number, batch in history.batches.items() if batch.decided_s or batch.checkpointed}
    found.add_all("early", name, nothing_early(visible, known))
    for number in sorted(seen):
        decided_s = history.batches.get(number, BatchSeen(number)).decided_s
        if seen[number] + CLOCK_S < decided_s:
            times = f"visible at {_clock(history, seen[number])} and decided at {_clock(history, decided_s)}"
            found.add("early", name, f"batch {number} was {times}", seen[number])


def _find_reordered(history: History, sights: Sights, found: Findings) -> None:
    """Per partition the first copy of each row counts: what comes again is duplicated, not out of order."""
    if history.key_of is None:
        return
    for partition, numbers in sights.in_order.items():
        newest: dict[str, int] = {}
        for number in _first_of_each(numbers, history.rows):
            key = history.key_of(number)
            if number < newest.get(key, NO_BATCH):
                after = f"row {number} comes after row {newest[key]}, both of key {key}, in partition {partition}"
                found.add("reordered", sights.sink, after)
            else:
                newest[key] = number


def _first_of_each(numbers: Sequence[int], rows: int) -> list[int]:
    met = bytearray(rows)
    first = []
    for number in numbers:
        if 0 <= number < rows and not met[number]:
            met[number] = 1
            first.append(number)
    return first


# All sinks ------------------------------------------------------------------------------------------------------------


def _find_split(history: History, sinks: Sequence[_Sink], found: Findings) -> None:
    """Each batch and sink that lacks it once: during the run by the looks, at the end by what is there."""
    for sink in sinks:
        others = [other for other in sinks if other is not sink]
        behind = lags(sink.played, sink.sizes, [o.played for o in others]) if sink.sights.snapshots else ()
        told = set()
        for lag in behind:
            told.add(lag.batch)
            evidence = (
                f"{lag.other} showed batch {lag.later_batch} at {_clock(history, lag.other_s)}, "
                f"and this sink had nothing of batch {lag.batch} at {_clock(history, lag.looked_s)}"
            )
            found.add("split", sink.sights.sink, evidence, lag.looked_s)
        for batch, n in sink.sizes.items():
            if batch == NO_BATCH or batch in told or not n or sink.visible[batch] or not _is_over(history, batch):
                continue
            whole = [o.sights.sink for o in others if o.sizes[batch] and o.visible[batch] == o.sizes[batch]]
            if whole:
                found.add("split", sink.sights.sink, f"batch {batch} is whole in {', '.join(whole)} and absent here")


def _strangers(history: History) -> list[str]:
    """Rows that nobody fed, in words."""
    numbered = [
        f"{s.sink}: row {number} was not fed"
        for s in history.sights
        for number in s.rows
        if not 0 <= number < history.rows
    ]
    return [f"{s.sink}: {words}" for s in history.sights for words in s.strangers] + numbered


def _reasons_of_rows(history: History, sinks: Sequence[_Sink], strangers: Sequence[str]) -> list[str]:
    reasons = []
    if strangers:
        reasons.append(f"{len(strangers)} row(s) that nobody fed are there, the first is {strangers[0]}.")
    if history.rows and sinks and not any(sink.rows_wanted for sink in sinks):
        reasons.append("The workload expects no row in any sink, so nothing was compared.")
    unread = sum(sink.visible.get(NO_BATCH, 0) for sink in sinks) if history.batch_of else 0
    if unread:
        reasons.append(f"{unread} row(s) are visible that no batch of the checkpoint has read.")
    return reasons


def _in_batch(wanted: Wanted, number: int) -> str:
    batch = wanted.batch_of[number]
    return "" if batch == NO_BATCH else f" (batch {batch})"


def _clock(history: History, at_s: float) -> str:
    """Seconds since the run began."""
    return f"{at_s - history.began_s:.3f} s"
