"""Processes that are known by pid and start time, and ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from semel.dev.ports import free_port, free_ports, is_taken, listens
from semel.dev.process import Process, processes_in, spawn
from tests.processes import wait_until

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


def test_a_process_is_alive_until_it_is_stopped(tmp_path: Path) -> None:
    process = spawn(["/bin/sleep", "60"], tmp_path / "log")
    assert process.is_alive()
    assert process.stop(10)
    assert not process.is_alive()
    assert not Path(f"/proc/{process.pid}").exists()
    assert process.stop(0)


def test_a_process_that_ignores_sigterm_is_killed_at_the_limit(tmp_path: Path) -> None:
    process = spawn([sys.executable, "-c", STUBBORN], tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text() == "deaf\n")
    assert not process.stop(0.2)
    assert not process.is_alive()


def test_a_pid_that_somebody_else_has_now_is_left_alone() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        stale = Process(other.pid, "123 ticks after boot of another day")
        assert not stale.is_alive()
        stale.kill()
        assert stale.stop(10)
        assert other.poll() is None
        other.kill()


def test_a_server_has_a_session_of_its_own_and_its_output_is_appended(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("earlier\n")
    process = spawn(["/bin/sh", "-c", "echo out; echo err >&2; exec sleep 60"], tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text() == "earlier\nout\nerr\n")
    assert os.getsid(process.pid) == process.pid
    process.kill()


def test_processes_are_found_by_program_and_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    sleep = ["/usr/bin/env", "-C", str(tmp_path / "here"), "sleep", "60"]
    found, elsewhere = spawn(sleep, tmp_path / "log"), spawn(["/bin/sleep", "60"], tmp_path / "log")
    wait_until(lambda: processes_in(tmp_path / "here", "sleep") == [found])
    assert processes_in(tmp_path / "here", "postgres") == []
    for process in (found, elsewhere):
        process.kill()
    assert processes_in(tmp_path / "here", "sleep") == []


def test_free_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(20_000 <= port <= 32_000 for port in ports)
    assert not any(is_taken(port) for port in ports)
    assert not set(free_ports(20, besides=ports)) & set(ports)


def test_a_port_is_taken_while_somebody_listens() -> None:
    port = free_port()
    assert (is_taken(port), listens(port)) == (False, False)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        assert (is_taken(port), listens(port)) == (True, True)
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            server.accept()[0].close()
            assert client.recv(1) == b""
    # The connection that the server closed first lingers on; it does not count.
    assert (is_taken(port), listens(port)) == (False, False)
