"""The checkpoint is made to say what was decided, before Spark reads it. The rule is `protocol.plans.resolve_plan`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from semel.decisions.log import DecisionLog
from semel.errors import CheckpointRolledBack, CheckpointUnusable, PlanChanged, PlanRestored
from semel.failpoints import failpoint
from semel.protocol.events import Journal
from semel.protocol.plans import (
    Plan,
    PlanAction,
    PlanFacts,
    PlannedFile,
    compare,
    digest_of,
    first_batch,
    gone_on_from,
    is_read_at_start,
    lists_to_put_back,
    must_start_again,
    resolve_plan,
    undecided_gap,
    what_is_read,
)
from semel.protocol.recovery import decided_plan, effective_committables
from semel.runtime.offsets import offsets_in, offsets_of
from semel.runtime.plans import Plans

#: So many batches before the next one are compared as well: Spark reads the plans of the last two when it starts.
LOOK_BACK_BATCHES = 2

#: Of no file is known what Spark has in its memory.
NOTHING_KNOWN: Mapping[str, str] = {}

_LOG = logging.getLogger("semel")

#: Says which markers of a batch in the sinks are not of the decision in its journal; "" when there are none.
StrangeMarks = Callable[[int, Journal], str]


def first_to_run(log: DecisionLog, next_batch: int) -> int:
    """The first batch that Spark hands us. `next_batch` is the first that the checkpoint does not know as done."""
    decided = decided_batches(log, next_batch)
    gap = undecided_gap(next_batch, decided)
    if gap is not None:
        raise CheckpointRolledBack(
            f"The decision log knows batch {max(decided)} and not batch {gap}, and the checkpoint knows batches only "
            f"up to {next_batch - 1}: what lies between is in neither.",
            data_now="every batch that was decided is visible once; this start wrote nothing",
        )
    return first_batch(next_batch, decided)


def decided_batches(log: DecisionLog, next_batch: int) -> dict[int, Journal]:
    """The journals of the newest batches that are decided."""
    journals = {batch: log.journal(batch) for batch in log.batches() if batch >= next_batch - LOOK_BACK_BATCHES}
    return {batch: j for batch, j in journals.items() if effective_committables(j) is not None}


def restore_plans(
    log: DecisionLog, plans: Plans, next_batch: int, strange_marks: StrangeMarks, under_way: int | None = None
) -> None:
    """Compare the newest decided batches with the checkpoint, oldest first, and put back what is to be put back.

    `under_way` is a batch whose rows Spark has handed over already: then nothing may be amiss.
    """
    told = [] if under_way is not None else _restore_lists(log, plans, next_batch)
    decided = decided_batches(log, next_batch)
    for batch, journal in decided.items():
        told += settle_plan(plans, batch, journal, next_batch, strange_marks, is_under_way=under_way is not None) or ()
        _keep(plans, batch, decided_plan(journal))
    if under_way is not None and must_start_again(under_way, max(decided, default=-1), was_amiss=bool(told)):
        raise restored(under_way, told)


def _restore_lists(log: DecisionLog, plans: Plans, next_batch: int) -> list[str]:
    """Put back what a file source has lost of its lists of batches that are over. Returns what was written.

    Spark reads them all when it starts, and a copy of a checkpoint may have an older `sources/` than `offsets/`. Each
    stands in the decision of its batch.
    """
    newest = decided_plan(log.journal(next_batch - 1)) if next_batch else None
    if newest is None:
        return []
    missing = plans.missing_lists(_offsets_of(newest, next_batch - 1, plans))
    if not missing:
        return []
    decided = (decided_plan(log.journal(batch)) for batch in reversed([b for b in log.batches() if b < next_batch]))
    found, left = lists_to_put_back(missing, (plan for plan in decided if plan is not None))
    written = [path for file in found for path in _put_back(plans, [file])]
    if written:
        _LOG.warning("Lists of files that were read were missing: %s put back.", ", ".join(written))
    if left:
        raise PlanChanged(
            f"Of the lists of files that were read {', '.join(sorted(left))} are missing, and no decision has them.",
            data_now="every batch that was decided is visible once, or will be; this start wrote no rows",
            remedy="Restore the folder sources from a copy of the checkpoint, then start again.",
        )
    return written


def _offsets_of(plan: Plan, batch: int, plans: Plans) -> bytes:
    decided = next((f.content for f in plan.files if f.path == offsets_of(batch)), None)
    return decided.encode() if decided is not None else plans.text(offsets_of(batch)) or b""


def _keep(plans: Plans, batch: int, plan: Plan | None) -> None:
    """A file that says what was decided may have been written a moment ago, by a Spark that has planned anew."""
    try:
        if plan is not None:
            plans.drop_wrong_checksums((*plan.files, *plan.before))
        if plans.has_planned(batch):
            plans.make_durable(batch)
    except OSError as error:
        raise CheckpointUnusable(f"The plan of batch {batch} cannot be made durable: {error}.") from error


def settle_plan(
    plans: Plans,
    batch: int,
    journal: Journal,
    next_batch: int,
    strange_marks: StrangeMarks,
    *,
    is_under_way: bool,
    in_hand: Mapping[str, str] = NOTHING_KNOWN,
) -> list[str] | None:
    """Make the checkpoint say of one decided batch what was decided. Returns what was written, None if all was well.

    `in_hand` are the digests of the files that Spark has in its memory, of those of which that is known.
    """
    plan = decided_plan(journal)
    is_over = batch < next_batch
    facts = _facts(plans, batch, plan, next_batch)
    if is_over and facts.missing and not _reads(plans, batch, next_batch):
        return None
    if plan is not None:
        facts = replace(facts, in_hand_differs=any(in_hand.get(f.path, f.digest) != f.digest for f in plan.files))
    if facts.different and not facts.written_from_it:
        facts = replace(facts, written_from_it=strange_marks(batch, journal))
    # What is written for a batch that is over is for Spark's next look back, and changes no rows of the one under way.
    action = resolve_plan(replace(facts, under_way=is_under_way and not is_over))
    if action is PlanAction.GO_ON:
        return None
    if action is PlanAction.REFUSE or plan is None:
        raise _refused(plans, batch, facts)
    wanted = {*facts.missing, *facts.different}
    written = _put_back(plans, [f for f in (*plan.files, *plan.before) if f.path in wanted])
    if written:
        kind = "said something else than was decided" if facts.different else "was missing"
        _LOG.warning("Batch %s is decided, and its plan %s: %s put back.", batch, kind, ", ".join(written))
    return written


def _reads(plans: Plans, batch: int, next_batch: int) -> bool:
    return is_read_at_start(batch, next_batch, is_planned=plans.has_planned(next_batch))


def _facts(plans: Plans, batch: int, plan: Plan | None, next_batch: int) -> PlanFacts:
    offsets, is_over = offsets_of(batch), batch < next_batch
    if plan is None:
        return PlanFacts(None, missing=() if is_over or plans.has_planned(batch) else [offsets])
    looked_at = what_is_read(plan, is_over=is_over)
    paths = [file.path for file in (*looked_at.files, *looked_at.before)]
    missing, different = compare(looked_at, {path: _digest(plans.text(path)) for path in paths})
    return PlanFacts(plan, missing, different, _written_from(plans, batch, next_batch) if different else "")


def _digest(content: bytes | None) -> str | None:
    return None if content is None else digest_of(content)


def _written_from(plans: Plans, batch: int, next_batch: int) -> str:
    proof = gone_on_from(batch, next_batch, is_next_planned=plans.has_planned(batch + 1))
    return f"{proof} is there" if proof else ""


def _put_back(plans: Plans, files: Iterable[PlannedFile]) -> list[str]:
    """The offsets come last: once they are there, Spark takes the batch for planned."""
    written = []
    for file in sorted(files, key=lambda f: f.path.startswith("offsets/")):
        plans.put_back(file)
        written.append(file.path)
        failpoint("startup.restored")
    return written


def restored(batch: int, files: Collection[str]) -> PlanRestored:
    names = ", ".join(files)
    if names and all(file.startswith("commits/") for file in files):
        return PlanRestored(f"Batch {batch} is decided, and the checkpoint had lost {names}, which is put back.")
    put_back = f"Put back as decided: {names}" if names else "Another start has put back what was decided"
    return PlanRestored(f"Batch {batch} is decided, and Spark had planned it over other rows. {put_back}.")


def _refused(plans: Plans, batch: int, facts: PlanFacts) -> PlanChanged:
    offsets = offsets_of(batch)
    if facts.plan is None:
        return PlanChanged(
            f"Batch {batch} was decided by an older semel, which did not record its plan, and {offsets} is missing.",
            remedy=f"Restore {offsets} from a copy of the checkpoint, then start again.",
        )
    contents = {file.path: file.content for file in (*facts.plan.files, *facts.plan.before)}
    if facts.written_from_it:
        planned = (plans.text(offsets) or b"nothing").decode(errors="replace")
        return PlanChanged(
            f"Batch {batch} was decided for other rows than the checkpoint says, and somebody has gone on from there "
            f"({facts.written_from_it}). Decided: {_in_words(contents[offsets] or '')}; planned now: "
            f"{_in_words(planned)}; not as decided: {', '.join(facts.different)}.",
        )
    lost = sorted(path for path in (*facts.missing, *facts.different) if contents[path] is None)
    return PlanChanged(
        f"Batch {batch} is decided, and of its plan {', '.join(lost)} cannot be restored: it was too large for the "
        "decision to carry.",
        data_now="the batch is decided; this start wrote nothing",
        remedy=f"Restore {', '.join(lost)} from a copy of the checkpoint, then start again.",
    )


def _in_words(content: str) -> str:
    return " ".join(offsets_in(content.encode())) or content.strip()
