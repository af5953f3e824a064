"""Servers that outlive the command: brought up, asked after and taken down from one shell after another.

Adding a server = one module that can start and stop it + one line in `KINDS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from semel.dev.kafka import KAFKA, KafkaCluster, Layout, Ports, lay_out
from semel.dev.records import Member, Record, locked, read_record, remove_record, write_record
from semel.errors import ConfigError

FOLDER = Path(".semel-dev")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What the user asked for. None is "as it was before", or else the default."""

    brokers: int | None = None
    port: int | None = None


class Server(Protocol):
    """A server with its data in one folder."""

    @property
    def address(self) -> str: ...

    def launch(self) -> None:
        """Start what does not run, without waiting."""

    def wait_until_ready(self) -> None: ...

    def stop_all(self) -> bool:
        """Whether everything ended by itself."""

    def members(self) -> tuple[Member, ...]:
        """Everything that was started, by this command or an earlier one."""


@dataclass(frozen=True)
class Kind:
    """A line of the table."""

    version: str
    open: Callable[[Path, Sequence[Member], Wish, Say], Server]


@dataclass(frozen=True)
class Status:
    """How a server is."""

    server: str
    state: str
    address: str
    version: str
    pids: tuple[int, ...]
    data: str
    # Whether it is as the user left it.
    as_wanted: bool


# The verbs ----------------------------------------------------------------------------------------------------------


def up(name: str, folder: Path, wish: Wish, say: Say) -> Status:
    """Bring a server up, on the data it had. Harmless for one that is up."""
    kind = _kind(name)
    with locked(folder):
        record = read_record(folder, name)
        members = record.members if record else ()
        server = kind.open(folder / name, members, wish, say)
        if record and members and record.members_up() == len(members):
            say(f"{name} is up already")
        else:
            record = _bring_up(Record(name, kind.version, server.address, True, members), server, folder)
        return _status(record, folder)


def down(names: Sequence[str], folder: Path, say: Say, *, remove: bool = False) -> list[Status]:
    """Stop servers, by default all that were ever brought up here. `remove` deletes their data too."""
    for name in names:
        _kind(name)
    if not folder.is_dir():
        return []
    with locked(folder):
        records = [record for name in names or KINDS if (record := read_record(folder, name))]
        for record in records:
            _take_down(record, folder, say)
            if remove:
                shutil.rmtree(folder / record.server, ignore_errors=True)
                remove_record(folder, record.server)
                say(f"removed the data of {record.server}")
        return [_status(replace(record, wanted=False), folder) for record in records]


def status(folder: Path) -> list[Status]:
    """Every server that was ever brought up here."""
    return [_status(record, folder) for name in KINDS if (record := read_record(folder, name))]


def all_up(found: Sequence[Status]) -> bool:
    """Whether there is something that should be up, and all of that is."""
    return any(each.state == "up" for each in found) and all(each.as_wanted for each in found)


def _bring_up(record: Record, server: Server, folder: Path) -> Record:
    try:
        server.launch()
        # Before waiting: whatever happens to this command, the next one must find the processes.
        started = replace(record, members=server.members())
        write_record(folder, started)
        server.wait_until_ready()
    except BaseException:
        # What ran before this command goes on.
        for member in set(server.members()) - set(record.members):
            member.process.kill()
        raise
    return started


def _take_down(record: Record, folder: Path, say: Say) -> None:
    server = _kind(record.server).open(folder / record.server, record.members, Wish(), say)
    if not any(member.process.is_alive() for member in record.members):
        say(f"{record.server} was not up")
    elif server.stop_all():
        say(f"stopped {record.server}")
    else:
        say(f"stopped {record.server}; it did not end by itself and was killed, which its data survives")
    write_record(folder, replace(record, wanted=False))


def _status(record: Record, folder: Path) -> Status:
    running, count = record.members_up(), len(record.members)
    state = "up" if running == count else "down" if running == 0 else f"{running} of {count} up"
    pids = tuple(member.process.pid for member in record.members if member.process.is_alive())
    data = str((folder / record.server).resolve())
    as_wanted = state == ("up" if record.wanted else "down")
    return Status(record.server, state, record.address, record.version, pids, data, as_wanted)


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise ConfigError(f"There is no server {name!r}.", remedy=f"Name one of those that exist: {', '.join(KINDS)}.")
    return KINDS[name]


# Kafka --------------------------------------------------------------------------------------------------------------

KAFKA_PORT = 9092


def _open_kafka(folder: Path, members: Sequence[Member], wish: Wish, say: Say) -> KafkaCluster:
    """The brokers as they are, when one of them runs; else new ones on the same data."""
    brokers = wish.brokers or len(members) or 1
    first = wish.port or (members[0].ports[0] if members else KAFKA_PORT)
    ports = range(first, first + brokers)
    if not any(member.process.is_alive() for member in members):
        return KafkaCluster(lay_out(folder, brokers=brokers, ports=ports), say=say)
    if [member.ports[0] for member in members] != list(ports):
        raise ConfigError(
            f"Kafka is up already on other ports: {', '.join(str(member.ports[0]) for member in members)}.",
            data_now="it goes on as it was; nothing was started or stopped",
            remedy="Stop it first: semel dev down kafka",
        )
    layout = Layout(folder.resolve(), tuple(Ports(*member.ports) for member in members))
    return KafkaCluster(layout, {broker: member.process for broker, member in enumerate(members)}, say=say)


KINDS: Mapping[str, Kind] = {
    "kafka": Kind(KAFKA.version, _open_kafka),
}
