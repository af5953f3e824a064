"""What the tests of the local databases share: who listens where, and who runs what."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from semel.dev.database import DatabaseServer
from semel.dev.process import Process, processes_in
from tests.processes import is_stopped, wait_until

LISTENING = "0A"
# 127.0.0.1 as the system writes it there.
LOOPBACK = "0100007F"


def listening_addresses(port: int) -> set[str]:
    """The addresses on which somebody listens on a port, of both families."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return {address for address, found in places if int(found, 16) == port}


def running_on(server: DatabaseServer) -> list[Process]:
    return processes_in(server.data, server.program)


def login(server: DatabaseServer, sql: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the package's own client says, with a password of the test's choice."""
    command, usual = server.client()
    return subprocess.run(
        command, env={**usual, **environment}, input=sql, capture_output=True, text=True, timeout=30, check=False
    )


@contextmanager
def port_taken() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def check_a_halted_server_keeps_clients_waiting(server: DatabaseServer) -> None:
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(server.query("SELECT 7;")))
    server.pause()
    try:
        everyone = running_on(server)
        wait_until(lambda: all(is_stopped(process.pid) for process in everyone))
        client.start()
        client.join(0.5)
        assert (client.is_alive(), answers, server.is_alive()) == (True, [], True)
    finally:
        server.resume()
    client.join(20)
    assert answers == ["7"]


def check_the_password_is_private(server: DatabaseServer) -> None:
    assert server.password_file.stat().st_mode & 0o777 == 0o600
    assert len(server.password) == 32
    assert server.data.stat().st_mode & 0o777 == 0o700
    told = [Path(f"/proc/{process.pid}/cmdline").read_bytes().decode() for process in running_on(server)]
    assert server.password not in "".join([*told, server.log.read_text(), repr(server)])


def uid_of(process: Process) -> int:
    return os.stat(f"/proc/{process.pid}").st_uid
