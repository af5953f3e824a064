"""A power cut leaves files half written, and Spark refuses to read them. The start drops those that nothing rests on.

Spark names its files before their content is on the disk. What a decision presupposes is synced before it. So a torn
file is one of three: it belongs to a batch that is not decided, which Spark plans anew; it is a `commits/N`, then Spark
asks for the batch again and we find it committed; or it is a snapshot of the state that Spark's maintenance wrote
beside the batches, of which the deltas are there. Anything else that is torn is left as it is, and Spark says so.

State of a batch that is not decided is dropped even where it is whole. The batch runs again, maybe over other rows, and
writes its deltas anew; a snapshot of the first try would hide them for ever, because Spark prefers snapshots.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from semel.durable import checksum_of, sync_folder
from semel.protocol.plans import COMPACTED
from semel.runtime.durability import OWN_FOLDER, STATE_FOLDER, sync_each
from semel.runtime.offsets import (
    NO_OFFSET,
    is_list_of_files,
    is_of_kafka,
    logs_planned,
    number_of_list,
    offsets_in,
)

#: Only the newest files of each log can be torn: those before were synced with a decision.
NEWEST = 3
#: Clocks of file systems are coarse.
SLACK_S = 2.0
CRC_HEADER = b"crc\0"
_LOG_FILE = re.compile(r"(\d+)(\.compact)?")
_RECORD = re.compile(r"(\d+)\.\d+\.json")
#: A snapshot, and what holds the same version beside it.
_SNAPSHOT = re.compile(r"(\d+)(\.snapshot|\.zip)")
_SAME_VERSION = {".snapshot": ".delta", ".zip": ".changelog"}
#: The state of one version, and the checksum of such a file. In Spark's second format an id stands behind the number.
_STATE_FILE = re.compile(r"\.?((\d+)(?:_[\w-]+)?)(\.delta|\.snapshot|\.changelog|\.zip)(?:\.crc)?")


def drop_torn(root: Path, is_decided: Callable[[int], bool], under_way: int | None = None) -> list[str]:
    """Drop it, durably. Returns the paths below the checkpoint, for a warning.

    `is_decided` says whether a batch is. Spark has read the plan of the one that is `under_way`, so it is not torn.
    Call it when the pipeline is claimed and before Spark reads the checkpoint.
    """
    torn = [
        *_torn_commits(root),
        *_torn_plans(root, lambda batch: batch == under_way or is_decided(batch)),
        *_torn_snapshots(root, synced_until_s(root, is_decided) - SLACK_S),
    ]
    for path in torn:
        checksum_of(path).unlink(missing_ok=True)
        path.unlink()
    for folder in {path.parent for path in torn}:
        sync_folder(folder)
    return [str(path.relative_to(root)) for path in torn]


# The logs -------------------------------------------------------------------------------------------------------------


def _torn_commits(root: Path) -> list[Path]:
    return [path for _, path in _newest(root / "commits") if not is_whole_log(path)]


def _torn_plans(root: Path, is_decided: Callable[[int], bool]) -> Iterator[Path]:
    """A plan with a torn or missing part goes as a whole. What the source logged of it and is whole may stay.

    Only the newest plan can be undecided, because Spark plans none before the one before is done. Without that one, or
    behind batches that the log alone knows, the checkpoint is older than it was, and nothing here is for us to judge.
    """
    plans = _newest(root / "offsets")
    undecided = plans.pop() if plans and not (is_decided(plans[-1][0]) or _is_done(root, plans[-1][0])) else None
    settled = plans[-1][0] if plans else -1
    if is_decided(settled + 1) or (undecided is not None and undecided[0] != settled + 1):
        return
    if plans and not is_whole_log(plans[-1][1]):
        return  # Spark refuses it, and without it nobody can say which lists are done
    before = plans[-1][1].read_bytes() if plans else None
    planned = undecided[1].read_bytes() if undecided is not None else None
    sources = [folder for folder in _folders(root / "sources") if folder.name.isdigit()]
    lost = {path for folder in sources for path in _torn_entries(folder, before, planned)}
    yield from sorted(lost)
    if undecided is not None and (not is_whole_log(undecided[1]) or _lacks_a_source(root, undecided[1], before, lost)):
        yield undecided[1]


def _is_done(root: Path, batch: int) -> bool:
    return (root / "commits" / str(batch)).exists()


def _torn_entries(folder: Path, settled: bytes | None, planned: bytes | None) -> list[Path]:
    """The entries of a source's log that no plan before rests on, and that are torn.

    A file source numbers its lists itself: a batch without new files has none, and a list may have been made for a plan
    that never was. Spark reads them all, so that behind one that is torn or missing none is of use.
    """
    rests_on, wanted = _line(settled, folder), _line(planned, folder)
    last = number_of_list(rests_on)
    if last is None and rests_on != NO_OFFSET:
        return []  # a source that keeps where it began, which was synced with the first decision
    entries = [(number, path) for number, path in sorted(_numbered(folder)) if last is None or number > last]
    torn = {number for number, path in entries if not is_whole_log(path)}
    is_of_files = any(number_of_list(offset) is not None for offset in (rests_on, wanted)) or any(
        is_list_of_files(path.read_bytes()) for _, path in entries
    )
    if not is_of_files:
        deeper = [path for path in _files_below(folder) if not is_whole(path)]
        return [*(path for number, path in entries if number in torn), *deeper]
    there = {number for number, _ in entries} - torn
    expected = 0 if last is None else last + 1
    while expected in there:
        expected += 1
    return [path for number, path in entries if number >= expected]


def _line(plan: bytes | None, folder: Path) -> str:
    """What a plan says of the source that logs in this folder."""
    lines = offsets_in(plan) if plan is not None else []
    source = int(folder.name)
    return lines[source] if source < len(lines) else NO_OFFSET


def _lacks_a_source(root: Path, plan: Path, before: bytes | None, lost: set[Path]) -> bool:
    """Whether a plan rests on an entry of its sources' logs that is not there, or is being dropped."""
    content = plan.read_bytes()
    offsets = offsets_in(content)
    for source, names in enumerate(logs_planned(content, before)):
        folder = root / "sources" / str(source)
        there = {path.name for _, path in _numbered(folder)} - {path.name for path in lost if path.parent == folder}
        if names is None:
            # Kafka's source writes down where it begins before anything is planned.
            keeps_its_beginning = is_of_kafka(offsets[source]) or any(folder in path.parents for path in lost)
            if keeps_its_beginning and not there and offsets[source] != NO_OFFSET:
                return True
        elif any(not {name, f"{name}{COMPACTED}"} & there for name in names):
            return True
    return False


