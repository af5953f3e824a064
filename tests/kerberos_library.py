"""The Python library for Kerberos. It needs a compiler, so `make setup` leaves it out, and tests build it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from semel.dev.debian import Product, install
from semel.dev.jars import cache_folder

LIBRARY = "gssapi==1.12.0"
BUILD_TIMEOUT_S_MAX = 600
_COMPILER = Product(
    "the development files of MIT Kerberos", ("libkrb5-dev", "gcc"), ("krb5-config", "gcc"), ("/usr/bin",)
)


def gssapi_folder() -> Path | None:
    """The folder to put into PYTHONPATH; None where the library is installed already. Built once for each Python."""
    if importlib.util.find_spec("gssapi") is not None:
        return None
    made = cache_folder().parent / "python" / f"{LIBRARY}-{sys.implementation.cache_tag}"
    if not made.is_dir():
        if shutil.which("krb5-config") is None or shutil.which("gcc") is None:
            install(_COMPILER, print)
        made.parent.mkdir(parents=True, exist_ok=True)
        # Made aside and renamed: a run that is cut short leaves nothing that looks complete.
        with tempfile.TemporaryDirectory(dir=made.parent) as aside:
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", f"{aside}/made", LIBRARY]
            subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S_MAX)
            Path(aside, "made").rename(made)
    return made
