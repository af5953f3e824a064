"""What a decision carries of Spark's plan of a batch."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from semel.decisions.files import FileStore
from semel.decisions.log import DecisionLog
from semel.decisions.memory import MemoryStore
from semel.durable import checksum_of
from semel.errors import CheckpointUnusable
from semel.ids import Attempt, Incarnation, PipelineId
from semel.protocol.events import Decided
from semel.protocol.plans import PlannedFile, digest_of
from semel.runtime import plans as plans_module
from semel.runtime.offsets import is_of_kafka, is_same_offset, logs_planned
from semel.runtime.plans import SparkPlans
from semel.runtime.restore import restore_plans


def offsets(*sources: str) -> bytes:
    return "\n".join(["v1", '{"batchWatermarkMs":0}', *sources]).encode()


def lists(number: int) -> str:
    """An offset of the file source: the number of its newest list."""
    return json.dumps({"logOffset": number})


KAFKA = '{"orders":{"0":20,"1":31}}'


def checkpoint(files: dict[str, bytes]) -> SparkPlans:
    store = MemoryStore()
    for path, content in files.items():
        store.create(path, content)
    return SparkPlans(store)


# Logs of sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "before", "wanted"),
    [
        pytest.param(lists(4), lists(2), [["3", "4"]], id="files came in two lists"),
        pytest.param(lists(2), lists(2), [[]], id="no files came"),
        pytest.param(lists(1), None, [["0", "1"]], id="the first batch"),
        pytest.param(lists(1), "-", [["0", "1"]], id="nothing had come before"),
        pytest.param(KAFKA, None, [None], id="the first batch of Kafka: where it began"),
        pytest.param(KAFKA, "-", [None], id="Kafka had brought nothing before"),
        pytest.param(KAFKA, KAFKA, [()], id="Kafka keeps nothing of later batches"),
        pytest.param("-", None, [None], id="a source that has brought nothing yet"),
        pytest.param("-", "-", [None], id="a source that has still brought nothing"),
        pytest.param("17", "16", [()], id="a number, as the rate source has"),
        pytest.param('{"logOffset":3,"more":1}', lists(2), [()], id="an unknown form"),
        pytest.param('{"logOffset":"3"}', "{", [()], id="neither a number nor JSON"),
    ],
)
def test_a_batch_rests_on_what_its_source_logged_since_the_batch_before(
    now: str, before: str | None, wanted: list[Sequence[str] | None]
) -> None:
    assert logs_planned(offsets(now), None if before is None else offsets(before)) == wanted


def test_each_source_is_looked_at_for_itself_and_one_that_is_new_begins() -> None:
    now = offsets(lists(3), KAFKA, lists(0))
    assert logs_planned(now, offsets(lists(2), KAFKA)) == [["3"], (), ["0"]]


def test_a_file_that_is_no_plan_names_no_log() -> None:
    assert logs_planned(b"", None) == []
    assert logs_planned(b"\xff\xfe", b"\xff") == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (KAFKA, KAFKA, True),
        (KAFKA, '{"orders": {"1": 31, "0": 20}}', True),
        (KAFKA, '{"orders":{"0":20,"1":32}}', False),
        ("-", "-", True),
        ("-", "17", False),
        ("17", "18", False),
    ],
)
def test_offsets_are_the_same_when_they_say_the_same(one: str, other: str, same: bool) -> None:
    assert is_same_offset(one, other) is same


def test_offsets_of_kafka_have_topics_with_partitions() -> None:
    assert is_of_kafka(KAFKA)
    assert is_of_kafka('{"logOffset":{"0":5}}')
    assert [o for o in (lists(4), "17", "-", "{}", "[1]", "{") if is_of_kafka(o)] == []


# What is read ---------------------------------------------------------------------------------------------------------


def test_the_plan_of_the_first_batch_is_its_offsets_and_where_the_source_began() -> None:
    plan = checkpoint({"offsets/0": offsets(KAFKA), "sources/0/0": b"v1\nbegan"}).read(0)
    assert {file.path: file.content for file in plan.files} == {
        "sources/0/0": "v1\nbegan",
        "offsets/0": offsets(KAFKA).decode(),
    }
    assert plan.before == ()


ICEBERG = '{"version":1,"snapshot_id":5,"position":0,"scan_all_files":false}'


def test_a_source_may_keep_where_it_began_in_folders_of_its_own() -> None:
    """Iceberg's does, and without it the first batch may begin elsewhere."""
    kept = {"sources/0/offsets/0": b'{"snapshot_id":4}', "sources/0/deep/er/0": b"x", "sources/0/1": b"y"}
    plan = checkpoint({"offsets/0": offsets(ICEBERG), **kept}).read(0)
    assert {file.path: file.content for file in plan.files} == {
        **{path: content.decode() for path, content in kept.items()},
        "offsets/0": offsets(ICEBERG).decode(),
    }


