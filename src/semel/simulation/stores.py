"""Three stores. Each method is one request: it happens whole or not at all, and nothing of it is lost later.

PreparedStore   a task's transaction is prepared, committed and dropped for itself, and expires
LedgerStore     tasks stage rows; the driver moves them inside an open transaction, which dies with its session
FilesStore      tasks stage files; a commit renames them and then creates a manifest, which is what readers read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from semel.errors import Fenced, SinkUnavailable
from semel.ids import Branch

Rows = tuple[int, ...]
#: Called when rows have become visible: store, batch, names of branches.
Watch = Callable[[str, int, Sequence[str]], None]


class StagedGone(Exception):
    """Not all of the staged rows are there."""


@dataclass
class SimulatedStore(ABC):
    """What all have: a fence, a watch on what becomes visible, and rows that tasks have left."""

    name: str
    watch: Watch
    staged: dict[Branch, Rows] = field(default_factory=dict)
    newest_incarnation: int = 0

    def stage(self, branch: Branch, rows: Rows, now: float) -> None:  # noqa: ARG002 - not every store counts the time
        self.staged[branch] = rows

    def refuse_if_older(self, incarnation: int) -> None:
        if incarnation < self.newest_incarnation:
            raise Fenced(f"Incarnation {incarnation} is older than {self.newest_incarnation}, which {self.name} knows.")

    def fence(self, incarnation: int) -> None:
        self.refuse_if_older(incarnation)
        self.newest_incarnation = incarnation

    def drop(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self.staged.pop(branch, None)

    def leftovers(self) -> tuple[Branch, ...]:
        return tuple(sorted(self.staged))

    def restart(self) -> None:  # noqa: B027 - what is staged or prepared is on disk
        """Open transactions are lost."""

    def bury(self, driver: int) -> None:  # noqa: B027 - not every store has sessions
        """The sessions of a dead driver end."""

    def orphans(self) -> list[str]:
        """What is left that no reader will ever see."""
        return [str(branch) for branch in self.leftovers()]

    @abstractmethod
    def visible(self) -> Counter[int]: ...

    @abstractmethod
    def newest_batch(self) -> int | None:
        """The newest marker."""

    @abstractmethod
    def shown(self, batch: int) -> list[str]:
        """The branches of which a batch is visible."""


@dataclass
class PreparedStore(SimulatedStore):
    """`marks` are written in the transaction that they mark: batch -> branch -> rows."""

    marks: dict[int, dict[str, Rows]] = field(default_factory=dict)
    prepared_at: dict[Branch, float] = field(default_factory=dict)

    def stage(self, branch: Branch, rows: Rows, now: float) -> None:
        self.staged[branch] = rows
        self.prepared_at[branch] = now

    def marked(self, batch: int) -> list[str]:
        return list(self.marks.get(batch, ()))

    def commit_prepared(self, branch: Branch) -> bool:
        """False when there is no such transaction: committed before, rolled back, or dropped."""
        rows = self.staged.pop(branch, None)
        if rows is None:
            return False
        self.marks.setdefault(branch.attempt.batch, {})[str(branch)] = rows
        self.watch(self.name, branch.attempt.batch, [str(branch)])
        return True

    def mark_empty(self, batch: int) -> bool:
        """No task marks a batch without rows."""
        if self.marks.get(batch):
            return False
        self.marks[batch] = {"": ()}
        return True

    def expire(self, now: float, timeout_s: float) -> int:
        old = [branch for branch in self.staged if self.prepared_at[branch] + timeout_s <= now]
        self.drop(old)
        return len(old)

    def visible(self) -> Counter[int]:
        return Counter(row for marks in self.marks.values() for rows in marks.values() for row in rows)

    def newest_batch(self) -> int | None:
        return max(self.marks, default=None)

    def shown(self, batch: int) -> list[str]:
        return [name for name in self.marks.get(batch, ()) if name]


@dataclass
class Move:
    """An open transaction: the rows of a batch and its ledger row. The ledger row is a lock on the batch."""

    driver: int
    incarnation: int
    batch: int
    branches: tuple[Branch, ...]
    rows: Rows


@dataclass
class LedgerStore(SimulatedStore):
    ledger: dict[int, Rows] = field(default_factory=dict)
    moved: dict[int, tuple[Branch, ...]] = field(default_factory=dict)
    open: list[Move] = field(default_factory=list)

    def fence(self, incarnation: int) -> None:
        super().fence(incarnation)
        self.open = [move for move in self.open if move.incarnation >= incarnation]

    def begin_move(self, driver: int, incarnation: int, batch: int, branches: Sequence[Branch]) -> Move | None:
        """None when the batch is visible already. A session has one transaction: what it had open is lost."""
        self._take_lock(batch, incarnation)
        if batch in self.ledger:
            return None
        move = Move(driver, incarnation, batch, tuple(branches), self._rows(branches))
        self.open.append(move)
        return move

    def commit_move(self, move: Move) -> bool:
        """False when the transaction is lost."""
        if all(move is not other for other in self.open):
            return False
        self.roll_back(move)
        self._apply(move.batch, move.branches, move.rows)
        return True

    def roll_back(self, move: Move) -> None:
        self.open = [other for other in self.open if other is not move]

    def move_at_once(self, incarnation: int, batch: int, branches: Sequence[Branch]) -> bool:
        """From the staged rows, in a transaction of its own. False when the batch is visible already."""
        self._take_lock(batch, incarnation)
        if batch in self.ledger:
            return False
        self._apply(batch, branches, self._rows(branches))
        return True

    def restart(self) -> None:
        self.open.clear()

    def bury(self, driver: int) -> None:
        self.open = [move for move in self.open if move.driver != driver]

    def orphans(self) -> list[str]:
        return super().orphans() + [f"open transaction of batch {move.batch}" for move in self.open]

    def visible(self) -> Counter[int]:
        return Counter(row for rows in self.ledger.values() for row in rows)

    def newest_batch(self) -> int | None:
        return max(self.ledger, default=None)

    def shown(self, batch: int) -> list[str]:
        return [str(branch) for branch in self.moved.get(batch, ())]

    def _rows(self, branches: Sequence[Branch]) -> Rows:
        if any(branch not in self.staged for branch in branches):
            raise StagedGone(self.name)
        return tuple(row for branch in branches for row in self.staged[branch])

    def _take_lock(self, batch: int, incarnation: int) -> None:
        self.open = [move for move in self.open if move.incarnation != incarnation]
        if any(move.batch == batch for move in self.open):
            raise SinkUnavailable(f"{self.name}: batch {batch} is locked by another session.")

    def _apply(self, batch: int, branches: Sequence[Branch], rows: Rows) -> None:
        self.ledger[batch] = self.ledger.get(batch, ()) + rows
        self.moved[batch] = (*self.moved.get(batch, ()), *branches)
        self.watch(self.name, batch, [str(branch) for branch in branches])


@dataclass
class FilesStore(SimulatedStore):
    final: dict[Branch, Rows] = field(default_factory=dict)
    manifests: dict[int, tuple[Branch, ...]] = field(default_factory=dict)

    def has_manifest(self, batch: int) -> bool:
        return batch in self.manifests

    def are_there(self, branches: Sequence[Branch]) -> bool:
        return all(branch in self.staged or branch in self.final for branch in branches)

    def rename(self, branch: Branch) -> None:
        if branch in self.staged:
            self.final[branch] = self.staged.pop(branch)
        elif branch not in self.final:
            raise SinkUnavailable(f"{self.name}: no file {branch}.")

    def create_manifest(self, batch: int, branches: Sequence[Branch]) -> bool:
        if batch in self.manifests:
            return False
        self.manifests[batch] = tuple(branches)
        self.watch(self.name, batch, [str(branch) for branch in branches])
        return True

    def tidy_behind(self, batch: int, branches: Sequence[Branch]) -> None:
        """What another attempt at a committed batch has left is in no manifest, and goes."""
        self.drop(branches)
        for branch in branches:
            if branch not in self.manifests[batch]:
                self.final.pop(branch, None)

    def withdraw(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            self.final.pop(branch, None)

    def orphans(self) -> list[str]:
        named = {branch for manifest in self.manifests.values() for branch in manifest}
        return super().orphans() + [str(branch) for branch in sorted(self.final) if branch not in named]

    def visible(self) -> Counter[int]:
        named = (branch for manifest in self.manifests.values() for branch in manifest)
        return Counter(row for branch in named for row in self.final.get(branch, ()))

    def newest_batch(self) -> int | None:
        return max(self.manifests, default=None)

    def shown(self, batch: int) -> list[str]:
        return [str(branch) for branch in self.manifests.get(batch, ())]
