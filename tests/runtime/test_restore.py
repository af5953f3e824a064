"""The checkpoint is made to say what was decided, or the start is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.errors import CheckpointRolledBack, PlanChanged, PlanRestored, SemelError
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Aborted, Decided, Journal, Started
from semel.protocol.plans import Plan, PlannedFile
from semel.runtime.plans import SparkPlans
from semel.runtime.restore import Seen, first_to_run, restore_plans, settle_plan
from tests.planned import offsets

PIPELINE = PipelineId("11111111-2222-3333-4444-555555555555")
UNASKED = Seen(lambda _, __: "", is_under_way=False)


class Scene:
    """A checkpoint in which the batches up to `done` are done, and a log in which those up to `decided` are decided."""

    def __init__(self, done: int, decided: int) -> None:
        self.files = MemoryStore()
        self.log = DecisionLog(MemoryStore())
        self.files.create("sources/0/0", b"v1\nbegan at 3")
        for batch in range(decided + 1):
            self.files.create(f"offsets/{batch}", offsets(batch))
            self.log.append(Decided(self.attempt(batch), (), plan=self.plans.read(batch)))
            if batch <= max(done, decided - 1):
                self.files.create(f"commits/{batch}", f"done {batch}".encode())
        for batch in range(done + 1, decided):
            self.files.delete(f"commits/{batch}")
        self.whole = self.content()

    def attempt(self, batch: int) -> Attempt:
        return Attempt(PIPELINE, batch, 0, Incarnation(1))

    @property
    def plans(self) -> SparkPlans:
        return SparkPlans(self.files)

    def content(self) -> dict[str, bytes]:
        return dict(self.files._files)

    def lose(self, *paths: str) -> None:
        for path in paths:
            self.files.delete(path)

    def start(self, under_way: int | None = None, marks: Callable[[int, Journal], str] = lambda _, __: "") -> None:
        restore_plans(self.log, self.plans, self.plans.next_batch(), marks, under_way)

    def refused(self, kind: type[SemelError], under_way: int | None = None) -> list[str]:
        before = self.content()
        with pytest.raises(kind) as caught:
            self.start(under_way)
        assert self.content() == before
        return str(caught.value).splitlines()


# Where Spark goes on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("done", "decided", "first"), [(-1, -1, 0), (4, 4, 5), (4, 5, 5), (-1, 0, 0), (2, 6, 6)])
def test_spark_goes_on_behind_what_is_done_or_with_the_newest_that_is_decided(
    done: int, decided: int, first: int
) -> None:
    scene = Scene(done, decided)
    assert first_to_run(scene.log, scene.plans.next_batch()) == first


def test_a_closed_slot_decides_nothing() -> None:
    scene = Scene(done=4, decided=4)
    scene.log.append(Aborted(scene.attempt(5)))
    assert first_to_run(scene.log, 5) == 5


def test_a_copy_that_is_older_than_what_the_log_still_knows_is_refused() -> None:
    scene = Scene(done=1, decided=6)
    scene.log.prune(before_batch=4)
    with pytest.raises(CheckpointRolledBack) as caught:
        first_to_run(scene.log, 2)
    what, data_now, remedy = str(caught.value).splitlines()
    assert "knows batch 6 and not batch 2, and the checkpoint knows batches only up to 1" in what
    assert data_now == "  the data now: every batch that was decided is visible once; this start wrote nothing"
    assert remedy.startswith("  what to do: Restore the newest checkpoint folder.")


# What is put back -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_says_what_was_decided_is_left_alone() -> None:
    for scene in (Scene(-1, -1), Scene(4, 4), Scene(4, 5), Scene(-1, 0)):
        scene.start()
        scene.start(under_way=scene.plans.next_batch())
        assert scene.content() == scene.whole


@pytest.mark.parametrize("lost", [["offsets/5"], ["commits/4"], ["offsets/5", "commits/4"]])
def test_what_is_missing_of_a_decided_batch_is_as_it_was_before_spark_looks(lost: list[str]) -> None:
    scene = Scene(done=4, decided=5)
    scene.lose(*lost)
    scene.start()
    assert scene.content() == scene.whole


def test_where_the_source_began_is_put_back_with_the_first_batch() -> None:
    scene = Scene(done=-1, decided=0)
    scene.lose("sources/0/0", "offsets/0")
    scene.start()
    assert scene.content() == scene.whole


def test_an_older_copy_gets_back_every_batch_that_was_decided_since() -> None:
    scene = Scene(done=6, decided=7)
    scene.lose("commits/3", "offsets/4", "commits/4", "offsets/5", "commits/5", "offsets/6", "commits/6", "offsets/7")
    scene.start()
    assert scene.content() == scene.whole
    assert scene.plans.next_batch() == 7


def test_the_offsets_of_the_last_two_batches_that_are_done_are_put_back_too() -> None:
    scene = Scene(done=6, decided=6)
    scene.log.prune(before_batch=5)
    scene.lose("offsets/4", "offsets/5", "offsets/6", "commits/5")
    scene.start()
    # Spark looks no further back, and of a batch that is done nobody asks what was done before it.
    assert set(scene.whole) - set(scene.content()) == {"offsets/4", "commits/5"}


def test_no_plan_is_left_out_behind_those_that_are_there() -> None:
    """Found by the simulation, seed 23348: a start died between two of them, and Spark missed the one before."""
    scene = Scene(done=6, decided=7)
    lost = [f"offsets/{batch}" for batch in range(3, 8)]
    scene.lose(*lost)
    written = []

    class Folder(MemoryStore):
        def replace(self, path: str, content: bytes) -> None:
            written.append(path)
            super().replace(path, content)

    folder = Folder()
    folder._files = scene.files._files
    scene.files = folder
    scene.start()
    assert scene.content() == scene.whole
    assert written == lost


def test_another_plan_that_nobody_has_used_is_overwritten(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(done=4, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    scene.start()
    assert scene.content() == scene.whole
    assert caplog.messages == [
        "Batch 5 is decided, and its plan said something else than was decided: offsets/5 put back."
    ]


def test_the_offsets_are_written_last_because_spark_takes_the_batch_for_planned_then() -> None:
    scene = Scene(done=-1, decided=0)
    scene.lose("sources/0/0", "offsets/0")
    written = settle_plan(scene.plans, 0, scene.log.journal(0), 0, UNASKED)
    assert written == ["sources/0/0", "offsets/0"]


def test_offsets_that_spark_has_purged_are_left_alone() -> None:
    """With `minBatchesToRetain` of one it keeps those of the newest planned batch and of the one before."""
    scene = Scene(done=4, decided=4)
    scene.files.create("offsets/5", offsets(5))
    purged = [f"offsets/{batch}" for batch in range(4)]
    scene.lose(*purged)
    for under_way in (None, 5):
        scene.start(under_way)
        assert set(purged).isdisjoint(scene.content())


# Lists of files -------------------------------------------------------------------------------------------------------


class ListsScene(Scene):
    """Batches that read one new file each; batch 4 found none. The tenth list holds all before it."""

    def __init__(self, done: int, decided: int) -> None:
        self.files, self.log = MemoryStore(), DecisionLog(MemoryStore())
        newest = -1
        for batch in range(decided + 1):
            if batch != 4:
                newest += 1
                name = f"{newest}.compact" if newest == 9 else str(newest)
                self.files.create(f"sources/0/{name}", f'v1\n{{"path":"{newest}.json"}}'.encode())
            self.files.create(f"offsets/{batch}", f'v1\n{{}}\n{{"logOffset":{newest}}}'.encode())
            self.log.append(Decided(self.attempt(batch), (), plan=self.plans.read(batch)))
            if batch <= done:
                self.files.create(f"commits/{batch}", b"done")
        self.whole = self.content()


@pytest.mark.parametrize("lost", [["sources/0/5"], ["sources/0/3", "sources/0/4", "sources/0/5"], ["sources/0/0"]])
def test_lists_of_batches_that_are_over_are_put_back(lost: list[str]) -> None:
    """A copy may have an older `sources/` than `offsets/`; Spark reads all lists, or says that one does not exist."""
    scene = ListsScene(done=6, decided=6)
    scene.lose(*lost)
    scene.start()
    assert scene.content() == scene.whole


def test_a_list_that_holds_those_before_it_is_put_back_in_their_place() -> None:
    scene = ListsScene(done=11, decided=11)
    scene.lose(*(f"sources/0/{n}" for n in range(9)), "sources/0/10")
    scene.start()
    assert set(scene.whole) - set(scene.content()) == {f"sources/0/{n}" for n in range(9)}
    scene.lose("sources/0/9.compact")
    scene.start()
    assert set(scene.whole) - set(scene.content()) == {f"sources/0/{n}" for n in range(9)}


def test_a_list_that_no_decision_has_is_refused_by_name() -> None:
    scene = ListsScene(done=6, decided=6)
    scene.log.prune(before_batch=3)
    scene.lose("sources/0/2", "sources/0/5")
    with pytest.raises(PlanChanged) as caught:
        scene.start()
    what, data_now, remedy = str(caught.value).splitlines()
    assert what == "Of the lists of files that were read sources/0/2 are missing, and no decision has them."
    assert data_now.startswith("  the data now: every batch that was decided is visible once")
    assert remedy == "  what to do: Restore the folder sources from a copy of the checkpoint, then start again."


def test_lists_that_were_made_behind_another_one_are_dropped() -> None:
    """Spark would take files for read that no batch has, or read some again that the decided list has, too."""
    scene = ListsScene(done=3, decided=3)
    scene.files.replace("offsets/3", b'v1\n{"anew":1}\n{"logOffset":3}')
    scene.files.replace("sources/0/3", b'v1\n{"path":"4.json"}')
    scene.files.create("sources/0/4", b'v1\n{"path":"3.json"}')
    scene.files.create("offsets/4", b'v1\n{"anew":1}\n{"logOffset":4}')
    scene.start()
    assert scene.content() == scene.whole


def test_a_plan_stays_with_its_list_where_only_the_list_before_it_was_lost() -> None:
    scene = ListsScene(done=3, decided=3)
    behind = {"sources/0/4": b'v1\n{"path":"4.json"}', "offsets/4": b'v1\n{}\n{"logOffset":4}'}
    for path, content in behind.items():
        scene.files.create(path, content)
    scene.lose("sources/0/3", "commits/3")
    scene.start()
    assert set(scene.content()) == set(scene.whole) - {"commits/3"} | set(behind)


def test_where_spark_has_the_batch_in_hand_a_plan_behind_it_goes_with_its_list() -> None:
    scene = ListsScene(done=2, decided=3)
    scene.files.replace("sources/0/3", b'v1\n{"path":"4.json"}')
    scene.files.create("sources/0/4", b'v1\n{"path":"3.json"}')
    scene.files.create("offsets/4", b'v1\n{}\n{"logOffset":4}')
    seen = Seen(lambda _, __: "", is_under_way=True, journals={3: scene.log.journal(3)})
    assert settle_plan(scene.plans, 3, scene.log.journal(3), 3, seen) == ["sources/0/3"]
    assert scene.content() == scene.whole


def test_a_list_that_holds_those_before_it_is_not_dropped_where_they_are_gone() -> None:
    scene = ListsScene(done=9, decided=9)
    assert "sources/0/8" in scene.whole
    scene.log.prune(before_batch=9)
    scene.lose(*(f"sources/0/{number}" for number in range(8)))
    scene.files.replace("offsets/9", b'v1\n{"anew":1}\n{"logOffset":8}')
    scene.files.replace("sources/0/8", b'v1\n{"path":"9.json"}')
    scene.files.create("sources/0/9.compact", b'v1\n{"path":"all.json"}')
    before = scene.content()
    with pytest.raises(PlanChanged) as caught:
        scene.start(under_way=10)
    assert scene.content() == before
    what, _, remedy = str(caught.value).splitlines()
    assert what.startswith(
        "Batch 9 was decided for other files than the checkpoint says. sources/0/9.compact must go, and"
    )
    assert remedy == "  what to do: Restore the folder sources from a copy of the checkpoint, then start again."


# When Spark has the rows already --------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [None, offsets(5, end=999)])
def test_with_the_rows_of_another_plan_in_its_hands_the_query_must_start_again(other: bytes | None) -> None:
    scene = Scene(done=4, decided=5)
    scene.lose("offsets/5")
    if other is not None:
        scene.files.create("offsets/5", other)
    with pytest.raises(PlanRestored) as caught:
        scene.start(under_way=5)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what == "Batch 5 is decided, and Spark had planned it over other rows. Put back as decided: offsets/5."
    assert data_now == "  the data now: this start wrote no rows; the checkpoint says again what was decided"
    assert remedy.startswith("  what to do: Start the pipeline again")
    assert scene.content() == scene.whole
    scene.start(under_way=5)


def test_a_commit_that_is_missing_is_not_told_as_other_rows() -> None:
    scene = Scene(done=4, decided=5)
    scene.lose("commits/4")
    with pytest.raises(PlanRestored) as caught:
        scene.start(under_way=5)
    assert caught.value.what == "Batch 5 is decided, and the checkpoint had lost commits/4, which is put back."
    assert scene.content() == scene.whole


def test_a_query_that_began_with_a_batch_behind_the_newest_decision_must_start_again() -> None:
    scene = Scene(done=4, decided=5)
    with pytest.raises(PlanRestored, match="Another start has put back what was decided"):
        scene.start(under_way=4)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [None, 5])
def test_another_plan_from_which_spark_has_gone_on_is_refused(under_way: int | None) -> None:
    scene = Scene(done=5, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    scene.files.create("offsets/6", offsets(6, end=1010))
    scene.files.create("commits/6", b"done")
    what, data_now, remedy = scene.refused(PlanChanged, under_way)
    assert what == (
        "Batch 5 was decided for other rows than the checkpoint says, and somebody has gone on from there "
        '(commits/6 is there). Decided: {"orders":{"0":60}}; planned now: {"orders":{"0":999}}; '
        "not as decided: offsets/5."
    )
    assert data_now.endswith("rows between the two plans may be in no sink")
    assert remedy.startswith("  what to do: Restore the checkpoint folder from a copy of one moment.")


def test_a_batch_that_was_decided_behind_another_plan_is_refused() -> None:
    """By a driver that compared none: its rows begin where the other plan ends."""
    scene = Scene(done=4, decided=5)
    scene.files.replace("offsets/4", offsets(4, end=999))
    assert "(offsets/5 is there)" in scene.refused(PlanChanged)[0]


def test_another_plan_behind_which_a_batch_was_begun_at_most_once_is_refused() -> None:
    scene = Scene(done=5, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    scene.files.create("offsets/6", offsets(6, end=1010))
    scene.log.append(Started(scene.attempt(6)))
    assert "(batch 6 was begun at-most-once)" in scene.refused(PlanChanged)[0]


def test_a_batch_that_an_older_release_decided_behind_another_plan_is_refused() -> None:
    """Its decision does not say for which plan it was taken."""
    scene = Scene(done=5, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    scene.files.create("offsets/6", offsets(6, end=1010))
    scene.log.append(Decided(scene.attempt(6), ()))
    assert "(offsets/6 is there)" in scene.refused(PlanChanged)[0]


# A batch whose end is there and that Spark has planned anew -----------------------------------------------------------


@pytest.mark.parametrize("under_way", [None, 6])
@pytest.mark.parametrize("is_next_planned", [True, False])
def test_a_batch_that_is_done_and_was_planned_anew_is_as_decided_again(
    under_way: int | None, is_next_planned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy had its end and not its plan. What Spark has planned behind the new plan begins elsewhere."""
    scene = Scene(done=5, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    if is_next_planned:
        scene.files.create("offsets/6", offsets(6, end=1010))
    if under_way is None:
        scene.start()
    else:
        with pytest.raises(PlanRestored, match="Put back as decided: offsets/5"):
            scene.start(under_way)
    assert scene.content() == scene.whole
    dropped = "Planned behind another plan of batch 5, and not decided: offsets/6 dropped."
    assert (dropped in caplog.messages) is is_next_planned


def test_a_plan_behind_one_that_is_missing_is_dropped() -> None:
    """It was made behind a plan that is gone; a plan of the next batch alone says nothing of where it begins."""
    scene = Scene(done=5, decided=5)
    scene.lose("offsets/5")
    scene.files.create("offsets/6", offsets(6, end=55))
    scene.start()
    assert scene.content() == scene.whole


def test_all_plans_behind_another_one_are_put_back_or_dropped() -> None:
    scene = Scene(done=5, decided=6)
    for batch in (5, 6):
        scene.files.replace(f"offsets/{batch}", offsets(batch, end=900 + batch))
    scene.files.create("offsets/7", offsets(7, end=999))
    scene.start()
    assert scene.content() == scene.whole


def test_what_another_start_puts_back_meanwhile_is_not_refused() -> None:
    """Found by the simulation, seed 87803: a driver slept between two of its looks."""
    scene = Scene(done=0, decided=1)
    wrong = {"sources/0/0": b"v1\nbegan at 9", "offsets/0": offsets(0, end=999)}
    looks = []

    class Folder(MemoryStore):
        def read(self, path: str) -> bytes | None:
            looks.append(path)
            return wrong[path] if path in wrong and looks.count(path) == 1 else super().read(path)

    folder = Folder()
    folder._files = scene.files._files
    scene.files = folder
    scene.start()
    assert looks.count("offsets/0") > 1
    assert scene.content() == scene.whole


def test_another_plan_of_which_a_sink_shows_rows_is_refused() -> None:
    scene = Scene(done=4, decided=5)
    scene.files.replace("offsets/5", offsets(5, end=999))
    with pytest.raises(PlanChanged, match="sink orders shows attempt 3"):
        scene.start(marks=lambda batch, _: "sink orders shows attempt 3" if batch == 5 else "")


def test_sinks_are_not_asked_while_nothing_is_different() -> None:
    scene = Scene(done=4, decided=5)
    scene.lose("offsets/5")
    scene.start(marks=lambda _, __: pytest.fail("a sink was asked"))
    assert scene.content() == scene.whole


def test_what_was_too_large_to_be_carried_is_refused_by_name() -> None:
    scene = Scene(done=4, decided=4)
    large = PlannedFile("sources/0/5", "sha256:of many files")
    scene.log.append(Decided(scene.attempt(5), (), plan=Plan((large,))))
    what, data_now, remedy = scene.refused(PlanChanged)
    assert what.startswith("Batch 5 is decided, and of its plan sources/0/5 cannot be restored: it was too large")
    assert data_now == "  the data now: the batch is decided; this start wrote nothing"
    assert remedy == "  what to do: Restore sources/0/5 from a copy of the checkpoint, then start again."


def test_a_decision_of_an_older_release_is_forwarded_with_its_plan_and_refused_without() -> None:
    scene = Scene(done=4, decided=4)
    scene.log.append(Decided(scene.attempt(5), ()))
    what, _, remedy = scene.refused(PlanChanged)
    assert what.startswith("Batch 5 was decided by an older semel, which did not record its plan, and offsets/5 is")
    assert remedy == "  what to do: Restore offsets/5 from a copy of the checkpoint, then start again."
    scene.files.create("offsets/5", offsets(5, end=999))
    scene.start()
