"""Jars by Maven coordinate, without Maven: the `ivy` jar inside PySpark is a program of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from semel.errors import SemelError
from semel.sources.kafka import connector

FETCH_TIMEOUT_S_MAX = 600
STAMP = ".complete"

#: Tells the user what is being done.
Say = Callable[[str], None]


def unavailable(what: str, remedy: str = "") -> SemelError:
    """The error for what this machine lacks."""
    return SemelError(
        what,
        data_now="nothing was started and no row was written",
        remedy=remedy or "Check that this machine reaches a Maven repository, then run the command again.",
    )


@dataclass(frozen=True)
class Coordinate:
    """What Maven calls `organisation:name:version`."""

    organisation: str
    name: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        parts = text.split(":")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"not a Maven coordinate: {text!r}: use organisation:name:version")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.organisation}:{self.name}:{self.version}"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.version}"


def fetch(coordinate: str, *, say: Say) -> list[Path]:
    """The jars of a coordinate with all its dependencies. A second call needs no network: they are kept."""
    wanted = Coordinate.parse(coordinate)
    folder = cache_folder() / wanted.folder
    if not (folder / STAMP).is_file():
        say(f"fetching {wanted} with its dependencies (once; at most {FETCH_TIMEOUT_S_MAX} s)")
        began = time.monotonic()
        _retrieve(wanted, folder)
        say(f"fetched {len(_jars(folder))} jars in {time.monotonic() - began:.0f} s into {folder}")
    return _jars(folder)


def connector_jars(*, say: Say) -> list[Path]:
    """What the installed PySpark lacks to read and write Kafka."""
    return jars_beside_spark(connector(), say=say)


def jars_beside_spark(coordinate: str, *, say: Say) -> list[Path]:
    """The jars of a coordinate that the installed PySpark does not have itself."""
    there = {_artifact(jar) for jar in _jars(pyspark_jars())}
    return [jar for jar in fetch(coordinate, say=say) if _artifact(jar) not in there]


def _artifact(jar: Path) -> str:
    """The name of a jar without its version."""
    return re.sub(r"-\d[^-]*$", "", jar.stem)


def cache_folder() -> Path:
    """Where jars are kept between runs, by the rules of the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "semel" / "jars"


def java() -> str:
    """The program that runs jars."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if found is None:
        raise unavailable("There is no Java on this machine.", remedy="Install Java 17, or set JAVA_HOME.")
    return found


def pyspark_jars() -> Path:
    """The folder of jars inside the PySpark that is installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise unavailable("PySpark is not installed.", remedy="Install it: pip install 'semel[spark]'")
    return Path(spec.submodule_search_locations[0]) / "jars"


def _jars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jar"))


def _retrieve(wanted: Coordinate, folder: Path) -> None:
    """Fetch next to the final folder and rename: a run that is cut short leaves nothing that looks complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as text:
        working = Path(text)
        _run_ivy(wanted, working)
        if not any(jar.name.startswith(wanted.name) for jar in _jars(working / "jars")):
            raise unavailable(f"Could not fetch {wanted}: no such jar was found.")
        (working / "jars" / STAMP).touch()
        # A folder without the stamp is of no use to anybody; one with it was made by somebody faster than us.
        if not (folder / STAMP).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            (working / "jars").rename(folder)


def _run_ivy(wanted: Coordinate, working: Path) -> None:
    ivy = next(iter(sorted(pyspark_jars().glob("ivy-*.jar"))), None)
    if ivy is None:
        raise unavailable("This PySpark has no ivy jar.", remedy="Install the PySpark that semel is tested with.")
    command = [java(), "-jar", str(ivy), "-cache", str(working / "cache"), "-confs", "default"]
    command += ["-dependency", wanted.organisation, wanted.name, wanted.version]
    command += ["-retrieve", f"{working}/jars/[artifact]-[revision].[ext]"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S_MAX, check=False)  # noqa: S603  the arguments are ours, there is no shell
    except subprocess.TimeoutExpired:
        raise unavailable(f"Could not fetch {wanted} within {FETCH_TIMEOUT_S_MAX} s.") from None
    if done.returncode != 0:
        raise unavailable(f"Could not fetch {wanted}: {_complaint(done.stdout + done.stderr)}.")


def _complaint(output: str) -> str:
    """The line in which ivy says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = (line for sign in ("Server access error", "not found", "Exception") for line in lines if sign in line)
    return next(telling, lines[-1] if lines else "ivy said nothing").strip(":. ")
