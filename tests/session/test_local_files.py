"""Checkpoint files by our own class are Hadoop's to the byte, and their names are given in one step."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from semel.decisions.hadoop import hadoop_conf
from semel.durable import checksum_of
from semel.errors import SemelError
from semel.session import local_files
from semel.session.local_files import (
    CLASS,
    CLASS_PATH,
    HADOOPS_OWN,
    MASTER,
    SETTING,
    VARIABLE,
    WITHOUT_IT,
    local_files_jar,
    with_local_files,
)
from semel.verify.power.disk import PowerDisk, require_fuse
from tests.session.checkpoint_files import WAYS, CheckpointFiles, checkpoint_files, class_behind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Make = Callable[..., CheckpointFiles]
ROUNDS = 60
DRIVERS = 4


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> CheckpointFiles:
    return checkpoint_files(spark, f"file:{tmp_path}", "ours")


def written_with(files: CheckpointFiles) -> None:
    """One of everything that Spark does to a checkpoint."""
    files.mkdirs("offsets")
    files.mkdirs("state/0/1")
    files.write("offsets/0", b"v1\nplan 0")
    files.write("offsets/1", b"x" * 1000)
    files.write("empty", b"")
    files.write("state/0/1/1.delta", b"old" * 500, overwrite=True)
    files.write("state/0/1/1.delta", b"new", overwrite=True)
    with pytest.raises(FileNotFoundError):
        files.write("no folder yet/2", b"")
    with pytest.raises(FileExistsError):
        files.write("offsets/0", b"somebody else's")
    files.begin("offsets/2", b"not to be").cancel()
    files.write("gone", b"")
    files.manager.delete(files.path("gone"))


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Names, permissions and contents, checksums included. Temporary names differ from run to run."""
    return {
        ".tmp" if path.name.endswith((".tmp", ".tmp.crc")) else str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.spark35
@pytest.mark.parametrize("umask", ["022", "077", "002"])
def test_names_contents_checksums_and_permissions_are_those_of_hadoop(
    spark: SparkSession, tmp_path: Path, umask: str
) -> None:
    """Hadoop goes by a umask of its own, and not by that of the process."""
    for way in WAYS:
        (tmp_path / way).mkdir()
        written_with(checkpoint_files(spark, f"file:{tmp_path / way}", way, **{"fs.permissions.umask-mode": umask}))
    ours, hadoops = (tree(tmp_path / way) for way in WAYS)
    assert ours == hadoops
    assert (tmp_path / "ours" / "offsets" / ".0.crc").is_file()
    assert stat.S_IMODE(ours["offsets/0"][0]) == 0o666 & ~int(umask, 8)
    assert stat.S_IMODE(ours["state/0"][0]) == 0o777 & ~int(umask, 8)


@pytest.mark.parametrize("place", ["plain", "with blanks", "ünï-çødé €", "a:b", "per%20cent", "up/../here", "linked"])
def test_what_one_way_has_written_the_other_reads_and_goes_on_with(
    spark: SparkSession, tmp_path: Path, place: str
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "up").mkdir()
    ours, hadoops = (checkpoint_files(spark, f"{tmp_path}/{place}", way) for way in WAYS)
    ours.mkdirs("offsets")
    for number, (writer, reader) in enumerate([(ours, hadoops), (hadoops, ours)] * 2):
        writer.write(f"offsets/{number}", f"plan {number}".encode())
        writer.write("state", f"{number}".encode(), overwrite=True)
        assert reader.read(f"offsets/{number}") == f"plan {number}".encode()
        assert reader.read("state") == f"{number}".encode()
        with pytest.raises(FileExistsError):
            reader.write(f"offsets/{number}", b"somebody else's")
        # What has lost a race leaves its temporary file behind, which both say.
        names = ours.names("offsets")
        assert names == hadoops.names("offsets")
        assert [name for name in names if not name.endswith(".tmp")] == list(map(str, range(number + 1)))
    written = tmp_path / os.path.normpath(place) / "offsets" / "3"
    assert written.read_bytes() == b"plan 3"


def test_of_drivers_that_race_for_a_name_one_gets_it_and_the_file_is_whole(files: CheckpointFiles) -> None:
    """Hadoop looks and then renames: several are told that the name is theirs, and a file has another's checksum."""
    winners = []
    files.mkdirs("offsets")
    with ThreadPoolExecutor(DRIVERS) as pool:
        barrier = threading.Barrier(DRIVERS)

        def race(name: str, driver: int) -> int | None:
            stream = files.begin(name, f"plan of driver {driver}".encode() * (driver + 1))
            barrier.wait(60)
            with suppress(Exception):
                stream.close()
                return driver
            return None

        for n in range(ROUNDS):
            told = [pool.submit(race, f"offsets/{n}", driver) for driver in range(DRIVERS)]
            won = [driver for one in told if (driver := one.result(60)) is not None]
            assert len(won) == 1, f"round {n}: {won}"
            assert files.read(f"offsets/{n}") == f"plan of driver {won[0]}".encode() * (won[0] + 1)
            winners += won
    assert len(winners) == ROUNDS
    assert len(Counter(winners)) > 1, "nobody raced"


def test_a_file_that_is_replaced_is_there_all_the_time(files: CheckpointFiles, tmp_path: Path) -> None:
    """Hadoop removes it first, and whoever dies then has lost it."""
    files.write("1.delta", b"0", overwrite=True)
    seen: Counter[bool] = Counter()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen[(tmp_path / "1.delta").exists()] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for n in range(ROUNDS):
            files.write("1.delta", b"%d" % n, overwrite=True)
            assert files.read("1.delta") == b"%d" % n
    finally:
        over.set()
        watcher.join()
    assert seen[False] == 0
    assert seen[True] > ROUNDS


def test_the_checksum_of_a_file_that_is_lost_is_not_in_the_way(files: CheckpointFiles, tmp_path: Path) -> None:
    """With Hadoop's own code Spark takes another query to be at work, at every start."""
    files.write("7", b"lost in a power cut")
    (tmp_path / "7").unlink()
    assert checksum_of(tmp_path / "7").is_file()
    files.write("7", b"planned anew")
    assert files.read("7") == b"planned anew"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [9, 2000])
