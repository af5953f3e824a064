"""What must be true: after every effect that a reader can see, and at the end. Anomalies have names and evidence.

early        something of a batch is visible that no decision names
lost         a row of a finished batch is visible in no store, or the checkpoint has passed it by
duplicated   a row is visible more than once in a store
torn         a store shows a part of a batch
split        a store shows a batch, another one does not
orphan       an open or prepared transaction, or something staged, is left
journal      the records of the log contradict each other, or the plans that Spark goes on from
nobody       a query whose batch was over when it started has fenced the driver that went on: neither can run now
stuck        the pipeline does not come to its end though nothing disturbs it
bug          the coordinator ended in a way that it never should
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semel.decisions.log import DecisionLog
from semel.ids import Attempt
from semel.protocol.events import Decided, Journal
from semel.protocol.invariants import (
    decision_carries_its_plan,
    decision_covers_every_sink,
    decision_names_one_attempt,
    decision_takes_the_next_slot,
    nothing_duplicated,
    nothing_early,
    nothing_lost,
    nothing_torn,
)
from semel.protocol.plans import digest_of
from semel.protocol.recovery import decided_plan, effective_committables
from semel.protocol.step import ProtocolError
from semel.runtime.restore import LOOK_BACK_BATCHES
from semel.simulation.checkpoint import OffsetsMissing

if TYPE_CHECKING:
    from semel.simulation.world import World

#: Rows from here up to there, the last one not included.
Span = tuple[int, int]
NAMES = ("early", "lost", "duplicated", "torn", "split", "orphan", "journal", "nobody", "stuck", "bug")


@dataclass(frozen=True)
class Anomaly:
    name: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}"


@dataclass
class Witness:
    """Looks on while the drivers work. It knows what was decided, whoever has forgotten it since."""

    anomalies: list[Anomaly] = field(default_factory=list)
    #: batch -> the branches that a decision named.
    named: dict[int, set[str]] = field(default_factory=dict)
    #: attempt -> the rows that its tasks were given: from, up to.
    ran: dict[Attempt, Span] = field(default_factory=dict)
    #: batch -> the rows that it was decided with.
    spans: dict[int, Span] = field(default_factory=dict)
    #: batch -> the digest of the offsets that it was decided for.
    offsets: dict[int, str] = field(default_factory=dict)
    looks: int = 0

    def report(self, name: str, evidence: str) -> None:
        self.anomalies.append(Anomaly(name, evidence))

    def decided(self, record: Decided) -> None:
        branches = {name for c in record.committables for name in c.branches}
        self.named.setdefault(record.attempt.batch, set()).update(branches)
        for file in record.plan.files if record.plan is not None else ():
            if file.path.startswith("offsets/"):
                self.offsets.setdefault(record.attempt.batch, file.digest)
        if not record.mends and record.attempt in self.ran:
            self.spans.setdefault(record.attempt.batch, self.ran[record.attempt])

    def saw(self, store: str, batch: int, branches: Sequence[str]) -> None:
        """These branches are visible from this moment on."""
        self.looks += 1
        for violation in nothing_early([batch], self.named):
            self.report("early", f"{store}: {violation}")
        for branch in branches:
            if batch in self.named and branch not in self.named[batch]:
                self.report("early", f"{store}: {branch} is visible and no decision names it")


@dataclass
class Audit:
    """What was compared at the end, so that a comparison of nothing is not taken for a pass."""

    rows: int = 0
    batches: int = 0


def audit(world: World) -> Audit:
    """Compare what every store shows with what went in; report what differs to the witness."""
    report = world.witness.report
    decided = {batch: list(range(*span)) for batch, span in sorted(world.witness.spans.items())}
    expected = {batch: rows for batch, rows in decided.items() if batch < world.checkpoint.next_batch}
    for name, store in world.stores.items():
        went_in: Counter[Hashable] = Counter({row for rows in decided.values() for row in rows})
        shown: Counter[Hashable] = Counter(store.visible())
        for violation in nothing_duplicated(went_in, shown):
            report("duplicated", f"{name}: row {violation}")
        for orphan in store.orphans():
            report("orphan", f"{name}: {orphan}")
    _audit_source(world, decided, expected)
    _audit_batches(world, expected)
    _audit_journals(world)
    rows = sum(len(rows) for rows in expected.values()) * len(world.stores)
    return Audit(rows, len(expected))


def _audit_source(world: World, decided: dict[int, list[int]], expected: dict[int, list[int]]) -> None:
    """The checkpoint says up to which row the source was read: all of them must be in some batch that was decided."""
    try:
        end = world.checkpoint.end_of_all()
    except OffsetsMissing as error:
        world.witness.report("stuck", f"Spark cannot start any more: {error}")
        return
    begin = min((rows[0] for rows in decided.values() if rows), default=end)
    forgotten = set(range(begin, end)) - {row for rows in expected.values() for row in rows}
    if forgotten:
        evidence = f"rows {sorted(forgotten)} are done as the checkpoint says, and no batch was decided with them"
        world.witness.report("lost", evidence)


def _audit_batches(world: World, expected: dict[int, list[int]]) -> None:
    """A batch that misses rows is lost, torn or split."""
    shown = {name: store.visible() for name, store in world.stores.items()}
    for batch, rows in expected.items():
        counts = {name: sum(1 for row in rows if visible[row]) for name, visible in shown.items()}
        if all(count == len(rows) for count in counts.values()):
            continue
        evidence = ", ".join(f"{name} {count} of {len(rows)}" for name, count in counts.items())
        torn = [v for count in counts.values() for v in nothing_torn([(batch, len(rows), count)])]
        if torn:
            world.witness.report("torn", f"{torn[0]} ({evidence})")
        elif any(counts.values()):
            world.witness.report("split", f"batch {batch}: {evidence}")
        else:
            missing = nothing_lost(Counter(rows), Counter())
            world.witness.report("lost", f"batch {batch}: {missing[0]} from every store")


def _audit_journals(world: World) -> None:
    log = DecisionLog(world.records)
    expected = range(world.checkpoint.next_batch)
    for batch in sorted({*log.batches(), *expected} - world.pruned):
        journal = log.journal(batch)
        violations: list[str] = []
        try:
            decided = effective_committables(journal)
            if decided is None and batch in expected:
                violations.append("it is committed and not decided")
        except ProtocolError as error:
            violations.append(str(error))
        for slot, record in enumerate(journal):
            if isinstance(record, Decided):
                violations += decision_takes_the_next_slot(record, journal[:slot])
                violations += decision_names_one_attempt(record)
                violations += [] if record.mends else decision_covers_every_sink(record, world.stores)
                violations += [] if record.mends else decision_carries_its_plan(record)
        violations += _other_plan(world, journal) if batch in expected[-LOOK_BACK_BATCHES:] else []
        for violation in violations:
            world.witness.report("journal", f"batch {batch}: {violation}")


def _other_plan(world: World, journal: Journal) -> list[str]:
    """The offsets that Spark reads when it starts are those that their batches were decided with."""
    plan = decided_plan(journal)
    found = world.checkpoint.files
    return [
        f"{file.path} is not as it was decided"
        for file in (plan.files if plan is not None else ())
        if file.path.startswith("offsets/") and file.path in found and digest_of(found[file.path]) != file.digest
    ]
