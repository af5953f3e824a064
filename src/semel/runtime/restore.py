"""The checkpoint is made to say what was decided, before Spark reads it. The rule is `protocol.plans.resolve_plan`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from semel.decisions.log import DecisionLog
from semel.errors import CheckpointRolledBack, CheckpointUnusable, PlanChanged, PlanRestored
from semel.failpoints import failpoint
from semel.protocol.events import Journal, Started
from semel.protocol.plans import (
    COMPACTED,
    Behind,
    Plan,
    PlanAction,
    PlanFacts,
    PlannedFile,
    compare,
    digest_of,
    first_batch,
    first_to_put_back,
    gone_on_from,
    is_read_at_start,
    lists_to_put_back,
    must_start_again,
    plan_to_drop,
    resolve_plan,
    undecided_gap,
    what_is_read,
)
from semel.protocol.recovery import decided_plan, effective_committables
from semel.runtime.offsets import offsets_in, offsets_of
from semel.runtime.plans import Plans

#: So many batches before the next one are compared as well: Spark reads the plans of the last two when it starts.
LOOK_BACK_BATCHES = 2

#: So often a checkpoint is looked at that another start puts back meanwhile.
LOOKS_MAX = 10

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
    known = known_since(log, next_batch - LOOK_BACK_BATCHES)
    return {batch: known[batch] for batch in decided_in(known)}


def known_since(log: DecisionLog, first: int) -> dict[int, Journal]:
    """The journals from this batch on."""
    return {batch: log.journal(batch) for batch in log.batches() if batch >= first}


def decided_in(journals: Mapping[int, Journal]) -> list[int]:
    return [batch for batch, journal in journals.items() if effective_committables(journal) is not None]


def is_replanned(plans: Plans, batch: int, journal: Journal) -> bool:
    """Whether the checkpoint has other offsets of a decided batch than those that it was decided for."""
    wanted, there = _offsets_decided(decided_plan(journal), batch), plans.text(offsets_of(batch))
    return wanted is not None and there is not None and digest_of(there) != wanted.digest


def _offsets_decided(plan: Plan | None, batch: int) -> PlannedFile | None:
    return next((f for f in plan.files if f.path == offsets_of(batch)), None) if plan is not None else None


def restore_plans(
    log: DecisionLog, plans: Plans, next_batch: int, strange_marks: StrangeMarks, under_way: int | None = None
) -> None:
    """Compare the newest decided batches with the checkpoint, oldest first, and put back what is to be put back.

    `under_way` is a batch whose rows Spark has handed over already: then nothing may be amiss.
    """
    told = [] if under_way is not None else _restore_lists(log, plans, next_batch)
    newest_planned = plans.newest("offsets")
    known = known_since(log, min(newest_planned + 1, next_batch - LOOK_BACK_BATCHES))
    first = first_to_put_back(next_batch, newest_planned, decided_in(known))
    decided = {batch: known[batch] for batch in decided_in(known) if batch >= first}
    seen = Seen(strange_marks, is_under_way=under_way is not None, journals=known, missing_from=newest_planned + 1)
    for batch, journal in decided.items():
        told += settle_plan(plans, batch, journal, next_batch, seen) or ()
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
    with _making_durable(batch):
        if plan is not None:
            plans.drop_wrong_checksums((*plan.files, *plan.before))
        if plans.has_planned(batch):
            plans.make_durable(batch)


def keep_what_spark_planned(plans: Plans, under_way: int) -> None:
    """The plan of the batch that Spark runs, and the one before: of two plans a power cut may take the older one.

    Then Spark does not even start, and never asks us again. Where Spark has planned both anew nothing was synced yet.
    """
    with _making_durable(under_way):
        if under_way and plans.has_planned(under_way):
            plans.make_durable(under_way)


@contextmanager
def _making_durable(batch: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointUnusable(f"The plan of batch {batch} cannot be made durable: {error}.") from error


@dataclass(frozen=True)
class Seen:
    """What a start knows besides the files of one batch.

    `in_hand` are the digests of the files that Spark has in its memory, of those of which that is known. `journals` are
    those of the batches that are decided. What is missing is put back from `missing_from` on, though Spark may not read
    it.
    """

    strange_marks: StrangeMarks
    is_under_way: bool
    in_hand: Mapping[str, str] = field(default_factory=dict)
    journals: Mapping[int, Journal] = field(default_factory=dict)
    missing_from: int | None = None


def settle_plan(plans: Plans, batch: int, journal: Journal, next_batch: int, seen: Seen) -> list[str] | None:
    """Make the checkpoint say of one decided batch what was decided. Returns what was written, None if all was well."""
    plan = decided_plan(journal)
    facts = _facts(plans, batch, journal, next_batch, seen)
    action = resolve_plan(facts)
    for _ in range(LOOKS_MAX):
        # Another start may be putting things back between our looks: only what stands still is refused.
        if action is not PlanAction.REFUSE or (again := _facts(plans, batch, journal, next_batch, seen)) == facts:
            break
        facts, action = again, resolve_plan(again)
    if action is PlanAction.GO_ON:
        return None
    if action is PlanAction.REFUSE or plan is None:
        raise _refused(plans, batch, facts)
    _drop_what_is_behind(plans, batch, plan, facts, seen)
    wanted = {*facts.missing, *facts.different}
    written = _put_back(plans, [f for f in (*plan.files, *plan.before) if f.path in wanted])
    if written:
        kind = "said something else than was decided" if facts.different else "was missing"
        _LOG.warning("Batch %s is decided, and its plan %s: %s put back.", batch, kind, ", ".join(written))
    return written


def _facts(plans: Plans, batch: int, journal: Journal, next_batch: int, seen: Seen) -> PlanFacts:
    plan, is_over = decided_plan(journal), batch < next_batch
    if plan is None:
        is_there = is_over or plans.has_planned(batch)
        return PlanFacts(None, missing=() if is_there else [offsets_of(batch)], under_way=seen.is_under_way)
    missing, different = _compared(plans, what_is_read(plan, is_over=is_over))
    if is_over and different:
        missing, different = _compared(plans, what_is_read(plan, is_over=True, is_replanned=True))
    if is_over and missing and not different and not _reads(plans, batch, next_batch, seen):
        return PlanFacts(plan)
    proof = ""
    if different:
        proof = gone_on_from(batch, _behind(plans, batch, seen)) or seen.strange_marks(batch, journal)
    return PlanFacts(
        plan,
        missing,
        different,
        proof,
        # What is written for a batch that is over is for Spark's next look back; see `must_start_again`.
        under_way=seen.is_under_way and not is_over,
        in_hand_differs=any(seen.in_hand.get(f.path, f.digest) != f.digest for f in plan.files),
    )


def _compared(plans: Plans, plan: Plan) -> tuple[list[str], list[str]]:
    return compare(plan, {file.path: _digest(plans.text(file.path)) for file in (*plan.files, *plan.before)})


def _digest(content: bytes | None) -> str | None:
    return None if content is None else digest_of(content)


def _reads(plans: Plans, batch: int, next_batch: int, seen: Seen) -> bool:
    if seen.missing_from is not None and batch >= seen.missing_from:
        return True
    before = next_batch - 1
    stays = plans.has_planned(next_batch) and plans.has_planned(before)
    stays = stays and not is_replanned(plans, before, seen.journals.get(before, ()))
    return is_read_at_start(batch, next_batch, is_planned=stays)


def _behind(plans: Plans, batch: int, seen: Seen) -> Behind:
    decided = decided_in(seen.journals)
    later = {n: seen.journals[n] for n in decided if n > batch}
    # Of a decision that carries no plan nobody can say for which it was taken.
    as_decided = [n for n, j in later.items() if plans.has_planned(n) and not is_replanned(plans, n, j)]
    begun = [n for n, j in seen.journals.items() if any(isinstance(record, Started) for record in j)]
    return Behind(plans.newest("offsets"), plans.newest("commits"), decided, as_decided, begun)


def _drop_what_is_behind(plans: Plans, batch: int, plan: Plan, facts: PlanFacts, seen: Seen) -> None:
    """What Spark has planned behind another plan than the decided one, and nobody has decided.

    It goes before the decided plan is put back: a start that dies in between finds that plan still missing.
    """
    amiss = {*facts.missing, *facts.different}
    following = plan_to_drop(batch, _behind(plans, batch, seen))
    if following is None and (batch + 1 in decided_in(seen.journals) or plans.has_planned(batch + 1)):
        return
    lists = _lists_to_drop(plans, batch, plan) if any(path.startswith("sources/") for path in amiss) else []
    # A plan without its lists would be of no use.
    is_doomed = following is not None and bool(lists or offsets_of(batch) in amiss)
    _drop(plans, batch, [offsets_of(batch + 1), *lists] if is_doomed else lists)


def drop_plan_behind(plans: Plans, batch: int, plan: Plan) -> None:
    """What a Spark that began elsewhere has planned behind this batch. Nobody has decided it."""
    _drop(plans, batch, [offsets_of(batch + 1), *_lists_to_drop(plans, batch, plan)])


def _drop(plans: Plans, batch: int, doomed: Collection[str]) -> None:
    for path in doomed:
        plans.drop(path)
    if doomed:
        _LOG.warning("Planned behind another plan of batch %s, and not decided: %s dropped.", batch, ", ".join(doomed))


def _lists_to_drop(plans: Plans, batch: int, plan: Plan) -> list[str]:
    """Lists of files behind the decided plan. They may name files of its own lists again, and leave others out."""
    decided = _offsets_of(plan, batch, plans)
    doomed = plans.lists_behind(decided)
    put_back = {file.path for file in plan.files}
    lost = [path for path in plans.missing_lists(decided, without=doomed) if not {path, path + COMPACTED} & put_back]
    if doomed and lost:
        raise PlanChanged(
            f"Batch {batch} was decided for other files than the checkpoint says. {', '.join(doomed)} must go, and "
            f"of the lists before them {', '.join(lost)} are missing.",
            data_now="every batch that was decided is visible once, or will be; this start wrote no rows",
            remedy="Restore the folder sources from a copy of the checkpoint, then start again.",
        )
    return doomed


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
