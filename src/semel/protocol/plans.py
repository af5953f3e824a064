"""What Spark planned for a batch, and what follows when the checkpoint says something else than the decision.

Spark closes and renames the files of its checkpoint and never syncs them; a decision is synced. So after a power loss,
or in a copy of a checkpoint that was taken while it was in use, the plan of a decided batch may be missing, and Spark
would plan the batch anew, over other rows. They would be in no sink: the batch is decided, so nobody writes it again.
That is why a decision carries the plan that it was taken for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

#: Every tenth list of a file source holds all before it, and its name ends so.
COMPACTED = ".compact"


@dataclass(frozen=True)
class PlannedFile:
    """A file of the checkpoint. Without `content` it was too large to be carried, and cannot be restored."""

    path: str
    digest: str
    content: str | None = None


@dataclass(frozen=True)
class Plan:
    """What Spark has written down of a batch before it ran.

    `files` are those that say which rows the batch has: `offsets/N`, and what its sources keep of it in logs of their
    own. `before` is what Spark had written of the batch before, `commits/N-1`: a batch runs only when that is there.
    """

    files: tuple[PlannedFile, ...]
    before: tuple[PlannedFile, ...] = ()

    @property
    def digest(self) -> str:
        """The same for the same rows."""
        return digest_of("\n".join(f"{file.path} {file.digest}" for file in self.files).encode())


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


# What a start finds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanFacts:
    """What is known of the plan of one decided batch.

    `missing` and `different` are files of the decided plan, as they are in the checkpoint now. `written_from_it` says
    what proves that somebody has gone on with the plan that is there; empty when nothing does. `under_way` is set where
    Spark has planned already and handed over the rows, so that it is too late to change what it reads. Then
    `in_hand_differs` says that these are rows of another plan, whatever the checkpoint says: an older driver may have
    put the plan back after Spark had planned anew.
    """

    plan: Plan | None
    missing: Collection[str] = ()
    different: Collection[str] = ()
    written_from_it: str = ""
    under_way: bool = False
    in_hand_differs: bool = False


class PlanAction(Enum):
    GO_ON = "the checkpoint says what was decided"
    RESTORE = "write the missing files as they were, before Spark plans anything"
    PUT_BACK = "write the decided plan over another one that nobody has used"
    RESTART = "put the decided plan back and stop: Spark has the rows of another one in its hands"
    REFUSE = "stop and change nothing"


def resolve_plan(facts: PlanFacts) -> PlanAction:
    """What to do about the plan of a batch that is decided. What cannot be restored is never guessed."""
    if not (facts.missing or facts.different or facts.in_hand_differs):
        return PlanAction.GO_ON
    # A release before 0.2 recorded no plan. Then nothing can be compared, and what is missing cannot be restored.
    if facts.plan is None or facts.written_from_it or not _carried(facts.plan, {*facts.missing, *facts.different}):
        return PlanAction.REFUSE
    if facts.under_way:
        return PlanAction.RESTART
    return PlanAction.PUT_BACK if facts.different else PlanAction.RESTORE


def _carried(plan: Plan, paths: Iterable[str]) -> bool:
    contents = {file.path: file.content for file in (*plan.files, *plan.before)}
    return all(contents[path] is not None for path in paths)


def what_is_read(plan: Plan, *, is_over: bool, is_replanned: bool = False) -> Plan:
    """The part of a decided plan that Spark still reads. Of a batch that is over it is the offsets alone.

    Where Spark has planned such a batch anew, what its sources keep of it is another plan's as well.
    """
    if is_over and not is_replanned:
        return Plan(tuple(f for f in plan.files if f.path.startswith("offsets")))
    return plan


def compare(plan: Plan, found: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """The files of a decided plan that are missing, and those that say something else. `found`: path -> digest."""
    files = (*plan.files, *plan.before)
    missing = [file.path for file in files if found.get(file.path) is None]
    different = [file.path for file in files if found.get(file.path) not in (None, file.digest)]
    return missing, different


def is_of_another_plan(marker: str, plan: str) -> bool:
    """Whether a marker of a batch proves rows of another plan. Each is a digest, or "" where none is said."""
    return bool(marker and plan) and marker != plan


def is_strange(
    marker: tuple[int, int] | None, decided: Collection[tuple[int, int]], plan: str = "", plans: Collection[str] = ()
) -> bool:
    """Whether a marker of a batch proves that somebody decided it for other rows than its journal says.

    Where both say for which plan, by its digest, that tells: drivers on two copies of a checkpoint count their attempts
    alike. Otherwise the attempts do, each given as its number and its incarnation. Of stores that keep neither, nothing
    follows.
    """
    if plan and plans:
        return plan not in plans
    return marker is not None and marker not in decided


def must_start_again(under_way: int, newest_decided: int, *, was_amiss: bool) -> bool:
    """Whether Spark has read a checkpoint that did not say what was decided. It runs the batch `under_way` already.

    `was_amiss` says that something had to be put back. A newer decision says that another start has put it back.
    """
    return was_amiss or newest_decided > under_way


# Lists of files that were read --------------------------------------------------------------------------------------


def lists_to_put_back(missing: Iterable[str], plans: Iterable[Plan]) -> tuple[list[PlannedFile], set[str]]:
    """Files of decided plans that stand for the missing lists, and those lists that no decision has.

    `missing` are paths of lists, `plans` those of batches that are over, newest first: what is compacted is in the
    newer ones, and makes the older lists unneeded.
    """
    found: list[PlannedFile] = []
    left = set(missing)
    for plan in plans:
        for file in reversed(plan.files):
            if file.content is not None and file.path.removesuffix(COMPACTED) in left:
                found.append(file)
                left -= _held_by(file.path, left)
        if not left:
            break
    return found, left


def _held_by(path: str, lists: Iterable[str]) -> set[str]:
    """The lists that this file stands for: itself, and all before it where it is a compacted one."""
    folder, _, name = path.removesuffix(COMPACTED).rpartition("/")
    if not path.endswith(COMPACTED):
        return {path}
    return {one for one in lists if one.rpartition("/")[0] == folder and int(one.rpartition("/")[2]) <= int(name)}


# Which batch comes next ----------------------------------------------------------------------------------------------


def next_batch_of(newest_done: int, newest_planned: int) -> int:
    """The first batch that Spark has not done, -1 standing for none that is done or planned.

    As Spark takes it: a batch that is planned implies that those before it are done, whatever `commits` says.
    """
    return max(newest_done + 1, newest_planned, 0)


def undecided_gap(next_batch: int, decided: Collection[int]) -> int | None:
    """A batch that the log does not know although it knows newer ones, or None.

    Spark decides nothing out of turn, so what lies between the checkpoint and the newest decision is all decided; where
    it is not, the log or the checkpoint has lost it.
    """
    newest = max(decided, default=-1)
    return next((batch for batch in range(next_batch, newest) if batch not in decided), None)


def first_batch(next_batch: int, decided: Collection[int]) -> int:
    """The first batch that Spark hands us, once the checkpoint says what was decided. There must be no gap.

    In a copy that is older than the log, batches behind `next_batch` are decided: all but the newest of them are done,
    because Spark begins none before that.
    """
    return max([next_batch, *decided])


def newest_state(first: int, *, is_decided: bool) -> int:
    """The newest version of the state that a decision rests on. `first` is the first batch that Spark hands us.

    Batch N makes version N+1 out of version N. While it is not decided it will run again, and make that version again.
    """
    return first + 1 if is_decided else first


def is_read_at_start(batch: int, next_batch: int, *, is_planned: bool) -> bool:
    """Whether Spark reads the offsets of a batch when it starts: those of the newest planned one and the one before.

    Older ones it may have purged. `is_planned` says that it has planned `next_batch`, and that this plan will stay:
    where the plan before it is missing, or another one, it may be dropped; see `plan_to_drop`.
    """
    return batch >= next_batch - (1 if is_planned else 2)


def first_to_put_back(next_batch: int, newest_planned: int, decided: Collection[int]) -> int:
    """The first batch whose offsets are put back where they are missing, although Spark reads those of the last two.

    A start may die between any two files that it puts back, and Spark, which knows nothing of it, does not even start
    when the offsets before the newest ones are missing. So nothing may be left out behind those that are there; but
    where the log has forgotten some of these batches, that cannot be had.
    """
    last_two = next_batch - 2
    missing = range(newest_planned + 1, last_two)
    return newest_planned + 1 if missing and all(batch in decided for batch in missing) else last_two


# Who has gone on from a plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behind:
    """What there is behind the plan of a batch, in the checkpoint and in the log.

    `newest_planned` and `newest_done` are the newest batches of which Spark has written the plan and the end, -1 where
    there is none. Of the batches in `decided` those in `as_decided` have the plan in the checkpoint that they were
    decided for, or nobody can say; those in `begun` were begun at-most-once.
    """

    newest_planned: int = -1
    newest_done: int = -1
    decided: Collection[int] = ()
    as_decided: Collection[int] = ()
    begun: Collection[int] = ()


def gone_on_from(batch: int, behind: Behind) -> str:
    """What proves that rows may have been written from another plan of a decided batch; empty when nothing does.

    A plan is no row. Spark plans a batch when the one before is done, and it writes that a batch is done when semel
    returns, which semel does for the rows of the decided plan only. So the end of a decided batch is that of its
    decision, whatever plan lies there now: Spark plans a batch anew whose end is there, where it has lost the offsets.
    What no decision explains is the end of a batch that is not decided, and the plan of one behind such a batch. And a
    batch that is decided for the plan that is there may have been decided behind the other one.
    """
    newest = batch
    while newest + 1 in behind.decided:
        newest += 1
    if behind.newest_done > newest:
        return f"commits/{behind.newest_done} is there"
    if behind.newest_planned > newest + 1:
        return f"offsets/{behind.newest_planned} is there"
    begun = next((f"batch {n} was begun at-most-once" for n in sorted(behind.begun) if n > batch), "")
    return begun or next((f"offsets/{n} is there" for n in sorted(behind.as_decided) if n > batch), "")


def is_behind(batch: int, first: int) -> bool:
    """Whether Spark runs a batch before the `first` that a start has settled: the checkpoint has lost plans since then.

    That batch is over, and its journal may be forgotten: nobody could say any more that it must not be written again.
    """
    return batch < first


def begins_elsewhere(decided: str, found: str | None, in_hand: str | None) -> bool:
    """Whether a query would begin its first batch elsewhere than the decided batch before that ends.

    All three are digests of the offsets of that batch: as it was decided, as the checkpoint has it, as Spark has read
    it; None where nothing is known. An older start may have put the plan back after Spark had read another one.
    """
    return found not in (None, decided) or in_hand not in (None, decided)


def plan_to_drop(batch: int, behind: Behind) -> int | None:
    """A plan to drop before the decided one of `batch` is put back: that of the next batch, if nobody has decided it.

    It was made behind another plan, so it begins elsewhere, and may even end before it begins. No row was written from
    it, and Spark plans the batch anew.
    """
    following = batch + 1
    is_open = following not in behind.decided and following not in behind.begun
    return following if is_open and behind.newest_planned == following and behind.newest_done <= batch else None
