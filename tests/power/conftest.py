"""A disk whose power can be cut, mounted for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.verify.power.disk import PowerDisk, require_fuse


@pytest.fixture(scope="session")
def fuse() -> None:
    require_fuse(may_install=True)


@pytest.fixture
def disk(fuse: None, tmp_path: Path) -> Iterator[PowerDisk]:
    with PowerDisk(tmp_path / "disk") as mounted:
        yield mounted
