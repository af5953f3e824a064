"""How a sink uses each store: after the model of `sinks.sql_participant`, `sinks.kafka` and `sinks.files`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from semel.errors import BatchFailed
from semel.ids import Attempt, Branch, PipelineId, parse_branch
from semel.protocol.events import Committable, Outcome
from semel.simulation.line import Line
from semel.simulation.stores import FilesStore, LedgerStore, Move, PreparedStore, SimulatedStore, StagedGone
from semel.sinks.base import Capabilities, Context, Participant, Remains, Sink, StagedPart, Writer, committable_for
from semel.sinks.evidence import Evidence, Mark

S = TypeVar("S", bound=SimulatedStore)
T = TypeVar("T")


class SimulatedParticipant(Participant, Generic[S]):
    """What the three have in common. Each call to the store goes over the driver's line."""

    def __init__(self, store: S, line: Line, context: Context) -> None:
        self.store = store
        self.line = line
        self.context = context

    def ask(self, verb: str, effect: Callable[[], T], what: object = "") -> T:
        return self.line.ask(self.store.name, verb, effect, what)

    def look(self, verb: str, effect: Callable[[], T], what: object = "") -> T:
        return self.line.ask(self.store.name, verb, effect, what, changes=False)

    def fence(self) -> None:
        self.ask("fence", lambda: self.store.fence(self.context.incarnation), self.context.incarnation)

    def prepare(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        self.look("is it fenced", lambda: self.store.refuse_if_older(self.context.incarnation))
        return self._promise(attempt, parts)

    @abstractmethod
    def _promise(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]: ...

    def abort(self, branches: Iterable[Branch]) -> None:
        named = sorted(branches)
        if named:
            self.ask("abort", lambda: self.store.drop(named), named)

    def recover(self) -> Remains:
        branches = self.look("leftovers", self.store.leftovers)
        return Remains(branches, self.look("newest marker", self.store.newest_batch))

    def close(self) -> None:
        if not self.line.driver.dead:
            self.store.bury(self.line.driver.number)

    def _vanished(self, attempt: Attempt) -> BatchFailed:
        return BatchFailed(f"{self.store.name}: staged rows of batch {attempt.batch} vanished before the decision.")


class PreparedParticipant(SimulatedParticipant[PreparedStore]):
    """One committable for each task. What is gone is proven gone by the marks."""

    def _promise(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        name = self.store.name
        waiting = [p for p in parts if p.payload]
        there = self.look("prepared", self.store.leftovers)
        if any(p.branch not in there for p in waiting):
            raise self._vanished(attempt)
        promised = [committable_for(name, attempt, [p], p.payload, key=f"{name}/{p.branch.task}") for p in parts]
        if not waiting:
            promised.append(committable_for(name, attempt, [], {"mark": True}, key=f"{name}/empty"))
        return tuple(promised)

    def commit(self, committable: Committable) -> Outcome:
        batch = committable.attempt.batch
        if committable.payload.get("mark"):
            marked = self.ask("commit", lambda: self.store.mark_empty(batch), committable.key)
            return Outcome.COMMITTED if marked else Outcome.ALREADY_COMMITTED
        if not committable.payload:
            return Outcome.ALREADY_COMMITTED
        (branch,) = branches_of(committable)
        marks = self.look("marks", lambda: self.store.marked(batch), committable.key)
        if str(branch) in marks:
            return Outcome.ALREADY_COMMITTED
        if not committable.mends and self._is_a_replay(committable, marks):
            self.abort([branch])
            return Outcome.ALREADY_COMMITTED
        if self.ask("commit", lambda: self.store.commit_prepared(branch), committable.key):
            return Outcome.COMMITTED
        return self._settle(str(branch), batch)

    def _settle(self, name: str, batch: int) -> Outcome:
        """There is no such transaction: it may have been committed between the two questions."""
        marks = self.look("marks", lambda: self.store.marked(batch))
        return Outcome.ALREADY_COMMITTED if name in marks else Outcome.GONE

    def _is_a_replay(self, committable: Committable, marks: Iterable[str]) -> bool:
        """Whether an earlier attempt at this batch is visible."""
        earlier = (branch.attempt.attempt for mark in marks if (branch := parse_branch(mark)))
        return "" in marks or any(number < committable.attempt.attempt for number in earlier)


class LedgerParticipant(SimulatedParticipant[LedgerStore]):
    """Prepares by moving the rows in a transaction that stays open. If it is lost, the staged rows are moved again."""

    def __init__(self, store: LedgerStore, line: Line, context: Context) -> None:
        super().__init__(store, line, context)
        self._held: dict[Attempt, Move] = {}

    def _promise(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        branches = [p.branch for p in parts if p.rows]
        driver, incarnation = self.line.driver.number, self.context.incarnation
        committable = committable_for(self.store.name, attempt, parts, {"stages": [str(b) for b in branches]})
        self._held.clear()
        try:
            move = self.ask(
                "move", lambda: self.store.begin_move(driver, incarnation, attempt.batch, branches), branches
            )
        except StagedGone:
            raise self._vanished(attempt) from None
        if move is not None:
            self._held[attempt] = move
        return (committable,)

    def commit(self, committable: Committable) -> Outcome:
        batch = committable.attempt.batch
        branches = [branch_of(name) for name in committable.payload["stages"]]
        move = self._held.pop(committable.attempt, None)
        if move is not None and self.ask("commit", lambda: self.store.commit_move(move), f"batch {batch}"):
            outcome = Outcome.COMMITTED
        else:
            try:
                outcome = self._commit_from_stages(batch, branches)
            except StagedGone:
                return Outcome.GONE
        self.abort(branches)
        return outcome

    def _commit_from_stages(self, batch: int, branches: Sequence[Branch]) -> Outcome:
        incarnation = self.context.incarnation
        moved = self.ask(
            "commit", lambda: self.store.move_at_once(incarnation, batch, branches), f"batch {batch} from the stages"
        )
        return Outcome.COMMITTED if moved else Outcome.ALREADY_COMMITTED

    def recover(self) -> Remains:
        remains = super().recover()
        # A batch without rows has nothing staged, but its open transaction must be found, too.
        held = [Branch(a, self.store.name, 0, 0) for a in self._held]
        extra = [b for b in held if all(b.attempt != other.attempt for other in remains.branches)]
        return Remains((*remains.branches, *extra), remains.newest_batch)

    def abort(self, branches: Iterable[Branch]) -> None:
        named = sorted(branches)
        for attempt in {b.attempt: None for b in named}:
            if (move := self._held.pop(attempt, None)) is not None:
                self.ask("roll back", lambda move=move: self.store.roll_back(move), attempt)  # type: ignore[misc]
        super().abort(named)


class FilesParticipant(SimulatedParticipant[FilesStore]):
    """Idempotent: renames what is not renamed yet, then creates the manifest if there is none."""

    def _promise(self, attempt: Attempt, parts: Sequence[StagedPart]) -> tuple[Committable, ...]:
        files = [p.branch for p in parts if p.rows]
        if not self.look("are they there", lambda: self.store.are_there(files), files):
            raise self._vanished(attempt)
        return (committable_for(self.store.name, attempt, parts, {"files": [str(b) for b in files]}),)

    def commit(self, committable: Committable) -> Outcome:
        batch = committable.attempt.batch
        files = [branch_of(name) for name in committable.payload["files"]]
        if self.look("manifest", lambda: self.store.has_manifest(batch), f"batch {batch}"):
            return self._committed_before(batch, files)
        if not self.look("are they there", lambda: self.store.are_there(files), files):
            self.ask("withdraw", lambda: self.store.withdraw(files), files)
            return Outcome.GONE
        return self._make_visible(batch, files)

    def _make_visible(self, batch: int, files: Sequence[Branch]) -> Outcome:
        for file in files:
            self.ask("rename", lambda file=file: self.store.rename(file), file)  # type: ignore[misc]
        if self.ask("commit", lambda: self.store.create_manifest(batch, files), f"batch {batch}"):
            return Outcome.COMMITTED
        return self._committed_before(batch, files)

    def _committed_before(self, batch: int, files: Sequence[Branch]) -> Outcome:
        self.ask("tidy behind", lambda: self.store.tidy_behind(batch, files), files)
        return Outcome.ALREADY_COMMITTED


# Sinks ----------------------------------------------------------------------------------------------------------------

_PARTICIPANTS: dict[type[SimulatedStore], type[SimulatedParticipant[Any]]] = {
    PreparedStore: PreparedParticipant,
    LedgerStore: LedgerParticipant,
    FilesStore: FilesParticipant,
}


@dataclass(frozen=True)
class SimulatedSink(Sink):
    """A sink of one driver: it knows the driver's line."""

    store: SimulatedStore
    line: Line

    kind: ClassVar[str] = "simulated"

    @property
    def capabilities(self) -> Capabilities:
        by_task = isinstance(self.store, PreparedStore)
        return Capabilities(native_prepare=by_task, commits_by_task=by_task, expires=by_task)

    def default_name(self) -> str:
        return self.store.name

    def describe(self) -> str:
        return self.store.name

    def check(self, schema: object) -> None:
        """Any row fits."""

    def writer(self, branch: Branch, *, durable: bool = True, plan: str = "") -> Writer:
        raise NotImplementedError("simulated tasks stage for themselves")

    def evidence(self, pipeline: PipelineId, batches: range) -> Evidence:  # noqa: ARG002 - there is one pipeline
        shown = {
            batch: self.line.ask(self.store.name, "evidence", partial(self.store.shown, batch), batch, changes=False)
            for batch in batches
        }
        attempts = [(batch, name, branch_of(name).attempt) for batch, names in shown.items() for name in names]
        return Evidence(tuple(Mark(batch, name, a.attempt, a.incarnation, 0) for batch, name, a in attempts))

    def participant(self, context: Context) -> Participant:
        return _PARTICIPANTS[type(self.store)](self.store, self.line, context)


def branch_of(name: str) -> Branch:
    branch = parse_branch(name)
    if branch is None:
        raise ValueError(f"not the name of a branch: {name}")
    return branch


def branches_of(committable: Committable) -> list[Branch]:
    return [branch_of(name) for name in committable.branches]
