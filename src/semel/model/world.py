"""A state of the world, as nested tuples of small numbers and short texts: hashable, comparable, compact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

KINDS = ("prepared", "ledger", "idempotent")
SINKS_MAX = 3
BATCHES_MAX = 4
TASKS_MAX = 2
FAULTS_MAX = 3

#: What the adversary has left to spend, in the order of `World.left`.
Fault = Literal["crashes", "zombies", "lost", "expiries", "restarts", "retries", "doubts", "away", "forgets", "strays"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

#: (sink, key, batch, attempt, incarnation, branches, mends)
CommittableCode: TypeAlias = tuple[int, str, int, int, int, tuple[int, ...], int]
#: (kind, incarnation, committables, plan); its attempt is the number of its slot.
RecordCode: TypeAlias = tuple[int, int, tuple[CommittableCode, ...], int]
JournalCode: TypeAlias = tuple[RecordCode, ...]
#: The slots of a batch as they lie in the log; a pruned one, or one that was never created, is empty.
Slots: TypeAlias = tuple[RecordCode | tuple[()], ...]
#: (state, attempt, prepared keys, pending keys, answers)
WorkCode: TypeAlias = tuple[str, int, tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]
#: What happened: a verb that `trace` puts into words, and its arguments.
Label: TypeAlias = tuple[str | int, ...]

ABORTED, DECIDED, MENDS, STARTED = range(4)


@dataclass(frozen=True)
class Bounds:
    """How large the world is and how often each thing may go wrong in it."""

    sinks: tuple[str, ...] = ("prepared", "ledger")
    batches: int = 2
    tasks: int = 1
    crashes: int = 1
    zombies: int = 1
    lost: int = 1
    expiries: int = 1
    restarts: int = 1
    retries: int = 0
    doubts: int = 0
    #: A store is away when a driver lets it prepare.
    away: int = 0
    #: The checkpoint loses files that Spark wrote: its machine lost power, or it is a copy taken a while ago.
    forgets: int = 0
    #: Somebody runs a batch past us, without semel or under a weaker guarantee.
    strays: int = 0
    #: Drivers may be started by Spark in the middle of a batch, too (`semel.sink`).
    drop_in: bool = False
    #: The checkpoint may come from a run at-most-once that began batch 0.
    weaker_before: bool = False

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.sinks if kind not in KINDS]
        if unknown or not 1 <= len(self.sinks) <= SINKS_MAX:
            raise ValueError(f"sinks are 1 to {SINKS_MAX} of {', '.join(KINDS)}, not {', '.join(self.sinks) or 'none'}")
        limits: dict[str, tuple[int, int]] = {"batches": (1, BATCHES_MAX), "tasks": (1, TASKS_MAX)}
        limits |= dict.fromkeys(FAULTS, (0, FAULTS_MAX))
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {low} to {high}, not {getattr(self, name)}")

    @property
    def claims_max(self) -> int:
        """More starts than this are never needed.

        Each fault costs one. A second driver may stop the newest as well, and where Spark has planned before we start,
        what it forgot costs another.
        """
        faults: int = sum(getattr(self, name) for name in FAULTS)
        return 2 + faults + self.zombies + self.weaker_before + self.forgets * self.drop_in


class Store(NamedTuple):
    """What a sink's store holds.

    `branches` are staged or prepared, invisible. `visible` counts the rows that a reader sees, by batch and task.
    `marks` prove what is visible: names of branches in a store that commits task by task, numbers of batches elsewhere.
    `held` is the transaction that a driver holds open in a ledger store: (incarnation, batch, attempt), or nothing.
    """

    kind: str
    fence: int
    branches: tuple[int, ...]
    visible: tuple[int, ...]
    marks: tuple[int, ...]
    held: tuple[int, ...]


class Driver(NamedTuple):
    """What a driver has in its memory, and where it is.

    `at` names its next step and `k` counts within it. `journal` is what it read of the batch, which may be outdated;
    `closed` is the journal with the slot that its start closed, by which it sweeps,
    and `closed_next` that of the batch behind it, where something of that is staged.
    `forward` is set while a start commits a batch that it found decided: there are no rows to write then.
    A driver that has not claimed yet is incarnation 0. `newest_mark` is the newest batch that a store has marked, plus
    1.
    """

    incarnation: int
    at: str
    batch: int
    k: int = 0
    forward: bool = False
    journal: JournalCode = ()
    closed: JournalCode = ()
    closed_next: JournalCode = ()
    work: WorkCode | tuple[()] = ()
    parts: tuple[tuple[int, int], ...] = ()
    proposal: tuple[CommittableCode, ...] = ()
    listing: tuple[tuple[int, ...], ...] = ()
    newest_mark: int = 0
    #: Where plans can be forgotten: the plan whose rows Spark has handed over, and the batch that it would run next.
    plan: int = 0
    next: int = 0
    #: The plan of the batch before, behind which Spark goes on, and the batch that it ran before anybody claimed.
    start: int = 0
    under: int = 0
    #: It has put back a plan although Spark has the rows of another in its hands.
    amiss: bool = False


class World(NamedTuple):
    """Everything.

    `plans` are those in the checkpoint, by batch; empty where none is ever forgotten.
    `requests` were sent and have not arrived. `asked` says that a person was asked, so that nobody starts by himself.
    `decided`, `broken` and `strayed` are the observer's: which batches were ever decided, and what went wrong.
    """

    claims: int
    commits: int
    plans: tuple[int, ...]
    journals: tuple[Slots, ...]
    decided: int
    stores: tuple[Store, ...]
    drivers: tuple[Driver, ...]
    requests: tuple[tuple[object, ...], ...]
    left: tuple[int, ...]
    asked: bool = False
    broken: str = ""
    #: The batch that somebody has run past us, plus 1.
    strayed: int = 0


def first_world(bounds: Bounds) -> World:
    """Nobody has claimed, nothing is written."""
    rows = (0,) * (bounds.batches * bounds.tasks)
    stores = tuple(Store(kind, 0, (), rows, (), ()) for kind in bounds.sinks)
    left = tuple(getattr(bounds, name) for name in FAULTS)
    plans = (0,) * bounds.batches if bounds.forgets else ()
    return World(0, 0, plans, ((),) * (bounds.batches + 1), 0, stores, (), (), left)


def left_of(world: World, fault: Fault) -> int:
    return world.left[FAULTS.index(fault)]


def spend(world: World, fault: Fault) -> World | None:
    """The world with one such fault less to come, or None when there is none left."""
    at = FAULTS.index(fault)
    if not world.left[at]:
        return None
    return world._replace(left=(*world.left[:at], world.left[at] - 1, *world.left[at + 1 :]))


def with_store(world: World, sink: int, store: Store) -> World:
    return world._replace(stores=(*world.stores[:sink], store, *world.stores[sink + 1 :]))


def with_driver(world: World, old: Driver, new: Driver) -> World:
    return world._replace(drivers=tuple(new if d.incarnation == old.incarnation else d for d in world.drivers))


def without_driver(world: World, driver: Driver) -> World:
    return world._replace(drivers=tuple(d for d in world.drivers if d.incarnation != driver.incarnation))


# Branches -----------------------------------------------------------------------------------------------------------


class BranchCode(NamedTuple):
    batch: int
    attempt: int
    incarnation: int
    task: int
    retry: int


def pack(batch: int, attempt: int, incarnation: int, task: int, retry: int) -> int:
    """A branch of some sink as one number."""
    if attempt >= 32 or incarnation >= 32:
        raise ValueError(f"attempt {attempt} of incarnation {incarnation} is more than the model has room for")
    return (((batch * 32 + attempt) * 32 + incarnation) * 4 + task) * 4 + retry


def unpack(branch: int) -> BranchCode:
    rest, retry = divmod(branch, 4)
    rest, task = divmod(rest, 4)
    rest, incarnation = divmod(rest, 32)
    batch, attempt = divmod(rest, 32)
    return BranchCode(batch, attempt, incarnation, task, retry)


def content(branch: int, tasks: int) -> int:
    """Which rows of the batch a branch holds. A replay numbers its tasks otherwise (SPARK-28650), so here each does."""
    code = unpack(branch)
    return (code.task + code.attempt) % tasks


# Journals -----------------------------------------------------------------------------------------------------------


def read_journal(slots: Slots) -> JournalCode:
    """What a driver reads: from the first slot up to the first empty one."""
    found: list[RecordCode] = []
    for record in slots:
        if len(record) != 4:
            break
        found.append(record)
    return tuple(found)


def create_slot(slots: Slots, slot: int, record: RecordCode) -> Slots | None:
    """The slots with the record in its place, or None when that is taken."""
    if slot < len(slots) and slots[slot]:
        return None
    padded = (*slots, *((),) * (slot + 1 - len(slots)))
    return (*padded[:slot], record, *padded[slot + 1 :])
