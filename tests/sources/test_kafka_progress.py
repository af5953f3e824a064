"""Reports and lag without Spark: they never fail a batch, never hold one up, and the newest wins."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from semel.dev.ports import free_port
from semel.sources import kafka_progress
from semel.sources.kafka_progress import KafkaProgress, lowest, reached_in
from semel.sources.lag import Lag
from semel.sources.plan import PlannedSource
from tests.processes import wait_until
from tests.sources.conftest import Topic


def log_of(*lines: object) -> bytes:
    """Spark's log of a batch."""
    return "\n".join(["v1", json.dumps({"batchWatermarkMs": 0}), *map(str, lines)]).encode()


def kafka_source(servers: str, group: str = "") -> PlannedSource:
    return PlannedSource("kafka", {"kafka.bootstrap.servers": servers, "semel.group": group})


def at(topic: str, **offsets: int) -> str:
    return json.dumps({topic: {number.removeprefix("p"): offset for number, offset in offsets.items()}})


# Spark's log --------------------------------------------------------------------------------------------------------


def test_each_source_has_its_own_line_in_the_order_of_the_plan() -> None:
    left, rate, right = kafka_source("a:1", "left"), PlannedSource("rate"), kafka_source("a:1", "right")
    raw = PlannedSource("kafka", {"kafka.bootstrap.servers": "a:1"})
    found = reached_in(log_of(at("t", p0=3), 17, at("u", p1=4), at("v", p0=1)), [left, rate, right, raw])
    assert [(r.group, r.offsets) for r in found] == [("left", {("t", 0): 3}), ("right", {("u", 1): 4})]


def test_a_source_that_has_not_begun_has_no_offsets() -> None:
    assert reached_in(log_of("-"), [kafka_source("a:1")]) == []


@pytest.mark.parametrize("log", [None, b"", b"v1", b"v2\n{}\n{}", log_of(), log_of("{}", "{}"), log_of("no json")])
def test_a_log_that_reads_differently_is_not_guessed_at(log: bytes | None) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json has its own kind of it
        reached_in(log, [kafka_source("a:1")])


def test_of_two_sources_over_one_topic_the_lower_offset_counts() -> None:
    assert lowest([{("t", 0): 5, ("t", 1): 2}, {("t", 0): 3, ("u", 0): 9}]) == {("t", 0): 3, ("t", 1): 2, ("u", 0): 9}


# The thread ---------------------------------------------------------------------------------------------------------


class SlowBroker:
    """Answers when it is let; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[Any, int]]] = []
        self.may_answer = threading.Event()

    def report(self, group: str, offsets: dict[Any, int]) -> None:
        self.may_answer.wait(30)
        self.told.append((group, offsets))

    def end_offsets(self, partitions: dict[Any, int]) -> dict[Any, int]:
        self.may_answer.wait(30)
        return {partition: offset + 5 for partition, offset in partitions.items()}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowBroker:
    broker = SlowBroker()
    monkeypatch.setattr(kafka_progress, "Broker", lambda _options, _timeout_s: broker)
    return broker


def progress_of(*sources: PlannedSource, read: Callable[[int], bytes | None] | None = None) -> KafkaProgress:
    return KafkaProgress(sources, read or (lambda batch: log_of(*[at("t", p0=batch) for _ in sources])))


def test_the_newest_of_what_waits_wins_and_no_batch_waits(slow: SlowBroker) -> None:
    progress = progress_of(kafka_source("a:1", "g"))
    began = time.monotonic()
    for batch in range(100):
        progress.began(batch)
        progress.ended(batch)
    assert time.monotonic() - began < 1.0
    assert not progress.flush(0.05)
    slow.may_answer.set()
    assert progress.flush(10)
    assert slow.told[-1] == ("g", {("t", 0): 99})
    assert len(slow.told) <= 2
    assert progress.lag(99) == Lag(99, {"t-0": 5})
    progress.close()


def test_closing_reports_the_last_batch_first(slow: SlowBroker) -> None:
    slow.may_answer.set()
    progress = progress_of(kafka_source("a:1", "g"))
    progress.ended(7)
    progress.close()
    assert slow.told == [("g", {("t", 0): 7})]
    wait_until(lambda: not any(t.name == "semel-kafka-progress" for t in threading.enumerate()), 10)


def test_closing_does_not_wait_for_ever(slow: SlowBroker) -> None:
    progress = progress_of(kafka_source("a:1", "g"))
    progress.ended(7)
    began = time.monotonic()
    progress.close(seconds_max=0.1)
    assert time.monotonic() - began < 2.0
    slow.may_answer.set()


LAST_WORDS = """
import sys
sys.path.insert(0, {root!r})
from tests.sources.test_kafka_progress import at, kafka_source, log_of, progress_of

