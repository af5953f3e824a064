"""What an audit comes to, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from semel.audit.facts import Facts, Range
from semel.audit.journals import Decision

#: What a finding may be, and what it means.
KINDS = {
    "lost": "decided and checkpointed, and the sink proves that it has not committed it",
    "torn": "decided and checkpointed, and the sink has committed a part of it only",
    "split": "checkpointed, and committed in one sink and not in another",
    "early": "committed without a decision",
    "duplicated": "the same part of a batch was committed by two attempts",
    "contradiction": "two records say what cannot both be true",
    "replanned": "decided and checkpointed for different rows: those between the two plans may be in no sink",
    "forgotten": "decided, and its plan is missing or another: the next start puts back what was decided, or refuses",
    "orphan": "left in a sink by a batch that is over: invisible, and dropped by the next start",
    "in flight": "not checkpointed yet: the driver that runs goes on with it, or the next start",
}
#: Those that do not say that the guarantee is broken.
HARMLESS = frozenset({"forgotten", "orphan", "in flight"})


@dataclass(frozen=True)
class Finding:
    kind: str
    batch: int
    sink: str
    evidence: str

    @property
    def breaks(self) -> bool:
        return self.kind not in HARMLESS


@dataclass(frozen=True)
class Cell:
    """What one sink shows of one batch. `decided` and `marked` count committables that leave a marker.

    `state` is marked, missing, part, waiting (it may still be marked), untold (`why` says why) or none: the batch is
    not this sink's, or nothing says that it is. `by_design`: the sink forgets such batches, which is no fault.
    """

    sink: str
    state: str = "none"
    decided: int = 0
    marked: int = 0
    rows_decided: int | None = None
    rows_marked: int | None = None
    attempts: tuple[int, ...] = ()
    incarnations: tuple[int, ...] = ()
    why: str = ""
    by_design: bool = False


@dataclass(frozen=True)
class Row:
    """One batch. `state` is planned, decided or checkpointed; `untold` is why its journal says nothing."""

    number: int
    range: Range
    state: str
    decision: Decision
    cells: tuple[Cell, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    untold: str = ""
    by_design: bool = False

    @property
    def over(self) -> bool:
        return self.state == "checkpointed"

    @property
    def proven(self) -> bool:
        """Over, decided, marked in every sink that the decision names, and nothing speaks against it."""
        states = {cell.state for cell in self.cells} - {"none"}
        broken = any(finding.breaks for finding in self.findings)
        return self.over and self.decision.is_taken and states == {"marked"} and not broken


@dataclass(frozen=True)
class Audit:
    """The whole. `verdict` is true, false, or None for unknown; `reasons` say why it is unknown."""

    facts: Facts
    verdict: bool | None
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return {True: "true", False: "false", None: "unknown"}[self.verdict]


def batches_in_words(numbers: Iterable[int]) -> str:
    """ "batch 3", "batches 0 to 7, 9"."""
    found = sorted(set(numbers))
    begins = [found[0], *(b for a, b in pairwise(found) if b > a + 1)]
    ends = [*(a for a, b in pairwise(found) if b > a + 1), found[-1]]
    runs = [str(a) if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True)]
    return f"batch{'es' if len(found) > 1 else ''} {', '.join(runs)}"
