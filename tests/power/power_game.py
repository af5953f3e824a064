"""The game of the kill tests on a disk that forgets: a child is killed at a failpoint, and then the power is cut."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from semel.durable import sync_file, sync_folder
from semel.verify.life import _processes_of
from semel.verify.power.disk import PowerDisk
from semel.verify.power.forgetful import Loss, Mode
from tests.e2e.child import Setup
from tests.e2e.game import Game, Life

GONE_WITHIN_S = 60.0
SINKS = ("sqlite", "files")
#: A row of the stateful shape: a key, how many inputs it had so far, and their sum.
Total = tuple[str, int, int]

STATE = "spark.sql.streaming.stateStore"
#: Snapshots come often, so that what Spark's maintenance writes beside the batches is met, too.
HDFS_BACKED = ((f"{STATE}.minDeltasForSnapshot", "2"), (f"{STATE}.maintenanceInterval", "1s"))
ROCKSDB = (
    (f"{STATE}.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"),
    *HDFS_BACKED,
)
CHANGELOG = (*ROCKSDB, (f"{STATE}.rocksdb.changelogCheckpointing.enabled", "true"))


@dataclass
class PowerGame(Game):
    """Everything lies on the disk; the input is durable from the start, as that of a replayable source is."""

    disk: PowerDisk = field(kw_only=True)
    losses: list[Loss] = field(default_factory=list)

    def deal(self) -> PowerGame:
        super().deal()
        for path in sorted(self.disk.folder.rglob("*"), reverse=True):
            (sync_folder if path.is_dir() else sync_file)(path)
        sync_folder(self.disk.folder)
        return self

    def lose_power(self, point: str, mode: Mode, seed: int, **changes: Any) -> Life:
        """A life that dies at a point and takes the power along. What was visible before must be so afterwards."""
        life = self.live(point, **changes)
        self._end_session(self.children[-1].pid)
        before = {sink: self.committed(sink) for sink in SINKS}
        self.losses.append(self.disk.cut_power(mode, seed))
        self.disk.restore_power()
        after = {sink: self.committed(sink) for sink in SINKS}
        assert all(after[sink] >= before[sink] for sink in SINKS), (point, mode, seed, before, after)
        return life

    def committed(self, sink: str = "") -> int:
        """How many inputs are visible; fails unless they are the first k, whole, once, and only decided batches.

        Which inputs share a batch is Spark's to say: a plan that was lost is made anew, maybe with more of them. So
        running totals are compared with those after each input, and not with those after each batch.
        """
        if self.setup.shape != "stateful":
            return super().committed(sink)
        visible = cast(Counter[Total], self.visible(sink))
        after: list[dict[str, tuple[int, int]]] = [{}]
        for rows in cast(list[Counter[Total]], self.expected):
            after.append({**after[-1], **{key: (n, total) for key, n, total in rows}})
        true = {(key, *totals) for state in after for key, totals in state.items()}
        assert {row: times for row, times in visible.items() if times != 1 or row not in true} == {}
        newest: dict[str, int] = {}
        for key, n, _ in visible:
            newest[key] = max(n, newest.get(key, 0))
        reached = [{key: n for key, (n, _) in state.items()} for state in after]
        assert newest in reached
        decided = list(accumulate(self.decided(sink), initial=0))
        assert visible.total() in decided, f"{visible.total()} rows are visible, decided: {decided}"
        return reached.index(newest)

    @staticmethod
    def _end_session(leader: int) -> None:
        """Python workers have a process group of their own, and may live a moment longer than the driver."""
        end = time.monotonic() + GONE_WITHIN_S
        while left := [pid for pid in _processes_of(leader) if pid != leader]:
            assert time.monotonic() < end, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def play_on(self) -> None:
        """To the end, without a fault: everything is there once."""
        last = self.live()
        assert last.returncode == 0, last
        assert {sink: self.committed(sink) for sink in SINKS} == dict.fromkeys(SINKS, self.batches)


def power_game(disk: PowerDisk, batches: int, **setup: Any) -> PowerGame:
    folder: Path = disk.folder / "game"
    return PowerGame(Setup(str(folder), sink="both", **setup), batches, 20, disk=disk).deal()
