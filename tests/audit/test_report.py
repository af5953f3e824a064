"""What people and programs are shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from semel.audit.compare import compare
from semel.audit.facts import BatchFacts, Facts, Range
from semel.audit.report import as_json, print_audit
from semel.audit.results import KINDS, Audit
from tests.audit.test_compare import branch, decided, mark, sink, whole


def facts() -> Facts:
    """Batch 0 is pruned, 1 is proven, 2 is lost in b, 3 is in flight; b forgets what is older than batch 1."""
    both = [BatchFacts(n, Range(files=1), (decided(n, whole("a", n), whole("b", n)),)) for n in range(1, 4)]
    a = sink("a", mark(0), mark(1), mark(2), mark(3), branches=(branch("a", 1, 9),))
    batches = [BatchFacts(0, Range(rows_max=1234)), *both]
    return Facts(
        "orders",
        "exactly-once",
        "/checkpoint [x]",
        incarnation=2,
        holder="pid 1 on host",
        sinks=[a, sink("b", mark(1), known_from=1)],
        batches=batches,
        next_batch=3,
        kept_from=1,
    )


def lines(audit: Audit, last: int = 20) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    print_audit(audit, console, last)
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_people_see_the_newest_batches_last_then_findings_then_what_is_proven_and_what_is_not() -> None:
    told = lines(compare(facts()))
    assert told[:2] == ["pipeline orders, exactly-once, checkpoint /checkpoint [x]", "incarnation 2: pid 1 on host"]
    table = [line.split() for line in told[2:7]]
    assert table == [
        ["batch", "source", "decided", "a", "b", "checkpointed"],
        ["0", "≤", "1,234", "rows", "not", "told", "10", "rows", "yes"],
        ["1", "1", "file", "attempt", "0", "10", "rows", "10", "rows", "yes"],
        ["2", "1", "file", "attempt", "0", "10", "rows", "no", "marker", "yes"],
        ["3", "1", "file", "attempt", "0", "10", "rows", "0", "of", "1", "so", "far", "in", "flight"],
    ]
    findings, proven, not_proven = (told.index(title) for title in ("findings", "proven", "not proven"))
    assert [line.split(":")[0].strip() for line in told[findings + 1 : proven]] == [
        "lost",
        "split",
        "in flight",
        "orphan",
    ]
    assert told[proven + 1].startswith("  Batch 1: decided once")
    assert "  Batch 0: the journal is pruned, so that only markers can be seen." in told[not_proven:]
    assert told[-1] == "verdict false: 1 of 4 batches proven in every sink"


def test_the_list_is_cut_and_the_comparison_is_not() -> None:
    audit = compare(facts())
    told = lines(audit, last=1)
    assert any("3 older batches are compared and not listed" in line for line in told)
    assert told[-1] == lines(audit)[-1]
    assert [batch["batch"] for batch in as_json(audit, last=1)["batches"]] == [3]
    assert as_json(audit, last=1)["compared"] == 4


def test_programs_get_plain_json_with_every_fact() -> None:
    told = json.loads(json.dumps(as_json(compare(facts()))))
    wanted = {"verdict", "pipeline", "guarantee", "checkpoint", "batches", "findings", "proven", "not_proven"}
    assert wanted <= set(told)
    assert told["verdict"] is False
    assert told["batches"][2]["sinks"]["b"]["state"] == "missing"
    assert {finding["kind"]: finding["breaks"] for finding in told["findings"]} == {
        "lost": True,
        "split": True,
        "in flight": False,
        "orphan": False,
    }
    assert {finding["kind"] for finding in told["findings"]} <= set(KINDS)
    assert as_json(replace(compare(facts()), verdict=None))["verdict"] == "unknown"


def test_an_audit_of_nothing_is_shown_too() -> None:
    nothing = compare(Facts("orders", "exactly-once", "/c", checkpoint_error="it was never started"))
    told = lines(nothing)
    assert told[-1] == "verdict unknown: 0 of 0 batches proven in every sink"
    assert any("it was never started" in line for line in told)
    assert told[0] == "pipeline orders, exactly-once, checkpoint /c"
    assert lines(compare(Facts("orders", "", "", checkpoint_error="the source is away")))[0] == "pipeline orders"
