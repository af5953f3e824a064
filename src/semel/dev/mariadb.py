"""A real MariaDB on this machine, from its Debian packages, on the loopback interface alone."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from semel.dev.database import DATABASE, USER, DatabaseServer, RunProgram, running
from semel.dev.debian import Product
from semel.dev.jars import Say

__all__ = ["MariaDbServer", "mariadb"]

# The packages without a service of their own: nothing of them starts by itself, now or at the next boot.
_PRODUCT = Product(
    "MariaDB",
    ("mariadb-server-core", "mariadb-client-core"),
    ("mariadb", "mariadb-install-db", "mariadbd"),
    ("/usr/sbin:/usr/bin",),
)


def mariadb(
    folder: Path,
    *,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> AbstractContextManager[MariaDbServer]:
    """Run a MariaDB with its data in `folder`. It ends with the block; the data stays.

    By default it listens on any port that is free. `settings` are those of my.cnf and beat ours.
    """
    return running(MariaDbServer, folder, port, settings, say)


class MariaDbServer(DatabaseServer):
    """A MariaDB. The login may do everything in its database and nothing elsewhere."""

    title = "MariaDB"
    scheme = "mysql"
    program = "mariadbd"
    ends_by = signal.SIGTERM
    account_name = "mysql"
    # It asks for the real paths of its files, so the whole way must be open to it. Where that is not so, below root's
    # home for one, it can still run as root.
    by_descriptor = False
    as_root = ("--user=root",)
    # The system lets go of its locks when it dies.
    leftovers = ()
    defaults = {
        "bind_address": "127.0.0.1",
        # It cannot do without a socket in the file system. A bare name lies in the data folder, which is private.
        "socket": "server.sock",
        "skip_name_resolve": "ON",
        "character_set_server": "utf8mb4",
        "innodb_flush_log_at_trx_commit": "1",
        # Clients may send files of theirs (LOAD DATA LOCAL INFILE).
        "local_infile": "ON",
        "max_connections": "200",
    }

    def product(self) -> Product:
        return _PRODUCT

    def initialise(self, place: str, run: RunProgram) -> None:
        # There is no test database, and nobody without a name.
        options = ["--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=socket"]
        run([self.programs["mariadb-install-db"], "--no-defaults", f"--datadir={place}", *options])
        # It reads one statement per line. XA RECOVER needs no right of its own.
        statements = [
            "FLUSH PRIVILEGES;",
            f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4;",
            f"CREATE USER {USER}@'%' IDENTIFIED BY '{self.password}';",
            f"GRANT ALL ON {DATABASE}.* TO {USER}@'%';",
        ]
        alone = [self.programs["mariadbd"], "--no-defaults", "--bootstrap", f"--datadir={place}"]
        run(alone, "\n".join(statements) + "\n")

    def command(self, place: str) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        return [self.programs["mariadbd"], "--no-defaults", f"--datadir={place}", f"--port={self.port}", *settings]

    def client(self) -> tuple[list[str], dict[str, str]]:
        where = ["--protocol=TCP", "--host=127.0.0.1", f"--port={self.port}", f"--user={USER}", f"-D{DATABASE}"]
        bare = ["--batch", "--skip-column-names", "--connect-timeout=5", "--default-character-set=utf8mb4"]
        # On the command line everybody could read it.
        return [self.programs["mariadb"], "--no-defaults", *where, *bare], {"MYSQL_PWD": self.password}
