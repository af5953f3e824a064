"""What Spark planned: the range of each batch in its sources, read from the checkpoint.

Spark's log of offsets has a line for each source. Kafka's line says where the batch ends in each partition; where it
begins is where the one before it ended, and before the first one what Kafka's source noted in `sources/`. The line of a
file source is the number of an entry in a log of its own, `sources/<n>/`, which names the files; now and then Spark
compacts that log into one file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.audit.facts import Range
from semel.decisions.base import RecordStore

COMPACT = ".compact"
#: A source that has not begun yet.
NOT_BEGUN = "-"

#: (topic, partition) -> where the next record lies.
Ends = Mapping[tuple[str, int], int]


def source_lines(log: bytes | None) -> list[Any] | None:
    """What offsets/N says of each source, None where it is nothing yet; None when it reads differently."""
    # A version, a line about Spark itself, then the sources.
    lines = (log or b"").decode(errors="replace").splitlines()
    if len(lines) < 2 or lines[0] != "v1":
        return None
    try:
        return [None if line == NOT_BEGUN else json.loads(line) for line in lines[2:]]
    except ValueError:
        return None


def kafka_ends(line: Any) -> Ends | None:
    """Where a batch ends in each partition, if this is a line of Kafka's: topics over numbers over offsets."""
    if not isinstance(line, dict) or not all(isinstance(numbers, dict) for numbers in line.values()):
        return None
    try:
        return {(topic, int(number)): int(at) for topic, numbers in line.items() for number, at in numbers.items()}
    except (TypeError, ValueError):
        return None


def log_offset(line: Any) -> int | None:
    """The number of an entry in a file source's own log, if this is a line of such a source."""
    found = line.get("logOffset") if isinstance(line, dict) else None
    return found if isinstance(found, int) else None


@dataclass
class Ranges:
    """The ranges of batches, one after the other; `store` is the checkpoint folder."""

    store: RecordStore
    saw_kafka: bool = False
    _initial: dict[int, Ends | None] = field(default_factory=dict)
    _compacted: dict[str, Counter[int]] = field(default_factory=dict)

    def of(self, batch: int, log: bytes | None, before: bytes | None) -> Range:
        """What a batch reads; `before` is the log of the batch before it, None for batch 0 or when Spark forgot it."""
        lines, earlier = source_lines(log), source_lines(before)
        if lines is None or (earlier is None and batch > 0):
            return Range()
        rows: list[int | None] = []
        files: list[int | None] = []
        wrong = []
        for index, line in enumerate(lines):
            start = earlier[index] if earlier and index < len(earlier) else None
            if (ends := kafka_ends(line)) is not None:
                self.saw_kafka = True
                begins = kafka_ends(start) if start is not None else self._first_offsets(index)
                rows.append(None if begins is None else sum(max(0, end - begins.get(p, 0)) for p, end in ends.items()))
                wrong += backwards(begins or {}, ends)
            elif (at := log_offset(line)) is not None:
                since = log_offset(start)
                files.append(self._files(index, range((-1 if since is None else since) + 1, at + 1)))
        return Range(_sum(rows), _sum(files), "; ".join(wrong))

    def _first_offsets(self, source: int) -> Ends | None:
        """Where Kafka's source began. Spark puts a zero byte in front, for readers of long ago (SPARK-19517)."""
        if source not in self._initial:
            content = (self.store.read(f"sources/{source}/0") or b"").lstrip(b"\0").decode(errors="replace")
            version, _, line = content.partition("\n")
            try:
                self._initial[source] = kafka_ends(json.loads(line)) if version == "v1" else None
            except ValueError:
                self._initial[source] = None
        return self._initial[source]

    def _files(self, source: int, entries: range) -> int | None:
        """How many files these entries of a source's log name; None when Spark has forgotten one of them."""
        counts = [self._files_of(source, entry) for entry in entries]
        return _sum(counts) if counts else 0

    def _files_of(self, source: int, entry: int) -> int | None:
        content = self.store.read(f"sources/{source}/{entry}")
        if content is not None:
            return len(_entries(content))
        names = self.store.list(f"sources/{source}")
        compacted = sorted(int(name.removesuffix(COMPACT)) for name in names if name.endswith(COMPACT))
        later = next((number for number in compacted if number >= entry), None)
        if later is None:
            return None
        path = f"sources/{source}/{later}{COMPACT}"
        if path not in self._compacted:
            self._compacted[path] = Counter(_batch_ids(self.store.read(path) or b""))
        return self._compacted[path][entry]


def backwards(begins: Ends, ends: Ends) -> list[str]:
    """Partitions whose offsets go back: what lies between was read twice, or the topic is another one."""
    return [
        f"the offset of {topic}-{number} goes back from {begins[topic, number]} to {end}"
        for (topic, number), end in sorted(ends.items())
        if end < begins.get((topic, number), end)
    ]


def _sum(numbers: Sequence[int | None]) -> int | None:
    """None for no number at all, or when one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def _entries(content: bytes) -> list[bytes]:
    """The lines of a file source's log, without the version in front."""
    return [line for line in content.splitlines()[1:] if line.strip()]


def _batch_ids(content: bytes) -> list[int]:
    found = []
    for line in _entries(content):
        try:
            found.append(int(json.loads(line)["batchId"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found
