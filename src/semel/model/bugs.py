"""The bugs that `mutants` seeds: changed rules, changed steps of the driver, changed stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from semel.model.adversary import Model
from semel.model.driver import Moves
from semel.model.stores import Stores
from semel.model.world import (
    ABORTED,
    CommittableCode,
    Driver,
    Label,
    RecordCode,
    Store,
    WorkCode,
    World,
    create_slot,
    read_journal,
    unpack,
    with_driver,
    with_store,
)
from semel.protocol.events import (
    Committable,
    Decided,
    Event,
    Journal,
    Outcome,
)
from semel.protocol.plans import Behind, PlanAction, PlanFacts, gone_on_from, resolve_plan
from semel.protocol.recovery import (
    CommitForward,
    Facts,
    Fate,
    Resolution,
    Run,
    resolve_batch,
)
from semel.protocol.refusals import Refusal, SinkFacts, refuse_rolled_back
from semel.protocol.states import State
from semel.protocol.step import Batch, step
from semel.runtime.mend import Mend, replace_gone
from semel.sinks.base import StagedPart

# Rules --------------------------------------------------------------------------------------------------------------


def moving(source: State, event: type[Event], target: State) -> Callable[[Batch, Event], Batch]:
    """The step function with one entry of its table changed."""

    def changed(batch: Batch, happened: Event) -> Batch:
        if batch.state is source and isinstance(happened, event):
            return replace(batch, state=target)
        return step(batch, happened)

    return changed


def believing(outcome: Outcome) -> Callable[[Batch, Event], Batch]:
    """The step function that takes one outcome for a commit."""

    def changed(batch: Batch, event: Event) -> Batch:
        after = step(batch, event)
        wrong = not after.pending and outcome in after.answers.values()
        return replace(after, state=State.COMMITTED) if wrong else after

    return changed


def recording(silence: type[Event]) -> Callable[[Batch, Event], Batch]:
    """The step function that takes this answer of the log for "recorded"."""

    def changed(batch: Batch, event: Event) -> Batch:
        if isinstance(event, silence):
            return replace(batch, state=State.DECIDED, attempt=batch.attempt + 1, pending=batch.prepared)
        return step(batch, event)

    return changed


def first_answer_is_enough(batch: Batch, event: Event) -> Batch:
    after = step(batch, event)
    enough = after.state is State.DECIDED and Outcome.COMMITTED in after.answers.values()
    return replace(after, state=State.COMMITTED, pending=frozenset()) if enough else after


def runs_what_is_decided(facts: Facts) -> Resolution:
    found = resolve_batch(facts)
    return Run(attempt=found.attempt) if isinstance(found, CommitForward) else found


def ignores_claims(facts: Facts) -> Resolution:
    return resolve_batch(replace(facts, newest_claim=facts.incarnation))


def always_attempt_0(facts: Facts) -> Resolution:
    found = resolve_batch(facts)
    return Run(attempt=0) if isinstance(found, Run) else found


def compares_no_plans(_facts: PlanFacts) -> PlanAction:
    return PlanAction.GO_ON


def restores_nothing(facts: PlanFacts) -> PlanAction:
    found = resolve_plan(facts)
    return PlanAction.REFUSE if found is PlanAction.RESTORE else found


def looks_at_files_only(facts: PlanFacts) -> PlanAction:
    return resolve_plan(replace(facts, in_hand_differs=False))


def nobody_has_gone_on(_batch: int, _behind: Behind) -> str:
    return ""


def what_is_decided_is_explained(batch: int, behind: Behind) -> str:
    return gone_on_from(batch, replace(behind, as_decided=()))


def any_file_is_proof(batch: int, behind: Behind) -> str:
    if behind.newest_planned > batch:
        return f"offsets/{behind.newest_planned} is there"
    return f"commits/{behind.newest_done} is there" if behind.newest_done >= batch else ""


def refuses_what_is_staged_behind(sink: SinkFacts, *, next_batch: int, is_decided: bool) -> Refusal | None:
    if sink.staged > next_batch:
        return Refusal.ROLLED_BACK
    return refuse_rolled_back(sink, next_batch=next_batch, is_decided=is_decided)


def aborts_nothing(*_: Any, **__: Any) -> Fate:
    return Fate.KEEP


def ignores_mends(journal: Journal) -> tuple[Committable, ...] | None:
    without = [r for r in journal if not (isinstance(r, Decided) and r.mends)]
    first = next((r for r in without if isinstance(r, Decided)), None)
    return None if first is None else first.committables


def mends_with_everything(_decided: Any, _gone: Any, parts: list[StagedPart]) -> Mend:
    return Mend(tuple(parts))


def mends_by_task_number(_decided: Any, gone: frozenset[str], parts: list[StagedPart]) -> Mend:
    keys = {str(p.branch): f"{p.branch.sink}/{p.branch.task}" for p in parts}
    wanted = tuple(p for p in parts if keys[str(p.branch)] in gone)
    spare = tuple(p for p in parts if p not in wanted)
    return Mend(wanted, spare, {str(p.branch): keys[str(p.branch)] for p in wanted})


def keeps_any_key(mend: Mend, decided: list[Committable], prepared: list[Committable]) -> list[Committable]:
    if not mend.keys and len(decided) == len(prepared):
        return replace_gone(mend, decided, prepared)
    return [replace(c, mends=True) for c in prepared]


def mends_under_a_new_key(mend: Mend, decided: list[Committable], prepared: list[Committable]) -> list[Committable]:
    return [replace(c, key=f"{c.key}/again") for c in replace_gone(mend, decided, prepared)]


# Steps of the driver --------------------------------------------------------------------------------------------------


class DecidesBeforeAllHavePrepared(Model):
    def all_prepared(self, wanted: tuple[int, ...], index: int) -> bool:
        return bool(wanted) and index == 0

    def require(self, record: RecordCode, slot: int, d: Driver) -> None:
        pass


class CommitsBeforeTheDecision(Model):
    """Commits each sink as soon as all have prepared, and records the decision then."""

    def do_decide(self, world: World, d: Driver) -> Moves:
        for c in d.proposal:
            if world.stores[c[0]].branches:
                store, _ = self.stores.commit(world.stores[c[0]], c, d.incarnation)
                return [(("commit", d.incarnation, d.batch, c[1], "committed"), with_store(world, c[0], store))]
        return super().do_decide(world, d)


class DoesNotClose(Model):
    def at_close_read(self, world: World, d: Driver) -> Moves:
        journal = read_journal(world.journals[d.batch])
        label = ("read", d.incarnation, d.batch, len(journal))
        return [self.after_close(label, world, d, d._replace(journal=journal))]


class BelievesTheCheckpoint(Model):
    """The first batch is the one that the checkpoint does not know as done, whatever the log has decided."""

    def first_batch(self, world: World, next_batch: int) -> int:  # noqa: ARG002 - that is the bug
        return next_batch


class ClosesOneBatchOnly(Model):
    """What is staged of the batch behind is swept, and its slot stays open."""

    def at_close_next(self, world: World, d: Driver) -> Moves:
        journal, record = read_journal(world.journals[d.batch + 1]), (ABORTED, d.incarnation, (), 0)
        now = self.closed(d._replace(closed_next=(*journal, record)))
        return [(("restored", d.incarnation, d.batch), with_driver(world, d, now))]


class SweepsBeforeItCloses(Model):
    """What is listed and undecided is dropped at once; the slot is closed afterwards."""

    def at_close(self, world: World, d: Driver) -> Moves:
        if d.k == 0:
            for sink, branches in enumerate(d.listing):
                decided = self.rules.effective(d.journal, d.batch) or ()
                named = {b for c in decided if c[0] == sink for b in c[5]}
                world = self.abort(world, sink, tuple(b for b in branches if b not in named))
            return [(("tidy", d.incarnation), with_driver(world, d, d._replace(k=1)))]
        return super().at_close(world, d)


class CleansStagingAtStart(Model):
    """Too-eager cleaning of staging folders (seatunnel#9828)."""

    def after_close(self, label: Label, world: World, old: Driver, d: Driver) -> tuple[Label, World]:
        for sink, branches in enumerate(d.listing):
            world = self.abort(world, sink, branches)
        return super().after_close(label, world, old, d)


class LooksBeforeItReads(Model):
    """The look for a newer claim comes first, the journal second."""

    has_looked = False

    def superseded(self, world: World, d: Driver) -> bool:
        return not self.has_looked and super().superseded(world, d)

    def at_read(self, world: World, d: Driver) -> Moves:
        if self.superseded(world, d):
            return super().at_look(world, d)
        return [(("look", d.incarnation, d.batch), with_driver(world, d, d._replace(at="look")))]

    def at_look(self, world: World, d: Driver) -> Moves:
        self.has_looked = True
        found = super().at_look(world, d._replace(journal=read_journal(world.journals[d.batch])))
        self.has_looked = False
        return found


class DoesNotLookAgain(Model):
    def do_commit(self, world: World, d: Driver) -> Moves:
        return super().do_commit(world, d._replace(k=1)) if d.k == 0 else super().do_commit(world, d)


class CommitsWhatWasNotNamed(Model):
    """Every branch of the attempt is committed, those of lost tasks included."""

    def promised(
        self, world: World, d: Driver, sink: int, parts: tuple[int, ...], mends: bool
    ) -> tuple[World, tuple[CommittableCode, ...]] | None:
        del parts
        return super().promised(world, d, sink, self.of_attempt(world, d, sink), mends)


class TakesSilenceForGone(Model):
    def unanswered(self, world: World, d: Driver, key: str) -> World:
        return self.answered(world, d, key, Outcome.GONE)


class TakesSilenceForDone(Model):
    def unanswered(self, world: World, d: Driver, key: str) -> World:
        return self.answered(world, d, key, Outcome.COMMITTED)


class CheckpointsWhenDecided(Model):
    def at_work_with(self, world: World, old: Driver, d: Driver, work: WorkCode) -> World:
        if work[0] == State.DECIDED.name and not d.forward and not work[4]:
            world = world._replace(commits=max(world.commits, d.batch + 1))
        return super().at_work_with(world, old, d, work)


class RollsBackTheWholeBatch(Model):
    def of_attempt(self, world: World, d: Driver, sink: int) -> tuple[int, ...]:
        return tuple(b for b in world.stores[sink].branches if unpack(b).batch == d.batch)


class RollsBackWhatItDecided(Model):
    """A driver that finds a newer claim after its decision takes the decision for void."""

    def do_commit(self, world: World, d: Driver) -> Moves:
        if d.k == 0 and self.superseded(world, d):
            for sink, store in enumerate(world.stores):
                world = self.abort(world, sink, tuple(b for b in store.branches if unpack(b)[2] == d.incarnation))
        return super().do_commit(world, d)


class WithdrawsNothing(Model):
    def roll_back(self, world: World, d: Driver) -> World:  # noqa: ARG002 - that is the bug
        return world


class OverwritesSlots(Model):
    """Create means create or replace."""

    def append(self, world: World, batch: int, slot: int, record: RecordCode) -> World | None:
        slots = world.journals[batch]
        if slot < len(slots) and slots[slot]:
            emptied = (*slots[:slot], (), *slots[slot + 1 :])
            world = world._replace(journals=(*world.journals[:batch], emptied, *world.journals[batch + 1 :]))
        return super().append(world, batch, slot, record)


class GoesOnInTheNextSlot(Model):
    """A driver whose slot is taken decides in the next one."""

    def append(self, world: World, batch: int, slot: int, record: RecordCode) -> World | None:
        while record[0] != ABORTED and create_slot(world.journals[batch], slot, record) is None:
            slot += 1
        return super().append(world, batch, slot, record)


class PrunesTooEarly(Model):
    """The journal of the batch itself is forgotten before Spark has checkpointed it."""

    def at_tidy(self, world: World, d: Driver) -> Moves:
        moves = super().at_tidy(world, d)
        if d.k:
            return moves
        return [(label, reached._replace(journals=((),) * len(world.journals))) for label, reached in moves]


class TidiesBeforeItCommits(Model):
    """What is staged of the batch is dropped once the batch is decided."""

    def do_commit(self, world: World, d: Driver) -> Moves:
        if d.k == 0 and not self.superseded(world, d):
            for sink, store in enumerate(world.stores):
                world = self.abort(world, sink, tuple(b for b in store.branches if unpack(b).batch <= d.batch))
        return super().do_commit(world, d)


# Stores ---------------------------------------------------------------------------------------------------------------


class LateCommitsHitTheNext(Stores):
    """Names are reused: a commit ends whatever is open under the same task."""

    def deliver(self, store: Store, c: CommittableCode, incarnation: int) -> Store:
        same = [b for b in store.branches if unpack(b).task == unpack(c[5][0]).task]
        if store.kind != "prepared" or not same:
            return super().deliver(store, c, incarnation)
        return self.publish(store, (c[0], c[1], unpack(same[0]).batch, c[3], c[4], (same[0],), c[6]))


class MarksNothing(Stores):
    """The marker is not in the transaction of the rows."""

    def marks(self, store: Store, c: CommittableCode) -> tuple[int, ...]:  # noqa: ARG002 - that is the bug
        return store.marks


class AsksNoMarker(Stores):
    """What is not there any more is taken for gone, whatever the marker says."""

    def commit(self, store: Store, c: CommittableCode, incarnation: int) -> tuple[Store, Outcome]:
        return super().commit(store._replace(marks=()) if store.kind == "prepared" else store, c, incarnation)


class TakesGoneForDone(Stores):
    """What is not there any more is taken for committed."""

    def commit(self, store: Store, c: CommittableCode, incarnation: int) -> tuple[Store, Outcome]:
        store, outcome = super().commit(store, c, incarnation)
        return store, Outcome.ALREADY_COMMITTED if outcome is Outcome.GONE else outcome


class SkipsTheFlush(Stores):
    """A task that ran again reports before its rows are written: the marker is committed without them."""

    def publish(self, store: Store, c: CommittableCode) -> Store:
        after = super().publish(store, c)
        return after._replace(visible=store.visible) if any(unpack(b).retry for b in c[5]) else after


class ShowsWhatIsStaged(Stores):
    """Prepared rows are visible."""

    def prepare(
        self, store: Store, sink: int, branches: tuple[int, ...]
    ) -> tuple[Store, tuple[CommittableCode, ...]] | None:
        answer = super().prepare(store, sink, branches)
        return answer and (self.publish(answer[0], answer[1][0]), answer[1])
