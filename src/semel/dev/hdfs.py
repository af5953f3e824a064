"""A real HDFS in one process: name node and data node from Hadoop's own test cluster."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from semel.dev.jars import fetch, java, unavailable
from semel.dev.ports import free_port
from semel.errors import SemelError

COORDINATE = "org.apache.hadoop:hadoop-client-minicluster:3.4.1"
START_TIMEOUT_S_MAX = 60
STOP_TIMEOUT_S_MAX = 10
# MiniDFSClusterManager writes this file once the name node and every data node serve.
_READY = "ready.json"


@contextmanager
def hdfs(
    folder: Path, *, say: Callable[[str], None] = lambda _: None, conf: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run an HDFS with its data in `folder`, and yield its address. It ends with the block."""
    jars = fetch(COORDINATE, say=say)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with (folder / "output.log").open("wb") as output:
        server = subprocess.Popen(  # noqa: S603  the arguments are ours, there is no shell
            _command(jars, port, conf or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(server, folder)
        yield f"hdfs://127.0.0.1:{port}"
    finally:
        _end(server)


def _command(jars: list[Path], port: int, conf: Mapping[str, str]) -> list[str]:
    manager = "org.apache.hadoop.test.MiniDFSClusterManager"
    options = ["-nnport", str(port), "-datanodes", "1", "-format", "-writeDetails", _READY]
    options += [word for key, value in conf.items() for word in ("-D", f"{key}={value}")]
    # It lives for seconds: the quick compiler and one collector start it in half the time.
    quick = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    return [java(), *quick, "-cp", os.pathsep.join(map(str, jars)), manager, *options]


def _wait_until_ready(server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S_MAX
    while not (folder / _READY).is_file():
        if server.poll() is not None:
            raise _failed(f"HDFS ended with code {server.returncode} while it started", folder)
        if time.monotonic() > deadline:
            raise _failed(f"HDFS did not answer within {START_TIMEOUT_S_MAX} s", folder)
        time.sleep(0.05)


def _failed(what: str, folder: Path) -> SemelError:
    lines = (folder / "output.log").read_text(errors="replace").splitlines()
    return unavailable(
        f"{what}: {lines[-1] if lines else 'it said nothing'}", remedy=f"Read {folder / 'output.log'}, then try again."
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S_MAX)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(STOP_TIMEOUT_S_MAX)
