"""The checks of the benchmarks can fail, and their pictures can be read. What they measure is not tested."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import numpy as np
import pytest
from benchmarks.engines.counts import TableCounts, TopicCounts, expected, require_even
from benchmarks.plots import Bars, bars
from benchmarks.reader import Seen, WrongRows, _Found, _note
from benchmarks.rows import HEAD, ROW_BYTES, key_of, value_of

SVG = "{http://www.w3.org/2000/svg}"


def seen(*numbers: int) -> Seen:
    column = np.array(numbers, "int64")
    return Seen(column, column, column, column)


def test_rows_that_came_once_each_in_any_order_pass() -> None:
    seen(2, 0, 1).require_each_once("an engine", 3)


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ((0, 2), "1 were lost and 0 came twice; 0 were never sent"),
        ((0, 1, 2, 1), "0 were lost and 1 came twice; 0 were never sent"),
        ((0, 1, 2, 3), "0 were lost and 0 came twice; 1 were never sent"),
        ((), "3 were lost"),
    ],
)
def test_a_row_that_is_lost_doubled_or_strange_fails(numbers: tuple[int, ...], what: str) -> None:
    with pytest.raises(WrongRows, match=what):
        seen(*numbers).require_each_once("an engine", 3)


def test_a_value_tells_its_number_and_has_its_size() -> None:
    value = value_of(4711)
    assert len(value) == ROW_BYTES
    assert HEAD.unpack_from(value)[0] == 4711


@dataclass
class Row:
    number: int

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "out"

    def value(self) -> bytes:
        return HEAD.pack(self.number, self.number * 10)

    def timestamp(self) -> tuple[int, int]:
        return 2, 5


def test_a_reader_that_waits_does_not_take_a_row_that_came_twice_for_one_that_is_missing() -> None:
    found = {"out": _Found()}
    assert _note(found, [Row(0), Row(7_000), Row(0)], 99) == 70_000
    assert found["out"].distinct == 2
    numbers, sent, seen_at, appended = (column.tolist() for column in found["out"].columns)
    assert (numbers, sent) == ([0, 7_000, 0], [0, 70_000, 0])
    assert (seen_at, appended) == ([99] * 3, [5] * 3)


def test_counts_are_expected_as_keys_are_dealt_out() -> None:
    dealt = [int(key_of(number, 10)) for number in range(25)]
    assert expected(25, 10).tolist() == [dealt.count(key) for key in range(10)]
    # A whole round brings every key once.
    assert sorted(dealt[:10]) == list(range(10))


def test_keys_that_would_not_be_dealt_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="7919"):
        require_even(7919 * 2)


class FixedCounts(TableCounts):
    rows: tuple[tuple[str, int], ...] = ()

    def _rows(self, what: str) -> list[tuple[object, ...]]:
        return [(sum(count for _, count in self.rows),)] if what.startswith("sum") else list(self.rows)


def test_a_key_with_a_wrong_count_fails() -> None:
    counts = FixedCounts(2, "", "")
    counts.rows = (("0", 2), ("1", 1))
    assert counts.total() == 3
    counts.require("an engine", 3)
    counts.rows = (("0", 1), ("1", 2))
    with pytest.raises(WrongRows, match="2 of 2 keys"):
        counts.require("an engine", 3)


@dataclass
class Message:
    number: int
    count: int

    def error(self) -> None:
        return None

    def key(self) -> bytes:
        return str(self.number).encode()

    def value(self) -> bytes:
        return str(self.count).encode()

    def timestamp(self) -> tuple[int, int]:
        return 1, self.count


@dataclass
class Consumer:
    messages: list[Message]

    def consume(self, most: int, _: float) -> list[Message]:
        found, self.messages = self.messages[:most], self.messages[most:]
        return found


def topic_counts(*messages: Message) -> TopicCounts:
    counts = TopicCounts.__new__(TopicCounts)
    super(TopicCounts, counts).__init__(1)
    counts.records, counts.again, counts.last_append_ms = 0, 0, 0
    counts._consumer = Consumer(list(messages))
    return counts


def test_a_count_that_comes_twice_fails() -> None:
    topic_counts(Message(0, 1), Message(0, 3)).require("an engine", 3)
    with pytest.raises(WrongRows, match="1 of 3 counts came twice"):
        topic_counts(Message(0, 1), Message(0, 3), Message(0, 3)).require("an engine", 3)


def test_a_picture_shows_every_figure_and_what_was_not_measured() -> None:
    drawn = ET.fromstring(bars(Bars("A & B", ["p50", "p99"], {"one": [12.5, 400.0], "two": [None, 7.0]})))  # noqa: S314 - our own text
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert "A & B" in texts
    assert {"one", "two", "12.5", "400", "7", "not measured"} <= set(texts)
    widths = [float(r.attrib["width"]) for r in drawn.iter(f"{SVG}rect") if r.attrib["class"] in ("s0", "s1")]
    # The legend's two boxes, then one bar a figure, on one scale.
    assert widths[3] / widths[2] == pytest.approx(400 / 12.5, rel=0.01)
