"""Bugs that somebody could have written into the runtime, or into a sink. Each is patched in for one test."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from semel.decisions.base import StoreUnanswered
from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.ids import Attempt, Branch
from semel.protocol import plans
from semel.protocol.events import (
    Committable,
    Decided,
    DecisionRecorded,
    DecisionUnanswered,
    Event,
    Journal,
    Outcome,
)
from semel.protocol.plans import Behind
from semel.protocol.recovery import Run
from semel.protocol.refusals import Refusal, SinkFacts, refuse_overtaken
from semel.protocol.states import State
from semel.runtime import batch, beginning, restore, startup
from semel.runtime.batch import Coordinator
from semel.runtime.mend import Mend, choose_parts
from semel.simulation import faults, world
from semel.simulation.checkpoint import Checkpoint
from semel.simulation.participants import FilesParticipant, LedgerParticipant, PreparedParticipant, branches_of
from semel.simulation.stores import LedgerStore
from semel.sinks.base import StagedPart

Patch = Callable[[pytest.MonkeyPatch], None]


# In the runtime -------------------------------------------------------------------------------------------------------


def an_error_is_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    def commit_one(self: Coordinator, committable: Committable, work: Any) -> Outcome:
        try:
            return self.participants[committable.sink].commit(committable)
        except Exception:  # noqa: BLE001 - the bug
            return Outcome.COMMITTED

    patch.setattr(Coordinator, "_commit_one", commit_one)


def gone_is_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator._commit_one

    def commit_one(self: Coordinator, committable: Committable, work: Any) -> Outcome:
        outcome = real(self, committable, work)
        return Outcome.ALREADY_COMMITTED if outcome is Outcome.GONE else outcome

    patch.setattr(Coordinator, "_commit_one", commit_one)


def a_stalled_batch_is_returned_to_spark(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator._conclude

    def conclude(self: Coordinator, work: Any) -> None:
        if work.state is not State.STALLED:
            real(self, work)

    patch.setattr(Coordinator, "_conclude", conclude)


def commits_before_it_decides(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator._decide

    def decide(self: Coordinator, work: Any) -> Event:
        for committable in work.proposal:
            self._commit_one(committable, work)
        return real(self, work)

    patch.setattr(Coordinator, "_decide", decide)


def decides_before_the_last_sink_has_prepared(patch: pytest.MonkeyPatch) -> None:
    """And takes what that sink would have promised for granted."""
    real = Coordinator._prepare

    def prepare(self: Coordinator, attempt: Attempt, parts: Any) -> tuple[Committable, ...]:
        *others, last = self.participants
        whole = dict(self.participants)
        self.participants = {name: whole[name] for name in others}
        try:
            prepared = real(self, attempt, parts)
        finally:
            self.participants = whole
        names = tuple(sorted(str(p.branch) for p in parts[last]))
        payload = {"stages": [], "files": [], "mark": True}
        return (*prepared, Committable(last, last, attempt, 0, names, payload))

    patch.setattr(Coordinator, "_prepare", prepare)


def no_answer_of_the_log_is_taken_for_yes(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator._decide

    def decide(self: Coordinator, work: Any) -> Event:
        event = real(self, work)
        if not isinstance(event, DecisionUnanswered):
            return event
        work.committables |= {c.key: c for c in work.proposal}
        return DecisionRecorded()

    patch.setattr(Coordinator, "_decide", decide)


def the_slot_is_decided_again_when_the_log_does_not_answer(patch: pytest.MonkeyPatch) -> None:
    """In the next slot: the first one may be taken by the request whose answer was lost."""
    real = DecisionLog.append

    def append(self: DecisionLog, record: Any) -> bool:
        try:
            return real(self, record)
        except StoreUnanswered:
            if not isinstance(record, Decided):
                raise
            return real(self, replace(record, attempt=replace(record.attempt, attempt=record.attempt.attempt + 1)))

    patch.setattr(DecisionLog, "append", append)


def a_record_replaces_the_one_before(patch: pytest.MonkeyPatch) -> None:
    def create(self: MemoryStore, path: str, content: bytes) -> bool:
        self._files[path] = content
        return True

    patch.setattr(MemoryStore, "create", create)


def a_start_does_not_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(startup, "sweep", lambda *_: 0)


def a_start_does_not_close_the_open_slot(patch: pytest.MonkeyPatch) -> None:
    def close(log: DecisionLog, ours: Attempt) -> Journal:
        return log.journal(ours.batch)

    patch.setattr(startup, "close_open_slot", close)


def a_decided_batch_is_run_again(patch: pytest.MonkeyPatch) -> None:
    """At a start that finds it decided, and not yet checkpointed."""
    patch.setattr(batch, "resolve_batch", lambda facts: Run(attempt=len(facts.journal)))


def a_mend_writes_all_rows_again(patch: pytest.MonkeyPatch) -> None:
    def choose(decided: Sequence[Committable], gone: Collection[str], parts: Sequence[StagedPart]) -> Mend:
        written = [p for p in parts if p.rows]
        of = {c.fingerprint: c.key for c in decided if c.rows}
        if any(p.fingerprint not in of for p in written):
            return Mend(tuple(parts))
        return Mend(tuple(written), (), {str(p.branch): of[p.fingerprint] for p in written})

    patch.setattr(batch, "choose_parts", choose)


def a_mend_goes_by_the_number_of_the_task(patch: pytest.MonkeyPatch) -> None:
    real = choose_parts

    def choose(decided: Sequence[Committable], gone: Collection[str], parts: Sequence[StagedPart]) -> Mend:
        whole = real(decided, gone, parts)
        if not whole.keys:
            return whole
        named = {f"{p.branch.sink}/{p.branch.task}": p for p in parts if p.rows}
        if any(key not in named for key in gone):
            return whole
        wanted = {key: named[key] for key in sorted(gone)}
        return Mend(tuple(wanted.values()), (), {str(p.branch): key for key, p in wanted.items()})

    patch.setattr(batch, "choose_parts", choose)


# About plans that the checkpoint has lost -----------------------------------------------------------------------------
#
# Few worlds show what some rules are for, or none, and unit tests and the model do: a gap in the log (whoever passes it
# by finds that all rows of what lies there are visible), the files `before` a batch (Spark only warns when they are
# missing), another plan that somebody has gone on from (nobody does so while the other rules hold), a query that began
# behind another plan, and starts that die between two plans that they put back.


def the_plan_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    for module in (restore, batch):
        patch.setattr(module, "settle_plan", lambda *_, **__: None)
    only_the_file_is_compared(patch)


def nothing_is_synced_and_nothing_put_back(patch: pytest.MonkeyPatch) -> None:
    """Either alone keeps the rows of a machine that fails; see `nothing_is_synced`."""
    nothing_is_synced(patch)
    the_plan_is_not_compared(patch)
    patch.setitem(faults.WEIGHTS, "old copy", 0)


def nothing_is_synced(patch: pytest.MonkeyPatch) -> None:
    """No bug while plans are put back, so not among the MUTANTS."""
    patch.setattr(Checkpoint, "sync", lambda *_: None)


def only_the_file_is_compared(patch: pytest.MonkeyPatch) -> None:
    """And not what Spark has in memory, which may be older."""
    real = Coordinator._require_decided_plan

    def require(self: Coordinator, work: Any) -> None:
        self.in_hand = dict
        real(self, work)

    patch.setattr(Coordinator, "_require_decided_plan", require)


def the_drop_in_goes_on_with_the_rows_of_another_plan(patch: pytest.MonkeyPatch) -> None:
    """It puts the decided plan back, and lets Spark go on with what it has in its hands."""
    real = restore.restore_plans

    def restore_plans(log: Any, spark: Any, next_batch: int, marks: Any, under_way: int | None = None) -> None:
        real(log, spark, next_batch, marks)

    patch.setattr(startup, "restore_plans", restore_plans)
    only_the_file_is_compared(patch)


def only_what_is_missing_is_put_back(patch: pytest.MonkeyPatch) -> None:
    """Another plan is taken for the decided one."""
    real = plans.compare

    def compare(plan: Any, found: Any) -> tuple[list[str], list[str]]:
        return real(plan, found)[0], []

    patch.setattr(restore, "compare", compare)
    only_the_file_is_compared(patch)


def what_is_staged_behind_a_decided_batch_looks_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """As it was: see seed 134 in `protocol.refusals`."""

    def refuse(sink: SinkFacts, *, next_batch: int, is_decided: bool) -> Refusal | None:
        newest = next_batch if is_decided else next_batch - 1
        return Refusal.ROLLED_BACK if sink.marked > newest or sink.staged > next_batch else None

    patch.setattr(startup, "refuse_rolled_back", refuse)


def what_is_staged_behind_a_decided_batch_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(startup, "closes_behind", lambda *_: False)


# About copies that know the end of a batch and not its plan -----------------------------------------------------------


def copies_without_plans(patch: pytest.MonkeyPatch) -> None:
    """No bug, but worlds in which one thing that is seldom is not: drop-ins, and copies that have few plans or none.

    Without any Spark plans batch 0 anew, and at its next start it takes the new plan for done.
    """

    def put(self: Checkpoint, dice: random.Random, age: int) -> None:
        if not self.is_older_than_newest:
            self.newest = dict(self.files)
        newest = {"commits": age % 5, "offsets": age % 3 - 1, "sources": dice.randint(-2, 0)}
        numbered = ((path, path.partition("/")[0], int(path.rpartition("/")[2])) for path in self.files)
        self._become({path: self.files[path] for path, folder, number in numbered if number <= newest[folder]})
        self.is_torn = False

    patch.setattr(Checkpoint, "put_older_copy", put)
    patch.setattr(world, "DROP_IN_CHANCE", 1.0)
    patch.setattr(faults, "WEIGHTS", {**faults.WEIGHTS, "old copy": 14, "power": 6, "crash": 8})


def the_end_of_a_batch_proves_that_its_plan_was_used(patch: pytest.MonkeyPatch) -> None:
    """As it was: then no start gets past the refusal (seeds 12701 and 80302 of that release)."""

    def gone_on_from(batch: int, behind: Behind) -> str:
        if behind.newest_planned > batch:
            return f"offsets/{behind.newest_planned} is there"
        return f"commits/{behind.newest_done} is there" if behind.newest_done >= batch else ""

    copies_without_plans(patch)
    patch.setattr(restore, "gone_on_from", gone_on_from)


def a_plan_that_was_made_behind_another_one_stays(patch: pytest.MonkeyPatch) -> None:
    copies_without_plans(patch)
    patch.setattr(restore, "plan_to_drop", lambda *_: None)


# About who runs the pipeline ------------------------------------------------------------------------------------------


def drop_ins_that_are_overtaken(patch: pytest.MonkeyPatch) -> None:
    """No bug, but worlds in which drop-ins fall asleep when Spark has read the checkpoint, and others do the rest."""
    for name, value in {"DROP_IN_CHANCE": 1.0, "BATCHES_MIN": 1, "BATCHES_MAX": 2}.items():
        patch.setattr(world, name, value)
    patch.setattr(faults, "WEIGHTS", {**dict.fromkeys(faults.WEIGHTS, 0), "zombie": 1})
    patch.setattr(faults, "AIMS", ("plan", "read plans", "list"))
    for name, value in {"FAULTS_MIN": 1, "FAULTS_MAX": 2}.items():
        patch.setattr(faults, name, value)


def a_query_whose_batch_is_over_fences_the_driver_that_waits(patch: pytest.MonkeyPatch) -> None:
    """As it was: only a batch that is planned behind it counted."""
    drop_ins_that_are_overtaken(patch)
    patch.setattr(beginning, "refuse_overtaken", lambda q: Refusal.OVERTAKEN if q.is_next_planned else None)


def a_copy_that_is_older_than_the_log_is_taken_for_another_driver(patch: pytest.MonkeyPatch) -> None:
    """See seed 846 of an earlier release: nobody may start, so nobody puts back what was decided."""
    copies_without_plans(patch)
    patch.setattr(beginning, "refuse_overtaken", lambda q: refuse_overtaken(replace(q, newest_decided=-1)))


# In a sink ------------------------------------------------------------------------------------------------------------


def what_is_not_there_is_taken_for_gone(patch: pytest.MonkeyPatch) -> None:
    """Without a look at the markers."""

    def commit(self: PreparedParticipant, committable: Committable) -> Outcome:
        if not committable.payload or committable.payload.get("mark"):
            return real(self, committable)
        (branch,) = branches_of(committable)
        known = self.ask("commit", lambda: self.store.commit_prepared(branch), committable.key)
        return Outcome.COMMITTED if known else Outcome.GONE

    real = PreparedParticipant.commit
    patch.setattr(PreparedParticipant, "commit", commit)


def what_is_not_there_is_taken_for_committed(patch: pytest.MonkeyPatch) -> None:
    def settle(self: PreparedParticipant, name: str, batch: int) -> Outcome:
        return Outcome.ALREADY_COMMITTED

    patch.setattr(PreparedParticipant, "_settle", settle)


def the_marker_is_written_after_the_rows(patch: pytest.MonkeyPatch) -> None:
    """In a transaction of its own."""

    def from_stages(self: LedgerParticipant, batch: int, branches: Sequence[Branch]) -> Outcome:
        store = self.store
        known = self.look("marker", lambda: batch in marked(store))
        if known:
            return Outcome.ALREADY_COMMITTED
        rows = store._rows(branches)
        self.ask("rows", lambda: store._apply(batch, branches, rows))
        self.ask("mark", lambda: marked(store).add(batch))
        return Outcome.COMMITTED

    def marked(store: LedgerStore) -> set[int]:
        found: set[int] = store.__dict__.setdefault("marked", set())
        return found

    real = LedgerStore.commit_move

    def commit_move(self: LedgerStore, move: Any) -> bool:
        committed = real(self, move)
        if committed:
            marked(self).add(move.batch)
        return committed

    patch.setattr(LedgerStore, "commit_move", commit_move)
    patch.setattr(LedgerParticipant, "_commit_from_stages", from_stages)


def the_manifest_comes_before_the_files(patch: pytest.MonkeyPatch) -> None:
    def make_visible(self: FilesParticipant, batch: int, files: Sequence[Branch]) -> Outcome:
        if not self.ask("commit", lambda: self.store.create_manifest(batch, files)):
            return self._committed_before(batch, files)
        for file in files:
            self.ask("rename", partial(self.store.rename, file), file)
        return Outcome.COMMITTED

    patch.setattr(FilesParticipant, "_make_visible", make_visible)


def an_abort_drops_nothing(patch: pytest.MonkeyPatch) -> None:
    def abort(self: LedgerParticipant, branches: Iterable[Branch]) -> None:
        """Nothing is dropped."""

    patch.setattr(LedgerParticipant, "abort", abort)


#: Bug -> the anomaly by which it is found, and seeds that are enough to find it.
MUTANTS: dict[Patch, tuple[str, range]] = {
    an_error_is_taken_for_committed: ("split", range(30)),
    gone_is_taken_for_committed: ("torn", range(60)),
    a_stalled_batch_is_returned_to_spark: ("split", range(40)),
    commits_before_it_decides: ("early", range(5)),
    decides_before_the_last_sink_has_prepared: ("lost", range(30)),
    no_answer_of_the_log_is_taken_for_yes: ("early", range(200)),
    the_slot_is_decided_again_when_the_log_does_not_answer: ("journal", range(60)),
    a_record_replaces_the_one_before: ("journal", range(60)),
    a_start_does_not_sweep: ("orphan", range(30)),
    a_start_does_not_close_the_open_slot: ("orphan", range(400, 450)),
    a_decided_batch_is_run_again: ("torn", range(100)),
    the_plan_is_not_compared: ("lost", range(60)),
    nothing_is_synced_and_nothing_put_back: ("lost", range(30)),
    only_what_is_missing_is_put_back: ("lost", range(90, 180)),
    the_drop_in_goes_on_with_the_rows_of_another_plan: ("lost", range(250, 320)),
    what_is_staged_behind_a_decided_batch_looks_rolled_back: ("bug", range(30)),
    what_is_staged_behind_a_decided_batch_is_left: ("orphan", range(1600, 1750)),
    the_end_of_a_batch_proves_that_its_plan_was_used: ("bug", range(60)),
    a_plan_that_was_made_behind_another_one_stays: ("duplicated", range(50, 110)),
    a_query_whose_batch_is_over_fences_the_driver_that_waits: ("nobody", range(150)),
    a_copy_that_is_older_than_the_log_is_taken_for_another_driver: ("stuck", range(30)),
    a_mend_writes_all_rows_again: ("duplicated", range(60)),
    a_mend_goes_by_the_number_of_the_task: ("duplicated", range(120, 205)),
    what_is_not_there_is_taken_for_gone: ("duplicated", range(20)),
    what_is_not_there_is_taken_for_committed: ("lost", range(100)),
    the_marker_is_written_after_the_rows: ("duplicated", range(120)),
    the_manifest_comes_before_the_files: ("split", range(80)),
    an_abort_drops_nothing: ("orphan", range(5)),
}
