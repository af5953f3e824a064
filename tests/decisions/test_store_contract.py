"""One suite over every store: what the decision log relies on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from semel.decisions.base import RecordStore, StoreUnanswered
from semel.decisions.files import FileStore
from semel.decisions.hadoop import HadoopStore
from semel.durable import TEMPORARY
from semel.failpoints import VARIABLE, FailpointError

CREATORS = 8
ROUNDS = 3
# Two, because they spin: more than there are cores would take turns instead of racing.
PROCESSES = 2
RECORDS_PER_PROCESS = 100
PATH = "decisions/0000000042.0.json"


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Let several threads begin the same work at the same moment, and collect what each of them got."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait(timeout=30)
        return work(number)

    with ThreadPoolExecutor(max_workers=count) as pool:
        return list(pool.map(begin, range(count)))


# Create, read, list, delete -------------------------------------------------------------------------------------------


def test_a_created_record_is_read_back_byte_for_byte(store: RecordStore) -> None:
    content = bytes(range(256)) * 300
    assert store.create(PATH, content) is True
    assert (store.exists(PATH), store.read(PATH)) == (True, content)


def test_an_empty_record_is_a_record(store: RecordStore) -> None:
    assert store.create(PATH, b"") is True
    assert (store.exists(PATH), store.read(PATH), store.create(PATH, b"late")) == (True, b"", False)


@pytest.mark.parametrize("second", [b"first", b"second"], ids=["same", "other"])
def test_a_record_is_created_only_if_absent(store: RecordStore, second: bytes) -> None:
    assert (store.create(PATH, b"first"), store.create(PATH, second)) == (True, False)
    assert store.read(PATH) == b"first"


def test_a_record_that_is_not_there_reads_as_none(store: RecordStore) -> None:
    assert (store.read(PATH), store.exists(PATH)) == (None, False)
    store.create(PATH, b"x")
    assert (store.read("decisions/other.json"), store.exists("decisions/other.json")) == (None, False)


def test_a_missing_folder_lists_nothing(store: RecordStore) -> None:
    assert store.list("decisions") == []


def test_a_folder_lists_its_files_sorted_and_only_its_own(store: RecordStore) -> None:
    for path in ("decisions/b.json", "decisions/a.json", "incarnations/c.json", "decisions/deeper/d.json", "e.json"):
        assert store.create(path, b"x")
    assert store.list("decisions") == ["a.json", "b.json"]


def test_a_folder_knows_the_folders_in_it(store: RecordStore) -> None:
    assert store.folders("sources") == []
    for path in ("sources/1/offsets/0", "sources/0/0", "sources/1/offsets/deeper/0", "sources/x"):
        assert store.create(path, b"x")
    assert (store.folders("sources"), store.folders("sources/1"), store.folders("sources/0")) == (
        ["0", "1"],
        ["offsets"],
        [],
    )


def test_a_deleted_record_is_gone_and_can_be_created_again(store: RecordStore) -> None:
    store.create(PATH, b"old")
    store.delete(PATH)
    assert (store.read(PATH), store.list("decisions")) == (None, [])
    assert store.create(PATH, b"new") is True
    assert store.read(PATH) == b"new"


def test_deleting_what_is_not_there_is_harmless(store: RecordStore) -> None:
    store.delete(PATH)
    store.create(PATH, b"x")
    store.delete("decisions/other.json")
    assert store.list("decisions") == ["0000000042.0.json"]


def test_a_store_says_where_it_is(store: RecordStore) -> None:
    assert store.describe() == str(getattr(store, "root", "memory"))


# Several creators -----------------------------------------------------------------------------------------------------


def test_of_concurrent_creators_exactly_one_wins(store: RecordStore) -> None:
    for turn in range(ROUNDS):
        path = f"decisions/{turn:010d}.0.json"

        def create(number: int, path: str = path) -> bool:
            return store.create(path, b"creator %d" % number)

        won = [number for number, created in enumerate(at_once(CREATORS, create)) if created]
        assert len(won) == 1
        assert store.read(path) == b"creator %d" % won[0]
    assert store.list("decisions") == [f"{turn:010d}.0.json" for turn in range(ROUNDS)]


def test_a_reader_never_sees_a_half_written_record(store: RecordStore) -> None:
    paths = [f"decisions/{n:010d}.0.json" for n in range(6)]
    whole = {bytes([letter]) * 200_000 for letter in (b"a"[0], b"b"[0])}
    done = threading.Event()
    seen: list[bytes] = []
    listed: set[str] = set()

    def create_all(letter: bytes) -> None:
        for path in paths:
            store.create(path, letter * 200_000)

    def read_all() -> None:
        while not done.is_set():
            listed.update(store.list("decisions"))
            seen.extend(content for path in paths if (content := store.read(path)) is not None)

    with ThreadPoolExecutor(max_workers=3) as pool:
        reader = pool.submit(read_all)
        creators = [pool.submit(create_all, letter) for letter in (b"a", b"b")]
        for creator in creators:
            creator.result(timeout=60)
        done.set()
        reader.result(timeout=60)
    seen += [store.read(path) or b"" for path in paths]
    assert len(seen) >= len(paths)
    assert [len(content) for content in seen if content not in whole] == []
    assert listed <= {path.rpartition("/")[2] for path in paths}


# With the temporary file written, each process waits on a shared board until all have written theirs: so they reach
# for the name within microseconds of each other. A store that looks first and renames then does not survive this.
RACE = """
import mmap, sys, time
from semel.decisions import files
store, me, count = files.FileStore(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with open(sys.argv[4], "r+b") as file:
    board = mmap.mmap(file.fileno(), 0)
deadline = time.monotonic() + 30
def meet(point):
    board[me] += 1
    while min(board[:]) < board[me] and time.monotonic() < deadline:
        pass
files.failpoint = meet
print(*(n for n in range(count) if store.create(f"race/{n:03d}", b"%d" % me)))
"""


def test_of_concurrent_processes_exactly_one_wins_each_file(tmp_path: Path) -> None:
    board = tmp_path / "board"
    board.write_bytes(bytes(PROCESSES))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(n), str(RECORDS_PER_PROCESS), str(board)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    won = {n: [int(record) for record in racer.communicate(timeout=60)[0].split()] for n, racer in enumerate(racers)}
    assert board.read_bytes() == bytes([RECORDS_PER_PROCESS] * PROCESSES)
    assert sorted(record for records in won.values() for record in records) == list(range(RECORDS_PER_PROCESS))
    owners = {int(p.name): int(p.read_text()) for p in (tmp_path / "race").iterdir()}
    assert owners == {record: n for n, records in won.items() for record in records}


# Death and doubt ------------------------------------------------------------------------------------------------------


def test_a_creator_killed_before_the_link_leaves_nothing_visible(tmp_path: Path) -> None:
    code = f"from semel.decisions.files import FileStore; FileStore({str(tmp_path)!r}).create({PATH!r}, b'killed')"
    killed = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: "log.written"}, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    # It got as far as the temporary file, whole.
    assert [p.read_bytes() for p in (tmp_path / "decisions").glob(f"{TEMPORARY}*")] == [b"killed"]
    store = FileStore(tmp_path)
    assert (store.list("decisions"), store.read(PATH), store.exists(PATH)) == ([], None, False)
    assert store.create(PATH, b"later") is True
    assert store.read(PATH) == b"later"


def test_a_creator_that_vanished_before_the_rename_leaves_nothing_visible(hadoop_store: HadoopStore) -> None:
    # What a killed driver leaves on HDFS: a synced temporary file that nobody closes.
    abandoned = hadoop_store._written(PATH, b"killed")
    names = [status.getPath().getName() for status in hadoop_store._manager.list(hadoop_store._path("decisions"))]
    assert [name.startswith(".0000000042.0.json.") for name in names] == [True]
    assert (hadoop_store.list("decisions"), hadoop_store.read(PATH), hadoop_store.exists(PATH)) == ([], None, False)
    assert hadoop_store.create(PATH, b"later") is True
    assert hadoop_store.read(PATH) == b"later"
    abandoned.cancel()


@pytest.mark.usefixtures("failing_at_log_written")
@pytest.mark.parametrize("store", ["files", "hadoop"], indirect=True)
def test_a_creator_that_failed_before_the_rename_cleans_up_and_can_try_again(store: RecordStore) -> None:
    with pytest.raises(FailpointError):
        store.create(PATH, b"failed")
    assert (store.list("decisions"), store.exists(PATH)) == ([], False)
    assert store.create(PATH, b"later") is True
    assert store.read(PATH) == b"later"


class Scripted:
    """Spark's manager with one line changed: what happens when a stream is closed."""

    def __init__(self, manager: Any, close: Callable[[Any], None]) -> None:
        self._manager = manager
        self._close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def createAtomic(self, path: Any, overwrite: bool) -> Any:  # noqa: N802  Spark's name
        return ScriptedStream(self._manager.createAtomic(path, overwrite), self._close)


class ScriptedStream:
    def __init__(self, stream: Any, close: Callable[[Any], None]) -> None:
        self._stream = stream
        self.close = lambda: close(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lost() -> OSError:
    return OSError("connection reset")


def test_a_rename_whose_answer_is_lost_is_found_done(hadoop_store: HadoopStore) -> None:
    def close(stream: Any) -> None:
        stream.close()
        raise lost()

    hadoop_store._manager = Scripted(hadoop_store._manager, close)
    assert hadoop_store.create(PATH, b"ours") is True
    assert hadoop_store.read(PATH) == b"ours"


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "answer lost"])
def test_a_record_that_another_created_meanwhile_is_not_ours(hadoop_store: HadoopStore, answered: bool) -> None:
    real = hadoop_store._manager

    def close(stream: Any) -> None:
        hadoop_store._manager = real
        assert hadoop_store.create(PATH, b"theirs") is True
        if not answered:
            raise lost()
        stream.close()

    hadoop_store._manager = Scripted(real, close)
    assert hadoop_store.create(PATH, b"ours") is False
    assert hadoop_store.read(PATH) == b"theirs"


