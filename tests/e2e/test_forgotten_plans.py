"""The checkpoint has lost what a batch was decided for, as in a power cut or in a copy taken while it was in use.

Without the plan in the decision, Spark planned the batch anew over other rows, semel found it decided and forwarded it,
and the rows between the two plans were in no sink, without a word.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.game import Game, Life
from tests.e2e.stores_game import StoresGame

# What is left when a file is lost, and what Spark makes of that, depends on how it was written.
pytestmark = pytest.mark.hadoop_files

#: Enough for a batch of everything.
ALL_ROWS = 100_000


def forget(checkpoint: Path, *files: str, checksums: bool = False) -> None:
    """As a power cut does: the file is gone, and the checksum that Hadoop keeps beside it is gone or not."""
    for name in files:
        path = checkpoint / name
        assert path.is_file(), f"there is no {name} to forget"
        path.unlink()
        checksum = path.with_name(f".{path.name}.crc")
        if checksums and checksum.exists():
            checksum.unlink()


def put_in_between(game: Game, after: int) -> None:
    """A new input file that Spark would take for the next batch, were it to plan it anew."""
    number = game.batches * game.rows
    path = Path(game.setup.folder) / "in" / "late.json"
    order = game._order(number)
    path.write_text(json.dumps(order) + "\n")
    os.utime(path, (1_700_000_000 + after - 0.5, 1_700_000_000 + after - 0.5))
    game.batches += 1


def require_all(game: Game, life: Life, late: int) -> None:
    assert life.returncode == 0, life
    expected = set(range(late)) | {late}
    for sink in ("sqlite", "files"):
        ids = sorted(row[0] for row in game.visible(sink).elements())  # type: ignore[index]
        assert ids == sorted(expected)


# Files to SQLite and files --------------------------------------------------------------------------------------------


def test_a_missing_plan_is_restored_from_the_decision_with_the_log_of_the_file_source(
    make_game: Callable[..., Game],
) -> None:
    """And the start that restores it may die in between."""
    game = make_game(sink="both", batches=4)
    late = game.batches * game.rows
    assert game.live("batch.decided@2").killed
    forget(game.checkpoint, "offsets/1", "sources/0/1", "commits/0")
    put_in_between(game, after=1)
    # The source's log comes first, then commits/0, then the offsets: each time the next start goes on from there.
    for _ in range(3):
        assert game.live("startup.restored@1").killed
    assert (game.checkpoint / "offsets" / "1").is_file()
    life = game.live()
    require_all(game, life, late)
    assert life.batches("forwarded") == [1]


def test_another_plan_that_nobody_has_used_is_overwritten_with_what_was_decided(make_game: Callable[..., Game]) -> None:
    """It lists another file than the one whose rows were decided."""
    game = make_game(sink="both", batches=3)
    late = game.batches * game.rows
    assert game.live("batch.decided@2").killed
    put_in_between(game, after=1)
    entry = game.checkpoint / "sources" / "0" / "1"
    other = entry.read_text().replace("00001.json", "late.json")
    forget(game.checkpoint, "sources/0/1", checksums=True)
    entry.write_text(other)
    life = game.live()
    require_all(game, life, late)
    assert life.batches("forwarded") == [1]
    assert "its plan said something else than was decided: sources/0/1 put back" in life.stderr


def test_a_snapshot_of_a_plan_that_was_lost_does_not_hide_the_rows_of_the_next_one(
    make_game: Callable[..., Game],
) -> None:
    """The power failed in batch 1, which was not decided; its plan is gone, and what maintenance wrote of it is not.

    Spark plans the batch over one more file, and writes only the delta of its state anew.
    """
    game = make_game(sink="sqlite", shape="stateful", batches=5)
    assert game.live("batch.staged@2").killed
    for store in sorted((game.checkpoint / "state" / "0").glob("[0-9]*")):
        # Each batch has all keys, so that its delta is all of the state, and the same as a snapshot.
        shutil.copy(store / "2.delta", store / "2.snapshot")
        shutil.copy(store / ".2.delta.crc", store / ".2.snapshot.crc")
    forget(game.checkpoint, "offsets/1", checksums=True)
    # The batch is decided over both files, and the state of its second try is loaded by the next life.
    assert game.live("batch.committed@1").killed
    assert '{"logOffset":2}' in (game.checkpoint / "offsets" / "1").read_text()
    assert not list((game.checkpoint / "state" / "0").glob("*/2.snapshot"))
    assert game.live().returncode == 0
    visible = game.visible()
    assert game.expected[0] + game.expected[2] + game.expected[3] + game.expected[4] == visible


@pytest.mark.parametrize("lost", [("3",), ("2", "3")])
def test_lists_of_files_of_batches_that_are_over_are_put_back(
    make_game: Callable[..., Game], lost: tuple[str, ...]
) -> None:
    """A copy whose `sources` are older than its `offsets`: Spark says only that a batch does not exist."""
    game = make_game(sink="both", batches=4)
    late = game.batches * game.rows
    assert game.live().returncode == 0
    forget(game.checkpoint, *(f"sources/0/{name}" for name in lost))
    put_in_between(game, after=9)
    life = game.live()
    require_all(game, life, late)
    assert life.batches("committed") == [4]


def test_with_the_drop_in_the_plan_is_put_back_and_the_next_start_goes_on(make_game: Callable[..., Game]) -> None:
    """Spark has planned the batch over another file by then."""
    game = make_game(sink="both", batches=3)
    late = game.batches * game.rows
    assert game.live("batch.decided@2", drop_in=True).killed
    forget(game.checkpoint, "offsets/1", "sources/0/1", checksums=True)
    put_in_between(game, after=1)
    life = game.live(drop_in=True)
    assert (life.returncode, "PlanRestored" in life.error) == (1, True), life.error[:3000]
    what, now, todo = life.error.partition("PlanRestored: ")[2].splitlines()[:3]
    assert (
        what == ("Batch 1 is decided, and Spark had planned it over other rows. Put back as decided: sources/0/1.")
        or "offsets/1" in what
    ), what
    assert now == "  the data now: this start wrote no rows; the checkpoint says again what was decided"
    assert todo.startswith("  what to do: Start the pipeline again")
    life = game.live(drop_in=True)
    require_all(game, life, late)
    assert life.batches("forwarded") == [1]


def test_a_copy_of_the_checkpoint_that_is_older_than_the_log_catches_up_with_it(
    make_game: Callable[..., Game], tmp_path: Path
) -> None:
    game = make_game(sink="both", batches=8)
    late = game.batches * game.rows
    assert game.live("batch.prepared@3").killed
    copy = tmp_path / "copy"
    shutil.copytree(game.checkpoint, copy, ignore=shutil.ignore_patterns("semel"))
    assert game.live("batch.decided@4").killed
    for part in ("offsets", "commits", "sources"):
        shutil.rmtree(game.checkpoint / part)
        shutil.copytree(copy / part, game.checkpoint / part)
    put_in_between(game, after=3)
    life = game.live()
    require_all(game, life, late)
    # Batches 2 to 5 were decided, and all but the last of them were done.
    assert life.batches("forwarded") == [5]


def plan_anew(game: Game, until: str) -> None:
    """Batch 1 is decided and done; the checkpoint says of it what was not decided, and batch 2 is planned behind it."""
    assert game.live(until).killed
    offsets = game.checkpoint / "offsets" / "1"
    (game.checkpoint / "offsets" / ".1.crc").unlink()
    offsets.write_text(offsets.read_text().replace('{"logOffset":1}', '{"logOffset":0}'))


def test_a_batch_that_is_done_and_was_planned_anew_is_as_decided_again(make_game: Callable[..., Game]) -> None:
    game = make_game(sink="both", batches=3)
    plan_anew(game, until="batch.began@3")
    life = game.live()
    require_all(game, life, game.batches * game.rows - 1)
    assert "Planned behind another plan of batch 1, and not decided: offsets/2 dropped." in life.stderr
    assert "its plan said something else than was decided: offsets/1 put back" in life.stderr


def test_a_drop_in_whose_copy_knows_the_end_of_a_batch_and_not_its_plan_has_every_row_once(
    make_game: Callable[..., Game],
) -> None:
    """Found by the simulation: Spark plans batch 0 anew, takes it for done at its next start and plans batch 1.

    Each time the driver dies before it puts anything back. The new lists name other files than the decided ones.
    """
    game = make_game(sink="both", batches=3)
    late = game.batches * game.rows
    assert game.live("batch.began@2", drop_in=True).killed
    forget(game.checkpoint, "offsets/0", "offsets/1", "sources/0/0", "sources/0/1", checksums=True)
    put_in_between(game, after=0)
    for planned in (0, 1):
        assert game.live("startup.claimed@1", drop_in=True).killed
        assert (game.checkpoint / "offsets" / str(planned)).is_file()
    assert "late.json" in (game.checkpoint / "sources" / "0" / "0").read_text()
    life = game.live(drop_in=True)
    assert (life.returncode, "PlanRestored" in life.error) == (1, True), life.error[:3000]
    assert not (game.checkpoint / "offsets" / "1").exists()
    assert not (game.checkpoint / "sources" / "0" / "1").exists()
    life = game.live(drop_in=True)
    require_all(game, life, late)
    assert life.batches("committed") == [1, 2, 3]


def test_a_batch_behind_whose_other_plan_one_was_decided_is_refused_in_three_lines(
    make_game: Callable[..., Game],
) -> None:
    game = make_game(sink="both", batches=3)
    plan_anew(game, until="batch.decided@3")
    life = game.live()
    assert life.returncode == 1
    what, now, todo = life.error.splitlines()
    assert what == (
        "Batch 1 was decided for other rows than the checkpoint says, and somebody has gone on from there "
        '(offsets/2 is there). Decided: {"logOffset":1}; planned now: {"logOffset":0}; not as decided: offsets/1.'
    )
    assert "rows between the two plans may be in no sink" in now
    assert "Restore the checkpoint folder" in todo
    assert game.committed("sqlite") == game.committed("files") == 2


def test_a_checksum_without_its_file_does_not_keep_a_pipeline_from_planning(make_game: Callable[..., Game]) -> None:
    """Spark takes it for a file of another query, which writes the same checkpoint, and stops at every start."""
    game = make_game(sink="both", batches=3)
    assert game.live("batch.began@2").killed
    forget(game.checkpoint, "offsets/1", "sources/0/1")
    assert (game.checkpoint / "offsets" / ".1.crc").is_file()
    require_all(game, game.live(), game.batches * game.rows - 1)


# Kafka to Kafka and databases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["missing", "different"])
def test_rows_that_arrive_after_the_decision_are_in_every_sink_once(
    make_stores_game: Callable[..., StoresGame], form: str
) -> None:
    """The finding: killed when the first batch is decided; its plan is lost; as many rows again arrive."""
    game = make_stores_game(batches=1)
    assert game.live("batch.decided").killed
    game.deal(1)
    if form == "missing":
        forget(game.checkpoint, "offsets/0", "sources/0/0")
    else:
        _plan_both(game.checkpoint / "offsets" / "0", game)
    require_all_forwarded(game, 0)


@pytest.mark.parametrize("keeps_id", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_copy_that_was_taken_while_a_batch_was_decided_has_every_row_once(
    make_stores_game: Callable[..., StoresGame], tmp_path: Path, keeps_id: bool
) -> None:
    """Spark's files are copied while batch 0 is over and batch 1 is not planned, `semel/` when batch 1 is decided."""
    game = make_stores_game(batches=1)
    assert game.live("batch.committed").killed
    copy = tmp_path / "copy"
    game.copy_checkpoint(copy)
    game.deal(1)
    assert game.live("batch.decided").killed
    assert (game.checkpoint / "offsets" / "1").is_file()
    for name in ("offsets", "sources", "commits"):
        shutil.rmtree(game.checkpoint / name)
        if (copy / name).is_dir():
            shutil.copytree(copy / name, game.checkpoint / name)
    assert not (game.checkpoint / "offsets" / "1").exists()
    if not keeps_id:
        forget(game.checkpoint, "metadata")
    game.deal(1)
    require_all_forwarded(game, 1)


def require_all_forwarded(game: StoresGame, batch: int) -> None:
    """All that has arrived would be one batch, were it planned anew."""
    life = game.require_good_end(game.live(rows_per_batch=ALL_ROWS))
    assert life.batches("forwarded") == [batch]
    assert game.committed() == game.dealt


def _plan_both(offsets: Path, game: StoresGame) -> None:
    """What Spark would have planned over all rows."""
    version, about, planned = offsets.read_text().split("\n")
    wider = {topic: {p: 2 * end for p, end in ends.items()} for topic, ends in json.loads(planned).items()}
    offsets.with_name(".0.crc").unlink()
    offsets.write_text("\n".join((version, about, json.dumps(wider))))
    assert sum(sum(ends.values()) for ends in wider.values()) == game.dealt
