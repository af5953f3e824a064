"""Who writes a batch: the driver, few tasks, or as many as Spark has."""

from __future__ import annotations

import pytest

from semel.errors import ConfigError
from semel.runtime.hands import (
    AS_PLANNED,
    DRIVER_BYTES,
    Allowed,
    BatchSize,
    Hands,
    Pace,
    Written,
    choose_hands,
    hands_again,
)
from semel.runtime.offsets import rows_between
from semel.runtime.options import DRIVER_ROWS, TASKS, Switches

TASKS_ONLY = Allowed(cores=2, driver_rows=0)


@pytest.mark.parametrize(
    ("batch", "hands"),
    {
        "a few hundred rows": (BatchSize(4, False, 400), Hands(1)),
        "some thousand": (BatchSize(4, False, 4_000), Hands(2)),
        "as many as four tasks are for": (BatchSize(4, False, 40_000), AS_PLANNED),
        "many": (BatchSize(4, False, 1_000_000), AS_PLANNED),
        "many in many partitions": (BatchSize(500, False, 3_000_000), Hands(300)),
        "nobody knows how many": (BatchSize(200, False, None), AS_PLANNED),
        "few behind a shuffle": (BatchSize(200, True, 400), Hands(2)),
        "many behind a shuffle": (BatchSize(200, True, 1_000_000), Hands(4)),
        "nobody knows how many come out of a shuffle": (BatchSize(200, True, None), Hands(4)),
        "a shuffle into few": (BatchSize(2, True, 1_000_000), AS_PLANNED),
        "one partition": (BatchSize(1, False, 400), AS_PLANNED),
        "none": (BatchSize(0, False, 0), AS_PLANNED),
    }.values(),
)
def test_there_are_as_many_tasks_as_the_rows_are_worth(batch: BatchSize, hands: Hands) -> None:
    assert choose_hands(batch, TASKS_ONLY) == hands


def test_the_driver_takes_what_is_small_in_rows_and_in_bytes() -> None:
    allowed = Allowed(cores=2)
    assert choose_hands(BatchSize(4, False, 5_000), allowed) == Hands(2, on_driver=True)
    assert choose_hands(BatchSize(200, True, 400), allowed) == Hands(2, on_driver=True)
    assert choose_hands(BatchSize(1, False, 0), allowed) == Hands(1, on_driver=True)
    assert not choose_hands(BatchSize(4, False, 5_001), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, None), allowed).on_driver
    size = DRIVER_BYTES // 100
    assert choose_hands(BatchSize(4, False, 100, row_bytes=size), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, 100, row_bytes=size + 1), allowed).on_driver


def test_of_the_first_batch_of_a_start_the_driver_takes_more() -> None:
    allowed = Allowed(cores=2, driver_rows=100)
    assert choose_hands(BatchSize(4, False, 1_000, is_first=True), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, 1_001, is_first=True), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, 1_000), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, 1, is_first=True), TASKS_ONLY).on_driver
    assert choose_hands(BatchSize(4, False, 10, row_bytes=DRIVER_BYTES, is_first=True), allowed).on_driver
    assert not choose_hands(BatchSize(4, False, 11, row_bytes=DRIVER_BYTES, is_first=True), allowed).on_driver


def test_a_limit_of_the_user_holds_whatever_the_rows_are_worth() -> None:
    assert choose_hands(BatchSize(8, False, 1_000_000), Allowed(cores=2, tasks_max=3)) == Hands(3)
    assert choose_hands(BatchSize(8, False, None), Allowed(cores=2, tasks_max=3)) == Hands(3)
    assert choose_hands(BatchSize(2, False, 1_000_000), Allowed(cores=2, tasks_max=3)) == AS_PLANNED


def test_a_batch_that_is_written_again_has_one_part_if_it_had_one_and_else_one_for_each_partition() -> None:
    assert hands_again(Written(1)) == hands_again(Written(1, in_order=False)) == Hands(1)
    assert hands_again(Written(2)) == hands_again(Written(200)) == AS_PLANNED
    # What was known by hashes is looked for by hashes.
    assert hands_again(Written(2, in_order=False)) == Hands(by_hash=True)


def test_the_batch_before_tells_how_many_rows_come_out() -> None:
    pace = Pace()
    assert pace.is_first
    assert pace.expects(300, is_shuffled=False) == 300
    # Behind a shuffle all of the state may come out, and nobody knows how much that is.
    assert pace.expects(300, is_shuffled=True) is None
    assert pace.expects(None, is_shuffled=False) is None
    pace.saw(100, 250, 80)
    assert not pace.is_first
    assert pace.expects(300, is_shuffled=False) == 750
    assert pace.expects(300, is_shuffled=True) == 300
    assert pace.expects(200, is_shuffled=True) == 250
    assert (pace.expects(None, is_shuffled=False), pace.row_bytes) == (250, 80)
    # Fewer came out than went in: the next time all may.
    pace.saw(100, 0, 0)
    assert (pace.expects(300, is_shuffled=False), pace.row_bytes) == (300, 80)


def test_offsets_of_kafka_say_how_many_rows_there_are() -> None:
    assert rows_between(['{"t":{"0":5,"1":7}}'], ['{"t":{"0":15,"1":7}}']) == 10
    assert rows_between(['{"t":{"0":5}}'], ['{"t":{"0":5,"1":30}}']) == 30
    assert rows_between([], ['{"t":{"0":8}}']) == 8
    assert rows_between(["-"], ['{"t":{"0":8}}']) == 8
    assert rows_between(['{"t":{"0":5}}', '{"u":{"0":1}}'], ['{"t":{"0":6}}', '{"u":{"0":4}}']) == 4
    assert rows_between(["-"], ['{"logOffset":3}']) is None
    assert rows_between([], []) is None
    assert rows_between(['{"t":{"0":5}}', "3"], ['{"t":{"0":6}}', "4"]) is None


def test_options_say_how_many_tasks_there_may_be() -> None:
    assert (Switches.said_by({}).tasks, Switches.said_by({}).tasks_max) == ("auto", 0)
    assert Switches.said_by({TASKS: "Partitions"}).tasks == "partitions"
    assert Switches.said_by({TASKS: "3", DRIVER_ROWS: "0"}) == Switches(tasks=3, driver_rows=0)
    assert Switches(tasks="3").tasks_max == Switches(tasks=3).tasks_max == 3


@pytest.mark.parametrize(
    ("name", "said"), [(TASKS, "few"), (TASKS, 0), (TASKS, -1), (DRIVER_ROWS, "-5"), (DRIVER_ROWS, "x")]
)
def test_what_is_no_number_is_refused(name: str, said: object) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        Switches.said_by({name: said})
