"""The local MariaDB, with a real server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.dev.account import Account, account_for
from semel.dev.mariadb import MariaDbServer, mariadb
from semel.errors import ConfigError, SemelError
from tests.dev import database_checks as checks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDbServer]:
    with mariadb(tmp_path_factory.mktemp("mariadb")) as running:
        yield running


# A server that serves -----------------------------------------------------------------------------------------------


def test_the_login_gets_in_and_the_settings_are_durable(server: MariaDbServer) -> None:
    assert server.query("SELECT current_user(), database();") == "semel@%\tsemel"
    numbers = "SELECT @@innodb_flush_log_at_trx_commit, @@local_infile, @@log_bin, @@max_connections;"
    assert server.query(numbers).split() == ["1", "1", "0", "200"]
    assert server.query("SELECT @@character_set_server, @@character_set_database;").split() == ["utf8mb4", "utf8mb4"]
    assert server.url == f"mysql://semel:{server.password}@{server.address}/semel"


def test_the_login_may_do_everything_in_its_database_and_nothing_elsewhere(server: MariaDbServer) -> None:
    assert server.query("CREATE TABLE own (n int); DROP TABLE own; XA RECOVER;") == ""
    with pytest.raises(SemelError, match="Access denied for user 'semel'"):
        server.query("CREATE DATABASE other;")
    assert server.query("SHOW DATABASES;").split() == ["information_schema", "semel"]


def test_nobody_gets_in_without_the_password(server: MariaDbServer) -> None:
    assert checks.login(server, "SELECT 1;").stdout == "1\n"
    for password in ("wrong", ""):
        refused = checks.login(server, "SELECT 1;", MYSQL_PWD=password)
        assert (refused.returncode, "Access denied for user 'semel'" in refused.stderr) == (1, True)


def test_it_listens_on_the_loopback_interface_alone(server: MariaDbServer) -> None:
    assert checks.listening_addresses(server.port) == {checks.LOOPBACK}
    # Its socket lies where nobody else may go.
    assert (server.data / "server.sock").is_socket()


def test_the_password_is_private(server: MariaDbServer) -> None:
    checks.check_the_password_is_private(server)


def test_a_file_of_the_client_is_loaded(server: MariaDbServer, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("1\tä\n2\t😀\n")
    load = f"LOAD DATA LOCAL INFILE '{tmp_path}/rows' INTO TABLE loaded CHARACTER SET utf8mb4;"
    server.query(f"CREATE TABLE loaded (n int, word text); {load}")
    assert server.query("SELECT * FROM loaded ORDER BY n;") == "1\tä\n2\t😀"


# A server that ends and comes back ----------------------------------------------------------------------------------


def test_rows_and_a_prepared_transaction_survive_a_kill(server: MariaDbServer) -> None:
    server.query("CREATE TABLE kept (n int); INSERT INTO kept VALUES (1);")
    server.query("XA START 'in doubt'; INSERT INTO kept VALUES (2); XA END 'in doubt'; XA PREPARE 'in doubt';")
    address, before = server.address, server.process
    assert before is not None
    server.kill()
    assert (server.is_alive(), before.is_alive(), checks.running_on(server)) == (False, False, [])
    server.start()
    assert (server.address, server.process == before) == (address, False)
    assert server.query("XA RECOVER; SELECT n FROM kept;").splitlines() == ["1\t8\t0\tin doubt", "1"]
    server.query("XA COMMIT 'in doubt';")
    assert server.query("SELECT n FROM kept ORDER BY n;").split() == ["1", "2"]


def test_it_stops_by_itself_also_when_halted_and_starting_twice_is_harmless(server: MariaDbServer) -> None:
    server.pause()
    assert server.stop()
    assert (server.is_alive(), checks.running_on(server)) == (False, [])
    server.start()
    process = server.process
    server.start()
    assert server.process == process


def test_a_halted_server_keeps_clients_waiting_until_it_goes_on(server: MariaDbServer) -> None:
    checks.check_a_halted_server_keeps_clients_waiting(server)


def test_the_binary_log_can_be_turned_on_and_nobody_is_root_where_the_way_is_open() -> None:
    with tempfile.TemporaryDirectory(prefix="semel test ") as text:
        folder = Path(text)
        # Root's temporary folders are closed to everybody else.
        folder.chmod(0o755)
        with mariadb(folder, settings={"log_bin": "changes", "server_id": "7"}) as logging:
            assert logging.query("SELECT @@log_bin, @@server_id;") == "1\t7"
            assert logging.process is not None
            assert checks.uid_of(logging.process) == logging.data.stat().st_uid != 0


# What cannot start --------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with checks.port_taken() as port:
        with pytest.raises(ConfigError) as raised, mariadb(tmp_path / "new", port=port):
            pass
        assert raised.value.what == f"MariaDB cannot listen on 127.0.0.1:{port}: another program does."
    assert not (tmp_path / "new").exists()


def test_a_server_that_cannot_start_quotes_its_log(tmp_path: Path) -> None:
    with pytest.raises(SemelError) as raised, mariadb(tmp_path, settings={"no_such_setting": "1"}):
        pass
    what, data_now, remedy = str(raised.value).splitlines()
    assert what.startswith("MariaDB ended while it started: ")
    assert "unknown variable 'no_such_setting=1'" in what
    assert data_now == "  the data now: nothing was started and no row was written"
    assert remedy == f"  what to do: Read {tmp_path}/server.log, then try again."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root meets data of another user")
def test_data_of_another_user_is_run_as_that_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12_345, 54_321)
    assert account_for(tmp_path, "mysql") == Account(12_345, 54_321)
