"""What happened in a run, event by event. Kept as it came; made readable only when somebody reads it."""

from __future__ import annotations

from collections.abc import Sequence

from semel.ids import Attempt, Branch

#: Number of the call, time, number of the driver (0 is the world itself), words.
Event = tuple[int, float, int, tuple[object, ...]]


def as_text(event: Event) -> str:
    calls, now, driver, words = event
    who = f"driver {driver}" if driver else "the world"
    text = " ".join(filter(None, map(_word, words))).replace(" :", ":")
    return f"{calls:5} {now:9.3f} s  {who:9}  {text}"


def _word(word: object) -> str:
    if isinstance(word, Branch):
        a = word.attempt
        return f"b{a.batch}a{a.attempt}i{a.incarnation}t{word.task}r{word.retry}"
    if isinstance(word, Attempt):
        return f"b{word.batch}a{word.attempt}i{word.incarnation}"
    if isinstance(word, Sequence) and not isinstance(word, str):
        return " ".join(map(_word, word))
    return str(word)
