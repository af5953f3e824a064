"""What may go wrong between any two steps, and the supervisor that starts the next driver."""

from __future__ import annotations

from typing import cast

from semel.model.driver import DriverSteps, Moves
from semel.model.world import (
    STARTED,
    CommittableCode,
    Driver,
    RecordCode,
    World,
    pack,
    spend,
    with_store,
    without_driver,
)
from semel.protocol.states import Action

STEPS_OF_A_START_MAX = 1_000


class Model(DriverSteps):
    """The whole model: everything that can happen next in a world."""

    def successors(self, world: World) -> Moves:
        if world.broken:
            return []
        moves: Moves = []
        for driver in world.drivers:
            moves += self.moves(world, driver)
        if not world.drivers and not self.finished(world) and not world.asked:
            moves += self.started(world)
        return moves + self.faults(world)

    def finished(self, world: World) -> bool:
        """Every batch has its commits/N."""
        return world.commits == self.bounds.batches

    def started(self, world: World) -> Moves:
        """The supervisor starts a driver when none runs. If that takes too often, the pipeline does not get on."""
        if world.claims >= self.bounds.claims_max:
            text = f"{world.claims} starts, and batch {world.commits} is not done"
            return [(("stuck",), world._replace(broken=f"finishes: {text}"))]
        moves: Moves = [(("start", self.next_batch(world)), self.with_a_driver(world))]
        if self.bounds.drop_in:
            moves.append((("start_in_batch", self.next_batch(world)), self.with_a_driver(world, at="plan")))
        return moves

    def with_a_driver(self, world: World, at: str = "claim") -> World:
        """It reads which batch comes next before it claims."""
        return world._replace(drivers=(*world.drivers, Driver(0, at, self.next_batch(world))))

    # Faults -----------------------------------------------------------------------------------------------------------

    def faults(self, world: World) -> Moves:
        moves = self.arrivals(world)
        if (crashed := spend(world, "crashes")) is not None:
            moves += [move for d in world.drivers if d.incarnation or d.plan for move in self.crashes(crashed, d)]
        if (doubled := spend(world, "zombies")) is not None and self.may_be_doubled(world):
            moves.append((("second_driver", self.next_batch(world)), self.with_a_driver(doubled)))
            if self.bounds.drop_in:
                moves.append((("second_in_batch", self.next_batch(world)), self.with_a_driver(doubled, at="plan")))
        moves += self.troubles_of_stores(world) + self.weaker_before(world)
        return moves + self.forgettings(world) + self.straying(world)

    def crashes(self, world: World, d: Driver) -> Moves:
        """The driver dies. Tasks that it has started may go on without it and stage what nobody waits for."""
        died = without_driver(world, d)
        moves: Moves = [(("crash", d.incarnation), died)]
        if d.at == "work" and self.rules.action(self.work(d)) is Action.STAGE and d.k < self.sinks:
            attempt = self.work(d)[1]
            branches = tuple(pack(d.batch, attempt, d.incarnation, task, 0) for task in range(self.bounds.tasks))
            orphaned = self.send(died, ("stage", d.k, branches, d.incarnation))
            moves.append((("crash_without_tasks", d.incarnation), orphaned))
        return moves

    def may_be_doubled(self, world: World) -> bool:
        """A driver that sleeps is taken for dead and another is started. One that has not claimed has done nothing."""
        return bool(world.drivers) and all(d.incarnation for d in world.drivers) and not self.finished(world)

    def troubles_of_stores(self, world: World) -> Moves:
        moves: Moves = []
        for sink, store in enumerate(world.stores):
            if store.kind == "prepared" and (aged := spend(world, "expiries")) is not None:
                for branch in store.branches:
                    expired = with_store(aged, sink, self.stores.drop(store, (branch,)))
                    moves.append((("expire", sink, branch), expired))
            if store.held and (away := spend(world, "restarts")) is not None:
                moves.append((("restart", sink), with_store(away, sink, store._replace(held=()))))
        return moves

    def arrivals(self, world: World) -> Moves:
        """A request that was sent takes effect now, whoever sent it and whether or not he lives."""
        moves: Moves = []
        for index, request in enumerate(world.requests):
            rest = world._replace(requests=world.requests[:index] + world.requests[index + 1 :])
            if request[0] == "commit":
                _, sink, code, incarnation = cast("tuple[str, int, CommittableCode, int]", request)
                store = self.stores.deliver(world.stores[sink], code, incarnation)
                moves.append((("commit_arrives", incarnation, code[1], code[2]), with_store(rest, sink, store)))
            elif request[0] == "stage":
                _, sink, branches, incarnation = cast("tuple[str, int, tuple[int, ...], int]", request)
                store = self.stores.stage(world.stores[sink], branches)
                moves.append((("tasks_arrive", incarnation, sink), with_store(rest, sink, store)))
            else:
                _, batch, slot, record = cast("tuple[str, int, int, RecordCode]", request)
                arrived = self.append(rest, batch, slot, record)
                moves.append((("slot_arrives", record[1], batch, slot), rest if arrived is None else arrived))
        return moves

    def weaker_before(self, world: World) -> Moves:
        if not self.bounds.weaker_before or world.claims or world.drivers:
            return []
        record: RecordCode = (STARTED, 1, (), 0)
        begun = world._replace(claims=1, journals=((record,), *world.journals[1:]))
        return [(("weaker_before",), begun)]

    # The last start ---------------------------------------------------------------------------------------------------

    def undisturbed_start(self, world: World) -> World:
        """The world after one more start in which nothing goes wrong: what a start is for must be done then."""
        calm = self.with_a_driver(world._replace(left=(0,) * len(world.left), requests=()))
        for _ in range(STEPS_OF_A_START_MAX):
            if not calm.drivers or calm.broken:
                return calm
            calm = self.moves(calm, calm.drivers[0])[0][1]
        return calm._replace(broken="finishes: a start that nobody disturbs does not come to an end")