def test_a_source_that_keeps_a_tree_without_end_is_refused() -> None:
    path = f"sources/0/{'x/' * 20}0"
    with pytest.raises(CheckpointUnusable, match="A source keeps folders more than 8 deep in memory: sources/0/x/x"):
        checkpoint({"offsets/0": offsets(ICEBERG), path: b"x"}).read(0)


@pytest.mark.parametrize("found", [None, b'{"snapshot_id":9}'])
def test_where_such_a_source_began_is_put_back_until_its_first_batch_is_done(found: bytes | None) -> None:
    path = "sources/0/offsets/0"
    log, whole = DecisionLog(MemoryStore()), checkpoint({"offsets/0": offsets(ICEBERG), path: b'{"snapshot_id":4}'})
    attempt = Attempt(PipelineId("11111111-2222-3333-4444-555555555555"), 0, 0, Incarnation(1))
    log.append(Decided(attempt, (), plan=whole.read(0)))
    plans = checkpoint({"offsets/0": offsets(ICEBERG)} | ({} if found is None else {path: found}))
    restore_plans(log, plans, plans.next_batch(), lambda _, __: "")
    assert plans.text(path) == b'{"snapshot_id":4}'


def test_the_plan_of_a_later_batch_is_its_offsets_its_lists_of_files_and_that_the_batch_before_is_done() -> None:
    files = {f"sources/0/{n}": f"list {n}".encode() for n in range(9)}
    files |= {"sources/0/9.compact": b"lists 0 to 9", "sources/0/10": b"list 10", "commits/6": b"done"}
    files |= {"offsets/6": offsets(lists(7)), "offsets/7": offsets(lists(9))}
    plan = checkpoint(files).read(7)
    assert [file.path for file in plan.files] == ["sources/0/8", "sources/0/9.compact", "offsets/7"]
    assert [(file.path, file.content) for file in plan.before] == [("commits/6", "done")]
    assert all(file.digest == digest_of((file.content or "").encode()) for file in plan.files)


def test_a_batch_that_runs_and_has_no_plan_is_told_in_three_lines() -> None:
    with pytest.raises(CheckpointUnusable) as caught:
        checkpoint({}).read(3)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what == "Spark runs batch 3, and the file offsets/3 of its plan is not in memory."
    assert data_now.startswith("  the data now: ")
    assert remedy.startswith("  what to do: Let nobody else write or clean the checkpoint folder")


def test_files_are_carried_as_long_as_there_is_room_and_of_others_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "CARRIED_BYTES_MAX", 100)
    large, small = b"x" * 90, offsets("17")
    plan = checkpoint({"offsets/0": small, "sources/0/0": large}).read(0)
    assert {file.path: file.content is not None for file in plan.files} == {"sources/0/0": False, "offsets/0": True}
    assert [file.digest for file in plan.files] == [digest_of(large), digest_of(small)]


def test_exactly_four_mebibytes_are_carried_and_one_byte_more_is_not() -> None:
    limit = 4 * 1024 * 1024
    room = limit - len(offsets(KAFKA))
    for size, carried in ((room, True), (room + 1, False)):
        plan = checkpoint({"offsets/0": offsets(KAFKA), "sources/0/0": b"x" * size}).read(0)
        assert [file.content is not None for file in plan.files] == [carried, True]


def test_bytes_that_are_no_text_are_known_by_their_digest() -> None:
    plan = checkpoint({"offsets/0": offsets("17"), "sources/0/0": b"\xff\x00"}).read(0)
    assert plan.files[0] == PlannedFile("sources/0/0", digest_of(b"\xff\x00"))
    assert plan.files[1].content == offsets("17").decode()


# What is written and looked at ----------------------------------------------------------------------------------------


def test_what_is_put_back_is_as_it_was_byte_for_byte() -> None:
    content = offsets('{"Bücher":{"0":1}}') + b"\n"
    plan = checkpoint({"offsets/0": content}).read(0)
    empty = checkpoint({"offsets/0": b"another"})
    empty.put_back(plan.files[0])
    assert empty.text("offsets/0") == content
    with pytest.raises(ValueError, match="offsets/0 was not carried"):
        empty.put_back(PlannedFile("offsets/0", "sha256:"))


def test_the_next_batch_is_the_newest_that_is_planned_or_the_one_behind_the_newest_that_is_done() -> None:
    """Spark plans none before the one before is done, whatever `commits` has lost."""
    assert checkpoint({}).next_batch() == 0
    assert checkpoint({"commits/2": b"", "offsets/4": b""}).next_batch() == 4
    assert checkpoint({"commits/4": b"", "offsets/4": b""}).next_batch() == 5
    found = checkpoint({"commits/9": b"", "commits/10": b"", "commits/.11.tmp": b"", "offsets/11": b""})
    assert found.next_batch() == 11
    assert (found.has_planned(11), found.has_planned(12)) == (True, False)


