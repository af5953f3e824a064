"""A real PostgreSQL on this machine, from its Debian package, on the loopback interface alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from semel.dev.database import DATABASE, USER, DatabaseServer, RunProgram, running
from semel.dev.debian import Product
from semel.dev.jars import Say

__all__ = ["PostgresServer", "postgres"]

# Debian keeps the versions apart, each in a folder of its own.
_VERSIONS = Path("/usr/lib/postgresql")
# Everybody shows a password, and nobody comes from elsewhere.
_LOGIN = "host all,replication all 127.0.0.1/32 scram-sha-256\n"


def postgres(
    folder: Path,
    *,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> AbstractContextManager[PostgresServer]:
    """Run a PostgreSQL with its data in `folder`. It ends with the block; the data stays.

    By default it listens on any port that is free. `settings` are those of postgresql.conf and beat ours.
    """
    return running(PostgresServer, folder, port, settings, say)


class PostgresServer(DatabaseServer):
    """A PostgreSQL. The login is a superuser: it is a server of one developer."""

    title = "PostgreSQL"
    scheme = "postgresql"
    program = "postgres"
    # What PostgreSQL calls a fast shutdown.
    ends_by = signal.SIGINT
    account_name = "postgres"
    by_descriptor = True
    # It refuses.
    as_root = ()
    # It names the process of the last server. When that number has gone to some other process since, PostgreSQL takes
    # that one for a server on this data and does not start.
    leftovers = ("postmaster.pid",)
    defaults = {
        # Off by default, and two-phase commit needs it.
        "max_prepared_transactions": "64",
        "max_connections": "200",
        "listen_addresses": "127.0.0.1",
        # No socket in the file system: everybody logs in with the password.
        "unix_socket_directories": "",
    }

    @property
    def dsn(self) -> str:
        """The URL as libpq takes it. It holds the password: not for logs."""
        return self.url

    def product(self) -> Product:
        made_by = self.data / "PG_VERSION"
        programs = ("initdb", "postgres", "psql")
        if made_by.is_file():
            # Data belongs to one version; a newer program does not open it.
            version = made_by.read_text().strip()
            return Product(f"PostgreSQL {version}", (f"postgresql-{version}",), programs, (_programs_of(version),))
        newest_first = sorted(_installed(), key=float, reverse=True)
        return Product("PostgreSQL", ("postgresql",), programs, tuple(map(_programs_of, newest_first)))

    def initialise(self, place: str, run: RunProgram) -> None:
        # Trust lasts until the file of logins is replaced, before anybody listens. Without the sync it takes a
        # second, not five; a machine that loses power in its first half minute needs a new data folder.
        options = [f"--username={USER}", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        run([self.programs["initdb"], "-D", place, *options])
        sql = f"ALTER ROLE {USER} PASSWORD '{self.password}';\nCREATE DATABASE {DATABASE};\n"
        alone = [self.programs["postgres"], "--single", "-D", place, "-c", "exit_on_error=on", "postgres"]
        run(alone, sql)
        (self.new_data / "pg_hba.conf").write_text(_LOGIN)

    def command(self, place: str) -> list[str]:
        settings = [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        return [self.programs["postgres"], "-D", place, "-p", str(self.port), *settings]

    def client(self) -> tuple[list[str], dict[str, str]]:
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", DATABASE]
        bare = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"]
        # On the command line everybody could read it.
        return [self.programs["psql"], *where, *bare], {"PGPASSWORD": self.password, "PGCONNECT_TIMEOUT": "5"}


def _installed() -> Iterator[str]:
    for program in _VERSIONS.glob("*/bin/postgres"):
        yield program.parent.parent.name


def _programs_of(version: str) -> str:
    return str(_VERSIONS / version / "bin")