def _files_below(folder: Path) -> Iterator[Path]:
    """What a source keeps in folders of its own (Iceberg's `offsets/0`). Hidden names are Hadoop's."""
    for below in _folders(folder):
        yield from (path for path in below.rglob("*") if path.is_file() and not path.name.startswith("."))


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    return [(int(m[1]), path) for path in _files(folder) if (m := _LOG_FILE.fullmatch(path.name))]


def _newest(folder: Path) -> list[tuple[int, Path]]:
    return sorted(_numbered(folder))[-NEWEST:]


def is_whole_log(path: Path) -> bool:
    """Whether a file of Spark's logs has the content that it was written with, as far as it can be known."""
    if not is_whole(path):
        return False
    # Kafka's source begins with a zero byte, for a Spark of long ago.
    version, _, body = path.read_bytes().lstrip(b"\0").partition(b"\n")
    of_a_source = path.parent.parent.name == "sources"
    if not re.fullmatch(rb"v\d+", version):
        # A source may have a format of its own: it is not empty, and that is all that we know.
        return of_a_source
    last = next((line for line in reversed(body.split(b"\n")) if line), b"")
    if last == b"":
        # A file source logs a batch without files so.
        return of_a_source
    if last == b"-":
        # An offset that is not there yet.
        return b"\0" not in body
    try:
        json.loads(last)
    except ValueError:
        return False
    return True


# The state ------------------------------------------------------------------------------------------------------------


def synced_until_s(root: Path, is_decided: Callable[[int], bool]) -> float:
    """Up to which time of a file all state is known to be synced; 0 when that is not known.

    The sync of a batch comes after its `offsets/N` and before its decision. What was written while it ran may have been
    missed, and whatever the log recorded later, that a slot was closed for one, came without a sync.
    """
    records: dict[int, list[Path]] = {}
    for path in _files(root / OWN_FOLDER / "decisions"):
        if (found := _RECORD.fullmatch(path.name)) is not None:
            records.setdefault(int(found[1]), []).append(path)
    newest = next((batch for batch in sorted(records, reverse=True) if is_decided(batch)), None)
    with suppress(FileNotFoundError):
        if newest is not None:
            return min(path.stat().st_mtime for path in (root / "offsets" / str(newest), *records[newest]))
    return 0.0


