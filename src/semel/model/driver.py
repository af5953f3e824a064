"""What a driver does, one atomic step at a time, in the order of `runtime.startup` and `runtime.batch`.

    start:      read commits/, claim, list every store, fence each, read the journal, close its open slot,
                put back what the checkpoint has forgotten (see plans), commit forward what is decided,
                sweep each store
    each batch: read the journal, look for a newer claim, stage each sink, prepare each sink, decide, look again,
                commit each committable in any order, mend what is gone, tidy, checkpoint

Every step takes a world and a driver and returns all that can come of it, as (label, world); several where an answer
may be lost. Between any two steps of one driver everybody else may act.

Reduction: two steps that touch nothing in common need not be tried in both orders. The sinks are staged, prepared,
fenced and swept in one order only, as the runtime does, and listing all stores is one step; a crash or another driver
may still come between any two sinks. Commits run in threads, and they are tried in every order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from semel.errors import BatchFailed
from semel.model.observer import Observer
from semel.model.plans import PlanSteps
from semel.model.rules import Rules
from semel.model.stores import Stores
from semel.model.world import (
    ABORTED,
    DECIDED,
    MENDS,
    Bounds,
    CommittableCode,
    Driver,
    Label,
    RecordCode,
    WorkCode,
    World,
    create_slot,
    pack,
    read_journal,
    spend,
    unpack,
    with_driver,
    with_store,
    without_driver,
)
from semel.protocol.events import (
    CommitAnswered,
    DecisionRecorded,
    DecisionRefused,
    DecisionUnanswered,
    Event,
    Outcome,
    Prepared,
    PrepareFailed,
    Superseded,
)
from semel.protocol.recovery import Fate, closes_behind, closes_slots
from semel.protocol.states import FINAL, Action, State
from semel.protocol.step import ProtocolError
from semel.runtime.phases import Limits

#: What vanishes each time is not written for ever.
MENDS_MAX = Limits().mends

Moves: TypeAlias = list[tuple[Label, World]]


class DriverSteps(PlanSteps, Observer):
    """The steps. `rules` may be a mutant's; `truth` is what the observer believes, and is never one."""

    def __init__(self, bounds: Bounds, rules: Rules | None = None, stores: Stores | None = None) -> None:
        self.bounds = bounds
        self.sinks = len(bounds.sinks)
        self.rules = rules or Rules(bounds.tasks)
        self.truth = Rules(bounds.tasks)
        self.stores = stores or Stores(bounds.tasks)

    def moves(self, world: World, driver: Driver) -> Moves:
        """All that the driver's next step can lead to. An error of the protocol is a violation, not an accident."""
        try:
            found: Moves = getattr(self, f"at_{driver.at}")(world, driver)
        except ProtocolError as error:
            return [(("protocol_error", driver.incarnation), world._replace(broken=f"tables: {error}"))]
        return found

    # Start ------------------------------------------------------------------------------------------------------------

    def at_claim(self, world: World, d: Driver) -> Moves:
        if self.is_overtaken(world, d):
            return [(("overtaken", d.under), without_driver(world, d))]
        mine = world.claims + 1
        claimed = d._replace(incarnation=mine, at="list")
        return [(("claim", mine), with_driver(world, d, claimed)._replace(claims=mine))]

    def at_list(self, world: World, d: Driver) -> Moves:
        listing = tuple(store.branches for store in world.stores)
        marked = [0]
        for store in world.stores:
            marked += [(unpack(m).batch if store.kind == "prepared" else m) + 1 for m in store.marks]
        found = d._replace(at="fence", k=0, listing=listing, newest_mark=max(marked))
        return [(("list", d.incarnation, sum(map(len, listing))), with_driver(world, d, found))]

    def at_fence(self, world: World, d: Driver) -> Moves:
        fenced = self.stores.fence(world.stores[d.k], d.incarnation)
        if fenced is None:
            return [(("fence_refused", d.incarnation, d.k), without_driver(world, d))]
        following = d._replace(k=d.k + 1) if d.k + 1 < self.sinks else d._replace(at="close_read", k=0)
        return [(("fence", d.incarnation, d.k), with_driver(with_store(world, d.k, fenced), d, following))]

    def at_close_read(self, world: World, d: Driver) -> Moves:
        if self.bounds.forgets:
            d, old = d._replace(next=self.next_batch(world)), d
            world = with_driver(world, old, d)
        first = self.first_batch(world, d.next if self.bounds.forgets else d.batch)
        if first is None:
            return [(("start_refused", d.incarnation, d.batch), without_driver(world, d)._replace(asked=True))]
        world, d = self.turned_to(world, d, first)
        journal = read_journal(world.journals[d.batch])
        label = ("read", d.incarnation, d.batch, len(journal))
        if not closes_slots(d.incarnation):
            return [self.after_close(label, world, d, d._replace(journal=journal))]
        return [(label, with_driver(world, d, d._replace(at="close", journal=journal)))]

    def at_close(self, world: World, d: Driver) -> Moves:
        record: RecordCode = (ABORTED, d.incarnation, (), 0)
        slot = len(d.journal)
        closed = self.append(world, d.batch, slot, record)
        if closed is None:
            again = with_driver(world, d, d._replace(at="close_read", journal=()))
            return [(("close_taken", d.incarnation, d.batch, slot), again)]
        journal = (*d.journal, record)
        label = ("close", d.incarnation, d.batch, slot)
        moves: Moves = [self.after_close(label, closed, d, d._replace(journal=journal))]
        if (lossy := spend(world, "lost")) is not None:
            late = self.send(lossy, ("slot", d.batch, slot, record))
            lost = closed._replace(left=lossy.left)
            moves.append((("close_unanswered", d.incarnation, d.batch, slot), without_driver(lost, d)))
            moves.append((("close_late", d.incarnation, d.batch, slot), without_driver(late, d)))
        return moves

    def after_close(self, label: Label, world: World, old: Driver, d: Driver) -> tuple[Label, World]:
        """Refuse a checkpoint that is older than a store; then make it say what was decided."""
        is_decided = self.rules.effective(d.journal, d.batch) is not None
        staged = {unpack(b).batch for branches in d.listing for b in branches}
        if self.rules.rolled_back(d.newest_mark - 1, max(staged, default=-1), d.batch, is_decided):
            return ("start_refused", d.incarnation, d.batch), without_driver(world, old)
        d = d._replace(k=0, journal=(), closed=d.journal)
        if closes_behind(d.batch, staged):
            return label, with_driver(world, old, d._replace(at="close_next"))
        return label, with_driver(world, old, self.closed(d))

    def at_close_next(self, world: World, d: Driver) -> Moves:
        """Something is staged of the batch behind: its driver may still decide it."""
        batch = d.batch + 1
        journal, record = read_journal(world.journals[batch]), (ABORTED, d.incarnation, (), 0)
        closed = self.append(world, batch, len(journal), record)
        if closed is None:
            raise ProtocolError(f"the first free slot of batch {batch} is taken")
        now = self.closed(d._replace(closed_next=(*journal, record)))
        return [(("close", d.incarnation, batch, len(journal)), with_driver(closed, d, now))]

    def closed(self, d: Driver) -> Driver:
        return d._replace(at="restore") if self.bounds.forgets else self.settling(d)

    def turned_to(self, world: World, d: Driver, batch: int) -> tuple[World, Driver]:
        """The driver with another batch before it, and the world that has it."""
        if batch == d.batch:
            return world, d
        turned = d._replace(batch=batch)
        return with_driver(world, d, turned), turned

    def after_restore(self, world: World, d: Driver) -> Moves:
        newest = max(self.decided_from(world, d.next - 2), default=-1)
        is_other = d.batch != d.under or self.rules.must_start_again(d.under, newest, was_amiss=d.amiss)
        if d.plan and is_other:
            return [(("restarted", d.incarnation, d.batch), without_driver(world, d))]
        return [(("restored", d.incarnation, d.batch), with_driver(world, d, self.settling(d)))]

    def settling(self, d: Driver) -> Driver:
        """Commit forward what is decided, then sweep."""
        is_decided = self.rules.effective(d.closed, d.batch) is not None
        return d._replace(at="read", forward=True, k=0) if is_decided else d._replace(at="sweep", k=0)

    def at_sweep(self, world: World, d: Driver) -> Moves:
        journals = {d.batch: d.closed, d.batch + 1: d.closed_next}
        doomed = tuple(
            branch
            for branch in d.listing[d.k]
            if self.rules.fate(branch, d.k, journals.get(unpack(branch).batch, ()), d.batch, d.incarnation)
            is Fate.ABORT
        )
        swept = self.must_be_swept(self.abort(world, d.k, doomed), d)
        is_last = d.k + 1 == self.sinks
        label = ("sweep", d.incarnation, d.k, len(doomed))
        if not is_last:
            return [(label, with_driver(swept, d, d._replace(k=d.k + 1)))]
        if d.batch == self.bounds.batches:
            return [(label, without_driver(swept, d))]
        return [(label, with_driver(swept, d, self.to_batch(d, d.batch, is_first=True)))]

    # A batch ----------------------------------------------------------------------------------------------------------

    def at_read(self, world: World, d: Driver) -> Moves:
        journal = read_journal(world.journals[d.batch])
        label = ("read", d.incarnation, d.batch, len(journal))
        return [(label, with_driver(world, d, d._replace(at="look", journal=journal)))]

    def superseded(self, world: World, d: Driver) -> bool:
        return world.claims > d.incarnation

    def at_look(self, world: World, d: Driver) -> Moves:
        newest = d.incarnation + self.superseded(world, d)
        name, work = self.rules.resolve(d.journal, d.batch, d.incarnation, newest)
        label = ("resolve", d.incarnation, d.batch, name)
        if name == "Unclear":
            return [(label, without_driver(world, d)._replace(asked=True))]
        if not work:
            return [(label, without_driver(world, d))]
        if name == "Run":
            world = self.must_show_nothing(world, d)
        if amiss := self.before_batch(world, d, is_decided=name != "Run"):
            return amiss
        return [(label, self.at_work_with(world, d, d._replace(at="work", k=0), work))]

    def at_work_with(self, world: World, old: Driver, d: Driver, work: WorkCode) -> World:
        """The world once the driver's batch has come into this state. Ends that need nothing done are done at once."""
        state = State[work[0]]
        same = work[:1] == d.work[:1]
        d = d._replace(work=work, k=d.k if same else 0)
        if d.forward and state in (State.COMMITTED, State.BROKEN):
            # What is gone needs its rows, and Spark brings them later.
            if state is State.COMMITTED:
                world = self.must_show_all(world, d.batch)
            return with_driver(world, old, d._replace(at="sweep", k=0, forward=False, journal=(), work=()))
        if state is State.COMMITTED:
            return with_driver(world, old, Driver(d.incarnation, self.after_commit(d), d.batch, work=work, plan=d.plan))
        if state in FINAL and self.rules.action(work) not in (Action.ROLL_BACK, Action.WITHDRAW):
            return without_driver(world, old)
        return with_driver(world, old, d)

    def after_commit(self, d: Driver) -> str:
        """Old journals are pruned now and then: here once, in the last batch."""
        return "tidy" if d.batch == self.bounds.batches - 1 else "checkpoint"

    def at_work(self, world: World, d: Driver) -> Moves:
        action = self.rules.action(self.work(d))
        moves: Moves = getattr(self, f"do_{action.name.lower()}")(world, d)
        return moves

    def report(self, world: World, d: Driver, event: Event, now: Driver | None = None) -> World:
        return self.at_work_with(world, d, now or d, self.rules.advance(self.work(d), event))

    # Stage and prepare ------------------------------------------------------------------------------------------------

    def do_stage(self, world: World, d: Driver) -> Moves:
        wanted = tuple(range(self.sinks))
        if d.k < len(wanted):
            return self.stage(world, d, wanted[d.k])
        return self.prepare(world, d, wanted, d.k - len(wanted))

    def do_restage(self, world: World, d: Driver) -> Moves:
        wanted = tuple(sorted({c[0] for c in self.known(d) if c[1] in self.gone(d)}))
        mended = sum(kind == MENDS and incarnation == d.incarnation for kind, incarnation, _, _ in d.journal)
        if mended == MENDS_MAX:
            return [(("prepare_failed", d.incarnation, d.batch, wanted[0]), self.prepare_failed(world, d, mends=True))]
        if d.k < len(wanted):
            return self.stage(world, d, wanted[d.k])
        return self.prepare(world, d, wanted, d.k - len(wanted), mends=True)

    def known(self, d: Driver) -> tuple[CommittableCode, ...]:
        """What the driver has in its hands: all that it read or decided, the newest of each key."""
        found = {c[1]: c for _, _, committables, _ in d.journal for c in committables}
        return tuple({**found, **{c[1]: c for c in self.rules.effective(d.journal, d.batch) or ()}}.values())

    def gone(self, d: Driver) -> tuple[str, ...]:
        return tuple(key for key, outcome in self.work(d)[4] if outcome == Outcome.GONE.name)

    def stage(self, world: World, d: Driver, sink: int) -> Moves:
        """All tasks of one sink. A task may be lost after it wrote: Spark runs it again under another retry."""
        attempt = self.work(d)[1]
        whole = tuple(pack(d.batch, attempt, d.incarnation, task, 0) for task in range(self.bounds.tasks))
        moves: Moves = [(("stage", d.incarnation, d.batch, attempt, sink), self.staged(world, d, sink, whole, whole))]
        if (lossy := spend(world, "retries")) is not None:
            again = (pack(d.batch, attempt, d.incarnation, 0, 1), *whole[1:])
            retried = self.staged(lossy, d, sink, (*whole, again[0]), again)
            moves.append((("stage_retried", d.incarnation, d.batch, attempt, sink), retried))
        return moves

    def staged(self, world: World, d: Driver, sink: int, left: tuple[int, ...], told: tuple[int, ...]) -> World:
        world = with_store(world, sink, self.stores.stage(world.stores[sink], left))
        return with_driver(world, d, d._replace(k=d.k + 1, parts=(*d.parts, *((sink, b) for b in told))))

    def prepare(self, world: World, d: Driver, wanted: tuple[int, ...], index: int, mends: bool = False) -> Moves:
        sink = wanted[index]
        parts = tuple(branch for at, branch in d.parts if at == sink)
        label = ("prepare", d.incarnation, d.batch, sink)
        try:
            answer = self.promised(world, d, sink, parts, mends)
        except BatchFailed:
            answer = None
        if answer is None:
            return [(("prepare_failed", *label[1:]), self.prepare_failed(world, d, mends))]
        away = self.away_at_prepare(world, answer[0], d, label, mends)
        world, promised = answer
        now = d._replace(k=d.k + 1, proposal=(*d.proposal, *promised))
        if self.all_prepared(wanted, index):
            keys = frozenset(c[1] for c in now.proposal)
            return [(label, self.report(world, d, Prepared(keys), now._replace(parts=()))), *away]
        return [(label, with_driver(world, d, now)), *away]

    def away_at_prepare(self, before: World, after: World, d: Driver, label: Label, mends: bool) -> Moves:
        """The request does not get there, or its answer does not come back: for the driver it is one failure."""
        if (lossy := spend(before, "away")) is None:
            return []
        moves: Moves = [(("prepare_away", *label[1:]), self.prepare_failed(lossy, d, mends))]
        if after != before:
            lost = after._replace(left=lossy.left)
            moves.append((("prepare_unanswered", *label[1:]), self.prepare_failed(lost, d, mends)))
        return moves

    def all_prepared(self, wanted: tuple[int, ...], index: int) -> bool:
        return index + 1 == len(wanted)

    def promised(
        self, world: World, d: Driver, sink: int, parts: tuple[int, ...], mends: bool
    ) -> tuple[World, tuple[CommittableCode, ...]] | None:
        """What one sink prepared, under the keys that it is decided by."""
        spare: tuple[int, ...] = ()
        if mends:
            parts, spare, _ = self.rules.mend(self.known(d), self.gone(d), sink, parts, ())
        answer = self.stores.prepare(world.stores[sink], sink, parts)
        if answer is None:
            return None
        store, promised = answer
        if mends:
            every = tuple(branch for at, branch in d.parts if at == sink)
            _, _, promised = self.rules.mend(self.known(d), self.gone(d), sink, every, promised)
        return self.abort(with_store(world, sink, store), sink, spare), promised

    def prepare_failed(self, world: World, d: Driver, mends: bool) -> World:
        if mends:
            # The batch stays decided; what was staged now is dropped.
            world = self.roll_back(world, d)
        return self.report(world, d, PrepareFailed(), d._replace(parts=(), proposal=()))

    # Decide -----------------------------------------------------------------------------------------------------------

    def do_decide(self, world: World, d: Driver) -> Moves:
        work = self.work(d)
        kind = MENDS if work[0] == State.MENDED.name else DECIDED
        record: RecordCode = (kind, d.incarnation, d.proposal, d.plan if kind == DECIDED else 0)
        slot, label = work[1], (d.incarnation, d.batch, work[1])
        self.require(record, slot, d)
        recorded = self.append(world, d.batch, slot, record)
        if recorded is None:
            return [(("decide_refused", *label), self.told(world, d, DecisionRefused(), record))]
        if kind == DECIDED:
            recorded = self.must_begin_where_the_one_before_ends(recorded, d)
        moves: Moves = [(("decide", *label), self.told(recorded, d, DecisionRecorded(), record))]
        if (lossy := spend(world, "lost")) is not None:
            lost = recorded._replace(left=lossy.left)
            late = self.send(lossy, ("slot", d.batch, slot, record))
            moves.append((("decide_unanswered", *label), self.told(lost, d, DecisionUnanswered(), record)))
            moves.append((("decide_late", *label), self.told(late, d, DecisionUnanswered(), record)))
        return moves

    def told(self, world: World, d: Driver, event: Event, record: RecordCode) -> World:
        """What the log answered. A driver that believes its decision recorded knows the journal with it."""
        believes = self.rules.advance(self.work(d), event)[0] == State.DECIDED.name
        journal = (*d.journal, record) if believes else d.journal
        return self.report(world, d, event, d._replace(proposal=(), journal=journal))

    def require(self, record: RecordCode, slot: int, d: Driver) -> None:
        faults = self.rules.faults_of_a_decision(record, slot, d.journal, d.batch, self.sinks)
        if faults:
            raise ProtocolError("; ".join(faults))

    def append(self, world: World, batch: int, slot: int, record: RecordCode) -> World | None:
        """The log with the record in its slot, or None when the slot is taken."""
        slots = create_slot(world.journals[batch], slot, record)
        if slots is None:
            return None
        decided = world.decided | (1 << batch if record[0] in (DECIDED, MENDS) else 0)
        journals = (*world.journals[:batch], slots, *world.journals[batch + 1 :])
        return self.must_be_one_decision(world._replace(journals=journals, decided=decided), batch, slot)

    # Commit -----------------------------------------------------------------------------------------------------------

    def do_commit(self, world: World, d: Driver) -> Moves:
        if d.k == 0:
            if self.superseded(world, d):
                return [(("fenced", d.incarnation, d.batch), self.report(world, d, Superseded()))]
            return [(("look", d.incarnation, d.batch), with_driver(world, d, d._replace(k=1)))]
        pending = self.work(d)[3]
        known = {c[1]: c for c in self.known(d)}
        return [move for key in pending for move in self.commit(world, d, known[key])]

    def commit(self, world: World, d: Driver, c: CommittableCode) -> Moves:
        """One request. Its answer may be lost after it took effect; or it is late, and the driver asks again or not."""
        sink, key = c[0], c[1]
        store, outcome = self.stores.commit(world.stores[sink], c, d.incarnation)
        done = with_store(world, sink, store)
        what = (d.incarnation, d.batch, key)
        moves: Moves = [(("commit", *what, outcome.value), self.answered(done, d, key, outcome))]
        if (lossy := spend(world, "lost")) is not None and outcome is Outcome.COMMITTED:
            lost = done._replace(left=lossy.left)
            moves.append((("commit_unanswered", *what), self.unanswered(lost, d, key)))
            moves.append((("commit_given_up", *what), self.answered(lost, d, key, Outcome.RETRY)))
            if self.stores.can_be_late(world.stores[sink], c, d.incarnation):
                late = self.send(lossy, ("commit", sink, c, d.incarnation))
                moves.append((("commit_late", *what), self.unanswered(late, d, key)))
                moves.append((("commit_late_given_up", *what), self.answered(late, d, key, Outcome.RETRY)))
        if (doubtful := spend(world, "doubts")) is not None:
            moves.append((("commit_in_doubt", *what), self.answered(doubtful, d, key, Outcome.IN_DOUBT)))
        return moves

    def answered(self, world: World, d: Driver, key: str, outcome: Outcome) -> World:
        return self.report(world, d, CommitAnswered(key, outcome))

    def unanswered(self, world: World, d: Driver, key: str) -> World:  # noqa: ARG002 - a mutant wants the key
        """No answer is none: the driver asks again, so nothing has changed for it."""
        return world

    def send(self, world: World, request: tuple[object, ...]) -> World:
        return world._replace(requests=tuple(sorted((*world.requests, request), key=repr)))

    # Ends -------------------------------------------------------------------------------------------------------------

    def do_roll_back(self, world: World, d: Driver) -> Moves:
        after = self.must_leave_nothing(self.roll_back(world, d), d)
        return [(("roll_back", d.incarnation, d.batch), without_driver(after, d))]

    def do_withdraw(self, world: World, d: Driver) -> Moves:
        after = self.must_leave_nothing(self.roll_back(world, d), d)
        return [(("withdraw", d.incarnation, d.batch), without_driver(after, d))]

    def roll_back(self, world: World, d: Driver) -> World:
        for sink in range(self.sinks):
            world = self.abort(world, sink, self.of_attempt(world, d, sink))
        return world

    def of_attempt(self, world: World, d: Driver, sink: int) -> tuple[int, ...]:
        mine = d.batch, self.work(d)[1], d.incarnation
        return tuple(b for b in world.stores[sink].branches if unpack(b)[:3] == mine)

    def at_tidy(self, world: World, d: Driver) -> Moves:
        """Forget old journals, then drop what lost tries left: two steps, and somebody may come between them."""
        if d.k == 0:
            # As many are kept as a copy of the checkpoint may be behind.
            kept_from = d.batch - self.bounds.forgets
            journals = tuple(() if batch < kept_from else slots for batch, slots in enumerate(world.journals))
            following = with_driver(world._replace(journals=journals), d, d._replace(k=1))
            return [(("prune", d.incarnation, d.batch), following)]
        for sink, store in enumerate(world.stores):
            world = self.abort(world, sink, tuple(b for b in store.branches if unpack(b).batch <= d.batch))
        return [(("tidy", d.incarnation), with_driver(world, d, d._replace(at="checkpoint", k=0)))]

    def at_checkpoint(self, world: World, d: Driver) -> Moves:
        """Spark writes commits/N. If somebody else has, Spark stops this query."""
        if world.commits > d.batch:
            return [(("checkpoint_taken", d.incarnation, d.batch), without_driver(world, d))]
        world = self.must_go_on_from_what_was_decided(world, d)
        world = world._replace(commits=d.batch + 1)
        label = ("checkpoint", d.incarnation, d.batch)
        if d.batch + 1 == self.bounds.batches:
            return [(label, without_driver(world, d))]
        return [(label, with_driver(world, d, self.to_batch(d, d.batch + 1, is_first=False)))]

    def abort(self, world: World, sink: int, branches: Iterable[int]) -> World:
        """Drop branches of a sink. The observer minds when a decision still needs one of them."""
        there = tuple(b for b in branches if b in world.stores[sink].branches)
        if not there:
            return world
        world = self.must_not_be_needed(world, sink, there)
        return with_store(world, sink, self.stores.drop(world.stores[sink], there))
