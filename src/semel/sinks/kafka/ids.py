"""Transactional ids of one machine: leased, numbered, used again only when what they were used for is settled."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import uuid
from pathlib import Path

from semel.durable import create_file

SLOTS_MAX = 10_000
#: (batch, attempt): what an id was used for.
Use = tuple[int, int]


class Lease:
    """A slot of this machine's pool of ids under one prefix, ours for as long as the process lives."""

    def __init__(self, prefix: str, folder: Path | None = None) -> None:
        self.prefix = prefix
        self._folder = folder or _private_folder(prefix)
        machine = self._folder / "machine"
        create_file(machine, uuid.uuid4().hex[:8].encode())
        self._machine = machine.read_text()
        self.slot, self._file = self._take_slot()
        self.uses = self._read_uses()

    def _take_slot(self) -> tuple[int, int]:
        for slot in range(SLOTS_MAX):
            file = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return slot, file
            except BlockingIOError:
                os.close(file)
        raise RuntimeError(f"more than {SLOTS_MAX} processes write under the prefix {self.prefix}")

    def _read_uses(self) -> dict[int, Use]:
        try:
            said = json.loads(os.pread(self._file, 1 << 20, 0) or b"{}")
            return {int(number): (batch, attempt) for number, (batch, attempt) in said.items()}
        except (ValueError, TypeError):
            # Cut short by a kill. An id that is taken in use too early costs a branch, which is then written again.
            return {}

    def transactional_id(self, number: int) -> str:
        return f"{self.prefix}-{self._machine}-{self.slot}-{number}"

    def is_free(self, number: int, use: Use) -> bool:
        """Whether what the id was used for last is settled by the time that a task works on `use`."""
        return self.uses.get(number, (-1, -1)) < use

    def note(self, number: int, use: Use) -> None:
        """Called before the first row: the next process that leases the slot must find it."""
        self.uses[number] = use
        content = json.dumps({str(n): u for n, u in self.uses.items()}).encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))

    def release(self) -> None:
        os.close(self._file)


def _private_folder(prefix: str) -> Path:
    """The folder belongs to this user alone: in one that others can write to, anybody can take a name."""
    top = Path(tempfile.gettempdir()) / f"semel-{os.getuid()}"
    top.mkdir(mode=0o700, exist_ok=True)
    if top.is_symlink() or top.stat().st_uid != os.getuid():
        raise PermissionError(f"{top} belongs to somebody else")
    folder = top / hashlib.sha256(prefix.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def id_pattern(prefix: str) -> re.Pattern[str]:
    """What the transactional ids under a prefix look like, and those of no other prefix."""
    return re.compile(re.escape(prefix) + r"-[0-9a-f]{8}-[0-9]+-[0-9]+")
