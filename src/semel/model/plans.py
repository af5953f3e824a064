"""What Spark plans, what the checkpoint forgets, and what a start puts back: after `runtime.restore`.

A plan is a number: the first plan of a batch is 1, and what is planned after the checkpoint has forgotten something is
another number, as if more rows had arrived meanwhile. Worlds in which nothing is ever forgotten have no plans at all:
every plan would be the first, so these steps are left out.
"""

from __future__ import annotations

from semel.model.rules import Rules
from semel.model.world import Bounds, Driver, Label, World, read_journal, spend, with_driver, without_driver
from semel.protocol.plans import PlanAction, first_batch, gone_on_from, next_batch_of, undecided_gap

Moves = list[tuple[Label, World]]

#: In place of a plan: there is none.
NO_PLAN = 0


class PlanSteps:
    """Steps of Spark and of a start that concern plans."""

    bounds: Bounds
    rules: Rules
    truth: Rules

    def next_batch(self, world: World) -> int:
        """The first batch that Spark would run."""
        newest = max((batch for batch, plan in enumerate(world.plans) if plan), default=-1)
        return next_batch_of(world.commits - 1, newest)

    def first_batch(self, world: World, next_batch: int) -> int | None:
        """The first that it runs once the checkpoint says what was decided; None when something lies in neither."""
        decided = [
            batch
            for batch in range(next_batch, self.bounds.batches)
            if self.rules.effective(read_journal(world.journals[batch]), batch) is not None
        ]
        return first_batch(next_batch, decided) if undecided_gap(next_batch, decided) is None else None

    # Spark ------------------------------------------------------------------------------------------------------------

    def at_plan(self, world: World, d: Driver) -> Moves:
        """Spark takes the plan that is there, or makes one of all rows that have arrived by now."""
        batch = d.batch
        if batch and not d.k and not world.plans[batch - 1]:
            # It begins where the one before has ended, and cannot tell.
            return [(("plan_missing", d.incarnation, batch - 1), without_driver(world, d))]
        found = world.plans[batch]
        if found and not d.k:
            return [(("plan_read", d.incarnation, batch, found), self.planned(world, d, found))]
        if found:
            # It has not read this one at its start, so somebody else is at work.
            return [(("plan_taken", d.incarnation, batch), without_driver(world, d))]
        fresh = 1 + self.bounds.forgets - world.left[-1]
        plans = (*world.plans[:batch], fresh, *world.plans[batch + 1 :])
        return [(("plan", d.incarnation, batch, fresh), self.planned(world._replace(plans=plans), d, fresh))]

    def planned(self, world: World, d: Driver, plan: int) -> World:
        """With the drop-in the first batch is planned before its function starts and claims anything."""
        at = "read" if d.incarnation else "claim"
        return with_driver(world, d, Driver(d.incarnation, at, d.batch, plan=plan))

    def to_batch(self, d: Driver, batch: int, *, is_first: bool) -> Driver:
        """Where a driver goes on to a batch. Plans are made where they can be forgotten."""
        if not self.bounds.forgets:
            return Driver(d.incarnation, "read", batch)
        if is_first and d.plan:
            return Driver(d.incarnation, "read", batch, plan=d.plan)
        return Driver(d.incarnation, "plan", batch, k=0 if is_first else 1)

    # A start ----------------------------------------------------------------------------------------------------------

    def at_restore(self, world: World, d: Driver) -> Moves:
        """One decided batch after the other, oldest first. `k` counts them; a crash may come between any two."""
        batch = max(0, d.next - 1) + d.k
        if batch > d.batch or batch >= self.bounds.batches:
            return self.after_restore(world, d)
        journal = read_journal(world.journals[batch])
        decided = self.rules.plan_of(journal, batch)
        if not decided:
            return self.at_restore(world, d._replace(k=d.k + 1))
        action = self.action_on_plan(world, d, batch, decided)
        label = ("restore", d.incarnation, batch, action.name)
        if action is PlanAction.GO_ON:
            return self.at_restore(world, d._replace(k=d.k + 1))
        if action is PlanAction.REFUSE:
            return [(label, self.refused(world, d, batch))]
        restored = self.put_back(world, batch, decided)
        amiss = d.amiss or bool(d.plan)
        return [(label, with_driver(restored, d, d._replace(k=d.k + 1, amiss=amiss)))]

    def action_on_plan(self, world: World, d: Driver, batch: int, decided: int, in_hand: int = NO_PLAN) -> PlanAction:
        """A start compares files only; what Spark has in its hands is asked before the batch."""
        is_over = batch < d.next
        following = batch + 1 < len(world.plans) and bool(world.plans[batch + 1])
        return self.rules.plan_action(
            decided,
            world.plans[batch],
            0 if is_over or not d.plan else in_hand or world.plans[batch] or decided,
            is_over=is_over,
            is_before_there=world.commits >= batch,
            gone_on_from=gone_on_from(batch, d.next, is_next_planned=following),
        )

    def before_forward(self, world: World, d: Driver) -> Moves:
        """Spark has handed over the rows of a decided batch: they must be those that it was decided for.

        Empty when they are. The checkpoint may have lost the plan after the start had looked.
        """
        decided = self.rules.plan_of(d.journal, d.batch) if self.bounds.forgets and not d.forward else NO_PLAN
        if not decided:
            return []
        action = self.action_on_plan(world, d._replace(next=d.batch), d.batch, decided, in_hand=d.plan)
        if action is PlanAction.GO_ON:
            return []
        label = ("restore", d.incarnation, d.batch, action.name)
        if action is PlanAction.REFUSE:
            return [(label, self.refused(world, d, d.batch))]
        return [(label, without_driver(self.put_back(world, d.batch, decided), d))]

    def refused(self, world: World, d: Driver, batch: int) -> World:
        """A person is asked. That is right only where two drivers have planned at once."""
        asked = without_driver(world, d)._replace(asked=True)
        return asked if self.bounds.zombies else asked._replace(broken=f"plan_kept: batch {batch} cannot be restored")

    def put_back(self, world: World, batch: int, decided: int) -> World:
        """The plan, and commits/N-1, which must have been there when the batch began."""
        plans = (*world.plans[:batch], decided, *world.plans[batch + 1 :])
        return world._replace(plans=plans, commits=max(world.commits, batch))

    def after_restore(self, world: World, d: Driver) -> Moves:
        raise NotImplementedError

    # Faults -----------------------------------------------------------------------------------------------------------

    def forgettings(self, world: World) -> Moves:
        """Files of the checkpoint vanish: the newest plan, the newest commits/N, or both with the plan before them."""
        if not self.bounds.forgets or (lossy := spend(world, "forgets")) is None:
            return []
        newest = max((batch for batch, plan in enumerate(world.plans) if plan), default=-1)
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
