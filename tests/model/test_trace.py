"""A way through the model reads as plain words and draws as a sequence diagram."""

from __future__ import annotations

import string

from semel.model.mutants import MUTANTS, hunt
from semel.model.trace import VERBS, mermaid, numbered, sentence
from semel.model.world import pack


def test_a_violation_is_told_step_by_step() -> None:
    (found,) = hunt(tuple(m for m in MUTANTS if m.name == "commit_before_decision"))
    (violation,) = found.result.violations
    assert numbered(violation.trace) == [
        " 1  a driver is started; Spark's next batch is 0",
        " 2  driver 1 claims the pipeline",
        " 3  driver 1 lists the stores and finds 0 branch(es)",
        " 4  driver 1 fences sink s0",
        " 5  driver 1 reads the journal of batch 0: 0 slot(s)",
        " 6  driver 1 sweeps sink s0: 0 branch(es) dropped",
        " 7  driver 1 reads the journal of batch 0: 0 slot(s)",
        " 8  driver 1 looks for a newer claim; batch 0 resolves to Run",
        " 9  driver 1 stages batch 0 attempt 0 in sink s0",
        "10  driver 1: sink s0 prepares batch 0",
        "11  driver 1 commits s0 of batch 0: committed",
    ]
    assert (violation.name, violation.text) == ("nothing_early", "sink s0: batch 0 is visible and was not decided")


def test_every_verb_that_a_driver_says_begins_with_the_driver() -> None:
    for name, verb in VERBS.items():
        fields = [field for _, field, _, _ in string.Formatter().parse(verb.text) if field]
        assert all(field.isdigit() for field in fields), name
        if verb.whom:
            assert verb.text.removeprefix("FAULT: ").startswith("driver {0}"), name


def test_an_expired_branch_is_named() -> None:
    label = ("expire", 0, pack(0, 1, 2, 0, 0))
    assert sentence(label).endswith("expires: batch 0 attempt 1 task 0 retry 0 of incarnation 2")


def test_the_diagram_has_drivers_log_stores_and_faults() -> None:
    way = (
        ("start", 0),
        ("claim", 1),
        ("list", 1, 0),
        ("crash", 1),
        ("start", 0),
        ("claim", 2),
        ("commit_late", 2, 0, "s0/0"),
    )
    assert mermaid(way, ("prepared", "ledger"), "no_loss: a row").splitlines() == [
        "sequenceDiagram",
        "    participant d1 as driver 1",
        "    participant d2 as driver 2",
        "    participant log as decision log",
        "    participant spark as Spark",
        "    participant s0 as s0 (prepared)",
        "    participant s1 as s1 (ledger)",
        "    Note over d1,s1: a driver is started, Spark's next batch is 0",
        "    d1->>log: claims the pipeline",
        "    d1->>s0: lists the stores and finds 0 branch(es)",
        "    d1->>s1: lists the stores and finds 0 branch(es)",
        "    Note over d1,s1: FAULT: driver 1 crashes",
        "    Note over d1,s1: a driver is started, Spark's next batch is 0",
        "    d2->>log: claims the pipeline",
        "    d2-xs0: sends the commit of s0/0 of batch 0, it is late",
        "    Note over d1,s1: VIOLATED no_loss: a row",
    ]
