"""What Spark planned, read from checkpoint folders as Spark writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semel.audit.facts import Range
from semel.audit.gather import kept_from
from semel.audit.ranges import Ranges
from semel.decisions.files import FileStore


def offsets(*lines: Any) -> bytes:
    texts = ["-" if line is None else json.dumps(line) for line in lines]
    return "\n".join(["v1", '{"batchWatermarkMs":0}', *texts]).encode()


def put(folder: Path, path: str, content: bytes) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def files(*entries: tuple[str, int]) -> bytes:
    lines = [json.dumps({"path": path, "timestamp": 1, "batchId": batch}) for path, batch in entries]
    return "\n".join(["v1", *lines]).encode()


def test_a_kafka_range_is_the_difference_of_the_offsets(tmp_path: Path) -> None:
    ranges = Ranges(FileStore(tmp_path))
    before, now = offsets({"in": {"0": 10, "1": 4}}), offsets({"in": {"0": 30, "1": 9}})
    assert ranges.of(3, now, before) == Range(rows_max=25)
    assert ranges.saw_kafka


def test_the_first_kafka_range_begins_where_the_source_noted(tmp_path: Path) -> None:
    put(tmp_path, "sources/0/0", b'\0v1\n{"in":{"0":7}}')
    now = offsets({"in": {"0": 30}})
    assert Ranges(FileStore(tmp_path)).of(0, now, None) == Range(rows_max=23)
    assert Ranges(FileStore(tmp_path / "nowhere")).of(0, now, None) == Range()


def test_a_partition_that_came_later_is_counted_from_zero(tmp_path: Path) -> None:
    before, now = offsets({"in": {"0": 10}}), offsets({"in": {"0": 10, "1": 6}})
    assert Ranges(FileStore(tmp_path)).of(1, now, before) == Range(rows_max=6)


@pytest.mark.parametrize("log", [b"", b"v1", b"v1\n", b"v2\n{}\n{}", b"v1\n{}\nno json", b"\xff"])
def test_a_log_that_reads_differently_says_nothing(log: bytes, tmp_path: Path) -> None:
    assert Ranges(FileStore(tmp_path)).of(0, log, None) == Range()


def test_an_offset_that_goes_back_is_told(tmp_path: Path) -> None:
    found = Ranges(FileStore(tmp_path)).of(1, offsets({"in": {"0": 3}}), offsets({"in": {"0": 9}}))
    assert found == Range(rows_max=0, wrong="the offset of in-0 goes back from 9 to 3")


def test_files_are_counted_in_the_log_of_their_source_and_in_what_was_compacted(tmp_path: Path) -> None:
    put(tmp_path, "sources/0/9.compact", files(("a", 8), ("b", 9), ("c", 9)))
    put(tmp_path, "sources/0/10", files(("d", 10)))
    ranges = Ranges(FileStore(tmp_path))
    at = [offsets({"logOffset": n}) for n in range(12)]
    assert ranges.of(9, at[9], at[8]) == Range(files=2)
    assert ranges.of(10, at[10], at[9]) == Range(files=1)
    assert ranges.of(10, at[10], at[7]) == Range(files=4)
    assert ranges.of(10, at[10], at[10]) == Range(files=0)
    assert ranges.of(11, at[11], at[10]) == Range()


def test_sources_of_several_kinds_are_told_apart(tmp_path: Path) -> None:
    put(tmp_path, "sources/1/0", files(("a", 0)))
    before, now = offsets({"in": {"0": 1}}, None, 5), offsets({"in": {"0": 3}}, {"logOffset": 0}, 9)
    found = Ranges(FileStore(tmp_path)).of(1, now, before)
    assert found == Range(rows_max=2, files=1)
    assert str(found) == "≤ 2 rows, 1 file"


@pytest.mark.parametrize("log", [None, b"", b"v7\n{}\n{}", b"v1\n{}\nnonsense"])
def test_a_log_that_reads_differently_is_not_guessed_at(tmp_path: Path, log: bytes | None) -> None:
    found = Ranges(FileStore(tmp_path)).of(1, log, offsets({"in": {"0": 1}}))
    assert (found, str(found)) == (Range(), "?")


def test_without_the_batch_before_the_range_is_not_known(tmp_path: Path) -> None:
    assert Ranges(FileStore(tmp_path)).of(5, offsets({"in": {"0": 3}}), None) == Range()


def test_which_journals_are_pruned_follows_from_the_newest_batch_that_ended() -> None:
    assert [kept_from(n) for n in (-1, 0, 98, 99, 198, 199, 298, 299)] == [0, 0, 0, 0, 0, 99, 99, 199]
