"""What the processes of a benchmark hold and use: the driver, Spark's JVM, its Python workers, the broker."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


def end_in_good_order() -> None:
    """A benchmark that is told to end, by `timeout` for one, leaves no broker and no engine behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def processes() -> Iterator[tuple[int, str]]:
    """This process and all below it, each with its kind."""
    for pid in tree(os.getpid()):
        try:
            yield pid, _kind_of(pid)
        except OSError:  # it ended while we looked
            continue


def processor_seconds() -> defaultdict[str, float]:
    """By kind, since each process began. Of a worker that has ended its parent knows."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid, kind in processes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        found[kind] += sum(map(int, fields[11:15])) / TICKS_PER_S
    return found


def resident_mb(pid: int) -> float:
    """Of a process and all below it. Pages that they share count for each of them."""
    found = 0.0
    for one in tree(pid):
        try:
            found += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * PAGE_MB
        except OSError:
            continue
    return found


def tree(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children[parent].append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found


def _kind_of(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if b"pyspark.daemon" in command:
        return "worker"
    if b"java" not in command.split(b"\0")[0]:
        return "driver"
    return "jvm" if b"SparkSubmit" in command else "broker"
