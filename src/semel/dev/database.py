"""What a local PostgreSQL and a local MariaDB have in common: one main process, one data folder, one login.

folder/
  data/        made once; it belongs to the user that the server runs as
  password     of the login; ours alone
  server.log   everything that the server said
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from semel.dev.account import Account, account_for, opened, ourselves
from semel.dev.debian import Product, find, install
from semel.dev.jars import Say, unavailable
from semel.dev.logs import telling_line
from semel.dev.ports import free_port, listens, refuse_taken
from semel.dev.process import Process, processes_in, spawn
from semel.dev.records import Member, write_private
from semel.errors import ConfigError, SemelError

# The login, and the database that belongs to it.
USER = DATABASE = "semel"
INITIALISE_TIMEOUT_S_MAX = 120.0
START_TIMEOUT_S_MAX = 60.0
STOP_TIMEOUT_S_MAX = 30.0
QUERY_TIMEOUT_S_MAX = 60.0
# A server whose main process was killed: how long the others may take to notice.
ORPHANS_TIMEOUT_S_MAX = 10.0
_ANSWER_TIMEOUT_S_MAX = 5.0
_POLL_S = 0.05


class RunProgram(Protocol):
    """Runs a program to its end, as the user of the server, with a text on stdin."""

    def __call__(self, command: Sequence[str], text: str = "") -> None: ...


class DatabaseServer(ABC):
    """A server that can be killed, stopped, halted and started again on the same port and data."""

    title: ClassVar[str]
    # Scheme of the URL.
    scheme: ClassVar[str]
    # The program that is the server.
    program: ClassVar[str]
    # The signal that ends the server without waiting for clients.
    ends_by: ClassVar[signal.Signals]
    defaults: ClassVar[Mapping[str, str]]
    # The user that the package may have made for its server.
    account_name: ClassVar[str]
    # Whether it takes its data folder as a descriptor, and so gets at it below folders that only root may enter.
    by_descriptor: ClassVar[bool]
    # What it must be told in order to run as root.
    as_root: ClassVar[tuple[str, ...]]
    # Files in the data folder by which a server that was killed keeps the next one out.
    leftovers: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        folder: Path,
        port: int,
        settings: Mapping[str, str] | None = None,
        process: Process | None = None,
        say: Say = lambda _: None,
    ) -> None:
        if not 0 < port < 65_536:
            raise ConfigError(f"{self.title} cannot listen on port {port}.", remedy="Use 1 to 65535.")
        self.folder = folder.resolve()
        self.port = port
        # What the caller asked for beats what we think best.
        self.settings = {**self.defaults, **(settings or {})}
        self.process = process
        self._say = say
        # Where in the log the present life of the server begins.
        self._log_bytes_before = 0

    # What differs ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def product(self) -> Product:
        """The package that can serve this data."""

    @abstractmethod
    def initialise(self, place: str, run: RunProgram) -> None:
        """Fill the new data folder, with the login and its database. Programs are to call it `place`."""

    @abstractmethod
    def command(self, place: str) -> list[str]:
        """The command line of the server, which is to call its data folder `place`."""

    @abstractmethod
    def client(self) -> tuple[list[str], dict[str, str]]:
        """The package's client as a command line that takes SQL on stdin, and the environment that it needs."""

    # Where it is ----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def new_data(self) -> Path:
        """The data folder while it is being made."""
        return self.folder / "data.new"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def password_file(self) -> Path:
        return self.folder / "password"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def password(self) -> str:
        if not self.password_file.is_file():
            raise ConfigError(
                f"There is no password of {self.title} in {self.folder}.",
                data_now="the data in that folder was not touched",
                remedy="Start the server first. If it has data without a password, remove that folder and start anew.",
            )
        return self.password_file.read_text().strip()

    @property
    def url(self) -> str:
        """All that a client needs. It holds the password: not for logs."""
        return f"{self.scheme}://{USER}:{self.password}@{self.address}/{DATABASE}"

    @cached_property
    def version(self) -> str:
        said = subprocess.run(  # noqa: S603  the arguments are ours, there is no shell
            [self.programs[self.program], "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
        found = re.search(r"\d+(\.\d+)+", said)
        return found.group() if found else "of an unknown version"

    @cached_property
    def programs(self) -> Mapping[str, str]:
        """The programs of the package by name. Installs the package when it is missing."""
        found = find(self.product())
        if found is None:
            install(self.product(), self._say)
            found = find(self.product())
        if found is None:
            names = ", ".join(self.product().programs)
            raise unavailable(
                f"{self.title} is installed, but one of its programs is missing: {names}.",
                remedy=f"Install it again: apt-get install --reinstall {' '.join(self.product().packages)}",
            )
        return found

    # What can be done with it ---------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def kill(self) -> None:
        """SIGKILL to every process of the server, as a power cut would. Returns when all are dead."""
        main = self._process()
        # Seen before as well: one that is ending already shows no program any more, yet it still lives.
        before = self._processes()
        # The main process first: nobody else starts new ones.
        main.send(signal.SIGKILL)
        everyone = [main, *before, *self._processes()]
        for process in everyone:
            process.send(signal.SIGKILL)
        for process in everyone:
            process.kill()

    def stop(self, *, seconds_max: float = STOP_TIMEOUT_S_MAX) -> bool:
        """End the server without waiting for clients, and kill it at the limit. Returns whether it ended by itself."""
        self.resume()
        clean = self._process().stop(seconds_max, by=self.ends_by)
        if not clean:
            self.kill()
        return clean

    def start(self, *, seconds_max: float = START_TIMEOUT_S_MAX) -> None:
        """Start on the same port and data. Returns when a client can log in; harmless for a server that runs."""
        self.launch()
        self.wait_until_ready(seconds_max=seconds_max)

    def pause(self) -> None:
        """SIGSTOP to every process: clients wait, nothing is closed."""
        self._process().send(signal.SIGSTOP)
        halted: set[Process] = set()
        # A process that was being started while we looked is found by the next look; no more can follow.
        while new := set(self._processes()) - halted:
            for process in new:
                process.send(signal.SIGSTOP)
            halted |= new

    def resume(self) -> None:
        """SIGCONT to every process. Harmless for a server that was not halted."""
        for process in (self._process(), *self._processes()):
            process.send(signal.SIGCONT)

    def query(self, sql: str, *, seconds_max: float = QUERY_TIMEOUT_S_MAX) -> str:
        """Run SQL with the package's own client. Returns what it printed: a line per row, bare values."""
        code, said = self._ask(sql, seconds_max)
        if code != 0:
            raise SemelError(
                f"{self.title} at {self.address} refused: {telling_line(said)}",
                data_now="what the statements before that one did stays",
                remedy="Correct the SQL, or bring the server back.",
            )
        return said.strip()

    # As one of the servers of `semel dev` ---------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the server unless it runs, without waiting until it serves."""
        if self.is_alive():
            return
        refuse_taken(self.port, self.title)
        self.folder.mkdir(parents=True, exist_ok=True)
        account = self._account()
        self._make_data(account)
        self._wait_for_orphans()
        for name in self.leftovers:
            (self.data / name).unlink(missing_ok=True)
        self._say(f"starting {self.title} {self.version} on {self.address}")
        self._log_bytes_before = self.log.stat().st_size if self.log.is_file() else 0
        with opened(self.data) as descriptor:
            root = self.as_root if account.uid == 0 else ()
            place = self._place(self.data, descriptor)
            # Servers must not share a folder for temporary files: MariaDB's have the same names in each.
            self.process = spawn(account.command([*self.command(place), *root], TMPDIR=place), self.log)

    def wait_until_ready(self, *, seconds_max: float = START_TIMEOUT_S_MAX) -> None:
        """Wait until a client can log in."""
        began = time.monotonic()
        next_word_s = 5.0
        while not self._answers():
            waited_s = time.monotonic() - began
            if not self.is_alive():
                raise self._failed(f"{self.title} ended while it started")
            if waited_s > seconds_max:
                raise self._failed(f"{self.title} did not serve within {seconds_max:.0f} s")
            if waited_s > next_word_s:
                self._say(f"waiting for {self.title}: {waited_s:.0f} s of at most {seconds_max:.0f} s")
                next_word_s += 5.0
            time.sleep(_POLL_S)

    def stop_all(self) -> bool:
        """Stop it if it runs. Returns whether it ended by itself."""
        return not self.is_alive() or self.stop()

    def members(self) -> tuple[Member, ...]:
        """What to remember of the server in order to find it again from another process."""
        return (Member((self.port,), self.process),) if self.process else ()

    # How ------------------------------------------------------------------------------------------------------------

    def _account(self) -> Account:
        """Whom it runs as: an ordinary user wherever that is possible."""
        chosen = account_for(self.data, self.account_name)
        return chosen if self.by_descriptor or chosen.reaches(self.folder) else ourselves()

    def _place(self, data: Path, descriptor: int) -> str:
        """What programs that inherit the descriptor of a data folder are to call that folder."""
        return f"/proc/self/fd/{descriptor}" if self.by_descriptor else str(data)

    def _make_data(self, account: Account) -> None:
        """Make the data folder aside and rename it: a run that is cut short leaves nothing that looks complete."""
        if self.data.is_dir():
            return
        self._say(f"making a data folder of {self.title} {self.version}")
        if not self.password_file.is_file():
            write_private(self.password_file, secrets.token_urlsafe(24))
        shutil.rmtree(self.new_data, ignore_errors=True)
        account.make_folder(self.new_data)
        with opened(self.new_data) as descriptor:
            self.initialise(self._place(self.new_data, descriptor), self._runner(account, descriptor))
        self.new_data.rename(self.data)

    def _runner(self, account: Account, descriptor: int) -> RunProgram:
        def run(command: Sequence[str], text: str = "") -> None:
            temporary = self._place(self.new_data, descriptor)
            code, said = account.run(
                command, text=text, keep=descriptor, temporary=temporary, seconds_max=INITIALISE_TIMEOUT_S_MAX
            )
            if code != 0:
                raise unavailable(
                    f"{Path(command[0]).name} could not make a data folder: {telling_line(self._hushed(said))}",
                    remedy=f"Check that the disk of {self.folder} is not full, then try again.",
                )

        return run

    def _hushed(self, text: str) -> str:
        """Programs quote the SQL that they did not like."""
        return text.replace(self.password, "...")

    def _wait_for_orphans(self) -> None:
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S_MAX
        while orphans := self._processes():
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in orphans)
                raise ConfigError(
                    f"Another {self.title} runs on {self.data}: process {pids}.",
                    data_now="it goes on as it was; nothing was started or stopped",
                    remedy="End it, then try again.",
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        # A client program for every look would be dear while nobody listens.
        return listens(self.port) and self._ask("SELECT 1;", _ANSWER_TIMEOUT_S_MAX)[0] == 0

    def _ask(self, sql: str, seconds_max: float) -> tuple[int, str]:
        command, environment = self.client()
        try:
            done = subprocess.run(  # noqa: S603  the arguments are ours, there is no shell
                command, env=environment, input=sql, capture_output=True, text=True, timeout=seconds_max, check=False
            )
        except subprocess.TimeoutExpired:
            return 1, f"it did not answer within {seconds_max:.0f} s"
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr

    def _processes(self) -> list[Process]:
        return processes_in(self.data.resolve(), self.program)

    def _process(self) -> Process:
        if self.process is None:
            raise ConfigError(f"{self.title} was never started.", remedy="Start it first.")
        return self.process

    def _failed(self, what: str) -> SemelError:
        said = self.log.read_bytes()[self._log_bytes_before :].decode(errors="replace")
        return unavailable(f"{what}: {telling_line(said)}", remedy=f"Read {self.log}, then try again.")


S = TypeVar("S", bound=DatabaseServer)


@contextmanager
def running(kind: type[S], folder: Path, port: int | None, settings: Mapping[str, str] | None, say: Say) -> Iterator[S]:
    """Run a server with its data in `folder`. It ends with the block; the data stays."""
    server = kind(folder, port or free_port(), settings, say=say)
    try:
        server.start()
        yield server
    finally:
        server.stop_all()
