"""In which order the sinks of a pipeline promise and commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from semel.protocol.events import Committable


def order_to_prepare(sinks: Iterable[tuple[str, bool]]) -> list[str]:
    """The names of sinks, each given with whether it drops what is prepared after a while: those wait the least."""
    return [name for name, _ in sorted(sinks, key=lambda sink: sink[1])]


def order_to_commit(committables: Iterable[Committable], prepared_in: Sequence[str]) -> list[Committable]:
    """The sinks commit in the opposite order: what can expire prepared last, and commits first."""
    place = {sink: -index for index, sink in enumerate(prepared_in)}
    return sorted(committables, key=lambda c: (place[c.sink], c.key))
