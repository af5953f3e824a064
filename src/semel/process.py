"""Which process this is, and what has become of one that a record names, as far as this machine can tell.

Host and process id are not enough: containers that share a host name all begin with process 1, and ids are used again.
So a record also says in which boot of which kernel the id counts, and in which namespace, and when the process began.
Outside of Linux nobody tells us these, and host and id have to do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Where the state of a process and the time of its birth stand in what follows its name in /proc/PID/stat.
_STATE, _BORN = 0, 19


def this_process() -> dict[str, Any]:
    """What a record says of who wrote it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "machine": _machine(), "born": born(pid)}


def is_this_process(said: Mapping[str, Any]) -> bool:
    """Whether a record was written by this very process. An older semel said no more than host and id."""
    ours = this_process()
    return {**ours, "host": "", "pid": 0, **_known(said)} == ours


def has_ended(said: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a record is gone. If it ran elsewhere, we cannot know."""
    ours, theirs = this_process(), _known(said)
    if theirs.get("host") != ours["host"] or theirs.get("machine", ours["machine"]) != ours["machine"]:
        return False
    pid = int(theirs.get("pid", 0))
    return not is_alive(pid) or theirs.get("born", born(pid)) != born(pid)


def is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # One that was killed and not yet waited for by its parent writes nothing.
    return _stat(pid)[_STATE : _STATE + 1] != ["Z"]


def born(pid: int) -> int:
    """When a process began, in ticks since the machine was booted; 0 when nobody tells."""
    told = _stat(pid)[_BORN : _BORN + 1]
    return int(told[0]) if told else 0


def _stat(pid: int) -> list[str]:
    # A name may have spaces and brackets in it.
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _machine() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _known(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: said[name] for name in ("host", "pid", "machine", "born") if name in said}