progress = progress_of(kafka_source({servers!r}, "last"), read=lambda batch: log_of(at({topic!r}, p0=batch)))
progress.ended(3)
"""


def test_a_script_that_ends_right_after_its_last_batch_still_reports_it(topic: Topic) -> None:
    topic.put(range(3))
    code = LAST_WORDS.format(root=str(Path(__file__).parents[2]), servers=topic.servers, topic=topic.name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert topic.group_is_at("last") == {0: 3}


def test_a_lag_that_is_old_is_not_shown(slow: SlowBroker) -> None:
    slow.may_answer.set()
    progress = progress_of(kafka_source("a:1"))
    assert progress.lag(0) is None
    progress.began(3)
    assert progress.flush(10)
    assert [batch for batch in range(3, 7) if progress.lag(batch)] == [3, 4]
    progress.close()


def test_sources_of_two_clusters_are_kept_apart(slow: SlowBroker) -> None:
    slow.may_answer.set()
    progress = progress_of(kafka_source("a:1", "g"), kafka_source("b:1", "g"))
    progress.began(3)
    progress.ended(3)
    assert progress.flush(10)
    assert slow.told == [("g", {("t", 0): 3}), ("g", {("t", 0): 3})]
    assert progress.lag(3) == Lag(3, {"t-0@a:1": 5, "t-0@b:1": 5})
    progress.close()


def test_a_query_without_such_a_source_starts_no_thread() -> None:
    progress = progress_of(PlannedSource("rate"), read=lambda _batch: pytest.fail("nobody needs the log"))
    progress.began(0)
    progress.ended(0)
    assert (progress.lag(0), progress.warning) == (None, "")
    progress.close()


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_a_log_that_cannot_be_read_is_a_warning() -> None:
    progress = progress_of(kafka_source("a:1", "g"), read=lambda _batch: None)
    progress.ended(4)
    assert progress.warning == (
        "The offsets of batch 4 cannot be read: "
        "Spark's log of offsets is not there or reads differently from what semel knows."
    )
    progress.close()


def test_a_broker_that_is_away_is_a_warning_once_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_progress, "ANSWER_S_MAX", 0.3)
    servers = f"127.0.0.1:{free_port()}"
    progress = progress_of(kafka_source(servers, "g"))
    with caplog.at_level(logging.WARNING):
        for batch in range(2):
            progress.ended(batch)
            assert progress.flush(10)
    assert progress.warning.startswith(
        f"The offsets of batch 1 did not reach the broker: Kafka at {servers} cannot be reached: "
    )
    assert [record.name for record in caplog.records] == ["semel.sources.kafka"]
    progress.close()


def test_a_group_that_others_read_in_is_left_to_them_and_taken_up_again(topic: Topic) -> None:
    topic.put(range(10))
    reader = Consumer({"bootstrap.servers": topic.servers, "group.id": "shared", "auto.offset.reset": "earliest"})
    reader.subscribe([topic.name])
    wait_until(lambda: reader.poll(0.5) is not None)
    progress = progress_of(kafka_source(topic.servers, "shared"), read=lambda batch: log_of(at(topic.name, p0=batch)))
    progress.ended(4)
    assert progress.flush(20)
    assert progress.warning.startswith(
        f"The offsets of batch 4 did not reach the broker: Kafka at {topic.servers} refused"
    )
    reader.close()
    progress.began(5)
    progress.ended(5)
    assert progress.flush(20)
    assert (progress.warning, topic.group_is_at("shared"), progress.lag(5)) == (
        "",
        {0: 5},
        Lag(5, {f"{topic.name}-0": 5}),
    )
    progress.close()
