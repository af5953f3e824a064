"""Every call of a driver to the outside, and what the faults of the plan do to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from semel.decisions.base import StoreUnanswered
from semel.errors import SinkUnavailable
from semel.simulation.faults import LOG_AWAY_CALLS_MAX, Call, Fault
from semel.simulation.scheduler import Driver, DriverDied

if TYPE_CHECKING:
    from semel.simulation.world import World

T = TypeVar("T")
LOG, CHECKPOINT = "log", "checkpoint"


class TaskFailed(RuntimeError):
    """A task failed for a reason of its own, as user code does."""


@dataclass(frozen=True)
class Late:
    """A request that is on its way while its sender is dead or has given up."""

    due_at_call: int
    call: Call
    what: object
    effect: Callable[[], object]


class Line:
    """What one driver has instead of a network."""

    def __init__(self, world: World, driver: Driver) -> None:
        self.world = world
        self.driver = driver

    def ask(self, place: str, verb: str, effect: Callable[[], T], what: object = "", *, changes: bool = True) -> T:
        """One request: its effect happens whole or not at all, and the driver may or may not hear of it."""
        world, driver = self.world, self.driver
        self.pause()
        call = Call(place, verb, changes)
        fault = world.plan.due(call, world.something_prepared)
        if fault is not None:
            world.tell(driver, "FAULT", fault.kind, "after the effect:" if fault.after else ":", place, verb, what)
            return self._ask_with(fault, call, effect, what)
        if world.away.get(place):
            world.away[place] -= 1
            world.tell(driver, place, verb, what, ": away")
            raise unanswered(call)
        answer = effect()
        world.tell(driver, place, verb, what, ":", _short(answer))
        return answer

    def pause(self, seconds: float = 0.001) -> None:
        """Time passes; what is late may arrive, and somebody else may go on."""
        world, driver = self.world, self.driver
        if driver.dead:
            raise DriverDied
        world.pass_time(seconds)
        if world.scheduler.wants_switch(driver, world.calls):
            world.scheduler.hand_over(driver)
            if driver.dead:
                raise DriverDied

    def die(self) -> NoReturn:
        self.driver.dead = True
        self.world.bury(self.driver)
        raise DriverDied

    def _ask_with(self, fault: Fault, call: Call, effect: Callable[[], T], what: object) -> T:
        """The faults after which the call is answered, or fails in a way of its own; then all others."""
        if fault.kind == "zombie":
            answer = effect() if fault.after else None
            self._fall_asleep(fault.span)
            return answer if fault.after else effect()  # type: ignore[return-value]
        if fault.kind == "expiry":
            self.world.let_transactions_expire()
            return effect()
        if fault.kind in ("power", "old copy"):
            if fault.after:
                with suppress(Exception):
                    effect()
            self._stop_the_machine(fault)
        if fault.kind in ("task retried", "task failed"):
            if fault.after:
                effect()
            self.world.tasks_are_doomed = fault.kind == "task failed"
            raise TaskFailed(f"a task failed at {call.place}")
        if fault.kind != "checkpoint lost":
            self._disturb(fault, call, effect, what)
        if fault.kind in ("checkpoint lost", "crash") or (fault.kind == "late effect" and fault.after):
            self.die()
        self.world.tell(self.driver, call.place, call.verb, what, ": no answer")
        raise unanswered(call)

    def _stop_the_machine(self, fault: Fault) -> NoReturn:
        if fault.kind == "power":
            self.world.lose_power()
        else:
            self.world.put_older_copy(fault.span)
        self.world.kill_all()
        raise DriverDied

    def _disturb(self, fault: Fault, call: Call, effect: Callable[[], object], what: object) -> None:
        """What happens at the other end of the line; the driver will not be told."""
        world = self.world
        if fault.kind == "late effect":
            world.late.append(Late(world.calls + fault.span, call, what, effect))
        elif fault.kind == "lost answer" or (fault.after and fault.kind in ("crash", "restart")):
            # A store that refuses says so to nobody.
            with suppress(Exception):
                effect()
        if fault.kind == "restart":
            world.restart(call.place)
        if fault.kind == "away":
            world.away[call.place] = min(fault.span, LOG_AWAY_CALLS_MAX) if call.place == LOG else fault.span

    def _fall_asleep(self, calls: int) -> None:
        world, driver = self.world, self.driver
        driver.zombie = True
        driver.wake_at_call = world.calls + calls
        world.scheduler.hand_over(driver)
        if driver.dead:
            raise DriverDied
        world.counts["zombies woken"] += 1
        world.tell(driver, "wakes up")


def unanswered(call: Call) -> Exception:
    """How the code under test learns that nobody answered."""
    text = f"{call.place} did not answer: {call.verb}"
    if call.place == LOG:
        return StoreUnanswered(text) if call.changes else OSError(text)
    return OSError(text) if call.place == CHECKPOINT else SinkUnavailable(f"{text}.")


def _short(answer: object) -> object:
    """An answer for the trace: nothing that changes later, and nothing that is another at the next run."""
    if answer is None:
        return "done"
    if isinstance(answer, bool | int | str):
        return answer
    if isinstance(answer, bytes):
        # Records name the process and the time, which are not of the seed.
        return "found" if answer else "nothing"
    return f"{len(answer)} found" if hasattr(answer, "__len__") else type(answer).__name__
