"""All lives of one contestant: killed by plan, then left alone until every order has arrived."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semel.demo.child import Child
from semel.demo.orders import Producer
from semel.demo.plan import Kill
from semel.demo.shops import Shop
from semel.errors import SemelError
from semel.failpoints import VARIABLE

LOOK_EVERY_S = 0.5
FIRST_BATCH_WITHIN_S = 120.0
POINT_WITHIN_S = 15.0
QUIET_S_MAX = 60.0
STOP_WITHIN_S = 45.0


@dataclass(frozen=True)
class Ended:
    """A batch that came to its end, in seconds since the game began."""

    pipeline: str
    batch: int
    how: str
    began_s: float
    ended_s: float


@dataclass
class Life:
    """From the start of the process to its end; before `started_s` it is Spark that starts."""

    began_s: float
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class Killed:
    at_s: float
    label: str


@dataclass
class Story:
    """What happened to one side: the raw material of the result and of the picture."""

    lives: list[Life] = field(default_factory=list)
    batches: list[Ended] = field(default_factory=list)
    kills: list[Killed] = field(default_factory=list)
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def batch_ids(self) -> set[tuple[str, int]]:
        return {(b.pipeline, b.batch) for b in self.batches}

    @property
    def handed_twice(self) -> set[tuple[str, int]]:
        """Batches that Spark handed over more than once: run again, or found decided and committed forward."""
        seen = Counter((b.pipeline, b.batch) for b in self.batches)
        return (
            {(b.pipeline, b.batch) for b in self.batches if b.how in ("replayed", "forwarded")}
            | {key for key, n in seen.items() if n > 1}
            | {key for key, n in self.begun.items() if n > 1}
        )


@dataclass
class Side:
    """`has_failpoints` says whether the kills of the plan that name a point can be placed there."""

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]
    folder: Path
    shop: Shop
    producer: Producer
    kills: Sequence[Kill]
    game_began: float
    has_failpoints: bool = True
    story: Story = field(default_factory=Story)
    delivered: int = 0
    doing: str = "waiting"
    cancelled: threading.Event = field(default_factory=threading.Event)
    _began_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def play(self) -> None:
        """The whole game of this side. Whatever happens, no child is left behind."""
        self.producer.start()
        try:
            for number, kill in enumerate(self.kills):
                self.producer.allow((number + 1) / (len(self.kills) + 1))
                self._life(kill)
            self.producer.allow(1.0)
            self._last_life()
        finally:
            self.producer.stop()

    # Lives that end by SIGKILL ----------------------------------------------------------------------------------------

    def _life(self, kill: Kill) -> None:
        child = self._start(kill.variable if self.has_failpoints else "")
        try:
            at_point = self._wait_for_moment(child, kill)
        finally:
            child.kill()
            died = self._now()
            self._hear_the_rest(child)
            self.story.lives[-1].ended_s = died
        if child.killed and not self.cancelled.is_set():
            self.story.kills.append(Killed(died, kill.point if at_point else "random"))

    def _wait_for_moment(self, child: Child, kill: Kill) -> bool:
        """Until the child died at its failpoint (True), or the moment has come to kill it (False)."""
        moment = self._now() + FIRST_BATCH_WITHIN_S
        progress = False
        while (left := moment - self._now()) > 0 and not self.cancelled.is_set():
            event = self._hear(child, min(left, LOOK_EVERY_S))
            if child.ended:
                self._require_killed(child)
                return True
            if event is None:
                continue
            if event["event"] == "batch" and not progress:
                progress = True
                moment = self._moment_after_first_batch(kill)
            elif event["event"] == "began" and event["pipeline"] == "orders" and progress:
                moment = min(moment, self._now() + kill.fraction * self._usual_s)
        if not progress and not self.cancelled.is_set():
            raise self._broken(child, f"made no batch within {FIRST_BATCH_WITHIN_S:.0f} s")
        return False

    def _moment_after_first_batch(self, kill: Kill) -> float:
        """Where there are no failpoints, the next batch is awaited, to be killed in the middle of it."""
        return self._now() + (POINT_WITHIN_S if kill.point or not self.has_failpoints else kill.delay_s)

    @property
    def _usual_s(self) -> float:
        """How long the last batch of orders took."""
        return next((b.ended_s - b.began_s for b in reversed(self.story.batches) if b.pipeline == "orders"), 0.3)

    # The last life ----------------------------------------------------------------------------------------------------

    def _last_life(self) -> None:
        """Left alone until every order has arrived, or nothing has moved for a while: then the audit tells."""
        child = self._start("")
        try:
            quiet_since = self._now()
            while not (self._all_arrived() or self.cancelled.is_set()):
                if self._hear(child, LOOK_EVERY_S) is not None:
                    quiet_since = self._now()
                if child.ended:
                    raise self._broken(child, f"ended by itself (exit code {child.process.returncode})")
                if self._now() - quiet_since > QUIET_S_MAX:
                    break
            self.doing = "stopping"
        finally:
            child.stop(0.0 if self.cancelled.is_set() else STOP_WITHIN_S)
            self._hear_the_rest(child)
            self.story.lives[-1].ended_s = self._now()
        self.doing = "done"

    def _all_arrived(self) -> bool:
        self.delivered = self.shop.delivered()
        return self.producer.done and self.shop.arrived(sum(len(part) for part in self.producer.files))

    # A child ----------------------------------------------------------------------------------------------------------

    def _start(self, failpoints: str) -> Child:
        number = len(self.story.lives)
        self.doing = "starting Spark"
        self.story.lives.append(Life(self._now(), 0.0, 0.0))
        variables = {**self.variables, VARIABLE: failpoints}
        return Child(self.command, variables, self.folder, self.folder / f"life-{number:02d}.log")

    def _hear(self, child: Child, wait_s: float) -> dict[str, Any] | None:
        event = child.next_event(wait_s)
        if event is None:
            return None
        now, key = self._now(), (event["pipeline"], event["batch"])
        if event["event"] == "began":
            self.story.begun[key] += 1
            self._began_s[key] = now
        elif event["event"] == "batch":
            began = self._began_s.pop(key, now - event.get("ms", 0.0) / 1000)
            how = event.get("how") or ("replayed" if self.story.begun[key] > 1 else "committed")
            self.story.batches.append(Ended(*key, how, began, now))
            self.delivered = self.shop.delivered()
        life = self.story.lives[-1]
        life.started_s = life.started_s or now
        self.doing = "running"
        return event

    def _hear_the_rest(self, child: Child) -> None:
        """What the child had said before it died is in the pipe still."""
        while not child.silent:
            self._hear(child, LOOK_EVERY_S)

    def _require_killed(self, child: Child) -> None:
        if not child.killed:
            raise self._broken(child, f"ended by itself (exit code {child.process.returncode})")

    def _broken(self, child: Child, what: str) -> SemelError:
        return SemelError(
            f"The {self.name} side {what}; its last words:\n{child.last_words()}",
            data_now="only the demo's own folder was written",
            remedy=f"Read {child.log}, then run the demo again with the same seed.",
        )

    def _now(self) -> float:
        return time.monotonic() - self.game_began
