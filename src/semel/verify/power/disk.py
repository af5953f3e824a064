"""A folder on a disk whose power can be cut."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from semel.dev.debian import Product, find, install
from semel.errors import ConfigError, MissingExtra
from semel.verify.power.forgetful import Loss, Mode

FUSE = Product("FUSE", ("fuse3",), ("fusermount3",), (os.environ.get("PATH", ""), "/usr/bin:/bin"))
DEVICE = Path("/dev/fuse")
ATTRIBUTE = "user.semel.power"
MOUNT_S_MAX = 30.0
LOOK_EVERY_S = 0.02


def require_fuse(*, may_install: bool = False) -> None:
    """Raise, in three lines, unless a disk can be mounted here."""
    if importlib.util.find_spec("mfusepy") is None:
        raise MissingExtra("A disk that forgets needs the package mfusepy.", extra="verify-power")
    if find(FUSE) is None:
        if may_install:
            install(FUSE, lambda _: None)
        else:
            raise ConfigError(
                "A disk that forgets needs FUSE, and the program fusermount3 is not on this machine.",
                remedy="Install it: sudo apt-get install -y --no-install-recommends fuse3",
            )
    if not os.access(DEVICE, os.R_OK | os.W_OK) and os.geteuid() != 0:
        raise _not_permitted()
    if not DEVICE.exists():
        raise ConfigError(
            f"A disk that forgets needs {DEVICE}, which this machine does not have.",
            remedy="Load the kernel's module (modprobe fuse), or give the container the device: --device /dev/fuse "
            "--cap-add SYS_ADMIN.",
        )


def _not_permitted(said: str = "") -> ConfigError:
    return ConfigError(
        f"A disk that forgets cannot be mounted here{f': {said}' if said else '.'}",
        remedy="Run it as root, or in a container with: --device /dev/fuse --cap-add SYS_ADMIN.",
    )


class PowerDisk:
    """Mounted on `folder` until it is closed, in a process that ends with this one. Its log is beside the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.log")
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "semel.verify.power.mount", str(folder)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)  # noqa: S603  ours
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise

    def _wait_until_mounted(self) -> None:
        end = time.monotonic() + MOUNT_S_MAX
        while not os.path.ismount(self.folder):
            if self._process.poll() is not None or time.monotonic() > end:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                raise _not_permitted(lines[-1] if lines else "it said nothing")
            time.sleep(LOOK_EVERY_S)

    def cut_power(self, mode: Mode, seed: int) -> Loss:
        """Now, for everybody: what is durable stays, and nothing can be read or written until `restore_power`."""
        self._order({"power": "off", "mode": mode, "seed": seed})
        return Loss(**{kind: tuple(paths) for kind, paths in self._lost().items()})

    def _lost(self) -> dict[str, list[str]]:
        """Linux limits the value of an attribute to 64 KiB, so it is told in pieces."""
        said = b""
        while piece := os.getxattr(self.folder, f"{ATTRIBUTE}.{len(said)}"):
            said += piece
        told: dict[str, list[str]] = json.loads(said)
        return told

    def restore_power(self) -> None:
        self._order({"power": "on"})

    def _order(self, order: dict[str, Any]) -> None:
        os.setxattr(self.folder, ATTRIBUTE, json.dumps(order).encode())

    def copy_to(self, folder: Path) -> None:
        """What is on it, for whoever looks when it is gone."""
        shutil.copytree(self.folder, folder, symlinks=True)

    def close(self) -> None:
        """The folder is a plain, empty one again. A process with a file open there does not keep us from it."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(MOUNT_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(MOUNT_S_MAX)
        program = find(FUSE)
        if os.path.ismount(self.folder) and program is not None:
            command = [program["fusermount3"], "-u", "-z", str(self.folder)]
            subprocess.run(command, capture_output=True, timeout=MOUNT_S_MAX, check=False)  # noqa: S603  ours

    def __enter__(self) -> PowerDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