@pytest.mark.parametrize("act", ["clean", "drop_state"])
def test_what_cannot_be_cleaned_is_told_in_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "offsets/1")

    for name in ("drop_torn", "drop_undecided_state"):
        monkeypatch.setattr(plans_module, name, fail)
    plans = SparkPlans(FileStore(tmp_path))
    with pytest.raises(CheckpointUnusable) as caught:
        plans.clean(lambda _: False) if act == "clean" else plans.drop_state(1, may_be_in_use=False)
    what, data_now, remedy = str(caught.value).splitlines()
    assert what.startswith(f"What the last run left half done in the checkpoint {tmp_path} cannot be removed: ")
    assert "offsets/1" in what
    assert data_now.startswith("  the data now: every batch that was decided is visible once, or will be")
    assert remedy.startswith("  what to do: Let this user read, write and list all of the checkpoint folder")


def with_checksum(root: Path, path: str, content: bytes, of: bytes) -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    checksum = checksum_of(root / path)
    checksum.write_bytes(b"crc\0" + (512).to_bytes(4, "big") + zlib.crc32(of).to_bytes(4, "big"))
    return checksum


def test_a_checksum_of_another_content_goes_where_the_file_is_as_decided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = offsets(KAFKA)
    decided = PlannedFile("offsets/1", digest_of(content), content.decode())
    plans = SparkPlans(FileStore(tmp_path))
    for found, of, stays in ((content, content, True), (b"another", content, True), (content, b"another", False)):
        checksum = with_checksum(tmp_path, "offsets/1", found, of)
        plans.drop_wrong_checksums([decided, PlannedFile("commits/0", "sha256:", "not there")])
        assert checksum.exists() is stays
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The file offsets/1 is as it was decided")
    assert (tmp_path / "offsets" / "1").read_bytes() == content


def test_a_start_lets_spark_read_a_decided_plan_beside_which_an_old_checksum_lies(tmp_path: Path) -> None:
    """A power cut in the middle of putting it back has left both."""
    content = offsets(KAFKA)
    checksum = with_checksum(tmp_path, "offsets/0", content, of=content)
    log, plans = DecisionLog(FileStore(tmp_path / "semel")), SparkPlans(FileStore(tmp_path))
    attempt = Attempt(PipelineId("11111111-2222-3333-4444-555555555555"), 0, 0, Incarnation(1))
    log.append(Decided(attempt, (), plan=plans.read(0)))
    with_checksum(tmp_path, "offsets/0", content, of=b"another")
    restore_plans(log, plans, plans.next_batch(), lambda _, __: "")
    assert not checksum.exists()


# What is dropped ------------------------------------------------------------------------------------------------------


def test_lists_behind_an_offset_are_those_with_a_higher_number() -> None:
    names = ("7", "8", "9.compact", "10", ".9.compact.crc", "metadata")
    found = checkpoint({f"sources/0/{name}": b"v1" for name in names} | {"sources/1/0": b"v1\nbegan"})
    assert sorted(found.lists_behind(offsets(lists(8), KAFKA))) == ["sources/0/10", "sources/0/9.compact"]
    assert found.lists_behind(offsets(lists(10), KAFKA)) == []


def test_of_a_source_that_had_brought_nothing_all_lists_of_files_are_behind() -> None:
    file = b'v1\n{"path":"a.json","timestamp":1,"batchId":0}'
    found = checkpoint({"sources/0/0": file, "sources/1/0": b"v1\nbegan"})
    assert found.lists_behind(offsets("-", "-")) == ["sources/0/0"]


def test_a_list_that_must_go_counts_as_missing() -> None:
    found = checkpoint({f"sources/0/{name}": b"v1" for name in ("8", "9.compact", "10")})
    assert found.missing_lists(offsets(lists(10))) == []
    missing = found.missing_lists(offsets(lists(8)), without=["sources/0/9.compact", "sources/0/10"])
    assert missing == [f"sources/0/{number}" for number in range(8)]


def test_a_plan_is_dropped_with_its_checksum(tmp_path: Path) -> None:
    checksum = with_checksum(tmp_path, "offsets/1", offsets(KAFKA), of=offsets(KAFKA))
    plans = SparkPlans(FileStore(tmp_path))
    for _ in range(2):
        plans.drop("offsets/1")
        assert not checksum.exists()
        assert not plans.has_planned(1)
    found = checkpoint({"offsets/1": offsets(KAFKA)})
    found.drop("offsets/1")
    assert not found.has_planned(1)
