"""What a run proves and what it does not, in sentences with the numbers behind them. Pure.

A sentence about a property is among the proven ones only if it was looked for and nothing was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from semel.verify.anomalies import Findings
from semel.verify.history import History, Sights

#: Sink -> kind -> why it was not looked for.
Unchecked = Mapping[str, Mapping[str, str]]

ALWAYS_OPEN = (
    "Other faults than these, other orders of events and other input: a run is a sample, and another seed another one."
)
NO_POWER_CUTS = "Power cuts and disks that lose what they have synced: processes were killed, the machine was not."
POWER_CUTS = (
    "Disks that lose what they have synced, and what the sinks' own disks lose: the power was that of the checkpoint's."
)


def reasons_for_doubt(history: History) -> list[str]:
    """Why the data are not known to be right, even if nothing wrong was found."""
    reasons = [f"The run did not reach its end: {history.broken}"] if history.broken else []
    reasons += [f"{s.sink} could not be read at the end: {s.error}" for s in history.sights if s.error]
    if not history.sights:
        reasons.append("No sink was read.")
    if not history.rows:
        reasons.append("No row was fed, so nothing was compared.")
    if history.rows < history.rows_wanted:
        reasons.append(f"{history.rows:,} rows were fed, and {history.rows_wanted:,} were asked for.")
    if history.kills < history.kills_wanted:
        reasons.append(f"There were {history.kills} kills, and {history.kills_wanted} were asked for.")
    reasons += [
        f"{s.sink} was never looked at while the pipeline ran."
        for s in history.sights
        if len(s.looks) <= s.last_looks and not s.error
    ]
    if history.faults.get("power") and not history.power_cuts:
        reasons.append("By none of the power cuts was anything lost, so they show nothing.")
    return reasons + list(_missing_decisions(history))


def _missing_decisions(history: History) -> Iterator[str]:
    if history.guarantee != "exactly-once" or not history.batch_of:
        return
    missing = [b.number for b in history.batches.values() if b.checkpointed and not b.decided_s]
    if missing:
        yield f"Of {len(missing)} checkpointed batch(es) no decision was read, the first is batch {min(missing)}."
    if not history.batches:
        yield "No batch was found in the checkpoint."


# What was proven ------------------------------------------------------------------------------------------------------


def proven(history: History, found: Findings, skipped: Unchecked, batches: int) -> list[str]:
    """One sentence per property that held, sink by sink, and what it held against. A run that broke off proves none."""
    if history.broken:
        return []
    sentences = [s for sights in history.sights for s in _proven_of(history, sights, found, skipped, batches)]
    if skipped and not any("split" in kinds for kinds in skipped.values()) and not found.count("split"):
        sentences.append(
            f"No sink lacked one of {batches:,} batches that was in another at the end, or an earlier one than another "
            "had shown before."
        )
    faults = ", ".join(f"{kind} {n}" for kind, n in sorted(history.faults.items()))
    if sentences and (history.kills or faults):
        sentences.append(f"This was so with {history.kills} kills; faults: {faults or 'none else'}.")
    if sentences and history.power_cuts:
        sentences.append(f"Something was lost by {history.power_cuts} of {history.faults['power']} power cuts.")
    return sentences


def _proven_of(history: History, sights: Sights, found: Findings, skipped: Unchecked, batches: int) -> Iterator[str]:
    def held(*kinds: str) -> bool:
        return not any(kind in skipped[sights.sink] or found.count(kind, sights.sink) for kind in kinds)

    sink, looks = sights.sink, f"{len(sights.looks):,} looks"
    if history.rows and held("lost", "duplicated"):
        rows = f"each of {history.rows:,} rows"
        yield f"{sink}: {rows} is there as often as expected, and was there too often at none of {looks}."
    if batches and held("torn"):
        when = f"at each of {looks} and at the end" if sights.snapshots else "at the end"
        yield f"{sink}: each of {batches:,} batches was there whole or not at all {when}."
    if batches and held("early"):
        decided = sum(1 for batch in history.batches.values() if batch.decided_s)
        yield f"{sink}: none of {decided:,} decided batches was visible before its decision."
    if history.rows and held("reordered"):
        yield f"{sink}: the rows of each key are in order in each of {len(sights.in_order)} partitions."
    if held("orphan"):
        yield f"{sink}: nothing open, prepared or staged is left."


# What was not ---------------------------------------------------------------------------------------------------------


def not_proven(history: History, skipped: Unchecked) -> list[str]:
    """What was not looked for, with the reason; then what no run of this kind can show."""
    sinks_of: dict[tuple[str, str], list[str]] = {}
    for sink, kinds in skipped.items():
        for why in dict.fromkeys(kinds.values()):
            named = " or ".join(kind for kind in kinds if kinds[kind] == why)
            sinks_of.setdefault((named, why), []).append(sink)
    sentences = [f"{', '.join(sinks)}: whether anything is {named}; {why}." for (named, why), sinks in sinks_of.items()]
    sentences += [s for sights in history.sights for s in _open_of(sights, skipped)]
    return [*sentences, ALWAYS_OPEN, POWER_CUTS if history.power_cuts else NO_POWER_CUTS]


def _open_of(sights: Sights, skipped: Unchecked) -> Iterator[str]:
    if sights.error:
        return
    if not sights.snapshots and "torn" not in skipped[sights.sink]:
        why = "partitions are read" if sights.in_order else "tasks become visible"
        judged = "the order in each partition and by the end" if sights.in_order else "the end"
        yield (
            f"{sights.sink}: that a reader never meets a part of a batch. Its {why} one by one, so this was judged by "
            f"{judged}."
        )
    ends = [look.ended_s for look in sights.looks]
    if len(ends) > 1:
        longest = max(after - before for before, after in pairwise(ends))
        missed = f"; {sights.misses:,} looks failed because the store was away" if sights.misses else ""
        apart = f"which were at most {longest:.1f} s apart{missed}"
        yield f"{sights.sink}: what was visible only between two looks, {apart}."
