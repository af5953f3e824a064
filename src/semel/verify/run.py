"""One run: a pipeline that is fed, broken, healed and drained, and the audit of what came of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semel.demo.warmup import spark_conf
from semel.dev.jars import Say
from semel.errors import ConfigError, SemelError
from semel.verify.audit import Audit, audit
from semel.verify.checkpoint import CheckpointWatcher
from semel.verify.classes import keep
from semel.verify.feeding import Feeding
from semel.verify.history import Event, History
from semel.verify.life import Life, begin_life
from semel.verify.nemesis import FIRST_BATCH_S_MAX, STOP_S_MAX, Broken, Nemesis
from semel.verify.plan import Fault, plan_faults, points_for
from semel.verify.report import as_json, write_report
from semel.verify.settings import Settings
from semel.verify.stage import Stage, nameless, proxied, set_up

#: How long nothing may move, when every row was read, before it is clear that no more will be shown.
QUIET_S_MAX = 90.0
#: The same where rows are still to be read: Spark may just be starting.
UNREAD_S_MAX = 180.0
DUMP_S_MAX = 60.0
#: So many lives more are tried when the plan is through and there were too few kills.
MORE_LIVES_MAX = 100
SETTLE_S_MAX = 60.0
#: How long the rows of the first life may take to be seen. A pipeline that shows none yet is not waited for any longer.
FIRST_ROWS_S_MAX = 5.0
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Result:
    history: History
    audit: Audit
    report: Path

    def as_json(self) -> dict[str, Any]:
        seconds = round(self.history.ended_s - self.history.began_s, 1)
        return {**as_json(self.history, self.audit, seconds), "report": str(self.report)}


def verify(settings: Settings, say: Say) -> Result:
    """Raises SemelError for wrong input, before anything was fed or broken. What comes later is told by the verdict.

    One kind of wrong input shows only in the first rows: that they cannot be told apart.
    """
    output = settings.output.resolve()
    was_there = output.is_dir()
    output.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"run-{settings.seed}-", dir=output))
    kept = False
    try:
        with ExitStack() as stack:
            history = Trial(set_up(stack, settings, work, say)).play()
        say("comparing what went in with what is there")
        found = audit(history)
        kept = settings.keep or found.verdict is not True
        # A report does not name what is not kept.
        history = history if kept else replace(history, logs=())
        report = write_report(output, history, found)
        return Result(history, found, report)
    finally:
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # there is a report in it
                if not was_there:
                    output.rmdir()


class Arrival:
    """Whether all rows have arrived, or nothing has moved for so long that none will: then the audit tells.

    `unread` says how many rows no batch has read so far. They are not lost: the pipeline may be slow.
    """

    def __init__(self, stage: Stage, feeding: Feeding, unread: Callable[[], int]) -> None:
        self.stage = stage
        self.feeding = feeding
        self.unread = unread
        self._moved, self._since = -1, time.monotonic()
        self._wanted: Counter[str] = Counter()
        self._counted = 0

    def is_over(self) -> bool:
        """Raises Broken when rows were not even read, or could not be fed."""
        self.feeding.require()
        read = self.feeding.read()
        moved = read + sum(reader.seen for reader in self.stage.readers)
        if moved != self._moved:
            self._moved, self._since = moved, time.monotonic()
        if self._is_complete(read):
            return True
        unread = self.unread()
        limit_s = UNREAD_S_MAX if unread else QUIET_S_MAX
        if time.monotonic() - self._since <= limit_s:
            return False
        if unread:
            raise Broken(f"{unread:,} rows were fed and not read, and nothing has moved for {limit_s:.0f} s")
        return True

    def _is_complete(self, read: int) -> bool:
        """Every row was read, and every one that is expected was seen: a pipeline may show little of what it reads.

        What was counted once is not counted again: there may be a million rows.
        """
        readers, fed = self.stage.readers, self.stage.feeder.fed
        for n in range(self._counted, fed):
            self._wanted.update(r.sink.name for r in readers if self.stage.workload.expect(n, r.sink.name))
        self._counted = fed
        enough = read >= fed >= self.stage.settings.rows
        return enough and all(r.seen >= self._wanted[r.sink.name] for r in readers)


#: The built-in pipeline reads it: who writes the batches of a life, a task for each partition, the driver, or one task.
WAY = "SEMEL_VERIFY_TASKS"
WAYS = ("partitions", "auto", "1")


def way_of(seed: int, life: int) -> str:
    """The same for the same seed, so that a run can be played again. Neighbours differ."""
    return WAYS[(seed + life) % len(WAYS)]


class Trial:
    """One run of `semel verify`, on a stage that is set up."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.say = stage.say
        self.began_s = time.time()
        self.events: list[Event] = []
        self.watcher = CheckpointWatcher(stage.checkpoint, len(stage.probe.sources))
        rows, per_batch = stage.settings.rows, stage.settings.rows_per_batch
        self.feeding = Feeding(stage.feeder, rows, per_batch, self._rows_read)
        self.nemesis = Nemesis(self.start_life, stage.servers, stage.disk, stage.say, self.events.append)
        self.nemesis.require = self.feeding.require
        self.nemesis.before_power_is_cut = self.watcher.forget_what_is_not_decided
        self._lives = 0

    def play(self) -> History:
        """Whatever happens, nothing that was started is left behind, and what was seen is told."""
        broken = ""
        self.watcher.start()
        for reader in self.stage.readers:
            reader.start()
        try:
            # Without rows there is nothing to break: the audit says that nothing is known.
            if self.stage.settings.rows:
                with self.feeding.going_on():
                    self._first_life()
                    self._require_identity()
                    self._suffer()
                    self.feeding.draining = True
                    self.say("left alone until every row has arrived")
                    self.nemesis.drain(Arrival(self.stage, self.feeding, self._rows_unread).is_over)
        except ConfigError:
            raise
        except (Broken, SemelError) as error:
            broken = str(error)
            self.say(f"broken off: {broken}")
        finally:
            self.nemesis.end()
            for reader in self.stage.readers:
                reader.stop()
        return self._history(broken)

    # Lives ------------------------------------------------------------------------------------------------------------

    def start_life(self, fault: Fault | None, dump: Path | None = None) -> Life:
        stage = self.stage
        self._lives += 1
        conf = {**spark_conf(dump or stage.archive, dump=dump is not None), **stage.conf}
        return begin_life(
            stage.target,
            stage.checkpoint,
            conf=conf,
            variables={**stage.variables, WAY: way_of(stage.settings.seed, self._lives)},
            log=stage.logs / f"life-{self._lives:04d}.log",
            fault=fault,
            master=stage.settings.master,
            number=self._lives,
        )

    def _first_life(self) -> None:
        """In peace: what fails now fails without our help. It leaves Spark's classes behind, where there are none."""
        self.say("one life in peace")
        dump = self.stage.work / "classes.jsa"
        life = self.start_life(None, None if self.stage.archive.exists() else dump)
        try:
            if not life.wait(self._made(life, 2), FIRST_BATCH_S_MAX):
                why = life.reason if life.ended else f"it made no second batch within {FIRST_BATCH_S_MAX:.0f} s"
                raise Broken(f"the pipeline does not run, though nothing disturbs it: {why}")
            life.stop(STOP_S_MAX, gone_within_s=DUMP_S_MAX)
            keep(dump, self.stage.archive)
        finally:
            life.kill()
            self.nemesis.tell_life(life, None)

    def _require_identity(self) -> None:
        """The first rows must be known: else nothing could be compared, and the verdict would be that all is lost."""
        stage, readers = self.stage, self.stage.readers
        end = time.monotonic() + FIRST_ROWS_S_MAX
        while not all(r.seen or r.first_stranger for r in readers) and time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)
        for reader in readers:
            if reader.first_stranger and not reader.seen:
                why = f"none of those that it shows was fed under its {stage.workload.identity!r}; the first is "
                now = f"{stage.feeder.fed} rows were fed, and those of the first batches are in the sinks"
                raise nameless(reader.sink, stage.workload, why + reader.first_stranger, now)

    def _made(self, life: Life, batches: int) -> Callable[[], bool]:
        def is_made() -> bool:
            self.feeding.require()
            return life.batches >= batches

        return is_made

    def _suffer(self) -> None:
        settings, stage = self.stage.settings, self.stage
        points = points_for(stage.probe.sinks, stage.probe.guarantee)
        servers = tuple(stage.servers)
        plan = plan_faults(settings.seed, settings.kills, stage.kinds, points, servers, proxied(stage.servers))
        for number, fault in enumerate(plan, start=1):
            self._one(fault, f"{number}/{len(plan)}")
        for _ in range(MORE_LIVES_MAX):
            if self.nemesis.kills >= settings.kills:
                break
            # Some life gave up when a server was away, before it could be killed.
            self._one(Fault("driver", delay_s=0.5), "one more")

    def _one(self, fault: Fault, which: str) -> None:
        outcome = self.nemesis.suffer(fault)
        seen = ", ".join(f"{reader.sink.name} {reader.seen:,}" for reader in self.stage.readers)
        self.say(f"{which} {fault}: {outcome}; {self.nemesis.kills} kills; rows seen: {seen}")

    def _rows_read(self) -> int:
        """By checkpointed batches; or, where the checkpoint does not tell, what every sink has shown."""
        seen = min(reader.seen for reader in self.stage.readers)
        return max(seen, self.watcher.rows_read(self.stage.feeder.places))

    def _rows_unread(self) -> int:
        """0 where the checkpoint tells of no row: then what is missing cannot be told from what was never read."""
        read = self.watcher.rows_read(self.stage.feeder.places)
        return self.stage.feeder.fed - read if read else 0

    # What came of it --------------------------------------------------------------------------------------------------

    def _history(self, broken: str) -> History:
        stage, settings = self.stage, self.stage.settings
        for reader in stage.readers:
            reader.settle(SETTLE_S_MAX)
        self.watcher.stop()
        pipeline = self.watcher.pipeline
        stateful = stage.probe.is_stateful
        return History(
            seed=settings.seed,
            pipeline=stage.probe.pipeline,
            guarantee=stage.probe.guarantee,
            rows=stage.feeder.fed,
            sights=[reader.sights(pipeline) for reader in stage.readers],
            expected=stage.workload.expect,
            key_of=stage.workload.key if stage.feeder.keeps_order and not stateful else None,
            batch_of=() if stateful else self.watcher.batch_of(stage.feeder.places),
            why_no_batches="the pipeline keeps state, so a row of its output is not one row of its input" * stateful,
            batches=self.watcher.batches(),
            events=sorted(self.events, key=lambda event: event.at_s),
            faults=dict(self.nemesis.faults),
            kills=self.nemesis.kills,
            power_cuts=self.nemesis.power_cuts,
            rows_wanted=settings.rows,
            kills_wanted=settings.kills,
            broken=broken or self.watcher.error,
            logs=[str(path) for path in sorted(stage.logs.glob("*.log"))],
            began_s=self.began_s,
            ended_s=time.time(),
            replay=settings.replay,
        )
