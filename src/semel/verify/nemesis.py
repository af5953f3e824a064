"""What is done to the lives of a pipeline: one life for each fault of the plan, then one that is left alone.

A life dies as its fault says, or gives up with an error where the fault is one that may make it: a server, a network or
a disk that was away. A life that ends by itself for any other reason says that the pipeline is broken, not what becomes
of its data.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from semel.errors import SemelError
from semel.failpoints import all_failpoints
from semel.verify.disk import Disk, ForgetfulDisk
from semel.verify.history import Event
from semel.verify.life import Life, signal_one
from semel.verify.plan import Fault
from semel.verify.servers import Server

FIRST_BATCH_S_MAX = 180.0
POINT_S_MAX = 30.0
#: How long a life may take to find its way back, and a zombie to its end: all patience of semel's own is in there.
GO_ON_S_MAX = 300.0
#: How long a life may take to notice that a part of it is dead, or that its disk is full.
NOTICE_S_MAX = 30.0
WORKER_S_MAX = 10.0
STOP_S_MAX = 60.0
DRAIN_S_MAX = 3600.0
#: A last life may be fenced by a driver of an earlier one; then another one is the last.
LAST_LIVES_MAX = 3

#: After these a life may give up with an error, and the next one goes on.
MAY_GIVE_UP = ("server", "between", "outage", "cut", "delay", "disk-full", "jvm", "worker", "executor")
PIPELINE = "pipeline"
DISK = "disk"


class Broken(Exception):
    """The run cannot go on, so it says nothing of the data."""


@dataclass
class Nemesis:
    """`start_life` starts the next life with the environment that its fault asks for, or one that is left alone."""

    start_life: Callable[[Fault | None], Life]
    servers: Mapping[str, Server]
    disk: Disk | None
    say: Callable[[str], None]
    record: Callable[[Event], None]
    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    zombies: list[Life] = field(default_factory=list)
    #: Lives whose Python driver is dead and whose JVM may not have noticed.
    orphans: list[Life] = field(default_factory=list)
    #: Whether another driver may have been at work in the present life.
    overlapped: bool = False
    life: Life | None = None
    #: Raises Broken when the run cannot go on: asked before each life, and while one waits for its first batch.
    require: Callable[[], None] = lambda: None
    before_power_is_cut: Callable[[], None] = lambda: None
    #: By which something was lost: others show nothing.
    power_cuts: int = 0

    def suffer(self, fault: Fault) -> str:
        """One life under one fault. Returns what came of it."""
        life = self._next_life(fault)
        try:
            outcome = ACTS[fault.kind](self, life, fault)
        finally:
            self.tell_life(life, fault)
        return outcome

    def drain(self, done: Callable[[], bool], seconds_max: float = DRAIN_S_MAX) -> None:
        """A life that is left alone until all is done, and then is stopped; zombies that are left wake up in it.

        What never arrives is not for us to judge: `done` may also say that nothing moves any more.
        """
        for _ in range(LAST_LIVES_MAX):
            life = self._next_life(None)
            try:
                if self._is_drained(life, done, seconds_max):
                    return
            finally:
                life.kill()
                self.tell_life(life, None)
        raise Broken(f"{LAST_LIVES_MAX} lives after the last fault did not come to a clean end")

    def end(self) -> None:
        """Nobody of any life is left."""
        for life in (*self.zombies, *self.orphans, *([self.life] if self.life else ())):
            life.kill()
        self.zombies.clear()
        self.orphans.clear()

    # What is done to a life -------------------------------------------------------------------------------------------

    def die_at_point(self, life: Life, fault: Fault) -> str:
        """It kills itself; a point that it does not come by is as good a moment as any."""
        self._first_batch(life, fault)
        life.wait(lambda: False, POINT_S_MAX)
        if life.ended:
            return self._kill(life, fault, itself=True)
        return self._kill(life, Fault("driver"), f"never at {fault.point}, ")

    def die_at_a_moment(self, life: Life, fault: Fault) -> str:
        return self._over_before(life, fault) or self._kill(life, fault)

    def lose_the_supervisor(self, life: Life, fault: Fault) -> str:
        """The next life does not wait until the JVM has noticed."""
        if over := self._over_before(life, fault):
            return over
        if not life.signal(signal.SIGKILL, "python"):
            return self._kill(life, fault)
        life.wait(lambda: False, NOTICE_S_MAX)
        self.orphans.append(life)
        self._count(fault, kills=1)
        return f"killed, {len(life.members())} processes left to themselves"

    def lose_a_part(self, life: Life, fault: Fault) -> str:
        """The JVM, a Python worker or an executor. What is left of the life gives up, or goes on and is killed."""
        if over := self._over_before(life, fault):
            return over
        if not self._kill_one(life, fault.kind):
            return self._kill(life, Fault("driver"), f"had no {fault.kind}, ")
        self._count(fault, kills=1)
        before = life.batches
        life.wait(lambda: life.batches > before, NOTICE_S_MAX)
        return self._kill(life, fault, f"its {fault.kind} killed, ", counted=True)

    def pause(self, life: Life, fault: Fault) -> str:
        if over := self._over_before(life, fault):
            return over
        life.signal(signal.SIGSTOP)
        time.sleep(fault.pause_s)
        life.signal(signal.SIGCONT)
        time.sleep(fault.pause_s)
        return self._kill(life, fault)

    def become_a_zombie(self, life: Life, fault: Fault) -> str:
        self._first_batch(life, fault)
        if not life.wait(lambda: life.stopped, POINT_S_MAX):
            return self._kill(life, Fault("driver"), f"never at {fault.point}, ")
        self._count(fault)
        self.zombies.append(life)
        return "stopped"

    def lose_a_server(self, life: Life, fault: Fault) -> str:
        """For a moment, or for as long as an outage."""
        if over := self._over_before(life, fault):
            return over
        with self._away(fault):
            time.sleep(fault.pause_s)
        return self._kill_when_it_goes_on(life, fault)

    def lose_a_server_between(self, life: Life, fault: Fault) -> str:
        self._first_batch(life, fault)
        if not life.wait(lambda: life.stopped, POINT_S_MAX):
            return self._kill(life, Fault("driver"), f"never at {fault.point}, ")
        with self._away(fault):
            pass
        life.signal(signal.SIGCONT)
        return self._kill_when_it_goes_on(life, fault)

    def lose_the_network(self, life: Life, fault: Fault) -> str:
        """Cut, silent, or slow."""
        if over := self._over_before(life, fault):
            return over
        server, began_s = self.servers[fault.server], time.time()
        try:
            if fault.kind == "delay":
                server.delay(fault.chunk_s)
            else:
                server.cut(silent=fault.silent)
            self._count(fault)
            life.wait(lambda: False, fault.pause_s)
        finally:
            server.repair()
            self._tell_outage(fault, fault.server, began_s)
        return self._kill_when_it_goes_on(life, fault)

    def run_out_of_disk(self, life: Life, fault: Fault) -> str:
        """It gives up, or stands still and is killed; then there is room again."""
        if self.disk is None:
            return self.die_at_a_moment(life, Fault("driver", delay_s=fault.delay_s))
        if over := self._over_before(life, fault):
            return over
        members, began_s = life.members(), time.time()
        try:
            self.disk.fill(members)
            self._count(fault)
            life.wait(lambda: False, NOTICE_S_MAX)
            return self._kill(life, fault, counted=True)
        finally:
            self.disk.free(members)
            self._tell_outage(fault, DISK, began_s)

    def lose_power(self, life: Life, fault: Fault) -> str:
        """Zombies and orphans end with the machine. What the disk still knew is there for the next life."""
        if not isinstance(self.disk, ForgetfulDisk):
            return self.die_at_a_moment(life, Fault("driver", delay_s=fault.delay_s))
        if over := self._over_before(life, fault):
            return over
        outcome = self._kill(life, fault)
        for other in (*self.zombies, *self.orphans):
            other.kill()
        self.zombies.clear()
        self.orphans.clear()
        self.before_power_is_cut()
        loss = self.disk.cut_power(fault.mode, fault.seed)
        # The watcher looks all the time: it may have looked once more in between, at what is gone now.
        self.before_power_is_cut()
        self.power_cuts += loss.total > 0
        self._note(f"the disk lost {len(loss.gone)} names, {len(loss.torn)} contents; {len(loss.back)} names came back")
        return outcome

    # Parts of that ----------------------------------------------------------------------------------------------------

    def _next_life(self, fault: Fault | None) -> Life:
        self.require()
        self._bury_orphans()
        self.overlapped = bool(self.orphans)
        self.life = self.start_life(fault)
        return self.life

    def _bury_orphans(self) -> None:
        for life in self.orphans:
            if not life.members():
                life.join()
        self.orphans = [life for life in self.orphans if not life.gone]

    def _first_batch(self, life: Life, fault: Fault) -> None:
        """Wait until a batch has ended, or the life has; zombies wake up then.

        Not in a life that will be stopped: what it holds in a store could keep a zombie waiting for ever.
        """

        def is_there() -> bool:
            self.require()
            return life.batches > 0 or life.stopped

        came = life.wait(is_there, FIRST_BATCH_S_MAX)
        if not came and not life.ended:
            life.kill()
            raise Broken(f"{fault}: no batch ended within {FIRST_BATCH_S_MAX:.0f} s: {life.reason}")
        if came and fault.kind not in ("zombie", "between"):
            self._wake_zombies()

    def _over_before(self, life: Life, fault: Fault) -> str:
        """Wait for the moment, some time after the first batch. Returns what came of a life that ended before it.

        Such a life has not suffered the fault, so nothing is counted.
        """
        self._first_batch(life, fault)
        life.wait(lambda: False, fault.delay_s)
        return self._kill(life, fault, suffered=False) if life.ended else ""

    def _wake_zombies(self) -> None:
        """They must notice that somebody else runs their pipeline, and end."""
        for zombie in self.zombies:
            self.overlapped = True
            zombie.signal(signal.SIGCONT)
            zombie.wait(lambda: False, GO_ON_S_MAX)
            ended = zombie.ended
            zombie.join()
            if not ended:
                raise Broken(f"a zombie was still at work {GO_ON_S_MAX:.0f} s after it woke up")
            if not zombie.fenced:
                raise Broken(f"a zombie woke up and was not fenced: {zombie.reason}")
            self._note(f"life {zombie.number} woke up as a zombie and was fenced")
        self.zombies.clear()

    def _kill_one(self, life: Life, role: str) -> bool:
        """SIGKILL to one process of a role, as soon as there is one."""
        life.wait(lambda: bool(life.members(role)), WORKER_S_MAX)
        return any(signal_one(pid, signal.SIGKILL) for pid in life.members(role)[:1])

    @contextmanager
    def _away(self, fault: Fault) -> Iterator[None]:
        """A server that is killed, and comes back whatever happens meanwhile."""
        began_s = time.time()
        self.servers[fault.server].kill()
        self._count(fault, kills=1)
        try:
            yield
        finally:
            self._start_server(fault.server)
            self._tell_outage(fault, fault.server, began_s)

    def _start_server(self, name: str) -> None:
        try:
            self.servers[name].start()
        except SemelError as error:
            raise Broken(f"{name} did not come back: {error.what}") from error

    def _kill_when_it_goes_on(self, life: Life, fault: Fault) -> str:
        """After all is well again: when the next batch has ended, or the life gave up with an error."""
        before = life.batches
        went_on = life.wait(lambda: life.batches > before, GO_ON_S_MAX)
        if not went_on and not life.ended:
            life.kill()
            raise Broken(f"{fault}: the life neither went on nor gave up within {GO_ON_S_MAX:.0f} s: {life.reason}")
        if went_on:
            # Those that had to wait because this life was stopped for a while.
            self._wake_zombies()
        return self._kill(life, fault, counted=True)

    def _kill(
        self,
        life: Life,
        fault: Fault,
        before: str = "",
        *,
        counted: bool = False,
        suffered: bool = True,
        itself: bool = False,
    ) -> str:
        """End a life. Returns what it died of; raises if it ended by itself, unless what it `suffered` is a reason.

        Whether it is to have killed `itself`, at its point, the caller must say: the kernel kills, too, for memory.
        """
        ours = itself or not life.ended
        if not life.ended:
            life.kill()
        if life.join():
            if not ours:
                raise Broken(f"{fault}: life {life.number} was killed, and not by this run; is memory short?")
            self._count(fault, kills=1, counted=counted)
            return f"{before}killed"
        if fault.point and life.error and all_failpoints()[fault.point].in_a_task:
            # Its Python worker was killed, and Spark failed the batch.
            self._count(fault, kills=1)
            return f"{before}a task killed"
        if (suffered and fault.kind in MAY_GIVE_UP and life.error) or (self.overlapped and life.fenced):
            return f"{before}gave up ({life.error_kind or 'an error of Spark'})"
        raise Broken(f"{fault}: life {life.number} ended by itself: {life.reason}")

    def _is_drained(self, life: Life, done: Callable[[], bool], seconds_max: float) -> bool:
        end = time.monotonic() + seconds_max
        life.wait(lambda: life.batches > 0 or done(), seconds_max)
        if not life.ended:
            self._wake_zombies()
        is_done = life.wait(done, max(0.0, end - time.monotonic()))
        if life.ended:
            life.join()
            if self.overlapped and life.fenced:
                self._note(f"life {life.number} was fenced by a driver of an earlier life")
                return False
            raise Broken(f"the last life ended by itself: {life.reason}")
        if not is_done:
            raise Broken(f"not everything had arrived {seconds_max:.0f} s after the last fault")
        code = life.stop(STOP_S_MAX)
        if code != 0:
            self._note(f"life {life.number} was asked to stop and ended with {code}: {life.reason}")
        return code == 0

    # What is told -----------------------------------------------------------------------------------------------------

    def _count(self, fault: Fault, *, kills: int = 0, counted: bool = False) -> None:
        self.kills += kills
        if not counted:
            self.faults[fault.kind] += 1
            self.record(Event(time.time(), "fault", fault.server or PIPELINE, str(fault)))

    def _note(self, words: str) -> None:
        self.say(f"  {words}")
        self.record(Event(time.time(), "note", PIPELINE, words))

    def _tell_outage(self, fault: Fault, lane: str, began_s: float) -> None:
        self.record(Event(began_s, "outage", lane, str(fault), until_s=time.time()))

    def tell_life(self, life: Life, fault: Fault | None) -> None:
        what = f"life {life.number}: {fault or 'left alone'}"
        self.record(Event(life.began_s, "life", PIPELINE, what, until_s=time.time()))
        for batch in life.told:
            kind = "batch" if batch.how == "committed" else "recovery"
            words = f"batch {batch.number} {batch.how}, {batch.rows} rows"
            began_s = batch.ended_s - batch.ms / 1000
            self.record(Event(began_s, kind, PIPELINE, words, until_s=batch.ended_s, batch=batch.number))


ACTS: Mapping[str, Callable[[Nemesis, Life, Fault], str]] = {
    "point": Nemesis.die_at_point,
    "driver": Nemesis.die_at_a_moment,
    "supervisor": Nemesis.lose_the_supervisor,
    "jvm": Nemesis.lose_a_part,
    "worker": Nemesis.lose_a_part,
    "executor": Nemesis.lose_a_part,
    "pause": Nemesis.pause,
    "zombie": Nemesis.become_a_zombie,
    "server": Nemesis.lose_a_server,
    "between": Nemesis.lose_a_server_between,
    "outage": Nemesis.lose_a_server,
    "cut": Nemesis.lose_the_network,
    "delay": Nemesis.lose_the_network,
    "disk-full": Nemesis.run_out_of_disk,
    "power": Nemesis.lose_power,
}
