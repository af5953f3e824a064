"""Certificates for servers that speak TLS."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """It is its own authority, and made out to localhost. `another` is nothing to it."""

    path: Path
    key: Path
    another: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("certificates")
    # The server may run as somebody else.
    folder.chmod(0o755)
    path, key = _make(folder, "ours")
    return Certificate(path, key, _make(folder, "another")[0])


def _make(folder: Path, name: str) -> tuple[Path, Path]:
    path, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    kind += ["-addext", "subjectAltName=DNS:localhost"]
    where = ["-keyout", str(key), "-out", str(path)]
    subprocess.run(["openssl", "req", *kind, *where], check=True, capture_output=True)  # noqa: S607 - whichever there is
    key.chmod(0o644)
    return path, key
