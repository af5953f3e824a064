"""What an observer who sees everything minds in a step of a driver; what it minds in a world is in `properties`."""

from __future__ import annotations

from semel.model.rules import Rules
from semel.model.world import ABORTED, Bounds, Driver, WorkCode, World, content, read_journal, unpack
from semel.protocol.step import ProtocolError


class Observer:
    """`truth` is what it believes, and is never a mutant's."""

    bounds: Bounds
    truth: Rules
    sinks: int

    def work(self, d: Driver) -> WorkCode:
        if not d.work:
            raise ProtocolError("the driver works on nothing")
        return d.work

    def must_be_swept(self, world: World, d: Driver) -> World:
        """After a start has swept a store, nothing that older drivers left is there, unless a decision names it.

        A driver that somebody has superseded meanwhile may keep what it cannot judge: the journals may be pruned
        under its hands. What it leaves, the next start sweeps.
        """
        if world.claims > d.incarnation:
            return world
        closed = [(d.closed, d.batch), (d.closed_next, d.batch + 1)]
        decided = [c for journal, batch in closed for c in self.truth.effective(journal, batch) or ()]
        named = {b for c in decided if c[0] == d.k for b in c[5]}
        for branch in {*d.listing[d.k]} & {*world.stores[d.k].branches} - named:
            if unpack(branch).incarnation < d.incarnation:
                return world._replace(broken=f"no_orphan: a start swept sink s{d.k} and left {words(branch)}")
        return world

    def must_show_nothing(self, world: World, d: Driver) -> World:
        """The newest driver found the batch undecided, so no store may show a row of it."""
        if world.claims > d.incarnation:
            return world
        batch, tasks = d.batch, self.bounds.tasks
        for sink, store in enumerate(world.stores):
            if any(store.visible[batch * tasks : (batch + 1) * tasks]):
                return world._replace(broken=f"no_torn: batch {batch} is to be run, and s{sink} shows rows of it")
        return world

    def must_show_all(self, world: World, batch: int) -> World:
        """A start has committed the batch forward, so every store shows all of it."""
        tasks = self.bounds.tasks
        for sink, store in enumerate(world.stores):
            if not all(store.visible[batch * tasks : (batch + 1) * tasks]):
                return world._replace(
                    broken=f"no_torn: batch {batch} is recovered, and s{sink} does not show all of it"
                )
        return world

    def must_be_one_decision(self, world: World, batch: int, slot: int) -> World:
        """A batch is decided once, and never by an older driver after a newer one has written into its journal.

        What drivers that slept through the pruning write into the journal of a checkpointed batch is read by nobody.
        """
        if batch < world.commits:
            return world
        record = world.journals[batch][slot]
        if len(record) == 4 and record[0] != ABORTED:
            newer = [before[1] for before in world.journals[batch][:slot] if before and before[1] > record[1]]
            if newer:
                text = f"incarnation {record[1]} decided batch {batch} after incarnation {newer[0]} had settled it"
                return world._replace(broken=f"one_decision: {text}")
        try:
            self.truth.effective(read_journal(world.journals[batch]), batch)
        except ProtocolError as error:
            return world._replace(broken=f"one_decision: {error}")
        return world

    def must_not_be_needed(self, world: World, sink: int, branches: tuple[int, ...]) -> World:
        tasks, store = self.bounds.tasks, world.stores[sink]
        for branch in branches:
            batch = unpack(branch).batch
            if batch < world.commits or store.visible[batch * tasks + content(branch, tasks)]:
                continue
            decided = self.truth.effective(read_journal(world.journals[batch]), batch) or ()
            if any(c[0] == sink and branch in c[5] for c in decided):
                return world._replace(broken=f"decided_is_kept: {words(branch)} is decided, and s{sink} dropped it")
        return world

    def must_leave_nothing(self, world: World, d: Driver) -> World:
        """A driver that ends because its batch cannot be decided leaves nothing of it behind."""
        for sink in range(self.sinks):
            mine = d.batch, self.work(d)[1], d.incarnation
            left = [b for b in world.stores[sink].branches if unpack(b)[:3] == mine]
            if left:
                return world._replace(broken=f"no_orphan: incarnation {d.incarnation} left {words(left[0])} in s{sink}")
        return world


def words(branch: int) -> str:
    b = unpack(branch)
    return f"batch {b.batch} attempt {b.attempt} task {b.task} retry {b.retry} of incarnation {b.incarnation}"
