"""A query that has the rows of another plan in memory than the one that was decided stops, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import semel
from semel.decisions.files import FileStore
from semel.errors import BatchFailed, PlanRestored
from semel.run.happenings import error_in
from semel.runtime.query import RunningQuery
from tests.runtime.test_pipeline import select

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Scene:
    """A drop-in that has done two batches of one file each, and then forgot that the second one is done."""

    def __init__(self, stream: DataFrame, folder: Path) -> None:
        self.stream, self.folder = stream, folder
        self.function = semel.sink(semel.Sqlite(str(folder / "out.db"), "out"))
        self.seen: dict[int, list[str]] = {}
        self.behind: dict[int, list[str]] = {}

    def run(self, before: Callable[[], None] = lambda: None) -> str:
        """Until there is nothing left; `before` happens when Spark has its first rows in its hands. Why it stopped."""

        def listen(df: DataFrame, batch: int) -> None:
            self.seen[batch] = RunningQuery(df).offsets_in_hand()
            self.behind[batch] = RunningQuery(df).offsets_behind()
            if len(self.seen) == 1:
                before()
            self.function(df, batch)

        self.seen.clear()
        self.behind.clear()
        writer = self.stream.writeStream.foreachBatch(listen).option("checkpointLocation", str(self.folder / "c"))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - why it stopped is what we ask for
            return str(error)
        finally:
            self.function.end()
        return ""

    def forget(self, *paths: str) -> None:
        """With the checksums that Hadoop keeps beside them."""
        for path in (self.folder / "c" / path for path in paths):
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def planned(self, batch: int) -> list[str]:
        return (self.folder / "c" / "offsets" / str(batch)).read_text().split("\n")[2:]

    def rows(self) -> list[tuple[int, int]]:
        return select(self.folder / "out.db", "SELECT count(*), count(DISTINCT id) FROM out")


def test_what_spark_has_in_memory_is_what_it_planned_and_what_it_read(stream: DataFrame, tmp_path: Path) -> None:
    scene = Scene(stream, tmp_path)
    assert scene.run() == ""
    assert scene.seen == {0: scene.planned(0), 1: scene.planned(1)}
    assert scene.behind == {0: ["-"], 1: scene.planned(0)}
    scene.forget("commits/1")
    assert scene.run() == ""
    assert scene.seen == {1: scene.planned(1)}
    assert scene.behind == {1: scene.planned(0)}
    assert scene.rows() == [(20, 20)]


def test_a_plan_that_was_put_back_behind_the_back_of_a_query_stops_it(stream: DataFrame, tmp_path: Path) -> None:
    scene = Scene(stream, tmp_path)
    scene.run()
    decided = (tmp_path / "c" / "offsets" / "1").read_bytes()
    scene.forget("commits/1", "offsets/1")
    (tmp_path / "c" / "offsets" / "1").write_bytes(decided.replace(b'"logOffset":1', b'"logOffset":0'))
    store = FileStore(str(tmp_path / "c"))
    stopped = scene.run(before=lambda: store.replace("offsets/1", decided))
    found = error_in(stopped)
    assert isinstance(found, PlanRestored), stopped
    assert "Batch 1 is decided" in found.what
    assert "Another start has put back what was decided" in found.what
    assert scene.run() == ""
    assert scene.rows() == [(20, 20)]


def test_a_query_that_began_behind_another_plan_than_was_decided_stops(
    stream: DataFrame, tmp_path: Path, put: Callable[[int], None]
) -> None:
    """An older start puts that plan back when Spark has read the other one and planned the next batch behind it."""
    scene = Scene(stream, tmp_path)
    assert scene.run() == ""
    put(2)
    decided = (tmp_path / "c" / "offsets" / "1").read_bytes()
    scene.forget("offsets/1")
    (tmp_path / "c" / "offsets" / "1").write_bytes(decided.replace(b'"logOffset":1', b'"logOffset":0'))
    store = FileStore(str(tmp_path / "c"))
    stopped = scene.run(before=lambda: store.replace("offsets/1", decided))
    found = error_in(stopped)
    assert isinstance(found, PlanRestored), stopped
    assert found.what == "Batch 2 was not begun: Spark begins elsewhere than batch 1, as decided, ends."
    assert scene.behind == {2: ['{"logOffset":0}']}
    assert not (tmp_path / "c" / "offsets" / "2").exists()
    assert scene.run() == ""
    assert scene.rows() == [(30, 30)]


def test_a_plan_that_is_overwritten_before_its_batch_is_written_stops_the_query(
    stream: DataFrame, tmp_path: Path
) -> None:
    """Two drivers plan a batch at once, and the file of the other one has taken the place of ours."""
    scene = Scene(stream, tmp_path)
    store = FileStore(str(tmp_path / "c"))
    kept: list[bytes] = []

    def overwrite() -> None:
        kept.append(store.read("offsets/0") or b"")
        store.replace("offsets/0", kept[0].replace(b'"logOffset":0', b'"logOffset":1'))

    found = error_in(scene.run(before=overwrite))
    assert isinstance(found, BatchFailed)
    assert found.what.startswith("Batch 0 was not begun: offsets/0 says something else than Spark has planned.")
    store.replace("offsets/0", kept[0])
    assert scene.run() == ""
    assert scene.rows() == [(20, 20)]


def test_the_drop_in_puts_back_the_list_of_files_and_spark_reads_it(
    stream: DataFrame, tmp_path: Path, put: Callable[[int], None]
) -> None:
    """Spark had planned the batch anew, over another file, and wrote the checksum of that list."""
    scene = Scene(stream, tmp_path)
    scene.run()
    scene.forget("commits/1", "offsets/1", "sources/0/1")
    put(2)
    (tmp_path / "in" / "001.json").rename(tmp_path / "in" / "009.json")
    stopped = scene.run()
    assert isinstance(error_in(stopped), PlanRestored), stopped
    (tmp_path / "in" / "009.json").rename(tmp_path / "in" / "001.json")
    assert scene.run() == ""
    assert scene.rows() == [(30, 30)]


def test_the_plans_of_several_sources_are_put_back_together(
    stream: DataFrame, tmp_path: Path, put: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Batch 1 has a file of each source; without its plan Spark would take the newest files along."""
    other = tmp_path / "other"
    other.mkdir()

    def put_other(number: int) -> None:
        (other / f"{number:03d}.json").write_text("".join(f'{{"id": {1000 + number * 10 + k}}}\n' for k in range(10)))

    def run() -> None:
        frame = stream.sparkSession.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(other))
        writer = semel.write(stream.select("id").union(frame)).to(semel.Sqlite(str(tmp_path / "out.db"), "out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        writer.start().awaitTermination()

    for number in (0, 1):
        put_other(number)
    run()
    scene = Scene(stream, tmp_path)
    assert scene.planned(1) == ['{"logOffset":1}', '{"logOffset":1}']
    scene.forget("commits/1", "offsets/1", "sources/0/1", "sources/1/1")
    put(2)
    put_other(2)
    run()
    assert "sources/0/1, sources/1/1, offsets/1 put back" in caplog.text
    assert scene.rows() == [(60, 60)]
