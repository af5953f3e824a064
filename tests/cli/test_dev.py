"""`semel dev`: servers that outlive the command, with a real Kafka and real databases."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from semel import cli
from semel.dev import servers
from semel.dev.kafka_program import program
from semel.dev.mariadb import MariaDbServer
from semel.dev.ports import free_port, free_ports
from semel.dev.postgres import PostgresServer
from semel.dev.process import Process, spawn
from semel.dev.records import Member, Record, read_record, write_record
from tests.processes import wait_until

Semel = Callable[..., tuple[int, str, str]]

#: What `semel dev up` promises after the first download.
READY_S_MAX = 20.0


@pytest.fixture
def semel(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Semel]:
    """Runs one command in a folder of its own, and at last takes down what it brought up."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["semel", "dev", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    yield run
    for name in servers.KINDS:
        if (record := read_record(servers.FOLDER, name)) is not None:
            for member in record.members:
                member.process.kill()


def record_of(folder: Path, server: str = "kafka") -> Record:
    record = read_record(folder / servers.FOLDER, server)
    assert record is not None
    return record


def only(text: str) -> dict[str, Any]:
    """The one server of a status in JSON."""
    (server,) = json.loads(text)["servers"]
    return dict(server)


# A real Kafka -------------------------------------------------------------------------------------------------------


def test_a_server_outlives_its_command_and_is_found_again(semel: Semel, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "semel.cli", "dev", "up", "kafka", "--port", str(port), "--json"]
    program(print)  # the first download takes as long as it takes
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < READY_S_MAX
    up = json.loads(done.stdout)
    assert (up["server"], up["state"], up["address"], up["version"]) == ("kafka", "up", f"127.0.0.1:{port}", "4.1.2")
    assert f"starting Kafka 4.1.2 on 127.0.0.1:{port}" in done.stderr

    code, out, _ = semel("status", "--json")
    assert (code, only(out)) == (0, up)

    code, out, _ = semel("up", "kafka")
    assert (code, out.splitlines()[0]) == (0, "kafka is up already")
    assert record_of(tmp_path).members[0].process.pid == up["pids"][0]

    code, _, err = semel("up", "kafka", "--brokers", "3")
    assert (code, err.splitlines()[0]) == (2, f"Kafka is up already on other ports: {port}.")

    assert semel("down", "kafka")[:2] == (0, "stopped kafka\n")
    assert not record_of(tmp_path).members[0].process.is_alive()
    code, out, _ = semel("status", "--json")
    assert (code, only(out)["state"], only(out)["as_wanted"]) == (1, "down", True)

    code, out, _ = semel("down", "--remove")
    assert (code, out) == (0, "kafka was not up\nremoved the data of kafka\n")
    assert sorted(file.name for file in servers.FOLDER.iterdir()) == [".gitignore", "lock"]
    code, out, _ = semel("status")
    assert (code, out) == (1, "no server was ever brought up here: semel dev up kafka\n")


def test_three_brokers_come_up_together_and_keep_three_copies(semel: Semel) -> None:
    code, out, err = semel("up", "kafka", "--brokers", "3", "--port", str(free_row(3)), "--json")
    assert code == 0, err
    up = json.loads(out)
    assert (len(set(up["pids"])), up["address"].count(",")) == (3, 2)
    write_one(up["address"])
    (kept,) = AdminClient({"bootstrap.servers": up["address"], "log_level": 0}).list_topics("kept").topics.values()
    assert sorted(kept.partitions[0].replicas) == [0, 1, 2]


def free_row(length: int) -> int:
    """The first of some ports next to each other that nobody uses."""
    for first in range(20_000, 30_000, length):
        with ExitStack() as taken, suppress(OSError):
            for port in range(first, first + length):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def test_a_server_that_crashed_is_brought_up_again_on_its_data(semel: Semel, tmp_path: Path) -> None:
    assert semel("up", "kafka", "--port", str(free_port()))[0] == 0
    record = record_of(tmp_path)
    write_one(record.address)
    crashed = record.members[0].process
    os.kill(crashed.pid, signal.SIGKILL)
    wait_until(lambda: not crashed.is_alive())

    code, out, _ = semel("status")
    assert (code, "down, should be up" in out) == (1, True)

    code, out, _ = semel("up", "kafka", "--json")
    again = json.loads(out)
    assert (code, again["state"], again["address"]) == (0, "up", record.address)
    assert read_one(record.address) == b"written before the crash"

    # More brokers would not find this data on the others, whether or not there are ports for them.
    assert semel("down")[0] == 0
    with socket.socket() as neighbour:
        with suppress(OSError):
            neighbour.bind(("127.0.0.1", record.members[0].ports[0] + 1))
        code, _, err = semel("up", "kafka", "--brokers", "3")
    assert (code, "another number of brokers: 1, not 3." in err) == (2, True)


