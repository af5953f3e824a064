"""The spool: what tasks stage for a store that moves rows in one transaction."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from semel.ids import Branch
from semel.sinks.sqlite.spool import SpoolDamaged, SpoolWriter, drop_spooled, spooled_batches, spooled_branches
from semel.testing.harness import OTHERS, OURS, arrow, attempt, rows_of


def branch(task: int = 0) -> Branch:
    return Branch(attempt(), "orders", task, 0)


def spool(folder: Path, which: Branch, *batches: pa.RecordBatch, durable: bool = True) -> str:
    writer = SpoolWriter(folder, which, lambda batch: batch, durable=durable)
    for batch in batches:
        writer.write(batch)
    writer.prepare()
    return str(which)


def read_ids(folder: Path, names: list[str], rows: int) -> list[int]:
    return [i for batch in spooled_batches(folder, names, rows) for i in batch.column("id").to_pylist()]


@pytest.mark.parametrize("durable", [True, False])
def test_rows_come_back_batch_by_batch_in_the_order_of_the_names(tmp_path: Path, durable: bool) -> None:
    one = spool(tmp_path, branch(0), arrow(rows_of(1, 2)), arrow(rows_of(3)), durable=durable)
    two = spool(tmp_path, branch(1), arrow(rows_of(4)), durable=durable)
    assert [b.num_rows for b in spooled_batches(tmp_path, [one, two], 4)] == [2, 1, 1]
    assert read_ids(tmp_path, [one, two], 4) == [1, 2, 3, 4]


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "spool", branch(), lambda batch: batch, durable=True)
    writer.write(arrow([]))
    assert writer.prepare().rows == 0
    assert not (tmp_path / "spool").exists()


def test_the_spool_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    name = spool(tmp_path / "a" / "b", branch(), arrow(rows_of(1)))
    assert read_ids(tmp_path / "a" / "b", [name], 1) == [1]


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95], ids=["empty", "half", "without its end"])
def test_a_truncated_file_is_damaged(tmp_path: Path, kept: float) -> None:
    name = spool(tmp_path, branch(), *(arrow(rows_of(*range(i, i + 50))) for i in range(0, 500, 50)))
    path = tmp_path / f"{name}.arrow"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(SpoolDamaged, match=path.name):
        read_ids(tmp_path, [name], 500)


def test_a_missing_file_is_damaged(tmp_path: Path) -> None:
    names = [spool(tmp_path, branch(task), arrow(rows_of(task))) for task in range(3)]
    (tmp_path / f"{names[1]}.arrow").unlink()
    with pytest.raises(SpoolDamaged, match="holds 2 of 3 staged rows"):
        read_ids(tmp_path, names, 3)


def test_more_rows_than_promised_are_damaged(tmp_path: Path) -> None:
    name = spool(tmp_path, branch(), arrow(rows_of(1, 2)))
    with pytest.raises(SpoolDamaged, match="holds 2 of 1 staged rows"):
        read_ids(tmp_path, [name], 1)


def test_branches_are_told_apart_by_pipeline_and_sink(tmp_path: Path) -> None:
    ours = [branch(0), branch(1)]
    theirs = [Branch(attempt(pipeline=OTHERS), "orders", 0, 0), Branch(attempt(), "returns", 0, 0)]
    for which in ours + theirs:
        spool(tmp_path, which, arrow(rows_of(1)))
    (tmp_path / "readme.arrow").write_text("not ours")
    assert spooled_branches(tmp_path, OURS, "orders") == tuple(ours)
    assert spooled_branches(tmp_path / "absent", OURS, "orders") == ()


def test_dropping_is_idempotent_and_leaves_the_folder_to_others(tmp_path: Path) -> None:
    """seatunnel#9828: another pipeline's task may be about to open its file in the folder."""
    folder = tmp_path / "spool"
    name = spool(folder, branch(), arrow(rows_of(1)))
    for _ in range(2):
        drop_spooled(folder, [name, "semel-unknown"])
    assert list(folder.iterdir()) == []


def test_a_conversion_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def refuse(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    writer = SpoolWriter(tmp_path, branch(), refuse, durable=True)
    with pytest.raises(ValueError, match="no"):
        writer.write(arrow(rows_of(1)))
    writer.abort()
    assert list(tmp_path.iterdir()) == []
