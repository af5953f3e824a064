"""What can be wrong, by name. An anomaly has a sink, evidence in words, and where it was seen during the run a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Each name with what it means to somebody who reads the sink.
NAMES = {
    "lost": "A row that went in is not there at the end, or not as often as expected.",
    "duplicated": "A row is there more often than expected, at the end or at any look before.",
    "torn": "A store showed a part of a batch, or has only a part of it at the end.",
    "split": "A sink lacks a batch at the end that another one has, or lacked it when another one was further.",
    "early": "A row was visible before the batch that it belongs to was decided.",
    "reordered": "Two rows of one key lie in one partition in another order than they went in.",
    "orphan": "Something open, prepared or staged is left in a store after the end.",
}
#: What needs batches, and a decision that makes each of them visible.
OF_BATCHES = ("torn", "split", "early")
#: So many are kept of each kind and sink. The counts are complete.
EVIDENCE_MAX = 20


def json_key(kind: str) -> str:
    """How the counts of a kind are called in the JSON object."""
    return "orphans" if kind == "orphan" else kind


@dataclass(frozen=True)
class Anomaly:
    """`at_s` is the time of day of the look that shows it; 0 where the last look does."""

    kind: str
    sink: str
    evidence: str
    at_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} in {self.sink}: {self.evidence}"


@dataclass
class Findings:
    """Anomalies as they are found: all are counted, the first of each kind and sink are kept."""

    kept: list[Anomaly] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, kind: str, sink: str, evidence: str, at_s: float = 0.0) -> None:
        if self.counts[kind, sink] < EVIDENCE_MAX:
            self.kept.append(Anomaly(kind, sink, evidence, at_s))
        self.counts[kind, sink] += 1

    def add_all(self, kind: str, sink: str, evidence: Iterable[str]) -> None:
        for one in evidence:
            self.add(kind, sink, one)

    def count(self, kind: str, sink: str | None = None) -> int:
        """How many there are in one sink, or in all."""
        if sink is not None:
            return self.counts[kind, sink]
        return sum(n for (found, _), n in self.counts.items() if found == kind)