def write_one(address: str) -> None:
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    admin.create_topics([NewTopic("kept", 1)])["kept"].result(20)
    producer = Producer({"bootstrap.servers": address, "log_level": 0})
    producer.produce("kept", "written before the crash")
    assert producer.flush(20) == 0


def read_one(address: str) -> bytes | str | None:
    consumer = Consumer({"bootstrap.servers": address, "log_level": 0, "group.id": "test"})
    consumer.assign([TopicPartition("kept", 0, OFFSET_BEGINNING)])
    (message,) = consumer.consume(1, timeout=20)
    consumer.close()
    return message.value()


def test_a_server_that_cannot_start_is_told_and_leaves_no_process(semel: Semel, tmp_path: Path) -> None:
    data = tmp_path / servers.FOLDER / "kafka" / "broker-0" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\nnode.id=77\ncluster.id=x\n")
    code, _, err = semel("up", "kafka", "--port", str(free_port()))
    assert code == 1
    what, _, remedy = err.splitlines()
    assert what.startswith("Kafka broker 0 ended while it started: ")
    assert "node" in what
    assert remedy.endswith("broker-0/broker.log, then try again.")
    assert not record_of(tmp_path).members[0].process.is_alive()
    assert semel("status")[0] == 1


# Real databases -----------------------------------------------------------------------------------------------------


