"""What Spark plans, what the checkpoint forgets, and what a start puts back: after `runtime.restore`.

A plan is a number: the first plan of a batch is 1, and what is planned after the checkpoint has forgotten something is
another number, as if more rows had arrived meanwhile. A plan says only where a batch ends, so PLANS_MAX times the
number of the plan behind which it was made is added. Worlds in which nothing is ever forgotten have no plans at all:
every plan would be the first, so these steps are left out.
"""

from __future__ import annotations

from semel.model.rules import Rules
from semel.model.world import (
    DECIDED,
    Bounds,
    Driver,
    Label,
    RecordCode,
    World,
    create_slot,
    left_of,
    read_journal,
    spend,
    with_driver,
    without_driver,
)
from semel.protocol.plans import Behind, PlanAction, first_batch, is_read_at_start, next_batch_of, undecided_gap
from semel.protocol.refusals import UnderWay

Moves = list[tuple[Label, World]]

#: In place of a plan: there is none.
NO_PLAN = 0
#: More than the checkpoint can forget.
PLANS_MAX = 8


class PlanSteps:
    """Steps of Spark and of a start that concern plans."""

    bounds: Bounds
    rules: Rules
    truth: Rules

    def next_batch(self, world: World) -> int:
        """The first batch that Spark would run."""
        return next_batch_of(world.commits - 1, self.newest_planned(world))

    def first_batch(self, world: World, next_batch: int) -> int | None:
        """The first that it runs once the checkpoint says what was decided; None when something lies in neither."""
        decided = self.decided_from(world, next_batch)
        return first_batch(next_batch, decided) if undecided_gap(next_batch, decided) is None else None

    def decided_from(self, world: World, first: int) -> list[int]:
        """The batches that are decided, from this one on."""
        journals = ((batch, read_journal(world.journals[batch])) for batch in range(max(0, first), self.bounds.batches))
        return [batch for batch, journal in journals if self.rules.effective(journal, batch) is not None]

    def newest_planned(self, world: World) -> int:
        return max((batch for batch, plan in enumerate(world.plans) if plan), default=-1)

    # Spark ------------------------------------------------------------------------------------------------------------

    def at_plan(self, world: World, d: Driver) -> Moves:
        """Spark looks where to go on; then it takes the plan that is there, or makes one of all rows that there are."""
        if d.k:
            return self.make_plan(world, d)
        missing = self.newest_planned(world) - 1
        if missing >= 0 and not world.plans[missing]:
            # The batch begins where that one has ended, and Spark cannot tell.
            return [(("plan_missing", d.incarnation, missing), without_driver(world, d))]
        batch = self.at_hand(world)
        if batch == self.bounds.batches:
            return [(("idle", d.incarnation), without_driver(world, d))]
        start = world.plans[batch - 1] if batch else NO_PLAN
        if d.incarnation and self.rules.is_behind(batch, d.batch):
            plan = world.plans[batch] or self.fresh(world, start)
            plans = (*world.plans[:batch], plan, *world.plans[batch + 1 :])
            return [(("runs_behind", d.incarnation, batch), without_driver(world._replace(plans=plans), d))]
        if found := world.plans[batch]:
            return [(("plan_read", d.incarnation, batch, found), self.planned(world, d, batch, start, found))]
        opened = Driver(d.incarnation, "plan", batch, k=1, start=start)
        return [(("open", d.incarnation, batch), with_driver(world, d, opened))]

    def at_hand(self, world: World) -> int:
        """The batch that Spark goes on with, by its plans: the newest planned one, unless that is done.

        Of a batch that it has lost the plan of, it does not see that it is done.
        """
        newest = self.newest_planned(world)
        return newest + (world.commits == newest + 1) if newest >= 0 else 0

    def make_plan(self, world: World, d: Driver) -> Moves:
        batch = d.batch
        if world.plans[batch]:
            # It was not there when Spark began, so somebody else is at work.
            return [(("plan_taken", d.incarnation, batch), without_driver(world, d))]
        fresh = self.fresh(world, d.start)
        plans = (*world.plans[:batch], fresh, *world.plans[batch + 1 :])
        planned = self.planned(world._replace(plans=plans), d, batch, d.start, fresh)
        return [(("plan", d.incarnation, batch, fresh), planned)]

    def fresh(self, world: World, start: int) -> int:
        return 1 + self.bounds.forgets - left_of(world, "forgets") + PLANS_MAX * number_of(start)

    def planned(self, world: World, d: Driver, batch: int, start: int, plan: int) -> World:
        """With the drop-in the first batch is planned before its function starts and claims anything."""
        at = "read" if d.incarnation else "claim"
        return with_driver(world, d, Driver(d.incarnation, at, batch, plan=plan, start=start, under=batch))

    def to_batch(self, d: Driver, batch: int, *, is_first: bool) -> Driver:
        """Where a driver goes on to a batch. Plans are made where they can be forgotten."""
        if not self.bounds.forgets:
            return Driver(d.incarnation, "read", batch)
        if is_first and d.plan:
            return Driver(d.incarnation, "read", batch, plan=d.plan, start=d.start)
        return Driver(d.incarnation, "plan", batch, k=0 if is_first else 1, start=NO_PLAN if is_first else d.plan)

    # A start ----------------------------------------------------------------------------------------------------------

    def is_overtaken(self, world: World, d: Driver) -> bool:
        """Whether somebody has ended the batch that Spark had in its hands when it called us."""
        batch = d.under
        if not d.plan or batch >= self.next_batch(world):
            return False
        decided = self.rules.plan_of(read_journal(world.journals[batch]), batch)
        query = UnderWay(
            batch,
            is_next_planned=self.is_planned(world, batch + 1),
            is_over=world.commits > batch and bool(world.plans[batch]),
            newest_decided=max(self.decided_from(world, 0), default=-1),
            is_replanned=bool(decided) and world.plans[batch] not in (NO_PLAN, decided),
        )
        return self.rules.refuse_overtaken(query) is not None

    def is_planned(self, world: World, batch: int) -> bool:
        return batch < len(world.plans) and bool(world.plans[batch])

    def at_restore(self, world: World, d: Driver) -> Moves:
        """One decided batch after the other, oldest first. `k` counts them; a crash may come between any two steps."""
        batch = max(0, d.next - 2) + d.k
        if batch > d.batch or batch >= self.bounds.batches:
            return self.after_restore(world, d)
        following = d._replace(k=d.k + 1)
        decided = self.rules.plan_of(read_journal(world.journals[batch]), batch)
        if not decided or self.is_left_out(world, d, batch):
            return self.at_restore(world, following)
        behind = self.behind(world, self.decided_from(world, d.next - 2))
        action = self.action_on_plan(world, d, batch, decided, behind)
        label = ("restore", d.incarnation, batch, action.name)
        if action is PlanAction.GO_ON:
            return self.at_restore(world, following)
        if action is PlanAction.REFUSE:
            return [(label, self.refused(world, d, batch))]
        amiss = d.amiss or bool(d.plan)
        if (doomed := self.doomed(world, batch, decided, behind)) is not None:
            dropped = with_driver(self.drop(world, doomed), d, d._replace(amiss=amiss))
            return [(("drop", d.incarnation, doomed), dropped)]
        return [(label, with_driver(self.put_back(world, batch, decided), d, following._replace(amiss=amiss)))]

    def is_left_out(self, world: World, d: Driver, batch: int) -> bool:
        """Of a batch that is over, what is missing is put back only where Spark reads it."""
        missing = batch < d.next and not world.plans[batch]
        if not missing:
            return False
        before = self.rules.plan_of(read_journal(world.journals[d.next - 1]), d.next - 1)
        there = world.plans[d.next - 1]
        stays = self.is_planned(world, d.next) and bool(there) and before in (NO_PLAN, there)
        return not is_read_at_start(batch, d.next, is_planned=stays)

    def behind(self, world: World, decided: list[int]) -> Behind:
        plans = {batch: self.rules.plan_of(read_journal(world.journals[batch]), batch) for batch in decided}
        as_decided = tuple(batch for batch, plan in plans.items() if world.plans[batch] == plan)
        return Behind(self.newest_planned(world), world.commits - 1, tuple(decided), as_decided)

    def doomed(self, world: World, batch: int, decided: int, behind: Behind) -> int | None:
        return self.rules.plan_to_drop(batch, behind) if world.plans[batch] != decided else None

    def action_on_plan(
        self, world: World, d: Driver, batch: int, decided: int, behind: Behind, in_hand: int = NO_PLAN
    ) -> PlanAction:
        """A start compares files only; what Spark has in its hands is asked before the batch."""
        is_over = batch < d.next
        return self.rules.plan_action(
            decided,
            world.plans[batch],
            0 if is_over or not d.plan else in_hand or world.plans[batch] or decided,
            is_over=is_over,
            is_before_there=world.commits >= batch,
            gone_on_from=self.rules.gone_on_from(batch, behind),
        )

    def before_batch(self, world: World, d: Driver, *, is_decided: bool) -> Moves:
        """Spark has handed over rows: it must go on behind what was decided, and with it. Empty when it does."""
        if not self.bounds.forgets or d.forward:
            return []
        before = self.rules.plan_of(read_journal(world.journals[d.batch - 1]), d.batch - 1) if d.batch else NO_PLAN
        if before and self.rules.begins_elsewhere(str(before), str(d.start), str(d.start)):
            dropped = world if is_decided else self.drop(world, d.batch)
            return [(("begins_elsewhere", d.incarnation, d.batch), without_driver(dropped, d))]
        return self.before_forward(world, d) if is_decided else []

    def before_forward(self, world: World, d: Driver) -> Moves:
        """The rows of a decided batch must be those that it was decided for.

        The checkpoint may have lost the plan after the start had looked.
        """
        decided = self.rules.plan_of(d.journal, d.batch)
        if not decided:
            return []
        behind = self.behind(world, self.decided_from(world, d.batch))
        action = self.action_on_plan(world, d._replace(next=d.batch), d.batch, decided, behind, in_hand=d.plan)
        if action is PlanAction.GO_ON:
            return []
        label = ("restore", d.incarnation, d.batch, action.name)
        if action is PlanAction.REFUSE:
            return [(label, self.refused(world, d, d.batch))]
        if (doomed := self.doomed(world, d.batch, decided, behind)) is not None:
            world = self.drop(world, doomed)
        return [(label, without_driver(self.put_back(world, d.batch, decided), d))]

    def refused(self, world: World, d: Driver, batch: int) -> World:
        """A person is asked. That is right only where two drivers have planned at once, or somebody ran past us."""
        asked = without_driver(world, d)._replace(asked=True)
        if self.bounds.zombies or world.strayed:
            return asked
        return asked._replace(broken=f"plan_kept: batch {batch} cannot be restored")

    def put_back(self, world: World, batch: int, decided: int) -> World:
        """The plan, and commits/N-1, which must have been there when the batch began."""
        if world.strayed > batch and world.plans[batch] not in (NO_PLAN, decided):
            text = f"rows are written behind plan {world.plans[batch]} of batch {batch}, and {decided} is put back"
            return world._replace(broken=f"no_loss: {text}")
        plans = (*world.plans[:batch], decided, *world.plans[batch + 1 :])
        return world._replace(plans=plans, commits=max(world.commits, batch))

    def drop(self, world: World, batch: int) -> World:
        if world.strayed > batch:
            return world._replace(broken=f"no_loss: rows are written from the plan of batch {batch}, which is dropped")
        return world._replace(plans=(*world.plans[:batch], NO_PLAN, *world.plans[batch + 1 :]))

    def after_restore(self, world: World, d: Driver) -> Moves:
        raise NotImplementedError

    # Faults -----------------------------------------------------------------------------------------------------------

    def forgettings(self, world: World) -> Moves:
        """Files of the checkpoint vanish: the newest plan, the newest commits/N, or both with the plan before them."""
        if not self.bounds.forgets or world.strayed or (lossy := spend(world, "forgets")) is None:
            return []
        newest = self.newest_planned(world)
        moves: Moves = []
        commits = world.commits
        if newest >= commits:
            moves.append((("forget", newest, commits), self.without_plans(lossy, newest)))
        if commits:
            moves.append((("forget_commit", commits - 1), lossy._replace(commits=commits - 1)))
            older = self.without_plans(lossy, commits)._replace(commits=commits - 1)
            moves.append((("forget_batch", commits - 1), older))
            moves.append((("forget_both", commits - 1), self.without_plans(older, commits - 1)))
            moves.append((("forget_done", commits - 1), self.without_plans(lossy, commits - 1)))
        return moves

    def without_plans(self, world: World, first: int) -> World:
        return world._replace(plans=tuple(p if b < first else NO_PLAN for b, p in enumerate(world.plans)))

    def straying(self, world: World) -> Moves:
        """Somebody runs the batch that Spark has at hand, without a look at what was decided before.

        Without semel or at-least-once no decision says so; a driver that compares no plans decides the batch.
        """
        if not self.bounds.forgets or world.drivers or world.strayed or (lossy := spend(world, "strays")) is None:
            return []
        batch, missing = self.at_hand(world), self.newest_planned(world) - 1
        decided = self.decided_from(world, 0)
        if batch == self.bounds.batches or batch in decided or (missing >= 0 and not world.plans[missing]):
            return []
        start = world.plans[batch - 1] if batch else NO_PLAN
        plan = world.plans[batch] or self.fresh(world, start)
        tasks = self.bounds.tasks
        shown = tuple(n or batch * tasks <= row < (batch + 1) * tasks for row, n in enumerate(world.stores[0].visible))
        strayed = lossy._replace(
            plans=(*world.plans[:batch], plan, *world.plans[batch + 1 :]),
            commits=max(world.commits, batch + 1),
            stores=tuple(store._replace(visible=tuple(map(int, shown))) for store in world.stores),
            decided=world.decided | 1 << batch,
            strayed=batch + 1,
        )
        record: RecordCode = (DECIDED, world.claims + 1, (), plan)
        slots = create_slot(world.journals[batch], len(read_journal(world.journals[batch])), record)
        moves: Moves = [(("stray", batch, plan), strayed)]
        if slots is not None:
            journals = (*world.journals[:batch], slots, *world.journals[batch + 1 :])
            known = strayed._replace(journals=journals, claims=world.claims + 1)
            moves.append((("stray_decides", world.claims + 1, batch, plan), known))
        return moves

    # What the observer minds ------------------------------------------------------------------------------------------

    def must_go_on_from_what_was_decided(self, world: World, d: Driver) -> World:
        """Spark has done with the batch: the next one begins where its plan ends. Else rows in between are lost."""
        if not self.bounds.forgets:
            return world
        decided = self.truth.plan_of(read_journal(world.journals[d.batch]), d.batch)
        if decided and d.plan != decided:
            text = f"batch {d.batch} was decided for plan {decided}, and Spark goes on behind plan {d.plan}"
            return world._replace(broken=f"no_loss: {text}")
        return world

    def must_begin_where_the_one_before_ends(self, world: World, d: Driver) -> World:
        """The batch is decided: its rows begin where those of the batch before end. Else rows between are lost.

        Nor does it go on with a plan that was made behind another one, unless two Sparks ran at once: one that is
        fenced may still plan a batch behind what it has read, and a plan does not say where it begins.
        """
        if not self.bounds.forgets or not d.batch:
            return world
        before = self.truth.plan_of(read_journal(world.journals[d.batch - 1]), d.batch - 1)
        text = f"batch {d.batch - 1} was decided for plan {before}, and batch {d.batch}"
        if before and d.start != before:
            return world._replace(broken=f"no_loss: {text} begins behind plan {d.start}")
        if before and d.plan // PLANS_MAX != number_of(before) and not self.bounds.zombies:
            return world._replace(broken=f"no_loss: {text} has plan {d.plan}, which was made behind another one")
        return world


def number_of(plan: int) -> int:
    return plan % PLANS_MAX
