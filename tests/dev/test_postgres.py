"""The local PostgreSQL, with a real server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.dev.account import account_for
from semel.dev.postgres import PostgresServer, postgres
from semel.dev.process import spawn
from semel.errors import ConfigError, SemelError
from tests.dev import database_checks as checks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


# A server that serves -----------------------------------------------------------------------------------------------


def test_the_login_gets_in_and_the_settings_are_durable_and_two_phase(server: PostgresServer) -> None:
    assert server.query("SELECT current_user, current_database();") == "semel|semel"
    names = ("fsync", "synchronous_commit", "max_prepared_transactions", "max_connections", "server_encoding")
    assert server.query("".join(f"SHOW {name};" for name in names)).split() == ["on", "on", "64", "200", "UTF8"]
    assert server.dsn == f"postgresql://semel:{server.password}@{server.address}/semel"


def test_nobody_gets_in_without_the_password(server: PostgresServer) -> None:
    assert checks.login(server, "SELECT 1;").stdout == "1\n"
    refused = checks.login(server, "SELECT 1;", PGPASSWORD="wrong")
    assert (refused.returncode, 'password authentication failed for user "semel"' in refused.stderr) == (2, True)
    assert server.query("SELECT DISTINCT auth_method FROM pg_hba_file_rules;") == "scram-sha-256"


def test_it_listens_on_the_loopback_interface_alone(server: PostgresServer) -> None:
    assert checks.listening_addresses(server.port) == {checks.LOOPBACK}
    assert server.query("SHOW unix_socket_directories;") == ""


def test_the_password_is_private(server: PostgresServer) -> None:
    checks.check_the_password_is_private(server)


def test_it_never_runs_as_root(server: PostgresServer) -> None:
    everyone = checks.running_on(server)
    assert len(everyone) > 1
    assert 0 not in {checks.uid_of(process) for process in everyone}


def test_wrong_sql_is_told(server: PostgresServer) -> None:
    with pytest.raises(SemelError, match=r'PostgreSQL at [0-9.:]+ refused: ERROR:  relation "nowhere" does not exist'):
        server.query("SELECT * FROM nowhere;")


# A server that ends and comes back ----------------------------------------------------------------------------------


def test_rows_and_a_prepared_transaction_survive_a_kill(server: PostgresServer) -> None:
    server.query("CREATE TABLE kept (n int); INSERT INTO kept VALUES (1);")
    server.query("BEGIN; INSERT INTO kept VALUES (2); PREPARE TRANSACTION 'in doubt';")
    address, before = server.address, checks.running_on(server)
    server.kill()
    assert not server.is_alive()
    survivors = [process for process in before if process.is_alive()]
    server.start()
    assert survivors == []
    assert (server.address, server.process in before) == (address, False)
    assert server.query("SELECT gid FROM pg_prepared_xacts; SELECT n FROM kept;").splitlines() == ["in doubt", "1"]
    server.query("COMMIT PREPARED 'in doubt';")
    assert server.query("SELECT n FROM kept ORDER BY n;").split() == ["1", "2"]


def test_it_starts_again_once_the_last_process_of_a_crashed_server_has_ended(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = server.process
    assert lost is not None
    straggler = next(process for process in checks.running_on(server) if process != lost)
    straggler.send(signal.SIGSTOP)
    lost.kill()
    monkeypatch.setattr("semel.dev.database.ORPHANS_TIMEOUT_S_MAX", 0.5)
    with pytest.raises(ConfigError, match=rf"Another PostgreSQL runs on {server.data}: process {straggler.pid}\."):
        server.start()
    # Now it notices by itself that it is alone, and ends.
    straggler.send(signal.SIGCONT)
    monkeypatch.undo()
    server.start()
    assert server.query("SELECT 1;") == "1"


def test_a_process_that_has_the_old_pid_now_does_not_keep_it_out(server: PostgresServer, tmp_path: Path) -> None:
    server.kill()
    account = account_for(server.data, "postgres")
    other = spawn(account.command(["/bin/sleep", "60"]), tmp_path / "log")
    lock = server.data / "postmaster.pid"
    lock.write_text("\n".join([str(other.pid), *lock.read_text().splitlines()[1:]]) + "\n")
    server.start()
    assert server.query("SELECT 1;") == "1"
    assert other.is_alive()
    other.kill()


def test_it_stops_by_itself_also_when_halted_and_starting_twice_is_harmless(server: PostgresServer) -> None:
    server.pause()
    assert server.stop()
    assert (server.is_alive(), checks.running_on(server)) == (False, [])
    assert not (server.data / "postmaster.pid").exists()
    server.start()
    process = server.process
    server.start()
    assert server.process == process


def test_a_halted_server_keeps_clients_waiting_until_it_goes_on(server: PostgresServer) -> None:
    checks.check_a_halted_server_keeps_clients_waiting(server)


# What cannot start --------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with checks.port_taken() as port:
        with pytest.raises(ConfigError) as raised, postgres(tmp_path / "new", port=port):
            pass
        assert raised.value.what == f"PostgreSQL cannot listen on 127.0.0.1:{port}: another program does."
    assert not (tmp_path / "new").exists()


def test_a_server_that_cannot_start_quotes_its_log_and_its_data_is_of_one_version(tmp_path: Path) -> None:
    with pytest.raises(SemelError) as raised, postgres(tmp_path, settings={"max_connections": "none"}):
        pass
    what, data_now, remedy = str(raised.value).splitlines()
    assert what.startswith("PostgreSQL ended while it started: ")
    assert 'invalid value for parameter "max_connections": "none"' in what
    assert data_now == "  the data now: nothing was started and no row was written"
    assert remedy == f"  what to do: Read {tmp_path}/server.log, then try again."

    (tmp_path / "data" / "PG_VERSION").write_text("9.1\n")
    assert PostgresServer(tmp_path, 1).product().packages == ("postgresql-9.1",)


def test_a_server_that_was_never_started_says_so(tmp_path: Path) -> None:
    never = PostgresServer(tmp_path, 1)
    assert (never.is_alive(), never.members(), never.stop_all()) == (False, (), True)
    with pytest.raises(ConfigError, match=r"PostgreSQL was never started\."):
        never.kill()
    with pytest.raises(ConfigError, match="There is no password of PostgreSQL in"):
        _ = never.dsn
    with pytest.raises(ConfigError, match="cannot listen on port 65536"):
        PostgresServer(tmp_path, 65_536)