def test_what_contradicts_its_checksum_is_refused(spark: SparkSession, tmp_path: Path, way: str, length: int) -> None:
    files = checkpoint_files(spark, f"file:{tmp_path}", way)
    files.write("7", b"a" * length)
    assert files.read("7") == b"a" * length
    assert len(checksum_of(tmp_path / "7").read_bytes()) == 8 + 4 * -(-length // 512)
    (tmp_path / "7").write_bytes(b"b" * length)
    with pytest.raises(OSError, match="Checksum error"):
        files.read("7")
    files.write("7", b"replaced", overwrite=True)
    assert files.read("7") == b"replaced"


def test_what_is_not_there_cannot_get_a_name(files: CheckpointFiles, tmp_path: Path) -> None:
    files.write("7", b"there")
    for overwrite in (True, False):
        stream = files.begin("7" if overwrite else "8", b"x", overwrite=overwrite)
        for path in tmp_path.glob(".*.tmp"):
            path.unlink()
        with pytest.raises(Exception, match="FileNotFoundException"):
            stream.close()
    assert files.read("7") == b"there"
    assert checksum_of(tmp_path / "7").is_file()
    assert not (tmp_path / "8").exists()


def test_a_link_that_leads_nowhere_is_a_name_that_is_taken(files: CheckpointFiles, tmp_path: Path) -> None:
    (tmp_path / "7").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        files.write("7", b"plan")
    assert (tmp_path / "7").is_symlink()


def test_a_folder_of_a_group_stays_one(files: CheckpointFiles, tmp_path: Path) -> None:
    """A folder below it belongs to the group, too; `chmod` does not take that away."""
    tmp_path.chmod(0o2775)
    files.mkdirs("offsets")
    assert stat.S_IMODE((tmp_path / "offsets").stat().st_mode) == 0o2755


def test_a_folder_is_renamed_as_hadoop_does_it(spark: SparkSession, files: CheckpointFiles, tmp_path: Path) -> None:
    files.mkdirs("a")
    files.write("a/1", b"one")
    none = spark.sparkContext._gateway.new_array(files.jvm.org.apache.hadoop.fs.Options.Rename, 0)  # type: ignore[union-attr]
    files.manager.fc().rename(files.path("a"), files.path("b"), none)
    assert files.read("b/1") == b"one"
    assert not (tmp_path / "a").exists()


# On disks that do what a test needs ----------------------------------------------------------------------------------

NO_LINKS = """
import errno, sys
from semel.verify.power import mount

def refuse(self, target, source):
    raise OSError(errno.EPERM, source)

mount.Forgetful.link = refuse
mount.serve(sys.argv[1])
"""
#: Between the moment at which a driver has looked, and the one at which it gives the name.
ANOTHER_IS_QUICKER = """
import stat, sys
from semel.verify.power import mount

def first_by_another(tree, name):
    if not name.rpartition("/")[2].startswith("."):
        try:
            tree.find(name)
        except FileNotFoundError:
            tree.create(name, stat.S_IFREG | 0o644).write(b"of another driver", 0)

link, rename = mount.Forgetful.link, mount.Forgetful.rename

def link_later(self, target, source):
    first_by_another(self.tree, target)
    return link(self, target, source)

def rename_later(self, old, new, flags=0):
    first_by_another(self.tree, new)
    return rename(self, old, new, flags)

mount.Forgetful.link, mount.Forgetful.rename = link_later, rename_later
mount.serve(sys.argv[1])
"""


@pytest.fixture
def make_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk that this program serves, in place of the one that forgets."""
    require_fuse(may_install=True)
    begin = subprocess.Popen

    with ExitStack() as stack:

        def make(program: str) -> Path:
            def begin_ours(command: list[str], **settings: Any) -> Any:
                ours = "semel.verify.power.mount" in command
                return begin([sys.executable, "-c", program, command[-1]] if ours else command, **settings)

            with monkeypatch.context() as patched:
                patched.setattr("semel.verify.power.disk.subprocess.Popen", begin_ours)
                return stack.enter_context(PowerDisk(tmp_path / "disk")).folder

        yield make


def test_whoever_is_a_moment_quicker_keeps_the_name(spark: SparkSession, make_disk: Callable[[str], Path]) -> None:
    folder = make_disk(ANOTHER_IS_QUICKER)
    files = checkpoint_files(spark, f"file:{folder}", "ours")
    with pytest.raises(FileExistsError):
        files.write("7", b"of ours")
    assert files.read("7") == (folder / "7").read_bytes() == b"of another driver"


def test_hadoops_own_code_takes_the_name_from_whoever_was_quicker(
    spark: SparkSession, make_disk: Callable[[str], Path]
) -> None:
    """The test of the test, and why a checkpoint of two drivers is safer with ours. semel's log always links."""
    folder = make_disk(ANOTHER_IS_QUICKER)
    checkpoint_files(spark, f"file:{folder}", "hadoop").write("7", b"of ours")
    assert (folder / "7").read_bytes() == b"of ours"


def test_a_disk_without_hard_links_is_written_as_hadoop_does_it(
    spark: SparkSession, make_disk: Callable[[str], Path]
) -> None:
    folder = make_disk(NO_LINKS)
    (folder / "one").write_bytes(b"")
    with pytest.raises(PermissionError):
        os.link(folder / "one", folder / "two")
    files = checkpoint_files(spark, f"file:{folder}", "ours")
    files.write("7", b"plan")
    assert files.read("7") == b"plan"
    with pytest.raises(FileExistsError):
        files.write("7", b"another")
    assert files.read("7") == b"plan"


# What it does not touch ---------------------------------------------------------------------------------------------


def test_hdfs_is_written_by_its_own_classes_all_the_same(spark: SparkSession, hdfs_uri: str) -> None:
    """The manager is the one that renames atomically there, and the one that semel's log asks for."""
    files = checkpoint_files(spark, f"{hdfs_uri}/files", "ours")
    assert str(files.manager.getClass().getSimpleName()) == "FileContextBasedCheckpointFileManager"
    assert class_behind(files) == "org.apache.hadoop.fs.Hdfs"
    files.mkdirs("offsets")
    files.write("offsets/7", b"plan")
    with pytest.raises(FileExistsError):
        files.write("offsets/7", b"another")
    assert files.read("offsets/7") == b"plan"


def test_what_queries_read_and_write_goes_the_way_it_went(spark: SparkSession) -> None:
    files = checkpoint_files(spark, "file:/anywhere", "ours")
    assert class_behind(files) == CLASS
    found = files.path("").getFileSystem(hadoop_conf(spark))
    # Which of the two it is depends on Hive's jars.
    assert str(found.getClass().getSimpleName()) in ("LocalFileSystem", "ProxyLocalFileSystem")


# The settings -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own class path has the jar already."""
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("bare")
def test_a_local_session_gets_the_class_and_keeps_its_class_path() -> None:
    made = with_local_files({MASTER: "local[2]", CLASS_PATH: "/mine.jar"}, say=pytest.fail)
    assert made == {MASTER: "local[2]", SETTING: CLASS, CLASS_PATH: f"/mine.jar{os.pathsep}{local_files_jar()}"}
    assert with_local_files(made, say=pytest.fail) == made


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "spark://host:7077", "yarn", ""])
def test_executors_elsewhere_would_not_find_the_class(master: str) -> None:
    assert with_local_files({MASTER: master}, say=pytest.fail) == {MASTER: master}


