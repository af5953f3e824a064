"""The disk of a checkpoint in `semel verify --faults power`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.ids import Attempt, Incarnation, pipeline_id
from semel.protocol.events import Decided
from semel.verify.checkpoint import CheckpointWatcher
from semel.verify.disk import ForgetfulDisk

PIPELINE = pipeline_id("874df88a-3217-4fa5-b2b2-eb456b7ec833")


def test_what_is_durable_at_the_end_is_kept_in_the_folder(fuse: None, tmp_path: Path) -> None:
    disk = ForgetfulDisk(tmp_path / "checkpoint")
    try:
        (disk.folder / "lost").write_bytes(b"x")
        assert disk.cut_power("all", 1).gone == ("/lost",)
        (disk.folder / "kept").write_bytes(b"x")
        with pytest.raises(ValueError, match="does not lose 'nothing'"):
            disk.cut_power("nothing", 1)
    finally:
        disk.close()
    assert not os.path.ismount(tmp_path / "checkpoint")
    assert os.listdir(tmp_path / "checkpoint") == ["kept"]


def test_after_a_power_cut_the_watcher_knows_only_what_was_decided(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / "offsets").mkdir(exist_ok=True)
        (tmp_path / "offsets" / str(n)).write_text(f'v1\n{{}}\n{{"logOffset":{n}}}')
    log = DecisionLog(FileStore(tmp_path / "semel"))
    for n in range(2):
        assert log.append(Decided(Attempt(PIPELINE, n, 0, Incarnation(1)), ()))
    watcher = CheckpointWatcher(tmp_path, 1)
    watcher.look()
    assert sorted(watcher.batches()) == [0, 1, 2]
    (tmp_path / "offsets" / "2").unlink()
    watcher.forget_what_is_not_decided()
    watcher.look()
    assert sorted(watcher.batches()) == [0, 1]
