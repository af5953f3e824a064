"""What becomes of a pipeline under a plan of faults: one life per fault, then one that is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.chaos.plan import Fault
from tests.e2e.kafka_audit import Findings
from tests.e2e.kafka_game import KafkaGame
from tests.e2e.kafka_points import IN_A_TASK
from tests.processes import is_stopped

FIRST_BATCH_S_MAX = 120.0
POINT_S_MAX = 30.0
END_S_MAX = 300.0
LOOK_EVERY_S = 0.02
#: A life never finds less input than this many batches.
BATCHES_AHEAD = 15
STDERR_KEPT = 4000
#: What ends one of two drivers: our own word, or Spark's when both want to write the same file of its checkpoint.
FENCED = ("Fenced: ", "Multiple streaming queries are concurrently using", "Multiple streaming jobs detected")


class Server(Protocol):
    """What a fault does to a server."""

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Broken(Exception):
    """The run cannot go on, so it says nothing of the data."""


class Child:
    """A life, and what it says, read as it speaks so that no pipe fills up."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.batches = 0
        self.error = ""
        self.last_words = ""
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._hear, self._drain)]
        for thread in self._threads:
            thread.start()

    def _hear(self) -> None:
        for line in self.process.stdout or ():
            event = json.loads(line) if line.startswith("{") else {}
            self.batches += event.get("event") == "batch"
            self.error = event.get("text", self.error)

    def _drain(self) -> None:
        for line in self.process.stderr or ():
            self.last_words = (self.last_words + line)[-STDERR_KEPT:]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def stopped(self) -> bool:
        try:
            return is_stopped(self.process.pid)
        except OSError:  # it ended while we looked
            return False

    def wait(self, true: Callable[[], bool], seconds_max: float) -> bool:
        """Until it is true, the child has ended, or the time is over. Returns whether it is true."""
        end = time.monotonic() + seconds_max
        while not true() and not self.ended and time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)
        return true()

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            os.killpg(self.process.pid, number)

    def join(self, seconds_max: float) -> None:
        """Wait for its end, and hear all it said."""
        try:
            self.process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise Broken(f"a life did not end within {seconds_max:.0f} s") from None
        for thread in self._threads:
            thread.join(10)

    def kill(self) -> bool:
        """SIGKILL. Returns whether that is what it died of."""
        self.signal(signal.SIGKILL)
        self.join(30)
        return self.process.returncode == -signal.SIGKILL


@dataclass
class Story:
    """What happened so far."""

    kills: int = 0
    duplicated: set[str] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)

    def note(self, findings: Findings) -> None:
        """What was wrong once stays wrong, whatever the next start makes of it."""
        self.duplicated |= set(findings.duplicated)
        self.torn |= set(findings.torn)
        self.early |= set(findings.early)


