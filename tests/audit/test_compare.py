"""The comparison on facts that are made up: each finding, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from semel.audit.compare import compare
from semel.audit.facts import BatchFacts, Facts, Range, SinkFacts
from semel.audit.report import as_json
from semel.audit.results import Audit, batches_in_words
from semel.audit.run import exit_code
from semel.ids import Attempt, Branch, Incarnation, pipeline_id
from semel.protocol.events import Aborted, Committable, Decided, Started
from semel.protocol.plans import Plan, PlannedFile, digest_of
from semel.sinks.evidence import NOTHING_KNOWN, UNSAID, Evidence, Mark

US = pipeline_id("01234567-89ab-cdef-0123-456789abcdef")
ROWS = 10


def attempt(batch: int, number: int = 0, incarnation: int = 1) -> Attempt:
    return Attempt(US, batch, number, Incarnation(incarnation))


def whole(sink: str, batch: int, number: int = 0) -> Committable:
    """As a sink gives it that commits a batch at once."""
    return Committable(sink, sink, attempt(batch, number), ROWS)


def branch(sink: str, batch: int, task: int, number: int = 0) -> Branch:
    return Branch(attempt(batch, number), sink, task, 0)


def part(sink: str, batch: int, task: int, number: int = 0, key: int | None = None) -> Committable:
    """As a sink gives it that commits task by task."""
    names = (str(branch(sink, batch, task, number)),)
    return Committable(sink, f"{sink}/{task if key is None else key}", attempt(batch, number), ROWS, names, {"id": "x"})


def decided(batch: int, *committables: Committable, number: int = 0, mends: bool = False) -> Decided:
    return Decided(attempt(batch, number), committables, mends)


def mark(batch: int, number: int = 0, rows: int = ROWS) -> Mark:
    return Mark(batch, "", number, 1, rows)


def part_mark(sink: str, batch: int, task: int, number: int = 0) -> Mark:
    return Mark(batch, str(branch(sink, batch, task, number)), number, 1, ROWS)


def sink(name: str, *marks: Mark, known_from: int = 0, **more: object) -> SinkFacts:
    return SinkFacts(name, name, replace(Evidence(marks, known_from, "it forgets", forgets=True), **more))  # type: ignore[arg-type]


def facts(sinks: Sequence[SinkFacts], *batches: BatchFacts, next_batch: int = 1) -> Facts:
    return Facts("orders", "exactly-once", "/checkpoint", sinks=sinks, batches=batches, next_batch=next_batch)


def kinds(audit: Audit) -> list[str]:
    return [finding.kind for finding in audit.findings]


BOTH = BatchFacts(0, Range(rows_max=ROWS), (decided(0, whole("a", 0), whole("b", 0)),))


# What is right ------------------------------------------------------------------------------------------------------


def test_a_batch_that_every_sink_has_marked_is_proven_and_its_rows_are_counted() -> None:
    audit = compare(facts([sink("a", mark(0)), sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit), exit_code([audit])) == (True, [], 0)
    assert "Batch 0: decided once" in audit.proven[0]
    assert "a: 10 rows in 1 batches, as many as were decided." in audit.proven
    told = as_json(audit)
    assert told["verdict"] is True
    assert told["batches"][0]["rows_in_source_max"] == ROWS
    assert told["batches"][0]["sinks"]["a"]["rows_marked"] == told["batches"][0]["sinks"]["a"]["rows_decided"] == ROWS


def test_a_task_without_rows_owes_no_marker() -> None:
    empty = Committable("k", "k/1", attempt(0), 0, (str(branch("k", 0, 1)),))
    batch = BatchFacts(0, journal=(decided(0, part("k", 0, 0), empty),))
    audit = compare(facts([sink("k", part_mark("k", 0, 0))], batch))
    assert audit.verdict is True
    assert (audit.rows[0].cells[0].decided, audit.rows[0].cells[0].marked) == (1, 1)


def test_a_batch_without_rows_is_proven_by_the_drivers_own_marker() -> None:
    nothing = Committable("k", "k/empty", attempt(0), 0, (), {"mark": True})
    batch = BatchFacts(0, journal=(decided(0, nothing),))
    assert compare(facts([sink("k", mark(0, rows=0))], batch)).verdict is True
    assert kinds(compare(facts([sink("k")], batch))) == ["lost"]


def test_a_store_that_keeps_only_the_batch_in_its_markers_is_taken_at_its_word() -> None:
    bare = Mark(0, "", UNSAID, UNSAID, UNSAID)
    audit = compare(facts([sink("m", bare)], BatchFacts(0, journal=(decided(0, whole("m", 0, 0)),))))
    assert audit.verdict is True
    assert not any("rows in" in line for line in audit.proven)


def test_a_mended_part_is_proven_by_the_mend_alone() -> None:
    journal = (
        decided(0, part("k", 0, 0), part("k", 0, 1)),
        decided(0, part("k", 0, 5, number=1, key=1), number=1, mends=True),
    )
    marks = [part_mark("k", 0, 0), part_mark("k", 0, 5, number=1)]
    audit = compare(facts([sink("k", *marks)], BatchFacts(0, journal=journal)))
    assert (audit.verdict, kinds(audit)) == (True, [])
    assert audit.notes == ("Batch 0: it was mended: what had vanished after the decision was written again.",)


def test_a_closed_slot_before_the_decision_changes_nothing() -> None:
    journal = (Aborted(attempt(0, 0, 2)), decided(0, whole("a", 0, 1), number=1))
    audit = compare(facts([sink("a", mark(0, 1))], BatchFacts(0, journal=journal)))
    assert (audit.verdict, kinds(audit)) == (True, [])


# What is wrong ------------------------------------------------------------------------------------------------------


def test_a_checkpointed_batch_without_marker_is_lost_and_split_from_where_it_is() -> None:
    audit = compare(facts([sink("a"), sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit), exit_code([audit])) == (False, ["lost", "split"], 1)
    lost, split = audit.findings
    assert (lost.batch, lost.sink) == (0, "a")
    assert "10 rows are decided and checkpointed" in lost.evidence
    assert split.evidence == "it is marked in b and not in a"


def test_a_marker_whose_rows_are_gone_is_lost() -> None:
    damaged = replace(mark(0), damage="its manifest names x.parquet, missing or cut short")
    audit = compare(facts([sink("a", damaged)], BatchFacts(0, journal=(decided(0, whole("a", 0)),))))
    assert (audit.verdict, kinds(audit)) == (False, ["lost"])


def test_some_parts_of_a_checkpointed_batch_are_torn() -> None:
    batch = BatchFacts(0, journal=(decided(0, part("k", 0, 0), part("k", 0, 1)),))
    audit = compare(facts([sink("k", part_mark("k", 0, 1))], batch))
    assert (audit.verdict, kinds(audit)) == (False, ["torn"])
    assert audit.findings[0].evidence == "1 of 2 parts have a marker: batch 0: 10 of 20 rows are visible"


@pytest.mark.parametrize("journal", [(), (Aborted(attempt(1)),)], ids=["nothing", "closed"])
def test_a_marker_of_a_batch_in_flight_without_a_decision_is_early(journal: tuple[Aborted, ...]) -> None:
    later = BatchFacts(1, journal=journal)
    audit = compare(facts([sink("a", mark(0), mark(1)), sink("b", mark(0))], BOTH, later))
    assert audit.verdict is False
    assert kinds(audit) == ["early", "in flight"]
    assert audit.findings[0].evidence == "batch 1 is visible and was not decided: no decision names attempt 0"


def test_a_marker_of_another_attempt_than_the_decided_one_is_early() -> None:
    journal = (Aborted(attempt(0)), decided(0, whole("a", 0, 1), number=1))
    audit = compare(facts([sink("a", mark(0, 0))], BatchFacts(0, journal=journal)))
    assert audit.verdict is False
    assert kinds(audit) == ["early", "lost"]


def test_a_part_that_is_visible_beside_its_mend_is_duplicated() -> None:
    journal = (decided(0, part("k", 0, 0)), decided(0, part("k", 0, 0, number=1), number=1, mends=True))
    marks = [part_mark("k", 0, 0), part_mark("k", 0, 0, number=1)]
    audit = compare(facts([sink("k", *marks)], BatchFacts(0, journal=journal)))
    assert (audit.verdict, kinds(audit)) == (False, ["duplicated"])
    assert audit.findings[0].evidence == "attempts 0 and 1 have both committed k/0"


def test_a_marker_with_another_number_of_rows_contradicts_the_decision() -> None:
    audit = compare(facts([sink("a", mark(0, rows=7))], BatchFacts(0, journal=(decided(0, whole("a", 0)),))))
    assert (audit.verdict, kinds(audit)) == (False, ["contradiction"])
    assert audit.findings[0].evidence == "the marker of a says 7 rows, the decision 10"


@pytest.mark.parametrize(
    ("journal", "words"),
    [
        ((decided(0, whole("a", 0), whole("a", 0)),), "two committables share the key a"),
        ((decided(0, whole("a", 0, 3)),), "a was prepared under batch 0 attempt 3"),
        ((decided(0, whole("a", 0), mends=True),), "slot 0 mends a batch that was not decided"),
        ((decided(0, whole("a", 0, 1), number=1),), "attempt 1 cannot be decided in slot 0"),
    ],
)
def test_a_journal_that_breaks_a_rule_of_the_protocol_is_a_contradiction(
    journal: tuple[Decided, ...], words: str
) -> None:
    audit = compare(facts([sink("a", mark(0))], BatchFacts(0, journal=journal)))
    assert audit.verdict is False
    assert any(f.kind == "contradiction" and words in f.evidence for f in audit.findings), audit.findings


def test_offsets_that_go_back_are_a_contradiction() -> None:
    batch = replace(BOTH, range=Range(wrong="the offset of orders-0 goes back from 9 to 3"))
    audit = compare(facts([sink("a", mark(0)), sink("b", mark(0))], batch))
    assert (audit.verdict, kinds(audit)) == (False, ["contradiction"])


def test_a_sink_that_knows_more_than_the_checkpoint_is_a_contradiction() -> None:
    audit = compare(facts([sink("a", mark(0), mark(5)), sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit)) == (False, ["contradiction"])
    assert "the checkpoint no batch after 0" in audit.findings[0].evidence


# What is merely worth a line ----------------------------------------------------------------------------------------


def test_what_is_left_of_a_batch_that_is_over_is_an_orphan_and_harmless() -> None:
    left = sink("a", mark(0), branches=(branch("a", 0, 3), branch("a", 0, 4)))
    audit = compare(facts([left, sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit)) == (True, ["orphan"])
    assert "and 1 more: staged or prepared" in audit.findings[0].evidence
    assert not any("staged or prepared" in line for line in audit.proven)


def test_what_is_prepared_for_a_batch_in_flight_is_no_orphan() -> None:
    busy = sink("a", mark(0), branches=(branch("a", 1, 0),))
    audit = compare(facts([busy, sink("b", mark(0))], BOTH, BatchFacts(1)))
    assert (audit.verdict, kinds(audit)) == (True, ["in flight"])
    assert audit.findings[0].evidence == "planned, and not decided"


def test_a_batch_that_is_decided_and_not_checkpointed_is_in_flight_and_not_lost() -> None:
    later = BatchFacts(1, journal=(decided(1, whole("a", 1), whole("b", 1)),))
    audit = compare(facts([sink("a", mark(0), mark(1)), sink("b", mark(0))], BOTH, later))
    assert (audit.verdict, kinds(audit)) == (True, ["in flight"])
    assert audit.findings[0].evidence == "decided in attempt 0; markers so far: a 1 of 1, b 0 of 1"
    assert [cell.state for cell in audit.rows[1].cells] == ["marked", "waiting"]


def test_a_second_decision_of_a_checkpointed_batch_is_a_note() -> None:
    journal = (decided(0, part("k", 0, 0)), decided(0, part("k", 0, 0, number=1), number=1))
    audit = compare(facts([sink("k", part_mark("k", 0, 0))], BatchFacts(0, journal=journal)))
    assert (audit.verdict, kinds(audit)) == (True, [])
    assert "recorded a second decision later; nobody acts on it" in audit.notes[0]


def test_a_second_decision_that_was_acted_on_is_duplicated() -> None:
    journal = (decided(0, part("k", 0, 0)), decided(0, part("k", 0, 0, number=1), number=1))
    marks = [part_mark("k", 0, 0), part_mark("k", 0, 0, number=1)]
    assert kinds(compare(facts([sink("k", *marks)], BatchFacts(0, journal=journal)))) == ["duplicated"]


def test_a_second_decision_of_a_batch_in_flight_is_a_contradiction() -> None:
    journal = (decided(0, whole("a", 0)), decided(0, whole("a", 0, 1), number=1))
    audit = compare(facts([sink("a")], BatchFacts(0, journal=journal), next_batch=0))
    assert (audit.verdict, kinds(audit)) == (False, ["contradiction", "in flight"])


# What cannot be told ------------------------------------------------------------------------------------------------


def test_a_pruned_journal_leaves_markers_that_prove_less() -> None:
    newest = replace(BOTH, number=1, journal=(decided(1, whole("a", 1), whole("b", 1)),))
    old = BatchFacts(0)
    sinks = [sink("a", mark(0), mark(1)), sink("b", mark(0), mark(1))]
    audit = compare(replace(facts(sinks, old, newest, next_batch=2), kept_from=1))
    assert (audit.verdict, [row.proven for row in audit.rows]) == (True, [False, True])
    assert "Batch 0: the journal is pruned, so that only markers can be seen." in audit.not_proven


def test_what_a_zombie_recorded_after_the_pruning_is_a_note() -> None:
    newest = replace(BOTH, number=1, journal=(decided(1, whole("a", 1), whole("b", 1)),))
    stray = BatchFacts(0, journal=(decided(0, part("a", 0, 0)),))
    sinks = [sink("a", mark(0), mark(1)), sink("b", mark(0), mark(1))]
    audit = compare(replace(facts(sinks, stray, newest, next_batch=2), kept_from=1))
    assert (audit.verdict, kinds(audit)) == (True, [])
    assert "what is there now was recorded later; nobody acts on it" in audit.notes[0]


def test_without_journal_a_hole_in_one_sink_is_split_and_a_sink_that_came_later_is_not() -> None:
    journals = {n: (decided(n, whole("a", n), whole("b", n)),) for n in (2,)}
    batches = [BatchFacts(n, journal=journals.get(n, ())) for n in range(3)]
    hole = [sink("a", mark(0), mark(1), mark(2)), sink("b", mark(0), mark(2))]
    assert kinds(compare(replace(facts(hole, *batches, next_batch=3), kept_from=2))) == ["split"]
    late = [sink("a", mark(0), mark(1), mark(2)), sink("b", mark(2))]
    assert compare(replace(facts(late, *batches, next_batch=3), kept_from=2)).verdict is True


def test_what_a_sink_has_forgotten_is_not_proven_and_not_lost() -> None:
    newest = replace(BOTH, number=1, journal=(decided(1, whole("a", 1), whole("b", 1)),))
    sinks = [sink("a", mark(1), known_from=1), sink("b", mark(0), mark(1))]
    audit = compare(facts(sinks, BOTH, newest, next_batch=2))
    assert (audit.verdict, kinds(audit), audit.rows[0].proven) == (True, [], False)
    assert "Batch 0 in a: it forgets." in audit.not_proven


def test_markers_that_somebody_removed_leave_it_unknown() -> None:
    newest = replace(BOTH, number=1, journal=(decided(1, whole("a", 1), whole("b", 1)),))
    sinks = [sink("a", mark(1), known_from=1, forgets=False), sink("b", mark(0), mark(1))]
    audit = compare(facts(sinks, BOTH, newest, next_batch=2))
    assert (audit.verdict, kinds(audit), exit_code([audit])) == (None, [], 3)
    assert audit.reasons == ("Batch 0 in a: it forgets.",)


def test_a_sink_that_knows_nothing_of_the_pipeline_leaves_it_unknown() -> None:
    audit = compare(facts([sink("a", known_from=NOTHING_KNOWN, forgets=False), sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert audit.reasons[:2] == ("No batch is proven in every sink.", "Nothing is proven of sink a: it forgets.")
    assert audit.proven == ("b: 10 rows in 1 batches, as many as were decided.",)


def test_a_sink_that_is_away_leaves_it_unknown_and_the_others_are_compared() -> None:
    away = SinkFacts("a", "a", error="PostgreSQL cannot be reached.")
    audit = compare(facts([away, sink("b", mark(0))], BOTH))
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert "Sink a did not answer: PostgreSQL cannot be reached." in audit.reasons
    lost = compare(facts([away, sink("b")], BOTH))
    assert (lost.verdict, kinds(lost)) == (False, ["lost"])


def test_a_journal_that_cannot_be_read_leaves_it_unknown() -> None:
    batch = BatchFacts(0, unreadable="The record x is damaged.")
    audit = compare(facts([sink("a", mark(0))], batch))
    assert (audit.verdict, kinds(audit)) == (None, [])
    assert "Batch 0: The record x is damaged." in audit.reasons


def test_a_checkpointed_batch_without_a_decision_leaves_it_unknown() -> None:
    journals = ((), (Started(attempt(0)),))
    words = [compare(facts([sink("a")], BatchFacts(0, journal=journal))).reasons[-1] for journal in journals]
    assert "there is no decision: it ran under a weaker guarantee" in words[0]
    assert "begun under at-most-once" in words[1]


def test_a_sink_that_the_pipeline_no_longer_has_leaves_its_batches_unknown() -> None:
    audit = compare(facts([sink("b", mark(0))], BOTH))
    assert audit.verdict is None
    assert "Batch 0 in a: the pipeline has no such sink any more." in audit.reasons


def test_nothing_compared_is_unknown() -> None:
    for nothing in (facts([sink("a")], next_batch=0), facts([sink("a")], BatchFacts(0), next_batch=0)):
        audit = compare(nothing)
        assert (audit.verdict, exit_code([audit])) == (None, 3)
        assert audit.reasons == ("Nothing was compared: no batch is over yet.",)
    unstarted = compare(replace(facts([]), checkpoint_error="it was never started"))
    assert (unstarted.verdict, unstarted.reasons) == (None, ("Nothing was compared: it was never started.",))


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_below_exactly_once_nothing_can_be_proven(guarantee: str) -> None:
    audit = compare(replace(facts([], BatchFacts(0)), guarantee=guarantee))
    assert (audit.verdict, audit.proven, audit.findings) == (None, (), ())
    assert "neither decisions nor markers" in audit.not_proven[0]


def test_what_markers_cannot_say_is_always_told() -> None:
    audit = compare(replace(facts([sink("a", mark(0)), sink("b", mark(0))], BOTH), kafka_source=True, left_out=3))
    told = "\n".join(audit.not_proven)
    for words in ("`semel verify` compares rows", "deletes or changes rows later", "upper bound", "3 older batches"):
        assert words in told


def test_the_worst_verdict_of_several_pipelines_is_the_exit_code() -> None:
    true = compare(facts([sink("a", mark(0)), sink("b", mark(0))], BOTH))
    false, unknown = replace(true, verdict=False), replace(true, verdict=None)
    assert [exit_code(of) for of in ([true], [true, unknown], [unknown, false, true])] == [0, 3, 1]


def test_batches_are_named_in_runs() -> None:
    assert batches_in_words([3]) == "batch 3"
    assert batches_in_words([7, 0, 1, 2, 9, 10]) == "batches 0 to 2, 7, 9 to 10"


# Plans --------------------------------------------------------------------------------------------------------------


def planned(batch: int, content: str) -> Plan:
    return Plan((PlannedFile(f"offsets/{batch}", digest_of(content.encode()), content),))


@pytest.mark.parametrize(("next_batch", "kind", "verdict"), [(1, "replanned", False), (0, "forgotten", None)])
def test_a_batch_whose_offsets_are_not_what_was_decided_is_told(
    next_batch: int, kind: str, verdict: bool | None
) -> None:
    decision = replace(decided(0, whole("a", 0)), plan=planned(0, 'v1\n{}\n{"orders":{"0":10}}'))
    batch = BatchFacts(0, journal=(decision,), offsets=digest_of(b"another"))
    audit = compare(facts([sink("a", mark(0))], batch, next_batch=next_batch))
    assert audit.verdict is verdict
    (finding,) = [f for f in audit.findings if f.kind == kind]
    assert finding.evidence == 'offsets/0 is not as it was decided: {"orders":{"0":10}}'


@pytest.mark.parametrize(
    ("next_batch", "found", "told"),
    [
        (0, {}, [("forgotten", "it is decided, and there is no sources/0/0")]),
        (1, {}, []),
        (0, {"sources/0/0": digest_of(b"x")}, [("forgotten", "sources/0/0 is not as it was decided: a.json")]),
        (1, {"sources/0/0": digest_of(b"x")}, [("replanned", "sources/0/0 is not as it was decided: a.json")]),
        (1, {"sources/0/0": digest_of(b"v1\na.json")}, []),
    ],
)
def test_lists_of_files_that_are_not_what_was_decided_are_told(
    next_batch: int, found: dict[str, str], told: list[tuple[str, str]]
) -> None:
    offsets = planned(0, '{"logOffset":0}').files[0]
    plan = Plan((PlannedFile("sources/0/0", digest_of(b"v1\na.json"), "v1\na.json"), offsets))
    decision = replace(decided(0, whole("a", 0)), plan=plan)
    batch = BatchFacts(0, journal=(decision,), offsets=offsets.digest, lists=found)
    audit = compare(facts([sink("a", mark(0))], batch, next_batch=next_batch))
    assert [(f.kind, f.evidence) for f in audit.findings if f.kind != "in flight"] == told


def test_offsets_that_are_what_was_decided_and_decisions_without_a_plan_are_not_told() -> None:
    plan = planned(0, "v1")
    for decision in (replace(decided(0, whole("a", 0)), plan=plan), decided(0, whole("a", 0))):
        batch = BatchFacts(0, journal=(decision,), offsets=plan.files[0].digest)
        assert kinds(compare(facts([sink("a", mark(0))], batch))) == []


def test_a_batch_that_is_decided_and_not_in_the_checkpoint_is_told() -> None:
    audit = compare(
        replace(facts([sink("a", mark(0))], BatchFacts(0, journal=(decided(0, whole("a", 0)),))), forgotten=[1])
    )
    assert [(f.kind, f.batch) for f in audit.findings] == [("forgotten", 1)]
    assert audit.verdict is True


def test_a_marker_of_another_plan_than_the_decision_is_a_contradiction() -> None:
    plan = planned(0, "v1")
    decision = Decided(attempt(0), (replace(whole("a", 0), plan=plan.digest),), plan=plan)
    for told, found in ((plan.digest, []), ("", []), (planned(0, "v2").digest, ["contradiction"])):
        batch = BatchFacts(0, journal=(decision,), offsets=plan.files[0].digest)
        assert kinds(compare(facts([sink("a", replace(mark(0), plan=told))], batch))) == found
