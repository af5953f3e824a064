"""Three kinds of store, each as its sinks behave. Pure: a store goes in, a store and an answer come out.

    prepared     each task's rows and marker are one prepared transaction, ended by its name, and it may expire
                 (Kafka, PostgreSQL and MySQL with prepared transactions)
    ledger       tasks stage, the driver moves the rows and writes the ledger row in one transaction, which it holds
                 open from prepare to commit; a restart loses that transaction and not what is staged (databases)
    idempotent   tasks stage files, commit publishes them under the name of the batch, created if absent (files)

The first two refuse an older incarnation. The third does not, so that the protocol is tried without that help.
"""

from __future__ import annotations

from semel.model.rules import sink_name
from semel.model.world import CommittableCode, Store, content, unpack
from semel.protocol.events import Outcome


class Stores:
    """How stores answer. A mutant overrides one of these."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def fences(self, store: Store) -> bool:
        return store.kind != "idempotent"

    def fence(self, store: Store, incarnation: int) -> Store | None:
        """The store that knows of the new incarnation, or None when it knows a newer one. Older sessions end."""
        if not self.fences(store):
            return store
        if store.fence > incarnation:
            return None
        held = () if store.held and store.held[0] < incarnation else store.held
        return store._replace(fence=incarnation, held=held)

    # Before the decision ----------------------------------------------------------------------------------------------

    def stage(self, store: Store, branches: tuple[int, ...]) -> Store:
        return store._replace(branches=tuple(sorted({*store.branches, *branches})))

    def prepare(
        self, store: Store, sink: int, branches: tuple[int, ...]
    ) -> tuple[Store, tuple[CommittableCode, ...]] | None:
        """What the sink promises, or None when it cannot: fenced, or staged rows have vanished."""
        batch, attempt, incarnation = unpack(branches[0])[:3]
        if store.fence > incarnation or not set(branches) <= set(store.branches):
            return None
        name = sink_name(sink)
        if store.kind == "prepared":
            return store, tuple(
                (sink, f"{name}/{unpack(b).task}", batch, attempt, incarnation, (b,), 0) for b in branches
            )
        if store.kind == "ledger" and batch not in store.marks:
            store = store._replace(held=(incarnation, batch, attempt))
        return store, ((sink, name, batch, attempt, incarnation, branches, 0),)

    # After it ---------------------------------------------------------------------------------------------------------

    def commit(self, store: Store, c: CommittableCode, incarnation: int) -> tuple[Store, Outcome]:
        """Asked by this incarnation. Idempotent; "gone" is said only when the marker proves it."""
        if store.kind == "prepared":
            return self.commit_branch(store, c)
        batch, branches = c[2], c[5]
        if batch in store.marks:
            return self.drop(store, branches), Outcome.ALREADY_COMMITTED
        if store.kind == "ledger" and store.held == (incarnation, batch, c[3]):
            return self.publish(store, c), Outcome.COMMITTED
        if not set(branches) <= set(store.branches):
            return store, Outcome.GONE
        return self.publish(store, c), Outcome.COMMITTED

    def commit_branch(self, store: Store, c: CommittableCode) -> tuple[Store, Outcome]:
        (branch,) = c[5]
        if branch in store.marks:
            return store, Outcome.ALREADY_COMMITTED
        earlier = (mark for mark in map(unpack, store.marks) if mark.batch == c[2] and mark.attempt < c[3])
        if not c[6] and any(earlier):
            return self.drop(store, (branch,)), Outcome.ALREADY_COMMITTED
        if branch not in store.branches:
            return store, Outcome.GONE
        return self.publish(store, c), Outcome.COMMITTED

    def publish(self, store: Store, c: CommittableCode) -> Store:
        """Rows and marker become visible in one step; what was staged is not staged any more."""
        visible = list(store.visible)
        for branch in c[5]:
            visible[c[2] * self.tasks + content(branch, self.tasks)] += 1
        return self.drop(store, c[5])._replace(visible=tuple(visible), marks=self.marks(store, c))

    def marks(self, store: Store, c: CommittableCode) -> tuple[int, ...]:
        return tuple(sorted({*store.marks, *(c[5] if store.kind == "prepared" else (c[2],))}))

    def deliver(self, store: Store, c: CommittableCode, incarnation: int) -> Store:
        """A commit that was sent long ago arrives. It names what it ends, and nobody looks at a marker before it."""
        branches = set(c[5])
        if store.kind == "ledger":
            mine = store.held == (incarnation, c[2], c[3])
            return self.publish(store, c) if mine and c[2] not in store.marks else store
        if store.kind == "idempotent" and c[2] in store.marks:
            return store
        return self.publish(store, c) if branches <= set(store.branches) else store

    def can_be_late(self, store: Store, c: CommittableCode, incarnation: int) -> bool:
        """A transaction that moves staged rows is a conversation: only its last word, the commit, can be late."""
        return store.kind != "ledger" or store.held == (incarnation, c[2], c[3])

    def drop(self, store: Store, branches: tuple[int, ...]) -> Store:
        """Abort. Harmless for names that the store does not know. A transaction that is held on them goes too."""
        attempts = {(b.incarnation, b.batch, b.attempt) for b in map(unpack, branches)}
        held = () if store.held in attempts else store.held
        kept = tuple(b for b in store.branches if b not in branches)
        return store._replace(branches=kept, held=held)
