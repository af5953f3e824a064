"""Each rule of the audit on a history that breaks it, and on one that only looks so."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from semel.verify.anomalies import EVIDENCE_MAX, NAMES, Anomaly
from semel.verify.audit import Audit, audit
from semel.verify.history import NO_BATCH, BatchSeen, History, Look
from tests.verify.histories import (
    at,
    eventful,
    eventful_and_wrong,
    good,
    look,
    sights_of,
    with_looks,
    with_sink,
    without_rows,
)

TWO_TABLES = {"left": "postgres", "right": "mysql"}
LARGE = 1_000_000
LARGE_SECONDS_MAX = 60.0
BYTES_PER_ROW_MAX = 100


def found(history: History) -> dict[str, int]:
    """What was found, without what was not."""
    return {kind: n for kind, n in audit(history).counts.items() if n}


def evidence(history: History, kind: str) -> list[str]:
    return [str(a) for a in audit(history).anomalies if a.kind == kind]


def verdict(history: History) -> tuple[Any, list[str]]:
    result = audit(history)
    return result.verdict, list(result.reasons)


# Nothing wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [0, 2])
def test_power_cuts_count_by_which_something_was_lost(counted: int) -> None:
    result = audit(replace(good(), faults={"power": 3}, kills=3, power_cuts=counted))
    nothing = ["By none of the power cuts was anything lost, so they show nothing."]
    assert (result.verdict, list(result.reasons)) == ((True, []) if counted else ("unknown", nothing))
    assert ("Something was lost by 2 of 3 power cuts." in result.proven) is bool(counted)
    assert any("the machine was not" in sentence for sentence in result.not_proven) is not bool(counted)


def test_a_good_run_is_true_and_says_what_was_compared() -> None:
    result = audit(good(rows=40, per_batch=10))
    assert result.verdict is True
    assert result.reasons == []
    assert (result.compared, result.batches) == (80, 4)
    assert result.counts == dict.fromkeys([*list(NAMES)[:-1], "orphans"], 0)
    assert any("each of 40 rows is there as often as expected" in s for s in result.proven)
    assert any("pg: each of 4 batches was there whole or not at all at each of 5 looks" in s for s in result.proven)


def test_an_eventful_good_run_is_true() -> None:
    history = eventful()
    result = audit(history)
    assert (result.verdict, result.reasons) == (True, [])
    assert result.compared == history.rows * 3
    assert history.kills > 0
    assert any(f"{history.kills} kills" in s for s in result.proven)


def test_rows_may_be_expected_twice_or_not_at_all() -> None:
    history = good(expected=lambda n, _: 2 if n == 3 else 0 if n == 4 else 1)
    for sink in ("pg", "topic"):
        rows = Counter({**sights_of(history, sink).rows, 3: 2})
        del rows[4]
        looks = [
            replace(one, added=[n for n in [*one.added, *([3] if 3 in one.added else [])] if n != 4])
            for one in sights_of(history, sink).looks
        ]
        history = with_sink(history, sink, rows=rows, looks=looks)
    assert verdict(history) == (True, [])


def test_a_row_that_a_later_one_replaces_may_be_there_for_a_while() -> None:
    """As an upsert does: at the end row 3 is not expected, but a reader saw it."""
    history = good(expected=lambda n, _: 0 if n == 3 else 1, sinks={"pg": "postgres"})
    sights = sights_of(history, "pg")
    looks = [sights.looks[0], replace(sights.looks[1], gone=[3]), *sights.looks[2:]]
    assert verdict(with_sink(history, "pg", rows=sights.rows - Counter([3]), looks=looks)) == (True, [])


# Lost -----------------------------------------------------------------------------------------------------------------


def test_a_row_that_is_missing_is_lost() -> None:
    history = with_sink(good(), "topic", rows=sights_of(good(), "topic").rows - Counter([17]))
    assert found(history) == {"lost": 1, "torn": 1}
    assert evidence(history, "lost") == ["lost in topic: row 17 is missing 1 time(s) (batch 1)"]
    assert audit(history).verdict is False


def test_a_row_that_is_there_once_and_expected_twice_is_lost() -> None:
    history = good(expected=lambda n, _: 2 if n == 3 else 1, batch_of=(), sinks={"pg": "postgres"})
    assert found(history) == {"lost": 1}


def test_a_row_that_was_visible_and_vanished_is_lost_and_says_when() -> None:
    history = with_looks(good(), "pg", look(3.9, gone=[5]))
    history = with_sink(history, "pg", rows=sights_of(history, "pg").rows - Counter([5]))
    assert evidence(history, "lost") == [
        "lost in pg: row 5 is missing 1 time(s) (batch 0); it was visible and vanished by 3.900 s"
    ]


def test_a_row_that_came_back_is_not_lost() -> None:
    history = with_looks(good(), "pg", look(3.9, gone=range(10)), look(3.95, range(10)))
    assert "lost" not in found(history)
    history = with_sink(history, "pg", rows=sights_of(history, "pg").rows - Counter([5]))
    assert evidence(history, "lost") == ["lost in pg: row 5 is missing 1 time(s) (batch 0)"]


# Duplicated -----------------------------------------------------------------------------------------------------------


def test_a_row_that_is_there_twice_is_duplicated() -> None:
    history = with_sink(good(), "pg", rows=sights_of(good(), "pg").rows + Counter([17, 18]))
    assert found(history) == {"duplicated": 2}
    assert "row 17 is visible 1 time(s) too often (batch 1)" in evidence(history, "duplicated")[0]


def test_a_row_that_was_there_twice_for_a_moment_is_duplicated() -> None:
    history = with_looks(good(), "pg", look(3.9, [5]), look(3.95, gone=[5]))
    assert found(history) == {"duplicated": 1}
    [only] = audit(history).anomalies
    assert only == Anomaly(
        "duplicated", "pg", "row 5 was visible 2 times at 3.900 s, 1 time(s) at the end (batch 0)", at(3.9)
    )


def test_a_row_that_is_expected_nowhere_and_is_there_is_duplicated() -> None:
    assert found(good(expected=lambda n, _: int(n != 4))) == {"duplicated": 2}


def test_extra_copies_do_not_make_up_for_missing_rows_of_the_batch() -> None:
    rows = sights_of(good(), "pg").rows - Counter([17]) + Counter([18])
    assert found(with_sink(good(), "pg", rows=rows)) == {"lost": 1, "duplicated": 1, "torn": 1}


# Torn -----------------------------------------------------------------------------------------------------------------


def test_a_batch_that_shows_in_part_at_a_look_is_torn_though_it_is_whole_later() -> None:
    first, second = look(1.55, range(10, 14)), look(1.6, range(14, 20))
    looks = sights_of(good(), "pg").looks
    history = with_sink(good(), "pg", looks=[looks[0], first, second, *looks[2:]])
    assert found(history) == {"torn": 1}
    assert evidence(history, "torn") == ["torn in pg: batch 1: 4 of 10 rows are visible at 1.550 s"]


def test_a_batch_of_which_rows_vanish_is_torn() -> None:
    history = with_looks(good(), "pg", look(2.0, gone=[3]), look(2.1, [3]))
    assert found(history) == {"torn": 1}


def test_a_topic_may_bring_a_batch_over_several_looks() -> None:
    looks = sights_of(good(), "topic").looks
    parts = [look(1.6, range(10, 14)), look(1.7, range(14, 20))]
    assert verdict(with_sink(good(), "topic", looks=[looks[0], *parts, *looks[2:]])) == (True, [])


def test_a_row_behind_rows_of_a_later_batch_is_torn() -> None:
    history = with_sink(good(key_of=None), "topic", in_order={0: [0, 2, 20, 4], 1: range(1, 40, 2)})
    assert found(history) == {"torn": 1}
    assert evidence(history, "torn") == ["torn in topic: batch 0: row 4 comes after rows of batch 2 in partition 0"]


def test_a_second_copy_behind_a_later_batch_is_duplicated_and_neither_torn_nor_reordered() -> None:
    topic = sights_of(good(), "topic")
    history = with_sink(
        good(), "topic", rows=topic.rows + Counter([4]), in_order={**topic.in_order, 0: [*topic.in_order[0], 4]}
    )
    assert found(history) == {"duplicated": 1}


# Split ----------------------------------------------------------------------------------------------------------------


def test_a_batch_that_one_sink_lacks_at_the_end_is_split() -> None:
    history = without_rows(good(sinks=TWO_TABLES), "right", *range(30, 40))
    assert found(history) == {"lost": 10, "split": 1}
    assert evidence(history, "split") == ["split in right: batch 3 is whole in left and absent here"]


def test_a_batch_that_every_sink_lacks_is_lost_and_not_split() -> None:
    history = without_rows(without_rows(good(), "pg", *range(30, 40)), "topic", *range(30, 40))
    assert found(history) == {"lost": 20}


def test_a_sink_that_lacks_a_batch_when_another_shows_the_next_is_split() -> None:
    looks = sights_of(good(sinks=TWO_TABLES), "right").looks
    behind = [looks[0], look(1.7), look(2.62), look(2.65, range(10, 30)), looks[3]]
    history = with_sink(good(sinks=TWO_TABLES), "right", looks=behind)
    assert found(history) == {"split": 1}
    assert evidence(history, "split") == [
        "split in right: left showed batch 2 at 2.600 s, and this sink had nothing of batch 1 at 2.620 s"
    ]


def test_a_topic_that_shows_the_next_batch_proves_that_a_table_is_behind() -> None:
    looks = sights_of(good(), "pg").looks
    behind = [looks[0], look(2.7), look(2.8, range(10, 30)), looks[3]]
    assert found(with_sink(good(), "pg", looks=behind)) == {"split": 1}


def test_a_sink_may_be_one_batch_behind() -> None:
    """For a moment one sink shows a batch that the other is about to show: that is no anomaly."""
    looks = sights_of(good(sinks=TWO_TABLES), "right").looks
    behind = [looks[0], look(1.7), look(1.9, range(10, 20)), *looks[2:]]
    assert verdict(with_sink(good(sinks=TWO_TABLES), "right", looks=behind)) == (True, [])


def test_a_topic_may_be_behind_because_its_reader_is() -> None:
    looks = sights_of(good(), "topic").looks
    behind = [looks[0], look(3.7), look(4.0, range(10, 40))]
    assert verdict(with_sink(good(), "topic", looks=behind)) == (True, [])


def test_a_look_that_began_before_the_other_ended_proves_nothing() -> None:
    """It asked before the other had its answer, so the batch may have come in between."""
    looks = sights_of(good(sinks=TWO_TABLES), "right").looks
    long_look = Look(at(2.59), at(2.70))
    history = with_sink(
        good(sinks=TWO_TABLES), "right", looks=[looks[0], long_look, look(2.8, range(10, 30)), looks[3]]
    )
    assert verdict(history) == (True, [])


def test_a_batch_that_vanishes_from_one_sink_is_split() -> None:
    history = with_looks(good(sinks=TWO_TABLES), "right", look(3.9, gone=range(10)), look(3.95, range(10)))
    assert found(history) == {"split": 1}


def test_a_sink_that_expects_nothing_of_a_batch_cannot_lack_it() -> None:
    history = good(sinks=TWO_TABLES, expected=lambda n, sink: int(sink == "left" or not 10 <= n < 20))
    assert verdict(without_rows(history, "right", *range(10, 20))) == (True, [])


# Early ----------------------------------------------------------------------------------------------------------------


def test_a_batch_that_shows_before_its_decision_is_early() -> None:
    history = good()
    late = {**history.batches, 2: BatchSeen(2, at(2.75), checkpointed=True)}
    assert found(replace(history, batches=late)) == {"early": 2}
    assert evidence(replace(history, batches=late), "early")[0] == (
        "early in pg: batch 2 was visible at 2.600 s and decided at 2.750 s"
    )


def test_a_look_within_the_tick_of_the_clock_is_not_early() -> None:
    history = good(sinks={"pg": "postgres"})
    close = {**history.batches, 2: BatchSeen(2, at(2.605), checkpointed=True)}
    assert verdict(replace(history, batches=close)) == (True, [])


def test_a_batch_that_shows_and_was_never_decided_is_early() -> None:
    history = good()
    assert found(replace(history, batches={**history.batches, 3: BatchSeen(3)})) == {"early": 2}


def test_a_checkpointed_batch_without_a_decision_leaves_the_verdict_unknown() -> None:
    """It was decided, or it would not be checkpointed: nobody has read the record in time."""
    history = good()
    missing = replace(history, batches={**history.batches, 3: BatchSeen(3, checkpointed=True)})
    result, reasons = verdict(missing)
    assert result == "unknown"
    assert reasons == ["Of 1 checkpointed batch(es) no decision was read, the first is batch 3."]


# Reordered, orphans ---------------------------------------------------------------------------------------------------


def test_rows_of_one_key_in_another_order_are_reordered() -> None:
    history = with_sink(good(per_batch=40), "topic", in_order={0: [0, 8, 4, 2, 6], 1: [1, 3]})
    assert found(history) == {"reordered": 1}
    assert evidence(history, "reordered") == [
        "reordered in topic: row 4 comes after row 8, both of key k0, in partition 0"
    ]


def test_rows_of_two_keys_may_come_in_any_order() -> None:
    history = with_sink(good(per_batch=40), "topic", in_order={0: [2, 0, 6, 4, 8], 1: [3, 1]})
    assert verdict(history) == (True, [])


def test_what_is_left_behind_is_an_orphan() -> None:
    history = with_sink(good(), "pg", left=["prepared transaction a", "staging table b"])
    assert found(history) == {"orphans": 2}
    assert evidence(history, "orphan")[0] == "orphan in pg: prepared transaction a"


# What cannot be said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_weaker_guarantees_are_not_held_to_what_needs_a_decision(guarantee: str) -> None:
    history = with_looks(good(guarantee=guarantee, batches={}), "pg", look(3.9, gone=[3]), look(3.95, [3]))
    result = audit(history)
    assert (result.verdict, result.reasons) == (True, [])
    assert any("whether anything is torn or split or early" in s and guarantee in s for s in result.not_proven)
    assert not any("batches" in s for s in result.proven)


def test_a_duplicate_under_a_weaker_guarantee_is_still_named() -> None:
    history = good(guarantee="at-least-once", batches={})
    assert found(with_sink(history, "pg", rows=sights_of(history, "pg").rows + Counter([1]))) == {"duplicated": 1}


def test_without_batches_the_reason_is_said() -> None:
    result = audit(good(batch_of=(), why_no_batches="the pipeline aggregates"))
    assert result.verdict is True
    assert result.batches == 4
    assert "pg, topic: whether anything is torn or split or early; the pipeline aggregates." in result.not_proven


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"broken": "no batch for 90 s"}, "The run did not reach its end: no batch for 90 s"),
        ({"rows_wanted": 41}, "40 rows were fed, and 41 were asked for."),
        ({"kills": 3, "kills_wanted": 4}, "There were 3 kills, and 4 were asked for."),
        ({"rows": 0, "rows_wanted": 0, "batch_of": ()}, "No row was fed, so nothing was compared."),
        ({"sights": ()}, "No sink was read."),
        ({"expected": lambda *_: 0}, "The workload expects no row in any sink, so nothing was compared."),
    ],
)
def test_what_was_not_reached_is_unknown(changes: dict[str, Any], reason: str) -> None:
    history = good(**changes)
    if "expected" in changes or changes.get("rows") == 0:
        for sink in ("pg", "topic"):
            history = with_sink(history, sink, rows=Counter(), in_order={}, looks=[look(1.0)])
    result, reasons = verdict(history)
    assert result == "unknown"
    assert reason in reasons


def test_an_empty_history_is_unknown() -> None:
    assert audit(History(seed=1, pipeline="p", guarantee="exactly-once", rows=0, sights=())).verdict == "unknown"


def test_a_sink_that_could_not_be_read_is_unknown_and_counts_for_nothing() -> None:
    history = with_sink(good(), "pg", error="connection refused", rows=Counter(), looks=())
    result = audit(history)
    assert (result.verdict, result.compared) == ("unknown", 40)
    assert result.reasons == ["pg could not be read at the end: connection refused"]
    assert set(result.unchecked["pg"]) == set(NAMES)
    assert not any(s.startswith("pg:") for s in result.proven)


@pytest.mark.parametrize("looks", [(), (look(4.9, range(40)),)])
def test_a_table_that_was_never_looked_at_before_the_end_is_unknown(looks: Sequence[Look]) -> None:
    assert verdict(with_sink(good(), "pg", looks=looks)) == (
        "unknown",
        ["pg was never looked at while the pipeline ran."],
    )


def test_a_topic_that_was_never_looked_at_before_the_end_is_unknown() -> None:
    """Its last look is several: it is read up to its end."""
    looks = [look(4.8, range(20)), look(4.9, range(20, 40))]
    assert verdict(with_sink(good(), "topic", looks=looks, last_looks=2)) == (
        "unknown",
        ["topic was never looked at while the pipeline ran."],
    )
    assert verdict(with_sink(good(), "topic", looks=looks, last_looks=1))[0] is True


def test_rows_that_nobody_fed_are_unknown_and_not_duplicated() -> None:
    history = with_sink(good(), "pg", strangers=["id 'x17'"], rows=Counter(range(41)))
    result = audit(history)
    assert result.verdict == "unknown"
    assert result.strangers == ["pg: id 'x17'", "pg: row 40 was not fed"]
    assert sum(result.counts.values()) == 0


def test_a_visible_row_that_no_batch_has_read_is_unknown() -> None:
    history = good()
    result, reasons = verdict(replace(history, batch_of=[*history.batch_of[:-1], NO_BATCH]))
    assert (result, reasons) == ("unknown", ["2 row(s) are visible that no batch of the checkpoint has read."])


def test_what_was_under_way_when_a_run_broke_off_is_not_lost() -> None:
    """The newest batch was never checkpointed: one sink lacks it, one has a part of it, and something is open."""
    history = good(broken="stuck")
    newest = max(history.batches)
    batches = {**history.batches, newest: replace(history.batches[newest], checkpointed=False)}
    rows = [n for n, batch in enumerate(history.batch_of) if batch == newest]
    history = without_rows(replace(history, batches=batches), "pg", *rows)
    history = with_sink(without_rows(history, "topic", rows[0]), "topic", left=["an open transaction"])
    found = audit(history)
    assert found.verdict == "unknown"
    assert not any(found.counts.values()), found.counts
    assert found.proven == []


def test_a_checkpointed_batch_is_lost_even_if_the_run_broke_off() -> None:
    found = audit(without_rows(good(broken="stuck"), "pg", 0))
    assert (found.verdict, found.counts["lost"]) == (False, 1)


def test_an_anomaly_in_a_run_that_broke_off_is_false() -> None:
    history = with_sink(good(broken="stuck"), "pg", rows=sights_of(good(), "pg").rows + Counter([1]))
    result, reasons = verdict(history)
    assert result is False
    assert reasons


# All of it ------------------------------------------------------------------------------------------------------------


def test_several_anomalies_at_once_are_all_found() -> None:
    result: Audit = audit(eventful_and_wrong())
    assert result.verdict is False
    assert {kind: n for kind, n in result.counts.items() if n} == {
        "lost": 100,
        "duplicated": 4,
        "split": 1,
        "orphans": 1,
    }
    assert result.by_sink["files_lake"]["lost"] == 100
    assert result.by_sink["kafka_billed"]["duplicated"] == 3
    assert not any(s.startswith("files_lake:") and "as often as expected" in s for s in result.proven)


def test_counts_are_complete_though_little_evidence_is_kept() -> None:
    history = with_sink(good(rows=1000, per_batch=100), "pg", rows=Counter())
    result = audit(history)
    assert result.counts["lost"] == 1000
    assert len([a for a in result.anomalies if a.kind == "lost"]) == EVIDENCE_MAX


def test_a_million_rows_in_three_sinks_are_compared_within_the_limits() -> None:
    history = good(LARGE, 500, {"pg": "postgres", "maria": "mysql", "topic": "kafka"})
    rows = sights_of(history, "maria").rows
    del rows[LARGE // 2]
    began_s = time.monotonic()
    result = audit(history)
    assert time.monotonic() - began_s < LARGE_SECONDS_MAX
    assert result.counts["lost"] == 1
    assert (result.compared, result.batches) == (3 * LARGE, LARGE // 500)


def test_the_audit_needs_little_memory_beside_the_history() -> None:
    history = good(20_000, 500, {"pg": "postgres", "maria": "mysql", "topic": "kafka"})
    tracemalloc.start()
    audit(history)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * BYTES_PER_ROW_MAX
