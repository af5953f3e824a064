"""Rows come as long as a run lasts, a little ahead of what the pipeline has read; what stops them is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.errors import SourceUnavailable
from semel.verify.checkpoint import CheckpointWatcher
from semel.verify.feeding import BATCHES_AHEAD, Feeding
from semel.verify.file_feeder import FileFeeder
from semel.verify.nemesis import Broken
from semel.verify.workload import DEFAULT, Workload
from tests.processes import wait_until

PER_BATCH = 10


def _feeder(folder: Path, workload: Workload = DEFAULT) -> FileFeeder:
    return FileFeeder("json", {"path": str(folder / "in")}, workload, PER_BATCH)


def _read_all(folder: Path, batch: int, *, is_over: bool = True) -> None:
    """What Spark leaves behind when batch N has taken up every file that is there."""
    files = sorted((folder / "in").glob("*.json"))
    texts = {
        "offsets": f'v1\n{{}}\n{{"logOffset":{batch}}}',
        "sources/0": "\n".join(["v1", *(json.dumps({"path": f"file://{f}", "batchId": batch}) for f in files)]),
        **({"commits": "v1\n{}"} if is_over else {}),
    }
    for name, text in texts.items():
        place = folder / "checkpoint" / name / str(batch)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_feeding_follows_what_the_pipeline_has_read_and_not_what_its_sinks_show(tmp_path: Path) -> None:
    """An aggregation shows a few rows, whatever goes in; a filter shows a part of them."""
    watcher, feeder = CheckpointWatcher(tmp_path / "checkpoint", 1), _feeder(tmp_path)
    feeding = Feeding(feeder, 10_000, PER_BATCH, lambda: watcher.rows_read(feeder.places))
    ahead = BATCHES_AHEAD * PER_BATCH
    for _ in range(2 * BATCHES_AHEAD):
        feeding.feed()
    assert feeder.fed == ahead
    _read_all(tmp_path, 0, is_over=False)
    watcher.look()
    feeding.feed()
    assert (watcher.rows_read(feeder.places), feeder.fed) == (0, ahead), "the batch may still be rolled back"
    _read_all(tmp_path, 0)
    watcher.look()
    for _ in range(2 * BATCHES_AHEAD):
        feeding.feed()
    assert (watcher.rows_read(feeder.places), feeder.fed) == (ahead, 2 * ahead)


def test_after_the_last_fault_not_one_batch_more_than_wanted_is_fed(tmp_path: Path) -> None:
    feeding = Feeding(_feeder(tmp_path), 25, PER_BATCH, lambda: 0)
    feeding.draining = True
    for _ in range(10):
        feeding.feed()
    assert feeding.feeder.fed == 30


def _unavailable(_: int) -> dict[str, int]:
    raise SourceUnavailable("The broker is away.")


def _divides_by_zero(n: int) -> dict[str, int]:
    return {"id": n, "share": 1 // (n - 15 if n >= 15 else 1)}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (_unavailable, "the source could not be fed: The broker is away."),
        (_divides_by_zero, "the source could not be fed: Row 15 of the workload cannot be made: ZeroDivisionError"),
    ],
)
def test_a_source_that_cannot_be_fed_breaks_the_run_and_says_why(
    row: Callable[[int], dict[str, int]], words: str, tmp_path: Path
) -> None:
    feeding = Feeding(_feeder(tmp_path, Workload(row)), 100, PER_BATCH, lambda: 0)
    with pytest.raises(Broken, match=words):
        _goes_on_until_it_fails(feeding)


def _goes_on_until_it_fails(feeding: Feeding) -> None:
    with feeding.going_on():
        wait_until(lambda: bool(feeding.failed), 10)
        feeding.require()


def test_what_breaks_for_want_of_input_is_told_as_that(tmp_path: Path) -> None:
    feeding = Feeding(_feeder(tmp_path, Workload(_divides_by_zero)), 100, PER_BATCH, lambda: 0)
    with pytest.raises(Broken, match="the source could not be fed"):
        _breaks_for_want_of_input(feeding)


def _breaks_for_want_of_input(feeding: Feeding) -> None:
    with feeding.going_on():
        wait_until(lambda: bool(feeding.failed), 10)
        raise Broken("no batch ended within 180 s")


def test_what_breaks_while_rows_come_is_told_as_it_is(tmp_path: Path) -> None:
    feeding = Feeding(_feeder(tmp_path), 100, PER_BATCH, lambda: 0)
    with pytest.raises(Broken, match="no batch ended"), feeding.going_on():
        raise Broken("no batch ended within 180 s")
