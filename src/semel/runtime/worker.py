"""What a Python worker of Spark does in vain around every task, and how it is spared that.

Each of these was found in a profile (docs/performance.md) and costs a small task more than its rows do. They change
the process that runs the user's own functions, too: the option `semel.tunedWorkers` turns all of them off.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import socket
import stat
import sys
from contextlib import suppress
from zipimport import zipimporter

#: glibc's numbers of the settings of its malloc, and the most that it takes for the last of them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
MAPPED_BYTES_MIN = 32 * 1024 * 1024
KEPT_BYTES_MAX = 128 * 1024 * 1024
GROWTH_BYTES = 16 * 1024 * 1024


def acknowledge_at_once() -> None:
    """Do not keep Spark waiting for an acknowledgement. Called before the first row is read.

    Spark sends a short header and then the rows, through a socket that has Nagle's algorithm on. The rows stay there
    until the header is acknowledged. The kernel takes 40 ms for that, because a worker that reads sends nothing.
    """
    if sys.platform == "linux":
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                    _acknowledge(int(entry))


def acknowledge(connection: socket.socket) -> None:
    """Acknowledge at once what comes through this connection."""
    if hasattr(socket, "TCP_QUICKACK") and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _acknowledge(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        acknowledge(connection)
    finally:
        connection.detach()


@functools.cache
def keep_memory() -> None:
    """Use the memory of one Arrow batch for the next one, too. Called before the first row is read.

    glibc maps larger blocks from the system one by one and unmaps them again. So the kernel clears every page of every
    batch, and of every copy of it: a third of what a task spends on its rows. Now up to 128 MB that are free stay with
    the worker.
    """
    with suppress(OSError, AttributeError):  # other systems, other allocators
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in (
            (_MMAP_THRESHOLD, MAPPED_BYTES_MIN),
            (_TRIM_THRESHOLD, KEPT_BYTES_MAX),
            (_TOP_PAD, GROWTH_BYTES),
        ):
            mallopt(setting, value)


def lighten() -> None:
    """Spare the worker what PySpark makes of it before and after each task. Called when a task ends."""
    lighten_import_path()
    lighten_collection()


def lighten_import_path() -> None:
    """Do not read archives again before the next task.

    Before each task PySpark calls `importlib.invalidate_caches()`, which from Python 3.10 on reads the directory of an
    archive again for every package that was ever imported from it: of pyspark.zip a dozen times, 90 ms a task, and of
    the jars that Spark puts on `sys.path`, where no Python module is. Finders that are not in the cache are not asked;
    the next import that needs one makes it again.
    """
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(".jar")]
    for entry, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[entry]


@functools.cache
def lighten_collection() -> None:
    """Leave the imported modules out of the `gc.collect()` that PySpark calls after each task: they live on anyway."""
    gc.collect()
    gc.freeze()