@dataclass
class Chaos:
    """`servers` are those that may be killed, by name."""

    game: KafkaGame
    servers: Mapping[str, Server]
    say: Callable[[str], None]
    story: Story = field(default_factory=Story)
    zombies: list[Child] = field(default_factory=list)
    #: Whether one woke up in the present life.
    zombie_woke: bool = False

    def play(self, plan: Sequence[Fault], rows: int, kills: int) -> Findings:
        """Every fault of the plan, then the rest of the input in peace."""
        for number, fault in enumerate(plan, start=1):
            self._suffer(fault, f"{number}/{len(plan)}")
        while self.story.kills < kills:
            # Some life gave up when a server was away, before it could be killed.
            self._suffer(Fault("moment", delay_s=0.5), "one more")
        self.game.deal_rows(max(0, rows - self.game.dealt))
        child = Child(self.game.start())
        child.wait(lambda: child.batches > 0, FIRST_BATCH_S_MAX)
        self._wake_zombies()
        child.join(END_S_MAX)
        if child.process.returncode != 0:
            raise Broken(f"the last life failed: {child.error or child.last_words}")
        self.game.world.wait_until_ended()
        findings = self.game.findings()
        self.story.note(findings)
        return findings

    def _suffer(self, fault: Fault, which: str) -> None:
        self._feed()
        self.zombie_woke = False
        child = Child(self.game.start(fault.failpoints, forever=True))
        outcome = ACTS[fault.kind](self, child, fault)
        self._look(f"{which} {fault}: {outcome}")

    def _feed(self) -> None:
        wanted = len(self.game.watcher.sights) + BATCHES_AHEAD * self.game.setup.rows_per_batch
        self.game.deal_rows(max(0, wanted - self.game.dealt))

    def _look(self, what: str) -> None:
        sights, findings = self.game.look()
        self.story.note(findings)
        self.say(
            f"{what}; {self.story.kills} kills, {len(sights)} rows visible, wrong: {sum(findings.counts.values())}"
        )

    # What is done to a life -------------------------------------------------------------------------------------------

    def die_at_point(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        child.wait(lambda: False, POINT_S_MAX)
        return self._kill(child, fault)

    def die_at_a_moment(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        time.sleep(fault.delay_s)
        return self._kill(child, fault)

    def pause(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        time.sleep(fault.delay_s)
        child.signal(signal.SIGSTOP)
        time.sleep(fault.pause_s)
        child.signal(signal.SIGCONT)
        time.sleep(fault.pause_s)
        return self._kill(child, fault)

    def become_a_zombie(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        if not child.wait(lambda: child.stopped, POINT_S_MAX):
            raise Broken(f"{fault} was not reached: {child.error or child.last_words}")
        self.zombies.append(child)
        return "stopped"

    def lose_a_server(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        time.sleep(fault.delay_s)
        self._kill_server(fault)
        time.sleep(fault.pause_s)
        self.servers[fault.server].start()
        return self._kill_when_it_goes_on(child, fault)

    def lose_a_server_between(self, child: Child, fault: Fault) -> str:
        self._first_batch(child, fault)
        if not child.wait(lambda: child.stopped, POINT_S_MAX):
            raise Broken(f"{fault} was not reached: {child.error or child.last_words}")
        self._kill_server(fault)
        self.servers[fault.server].start()
        child.signal(signal.SIGCONT)
        return self._kill_when_it_goes_on(child, fault)

    # Parts of that ----------------------------------------------------------------------------------------------------

    def _first_batch(self, child: Child, fault: Fault) -> None:
        """Wait until a batch has ended, or the life has; zombies wake up then."""
        came = child.wait(lambda: child.batches > 0 or child.stopped, FIRST_BATCH_S_MAX)
        if not came and not child.ended:
            raise Broken(f"{fault}: no batch within {FIRST_BATCH_S_MAX:.0f} s: {child.last_words}")
        if came:
            self._wake_zombies()

    def _wake_zombies(self) -> None:
        """They must notice that somebody else runs their pipeline, and end."""
        for zombie in self.zombies:
            zombie.signal(signal.SIGCONT)
            zombie.join(END_S_MAX)
            if not _is_fenced(zombie):
                raise Broken(f"a zombie was not fenced: {zombie.error or zombie.last_words}")
            self.say("  a zombie woke up and was fenced")
            self.zombie_woke = True
        self.zombies.clear()

    def _kill_server(self, fault: Fault) -> None:
        self.servers[fault.server].kill()
        self.story.kills += 1

    def _kill_when_it_goes_on(self, child: Child, fault: Fault) -> str:
        """After the server is back: when the next batch has ended, or the life gave up with an error."""
        before = child.batches
        child.wait(lambda: child.batches > before, END_S_MAX)
        return self._kill(child, fault)

    def _kill(self, child: Child, fault: Fault) -> str:
        if child.kill():
            self.story.kills += 1
            return "killed"
        if fault.point in IN_A_TASK and "failed before it was decided" in child.error:
            # Its Python worker was killed, and Spark failed the batch.
            self.story.kills += 1
            return "task killed"
        if (fault.kind.startswith("server") and child.error) or (self.zombie_woke and _is_fenced(child)):
            return f"gave up ({_kind(child.error)})"
        raise Broken(f"{fault}: the life ended by itself: {child.error or child.last_words}")

    def end(self) -> None:
        for zombie in self.zombies:
            zombie.kill()


ACTS: dict[str, Callable[[Chaos, Child, Fault], str]] = {
    "point": Chaos.die_at_point,
    "moment": Chaos.die_at_a_moment,
    "pause": Chaos.pause,
    "zombie": Chaos.become_a_zombie,
    "server": Chaos.lose_a_server,
    "server between": Chaos.lose_a_server_between,
}


def _is_fenced(child: Child) -> bool:
    return any(words in child.error for words in FENCED)


def _kind(error: str) -> str:
    """Which of our errors it is, out of what Spark makes of it."""
    names = ("CommitStalled", "BatchFailed", "SinkUnavailable", "DecisionUnknown", "SourceUnavailable", "Fenced")
    return next((name for name in names if name in error), "an error of Spark")
