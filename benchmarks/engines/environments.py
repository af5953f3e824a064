"""Virtual environments for engines that are not ours: each has its own, made once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from semel.dev.jars import cache_folder, fetch

INSTALL_TIMEOUT_S_MAX = 1_800
STAMP = ".complete"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """Packages from PyPI by exact version, and jars by Maven coordinate."""

    name: str
    packages: tuple[str, ...]
    jars: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        wanted = f"{sys.version_info[:2]} {self.packages}"
        return cache_folder().parent / "peers" / f"{self.name}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"

    def python(self, say: Say) -> str:
        """The interpreter that has the packages. A second call needs no network."""
        if not (self.folder / STAMP).is_file():
            say(f"installing {', '.join(self.packages)} (once; at most {INSTALL_TIMEOUT_S_MAX} s)")
            self._make()
        return str(self.folder / "bin" / "python")

    def jar_files(self, say: Say) -> list[Path]:
        return [jar for coordinate in self.jars for jar in fetch(coordinate, say=say)]

    def _make(self) -> None:
        # An environment cannot be renamed, because its scripts name its folder. The stamp says that it is whole.
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        python = str(self.folder / "bin" / "python")
        # Some packages that Flink needs are sources only, whose builds still expect `pkg_resources`.
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
            constraint.write("setuptools<80\n")
            constraint.flush()
            _run([python, "-m", "pip", "install", "-q", "-c", constraint.name, "setuptools<80", "wheel"])
            _run([python, "-m", "pip", "install", "-q", *self.packages], {"PIP_CONSTRAINT": constraint.name})
        (self.folder / STAMP).touch()


#: The connector's version names the line of Flink behind a dash.
FLINK = Environment("flink", ("apache-flink==2.2.1",), ("org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2",))
QUIX = Environment("quix", ("quixstreams==3.28.1",))


def _run(command: Sequence[str], more: dict[str, str] | None = None) -> None:
    environment = {**os.environ, **(more or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S_MAX, check=False, env=environment
    )
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise RuntimeError(f"{' '.join(command)} failed:\n" + "\n".join(lines))


def main() -> None:
    for environment in (FLINK, QUIX):
        print(environment.python(print), [jar.name for jar in environment.jar_files(print)])


if __name__ == "__main__":
    main()
