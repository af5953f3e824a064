"""What is remembered of servers that outlive the command that started them: one small file each."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from semel.dev.ports import listens
from semel.dev.process import Process
from semel.errors import ConfigError


@dataclass(frozen=True)
class Member:
    """One process of a server, and where it listens: first the port that clients use."""

    ports: tuple[int, ...]
    process: Process

    def is_up(self) -> bool:
        return self.process.is_alive() and listens(self.ports[0])


@dataclass(frozen=True)
class Record:
    """A server as the last command left it."""

    server: str
    version: str
    address: str
    wanted: bool
    members: tuple[Member, ...]
    # What clients connect with, without the password; empty when the address is all they need.
    url: str = ""

    def members_up(self) -> int:
        return sum(member.is_up() for member in self.members)


def read_record(folder: Path, server: str) -> Record | None:
    """What is remembered of a server; None when there is nothing."""
    file = _file(folder, server)
    try:
        fields = json.loads(file.read_text())
        members = [Member(tuple(m["ports"]), Process(**m["process"])) for m in fields.pop("members")]
        return Record(**fields, members=tuple(members))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read as the state of {server}: {error}.",
            data_now="nothing was started or stopped; the data of the server was not touched",
            remedy=f"End {server} by hand if it runs, remove that file, and bring the server up again.",
        ) from error


def write_record(folder: Path, record: Record) -> None:
    write_private(_file(folder, record.server), json.dumps(asdict(record), indent=1))


def remove_record(folder: Path, server: str) -> None:
    _file(folder, server).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time. The system lets go of the lock when the command ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    # Nothing in this folder belongs into anybody's repository.
    (folder / ".gitignore").write_text("*\n")
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another semel command is starting or stopping servers in {folder}.",
                data_now="nothing was started or stopped by this command",
                remedy="Wait until it ends, then run this command again.",
            ) from None
        yield


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    aside.rename(file)


def _file(folder: Path, server: str) -> Path:
    return folder / f"{server}.json"
