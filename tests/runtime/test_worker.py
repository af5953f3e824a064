"""What a worker is spared between tasks, without Spark."""

from __future__ import annotations

import gc
import importlib
import platform
import socket
import subprocess
import sys
import zipfile
import zipimport
from pathlib import Path

import pytest

from semel.runtime import worker


def test_jars_leave_the_import_path_and_archives_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("once_upon_a_time.py", "answer = 42")
    monkeypatch.setattr(sys, "path", ["a.jar", str(archive), "b.jar"])
    finder = zipimport.zipimporter(str(archive))
    monkeypatch.setattr(sys, "path_importer_cache", {str(archive): finder, "here": None})
    worker.lighten_import_path()
    assert (sys.path, sys.path_importer_cache) == ([str(archive)], {"here": None})
    # What is needed after all is found again.
    assert importlib.import_module("once_upon_a_time").answer == 42
    del sys.modules["once_upon_a_time"]


def test_the_modules_are_left_out_of_collections_once() -> None:
    gc.unfreeze()
    try:
        worker.lighten_collection()
        modules = gc.get_freeze_count()
        assert modules > len(sys.modules)
        kept: list[list[int]] = [[] for _ in range(1000)]
        worker.lighten_collection()
        # What a task leaves is collected as ever.
        assert gc.get_freeze_count() <= modules
        assert len(kept) == 1000
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux only")
def test_what_was_received_is_acknowledged_at_once_and_every_descriptor_stays_open() -> None:
    """Without it, Nagle's algorithm on the other side and the delayed acknowledgement on this one cost 40 ms."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            for _ in range(3):
                theirs.sendall(b"header")
                worker.acknowledge_at_once()
                theirs.sendall(b"rows")
                received = b""
                while len(received) < len(b"headerrows"):
                    received += ours.recv(100)
                assert received == b"headerrows"
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_the_memory_of_one_batch_is_used_for_the_next_one() -> None:
    """In a process of its own: it is a setting of the whole process. A page that was given back costs a fault."""
    program = """
import resource
from semel.runtime import worker

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [bytearray(1 << 20) for _ in range(20)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = faults()
worker.keep_memory()
faults()
print(without, faults())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    without, kept = map(int, ran.stdout.split())
    # A megabyte is 256 pages.
    assert without > 10 * 20 * 128
    assert kept < 256
