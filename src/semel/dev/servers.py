"""Servers that outlive the command: brought up, asked after and taken down from one shell after another.

Adding a server = one module that can start and stop it + one line in `KINDS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from semel.dev.database import DatabaseServer
from semel.dev.jars import Say
from semel.dev.kafka import KafkaCluster, Layout, Ports, lay_out
from semel.dev.mariadb import MariaDbServer
from semel.dev.postgres import PostgresServer
from semel.dev.records import Member, Record, locked, read_record, remove_record, write_record
from semel.errors import ConfigError

FOLDER = Path(".semel-dev")


@dataclass(frozen=True)
class Wish:
    """What the user asked of one server. None is "as it was before", or else the default."""

    brokers: int | None = None
    port: int | None = None


class Server(Protocol):
    """A server with its data in one folder."""

    @property
    def address(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def url(self) -> str:
        """What clients connect with, the password included; empty when the address is all they need."""

    def launch(self) -> None:
        """Start what does not run, without waiting."""

    def wait_until_ready(self) -> None: ...

    def stop_all(self) -> bool:
        """Whether everything ended by itself."""

    def members(self) -> tuple[Member, ...]:
        """Everything that was started, by this command or an earlier one."""


# How one kind of server is found again, or laid out anew.
Open = Callable[[Path, Sequence[Member], Wish, Say], Server]


@dataclass(frozen=True)
class ServerKind:
    """`variable` is the one of the environment in which a pipeline finds what to connect with."""

    open: Open
    variable: str
    #: For a database: what lays one out in a folder, at a port.
    database: type[DatabaseServer] | None = None


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
    # What clients connect with. The password is in it only for the user who brings the server up.
    url: str = field(default="", repr=False)


# The verbs ----------------------------------------------------------------------------------------------------------


def up(names: Sequence[str], folder: Path, wish: Wish, say: Say) -> Iterator[Status]:
    """Bring servers up one after the other, on the data they had. Harmless for those that are up."""
    openers = {name: _open(name) for name in names}
    if wish.port is not None and len(openers) > 1:
        raise ConfigError(
            f"One port, {wish.port}, cannot serve several servers: {', '.join(openers)}.",
            remedy="Bring them up one by one, each with its --port, or all on their usual ports.",
        )
    if wish.brokers is not None and KAFKA_NAME not in openers:
        raise ConfigError(
            f"Only Kafka has brokers, not {', '.join(openers)}.", remedy="Leave out --brokers, or name kafka too."
        )
    with locked(folder):
        for name, opener in openers.items():
            yield _up(name, opener, folder, wish, say)


def down(names: Sequence[str], folder: Path, say: Say, *, remove: bool = False) -> list[Status]:
    """Stop servers, by default all that were ever brought up here. `remove` deletes their data too."""
    for name in names:
        _open(name)
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


def _up(name: str, opener: Open, folder: Path, wish: Wish, say: Say) -> Status:
    record = read_record(folder, name)
    members = record.members if record else ()
    server = opener(folder / name, members, wish, say)
    if record and members and record.members_up() == len(members):
        say(f"{name} is up already")
    else:
        record = _bring_up(name, members, server, folder)
    return replace(_status(record, folder), url=server.url)


def _bring_up(name: str, before: Sequence[Member], server: Server, folder: Path) -> Record:
    try:
        server.launch()
        # Before waiting: whatever happens to this command, the next one must find the processes.
        url = _without_password(server.url)
        started = Record(name, server.version, server.address, True, server.members(), url)
        write_record(folder, started)
        server.wait_until_ready()
    except BaseException:
        # What ran before this command goes on.
        for member in set(server.members()) - set(before):
            member.process.kill()
        raise
    return started


def _take_down(record: Record, folder: Path, say: Say) -> None:
    server = _open(record.server)(folder / record.server, record.members, Wish(), say)
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
    return Status(record.server, state, record.address, record.version, pids, data, as_wanted, record.url)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}").geturl() if url else ""


def _open(name: str) -> Open:
    if name not in KINDS:
        raise ConfigError(f"There is no server {name!r}.", remedy=f"Name one of those that exist: {', '.join(KINDS)}.")
    return KINDS[name].open


# Kafka --------------------------------------------------------------------------------------------------------------

KAFKA_NAME = "kafka"
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


# Databases ----------------------------------------------------------------------------------------------------------

POSTGRES_PORT = 5432
MARIADB_PORT = 3306


def open_database(kind: type[DatabaseServer], usual_port: int) -> Open:
    def open_one(folder: Path, members: Sequence[Member], wish: Wish, say: Say) -> DatabaseServer:
        """The server as it is, when it runs; else a new one on the same data."""
        before = members[0] if members else None
        port = wish.port or (before.ports[0] if before else usual_port)
        if before and before.process.is_alive() and before.ports[0] != port:
            raise ConfigError(
                f"{kind.title} is up already on another port: {before.ports[0]}.",
                data_now="it goes on as it was; nothing was started or stopped",
                remedy=f"Stop it first: semel dev down {folder.name}",
            )
        return kind(folder, port, process=before.process if before else None, say=say)

    return open_one


KINDS: Mapping[str, ServerKind] = {
    KAFKA_NAME: ServerKind(_open_kafka, "SEMEL_KAFKA_SERVERS"),
    "postgres": ServerKind(open_database(PostgresServer, POSTGRES_PORT), "SEMEL_POSTGRES_URL", PostgresServer),
    "mariadb": ServerKind(open_database(MariaDbServer, MARIADB_PORT), "SEMEL_MARIADB_URL", MariaDbServer),
}
