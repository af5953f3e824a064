"""What stands in Spark's `offsets/N`, and what a batch rests on in its sources' own logs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from semel.sources.lag import ends_in

#: What Spark writes in place of an offset while a source has brought nothing.
NO_OFFSET = "-"


def offsets_of(batch: int) -> str:
    return f"offsets/{batch}"


def commits_of(batch: int) -> str:
    return f"commits/{batch}"


def logs_planned(offsets: bytes, earlier: bytes | None) -> list[Sequence[str] | None]:
    """For each source the entries of its own log that a batch rests on; None means all that are there. Pure.

    The file source numbers the lists of its files, and an offset of it is the number of the newest list. Other sources
    keep at most where they began, which matters until their first batch is done.
    """
    befores = offsets_in(earlier) if earlier is not None else []
    found: list[Sequence[str] | None] = []
    for source, offset in enumerate(offsets_in(offsets)):
        before = befores[source] if source < len(befores) else NO_OFFSET
        newest = number_of_list(offset)
        if newest is not None:
            oldest = number_of_list(before)
            found.append([str(n) for n in range(0 if oldest is None else oldest + 1, newest + 1)])
        else:
            found.append(None if before == NO_OFFSET else ())
    return found


def offsets_in(content: bytes) -> list[str]:
    """Spark's form: a version, a line about the batch, then a line for each source."""
    return content.decode(errors="replace").rstrip("\n").split("\n")[2:]


def number_of_list(offset: str) -> int | None:
    """The newest list of files that an offset names, if it is one of the file source."""
    try:
        body = json.loads(offset)
    except ValueError:
        return None
    number = body.get("logOffset") if isinstance(body, dict) and len(body) == 1 else None
    return number if isinstance(number, int) else None


def is_list_of_files(content: bytes) -> bool:
    """Whether an entry of a source's log is a list of a file source: a version, then a line for each file."""
    lines = content.decode(errors="replace").split("\n")[1:]
    with suppress(ValueError):
        file = json.loads(lines[0]) if lines else None
        return isinstance(file, dict) and {"path", "batchId"} <= file.keys()
    return False


def is_of_kafka(offset: str) -> bool:
    """Whether an offset has topics, and in each up to where its partitions are read."""
    try:
        topics = json.loads(offset)
    except ValueError:
        return False
    return isinstance(topics, dict) and bool(topics) and all(isinstance(ends, dict) for ends in topics.values())


def rows_between(since: Sequence[str], upto: Sequence[str]) -> int | None:
    """How many records of Kafka lie between these offsets of all sources; None where one of them is not of Kafka.

    A partition that is new begins somewhere behind 0, so that there are no more than this.
    """
    if not upto or not all(offset == NO_OFFSET or is_of_kafka(offset) for offset in (*since, *upto)):
        return None
    began = [_ends(offset) for offset in since] + [{}] * (len(upto) - len(since))
    return sum(
        max(end - before.get(partition, 0), 0)
        for before, ends in zip(began, map(_ends, upto), strict=True)
        for partition, end in ends.items()
    )


def _ends(offset: str) -> dict[tuple[str, int], int]:
    return {} if offset == NO_OFFSET else ends_in(offset)


def is_same_offset(one: str, other: str) -> bool:
    """Whether two offsets say the same. A source may write the fields of one in another order the next time."""
    try:
        return one == other or bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