def test_what_the_user_chose_stays() -> None:
    chosen = {MASTER: "local", SETTING: HADOOPS_OWN}
    assert with_local_files(chosen, say=pytest.fail) == chosen


def test_a_jar_that_a_distribution_brings_is_not_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(local_files_jar()))
    assert with_local_files({MASTER: "local"}, say=pytest.fail) == {MASTER: "local", SETTING: CLASS}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("missing", ["java", "compiler", "folder"])
def test_where_it_cannot_be_compiled_one_line_says_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if missing == "java":
        monkeypatch.setenv("JAVA_HOME", "/nowhere")
    elif missing == "compiler":
        monkeypatch.setattr(local_files, "COMPILER_JARS", ("no-such-*.jar",))
    else:
        (tmp_path / "semel").write_text("a file where the folder should be")
    said: list[str] = []
    assert with_local_files({MASTER: "local"}, say=said.append) == {MASTER: "local"}
    assert len(said) == 1
    assert said[0].startswith(WITHOUT_IT)
    assert "\n" not in said[0]
    assert len(said[0]) > len(WITHOUT_IT) + 10


def test_code_that_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local_files, "SOURCE", tmp_path / "LocalFiles.java")
    (tmp_path / "LocalFiles.java").write_text("package semel.session; public class LocalFiles { nonsense }")
    with pytest.raises(SemelError, match=r"LocalFiles.java cannot be compiled: .*nonsense|LocalFiles.java cannot be"):
        local_files_jar()
    assert list((tmp_path / "semel" / "jars").iterdir()) == []


def test_two_that_compile_at_once_find_one_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        made = set(pool.map(lambda _: local_files_jar(), range(2)))
    assert [path.read_bytes()[:2] for path in made] == [b"PK"]
    assert list((tmp_path / "semel" / "jars").iterdir()) == list(made)