@pytest.fixture
def usual_ports(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Ports that are free, as if they were the usual ones: somebody may use those of this machine."""
    postgres, mariadb = free_ports(2)
    for name, kind, port in (("postgres", PostgresServer, postgres), ("mariadb", MariaDbServer, mariadb)):
        elsewhere = replace(servers.KINDS[name], open=servers.open_database(kind, port))
        monkeypatch.setitem(servers.KINDS, name, elsewhere)
    return postgres, mariadb


def test_two_databases_at_once(semel: Semel, tmp_path: Path, usual_ports: tuple[int, int]) -> None:
    code, out, err = semel("up", "postgres", "mariadb", "--json")
    assert code == 0, err
    postgres, mariadb = json.loads(out)["servers"]
    assert [postgres["address"], mariadb["address"]] == [f"127.0.0.1:{port}" for port in usual_ports]
    password = (tmp_path / servers.FOLDER / "postgres" / "password").read_text()
    assert postgres["url"] == f"postgresql://semel:{password}@127.0.0.1:{usual_ports[0]}/semel"
    assert mariadb["url"].startswith("mysql://semel:")
    client = shutil.which("psql")
    assert client is not None
    asked = subprocess.run([client, postgres["url"], "-Atc", "SELECT 1"], capture_output=True, timeout=30, check=False)
    assert asked.stdout == b"1\n"

    # Who asks after a server is not told its password, in no way.
    for arguments in (["status"], ["status", "--json"]):
        code, out, err = semel(*arguments)
        assert (code, f"postgresql://semel@127.0.0.1:{usual_ports[0]}/semel" in out) == (0, True)
        assert password not in out + err
    assert password not in (tmp_path / servers.FOLDER / "postgres.json").read_text()

    code, out, _ = semel("up", "postgres")
    assert (code, out.splitlines()[0]) == (0, "postgres is up already")
    assert out.splitlines()[-1] == f"connect with {postgres['url']}"
    code, _, err = semel("up", "postgres", "--port", str(free_port()))
    assert (code, err.splitlines()[0]) == (2, f"PostgreSQL is up already on another port: {usual_ports[0]}.")

    processes = [record_of(tmp_path, name).members[0].process for name in ("postgres", "mariadb")]
    assert semel("down", "mariadb")[:2] == (0, "stopped mariadb\n")
    assert [process.is_alive() for process in processes] == [True, False]
    assert semel("down", "--remove")[0] == 0
    assert sorted(file.name for file in servers.FOLDER.iterdir()) == [".gitignore", "lock"]


def test_a_server_that_fails_leaves_the_one_before_it_up(semel: Semel, usual_ports: tuple[int, int]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", usual_ports[1]))
        taken.listen()
        code, out, err = semel("up", "postgres", "mariadb")
    assert (code, err.splitlines()[0]) == (
        2,
        f"MariaDB cannot listen on 127.0.0.1:{usual_ports[1]}: another program does.",
    )
    assert "connect with postgresql://semel:" in out
    assert only(semel("status", "--json")[1])["state"] == "up"
    assert semel("down")[:2] == (0, "stopped postgres\n")


WRONG_TOGETHER = {
    "one port for two": (
        ["kafka", "postgres", "--port", "9"],
        "One port, 9, cannot serve several servers: kafka, post",
    ),
    "brokers of no Kafka": (["postgres", "--brokers", "3"], "Only Kafka has brokers, not postgres."),
}


@pytest.mark.parametrize(("arguments", "what"), WRONG_TOGETHER.values(), ids=WRONG_TOGETHER.keys())
def test_options_that_do_not_fit_the_servers_are_refused(semel: Semel, arguments: list[str], what: str) -> None:
    code, _, err = semel("up", *arguments)
    assert (code, err.startswith(what), len(err.splitlines())) == (2, True, 3)
    assert not servers.FOLDER.exists()


# Without a Kafka ----------------------------------------------------------------------------------------------------


def test_a_pid_that_somebody_else_has_now_is_not_killed(semel: Semel, tmp_path: Path) -> None:
    other = spawn(["/bin/sleep", "60"], tmp_path / "log")
    stale = Member((free_port(), 1, 2), replace(other, started="another day"))
    servers.FOLDER.mkdir()
    write_record(servers.FOLDER, Record("kafka", "4.1.2", "127.0.0.1:1", True, (stale,)))
    code, out, _ = semel("status", "--json")
    assert (code, only(out)["state"], only(out)["pids"]) == (1, "down", [])
    assert semel("down")[:2] == (0, "kafka was not up\n")
    assert other.is_alive()
    other.kill()


def test_a_cluster_that_lost_a_broker_is_told_as_such(semel: Semel, tmp_path: Path) -> None:
    stand_ins = [spawn(["/bin/sleep", "60"], tmp_path / "log") for _ in range(3)]
    stand_ins[1].kill()
    ports = free_ports(3)
    servers.FOLDER.mkdir()
    members = tuple(Member((port, 1, 2), process) for port, process in zip(ports, stand_ins, strict=True))
    with ExitStack() as listening:
        for port in ports:
            server = listening.enter_context(socket.socket())
            server.bind(("127.0.0.1", port))
            server.listen()
        write_record(servers.FOLDER, Record("kafka", "4.1.2", "a,b,c", True, members))
        code, out, _ = semel("status", "--json")
    assert (code, only(out)["state"]) == (1, "2 of 3 up")
    assert only(out)["pids"] == [stand_ins[0].pid, stand_ins[2].pid]


def test_a_port_that_is_taken_is_told_in_three_lines(semel: Semel) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, out, err = semel("up", "kafka", "--port", str(port))
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"Kafka broker 0 cannot listen on 127.0.0.1:{port}: another program does.",
        "  the data now: nothing was started and no row was written",
        "  what to do: End that program, or choose another port (--port on the command line).",
    ]
    assert semel("status")[0] == 1


@pytest.mark.parametrize("verb", ["up", "down"])
def test_an_unknown_server_says_which_exist(semel: Semel, verb: str) -> None:
    code, _, err = semel(verb, "kafkaesque")
    assert (code, err.splitlines()[0]) == (2, "There is no server 'kafkaesque'.")
    assert err.splitlines()[2] == "  what to do: Name one of those that exist: kafka, postgres, mariadb."
    assert not servers.FOLDER.exists()


def test_nothing_to_take_down_is_no_error(semel: Semel) -> None:
    assert semel("down") == (0, "no server was ever brought up here: semel dev up kafka\n", "")
    assert json.loads(semel("down", "--json")[1]) == {"servers": []}
    assert not servers.FOLDER.exists()


def test_two_commands_at_once_are_kept_apart(semel: Semel) -> None:
    servers.FOLDER.mkdir()
    with (servers.FOLDER / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, err = semel("up", "kafka")
    assert (code, err.splitlines()[0]) == (
        2,
        "Another semel command is starting or stopping servers in .semel-dev.",
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"members": [{"ports": [1]}]}', '{"members": []}'])
def test_a_state_file_that_cannot_be_read_is_told_in_three_lines(semel: Semel, content: str) -> None:
    servers.FOLDER.mkdir()
    (servers.FOLDER / "kafka.json").write_text(content)
    for verb in (["status"], ["up", "kafka"], ["down"]):
        code, _, err = semel(*verb)
        what, data_now, _ = err.splitlines()
        assert (code, what.startswith(".semel-dev/kafka.json cannot be read as the state of kafka: ")) == (2, True)
        assert data_now.endswith("the data of the server was not touched")
    (servers.FOLDER / "kafka.json").unlink()


@pytest.mark.parametrize("wrong", [["--brokers", "0"], ["--brokers", "6"], ["--port", "0"], ["--port", "x"]])
def test_numbers_out_of_range_are_refused(semel: Semel, wrong: list[str]) -> None:
    code, _, err = semel("up", "kafka", *wrong)
    assert (code, f"Invalid value for '{wrong[0]}'" in err) == (2, True)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = Record("kafka", "4.1.2", "a:1", False, (Member((1, 2, 3), Process(4, "then")),))
    write_record(tmp_path, record)
    assert read_record(tmp_path, "kafka") == record