def test_a_rename_that_cannot_be_found_is_unanswered(hadoop_store: HadoopStore) -> None:
    def close(_: Any) -> None:
        raise lost()

    hadoop_store._manager = Scripted(hadoop_store._manager, close)
    with pytest.raises(StoreUnanswered, match="connection reset"):
        hadoop_store.create(PATH, b"ours")


def test_a_rename_is_unanswered_when_the_record_cannot_be_read(
    hadoop_store: HadoopStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(stream: Any) -> None:
        stream.close()
        raise lost()

    def unreadable(_: str) -> bytes:
        raise OSError("name node is in safe mode")

    hadoop_store._manager = Scripted(hadoop_store._manager, close)
    monkeypatch.setattr(hadoop_store, "read", unreadable)
    with pytest.raises(StoreUnanswered, match="connection reset"):
        hadoop_store.create(PATH, b"ours")


def test_what_java_refuses_is_an_os_error_of_one_line_that_names_the_record(hadoop_store: HadoopStore) -> None:
    assert hadoop_store.create("decisions", b"a file where a folder should be")
    with pytest.raises(OSError, match=r"cannot \w+( for)? hdfs://.*/decisions/0000000042.0.json: ") as raised:
        hadoop_store.create(PATH, b"x")
    assert len(str(raised.value).splitlines()) == 1


# Names that are not on the disk yet -----------------------------------------------------------------------------------


def test_to_make_a_record_durable_changes_nothing_that_is_seen(store: RecordStore) -> None:
    store.create(PATH, b"x")
    store.make_durable(PATH)
    assert (store.read(PATH), store.list("decisions")) == (b"x", ["0000000042.0.json"])


def test_a_store_knows_its_own_record_after_an_answer_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: a LINK that is sent again is answered "exists", though the first one did it."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", link)
    store = FileStore(tmp_path)
    assert store.create(PATH, b"ours") is True
    assert (store.create(PATH, b"ours"), store.create(PATH, b"theirs")) == (False, False)
    assert store.read(PATH) == b"ours"


@pytest.fixture
def syncs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """How often a folder was synced since."""
    real, seen = os.fsync, []

    def fsync(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return lambda folder: seen.count(str(folder))


def test_a_record_of_another_process_is_synced_once_before_it_is_acted_on(
    tmp_path: Path, syncs_of: Callable[[Path], int]
) -> None:
    """Its creator may have died after the link and before the sync of the folder."""
    (tmp_path / "decisions").mkdir()
    (tmp_path / PATH).write_bytes(b"theirs")
    store = FileStore(tmp_path)
    for _ in range(3):
        store.make_durable(PATH)
    assert syncs_of(tmp_path / "decisions") == 1


def test_a_record_of_ones_own_is_not_synced_again(tmp_path: Path, syncs_of: Callable[[Path], int]) -> None:
    store = FileStore(tmp_path)
    store.create(PATH, b"ours")
    before = syncs_of(tmp_path / "decisions")
    store.make_durable(PATH)
    assert (before, syncs_of(tmp_path / "decisions")) == (1, 1)


def test_to_make_durable_what_is_not_there_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="decisions"):
        FileStore(tmp_path).make_durable(PATH)
    assert list(tmp_path.iterdir()) == []