def drop_undecided_state(root: Path, newest: int, *, may_be_in_use: bool) -> int:
    """Drop, durably, the state behind version `newest`, the last one that a decision rests on. Returns how many files.

    With `may_be_in_use` Spark runs the batch that makes the next version, and its rows may have been computed already.
    Then only snapshots go whose version stands beside them in another form.
    """
    doomed = [path for store in _stores(root / STATE_FOLDER) for path in _behind(store, newest, may_be_in_use)]
    for path in doomed:
        path.unlink(missing_ok=True)
    sync_each(sorted({str(path.parent) for path in doomed}), sync_folder)
    return len(doomed)


def _behind(store: Path, newest: int, may_be_in_use: bool) -> Iterator[Path]:
    names: set[str] = set()
    with suppress(FileNotFoundError):
        names.update(os.listdir(store))
    for name in sorted(names):
        found = _STATE_FILE.fullmatch(name)
        if found is None or int(found[2]) <= newest:
            continue
        version, kind = found[1], found[3]
        # The HDFS-backed provider never has a snapshot alone, whatever a power cut made of its delta.
        is_extra = kind == ".snapshot" or (kind == ".zip" and f"{version}.changelog" in names)
        if is_extra or not may_be_in_use:
            yield store / name


def _torn_snapshots(root: Path, since_s: float) -> Iterator[Path]:
    """The newest of each store is the one that is read; where it is torn the one before it becomes the newest."""
    for store in _stores(root / STATE_FOLDER):
        names = {path.name for path in _files(store)}
        found = [(int(m[1]), m[2]) for name in names if (m := _SNAPSHOT.fullmatch(name))]
        for version, kind in sorted(found, reverse=True):
            path = store / f"{version}{kind}"
            if f"{version}{_SAME_VERSION[kind]}" not in names:
                continue  # it is the only copy of that version: synced with the decision, or never needed
            if path.stat().st_mtime < since_s or _is_whole_snapshot(path, since_s):
                break
            yield path


def _is_whole_snapshot(path: Path, since_s: float) -> bool:
    if not is_whole(path):
        return False
    if path.suffix != ".zip":
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            described = json.loads(archive.read("metadata").partition(b"\n")[2])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        return False
    for part in described.get("sstFiles", []):
        file = path.parent / "SSTs" / part["dfsSstFileName"]
        if not file.is_file() or file.stat().st_size != part["sizeBytes"]:
            return False
        if file.stat().st_mtime >= since_s and not is_whole(file):
            return False
    return True


def _stores(state: Path) -> Iterator[Path]:
    """`state/<operator>/<partition>`, and below it one for each named store."""
    for operator in _folders(state):
        # What is the root of a volume holds a folder of the system's, which we may not list: lost+found.
        for partition in _folders(operator) if operator.name.isdigit() else ():
            if partition.name.isdigit():
                yield partition
                yield from _folders(partition)


# Hadoop's checksums ---------------------------------------------------------------------------------------------------


def is_whole(path: Path) -> bool:
    """Not empty, and as its checksum says."""
    content = path.read_bytes()
    return bool(content.strip(b"\0")) and agrees_with_checksum(path, content)


def agrees_with_checksum(path: Path, content: bytes) -> bool:
    """Whether Hadoop's local file system would read this content (ChecksumFileSystem).

    A checksum file that is missing or torn itself says nothing: Hadoop ignores it, too.
    """
    try:
        sums = checksum_of(path).read_bytes()
    except FileNotFoundError:
        return True
    if len(sums) < 8 or not sums.startswith(CRC_HEADER):
        return True
    each = int.from_bytes(sums[4:8], "big")
    if each == 0:
        return True
    expected = [sums[n : n + 4] for n in range(8, len(sums), 4)]
    found = [zlib.crc32(content[n : n + each]).to_bytes(4, "big") for n in range(0, len(content), each)]
    return found == expected


def _files(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in folder.iterdir() if path.is_file()]
    return []


def _folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path for path in folder.iterdir() if path.is_dir())
    return []
