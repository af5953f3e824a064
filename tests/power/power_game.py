"""The game of the kill tests on a disk that forgets: a child is killed at a failpoint, and then the power is cut."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semel.durable import sync_file, sync_folder
from semel.verify.life import _processes_of
from semel.verify.power.disk import PowerDisk
from semel.verify.power.forgetful import Loss, Mode
from tests.e2e.child import Setup
from tests.e2e.game import Game, Life

GONE_WITHIN_S = 60.0
SINKS = ("sqlite", "files")

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
