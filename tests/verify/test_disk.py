"""A disk that is full: a file system of its own, and a limit on running processes; then a real pipeline on it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.verify import disk as module
from semel.verify.disk import Disk
from semel.verify.history import Event
from semel.verify.nemesis import Nemesis
from semel.verify.plan import Fault
from tests.verify.lives import Lives

#: Says "ok" or the number of the error for each line it gets.
WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab") as file:
            file.write(b"x" * 5000)
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk" / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _writes(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.fixture(params=["mounted", "limited"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "limited":
        monkeypatch.setattr(module, "_run", lambda *_: False)
    made = Disk(tmp_path / "disk", 64)
    if request.param == "mounted" and not made.is_mounted:
        pytest.skip("this user may not mount")
    assert made.is_mounted == (request.param == "mounted")
    yield made
    made.close()


def test_nothing_can_be_written_until_there_is_room_again(disk: Disk, writer: subprocess.Popen[str]) -> None:
    assert _writes(writer) == "ok"
    disk.fill([writer.pid])
    assert _writes(writer) == str(errno.ENOSPC if disk.is_mounted else errno.EFBIG)
    disk.free([writer.pid])
    assert _writes(writer) == "ok"


def test_a_disk_is_gone_after_its_end_and_what_was_on_it_is_kept(disk: Disk) -> None:
    """A run whose verdict is not true is looked into, and its checkpoint first."""
    (disk.folder / "offsets").mkdir()
    (disk.folder / "offsets" / "0").write_text("x")
    disk.fill([])
    disk.close()
    assert not os.path.ismount(disk.folder)
    assert (disk.folder / "offsets" / "0").read_text() == "x"
    assert [path.name for path in disk.folder.iterdir()] == ["offsets"]
    assert [path.name for path in disk.folder.parent.iterdir()] == [disk.folder.name]


def test_a_disk_is_gone_even_while_somebody_has_a_file_open(disk: Disk) -> None:
    with (disk.folder / "file").open("w"):
        disk.close()
        assert not os.path.ismount(disk.folder)


@pytest.mark.long
def test_a_pipeline_whose_disk_was_full_goes_on_as_if_nothing_had_been(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path)
    monkeypatch.setattr(Lives, "checkpoint", disk.folder)
    events: list[Event] = []
    nemesis = Nemesis(lives.fed_ahead(10), {}, disk, print, events.append)
    try:
        outcomes = [nemesis.suffer(Fault("disk-full", delay_s=delay_s)) for delay_s in (0.0, 0.7)]
        nemesis.drain(lambda: lives.rows() == lives.all_rows, 240)
    finally:
        nemesis.end()
        lives.end()
    assert [words.split(" ")[0] for words in outcomes] == ["gave", "gave"], outcomes
    assert lives.rows() == lives.all_rows
    assert nemesis.faults == {"disk-full": 2}
    assert [event.lane for event in events if event.kind == "outage"] == ["disk", "disk"]
