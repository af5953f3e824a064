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


def what_is_read(plan: Plan, *, is_over: bool) -> Plan:
    """The part of a decided plan that Spark still reads. Of a batch that is over it is the offsets alone."""
    return Plan(tuple(f for f in plan.files if f.path.startswith("offsets"))) if is_over else plan


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

    Older ones it may have purged. `is_planned` says whether it has planned `next_batch`.
    """
    return batch >= next_batch - (1 if is_planned else 2)


def gone_on_from(batch: int, next_batch: int, *, is_next_planned: bool) -> str:
    """Which file of Spark's proves that somebody has gone on with the plan that is there; empty when none does.

    `is_next_planned` says whether Spark has planned the batch behind this one.
    """
    if is_next_planned:
        return f"offsets/{batch + 1}"
    return f"commits/{batch}" if batch < next_batch else ""
