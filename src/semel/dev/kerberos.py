"""A real KDC on this machine: MIT Kerberos from its Debian packages, on the loopback interface, with its own realm."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from semel.dev.debian import Product, find, install
from semel.dev.jars import Say, unavailable
from semel.dev.ports import free_port, listens
from semel.dev.process import Process, spawn

__all__ = ["REALM", "Kdc", "host", "kdc"]

REALM = "SEMEL.TEST"

START_TIMEOUT_S_MAX = 20.0
COMMAND_TIMEOUT_S_MAX = 30
STOP_TIMEOUT_S_MAX = 5.0
_POLL_S = 0.05

_PRODUCT = Product(
    "MIT Kerberos",
    ("krb5-kdc", "krb5-admin-server", "krb5-user"),
    ("krb5kdc", "kdb5_util", "kadmin.local", "kinit"),
    ("/usr/sbin:/usr/bin",),
)


def host() -> str:
    """The name of the loopback interface, which is a part of the names of the services here."""
    return socket.gethostbyaddr("127.0.0.1")[0]


@contextmanager
def kdc(folder: Path, *, ticket_life_s: int = 3600, say: Say = lambda _: None) -> Iterator[Kdc]:
    """Run a KDC with its data in `folder`. It ends with the block."""
    made = Kdc(folder.resolve(), _programs(say), ticket_life_s)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _programs(say: Say) -> Mapping[str, str]:
    found = find(_PRODUCT)
    if found is None:
        install(_PRODUCT, say)
        found = find(_PRODUCT)
    if found is None:
        raise unavailable("MIT Kerberos lacks a program.", remedy=f"Install {' '.join(_PRODUCT.packages)} anew.")
    return found


class Kdc:
    """A realm with principals. `config` is what KRB5_CONFIG names for whoever belongs to it."""

    def __init__(self, folder: Path, programs: Mapping[str, str], ticket_life_s: int) -> None:
        self.folder = folder
        self.port = free_port()
        self.config = folder / "krb5.conf"
        self._programs = programs
        self._life = f"{ticket_life_s}s"
        self._profile = folder / "kdc.conf"
        self._log = folder / "kdc.log"
        self._process: Process | None = None

    def start(self) -> None:
        """Make the realm where it is missing, and serve. Returns when it does."""
        if not self._profile.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.config.write_text(self._krb5_conf())
            self._profile.write_text(self._kdc_conf())
            # The master key is kept in a file, so that nobody has to type its password.
            self.run("kdb5_util", "create", "-s", "-r", REALM, "-P", "master of a realm for tests")
        environment = [f"{name}={value}" for name, value in self._environment().items()]
        self._process = spawn(["/usr/bin/env", *environment, self._programs["krb5kdc"], "-n"], self._log)
        deadline = time.monotonic() + START_TIMEOUT_S_MAX
        while not listens(self.port):
            if not self._process.is_alive() or time.monotonic() > deadline:
                raise unavailable("The KDC did not start.", remedy=f"Read {self._log}, then try again.")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(STOP_TIMEOUT_S_MAX)

    def keytab(self, principal: str) -> Path:
        """A new principal with a random key, in a keytab of its own."""
        file = self.folder / f"{principal.replace('/', '_')}.keytab"
        self.run("kadmin.local", "-r", REALM, "-q", f"addprinc -randkey {principal}@{REALM}")
        self.run("kadmin.local", "-r", REALM, "-q", f"ktadd -k {file} {principal}@{REALM}")
        if not file.is_file():
            raise unavailable(f"The KDC made no keytab for {principal}.", remedy=f"Read {self._log}, then try again.")
        return file

    def ticket(self, principal: str, keytab: Path) -> Path:
        """A ticket in a cache of its own, as kinit gets it."""
        cache = self.folder / f"{principal.replace('/', '_')}.ticket"
        self.run("kinit", "-k", "-t", str(keytab), "-c", f"FILE:{cache}", f"{principal}@{REALM}")
        return cache

    def run(self, program: str, *words: str) -> None:
        done = subprocess.run(  # noqa: S603  the arguments are ours, there is no shell
            [self._programs[program], *words],
            env={**os.environ, **self._environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S_MAX,
            check=False,
        )
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["it said nothing"]
            raise unavailable(f"{program} failed: {lines[-1]}", remedy="Mend the cause, then try again.")

    def _environment(self) -> dict[str, str]:
        return {"KRB5_CONFIG": str(self.config), "KRB5_KDC_PROFILE": str(self._profile)}

    def _krb5_conf(self) -> str:
        """Clients look a service up under the name of its address: Java's Kafka client can do nothing else."""
        return f"""[libdefaults]
  default_realm = {REALM}
  dns_lookup_realm = false
  dns_lookup_kdc = false
  dns_canonicalize_hostname = true
  rdns = true
  udp_preference_limit = 1
[realms]
  {REALM} = {{
    kdc = 127.0.0.1:{self.port}
  }}
"""

    def _kdc_conf(self) -> str:
        return f"""[kdcdefaults]
  kdc_listen = 127.0.0.1:{self.port}
  kdc_tcp_listen = 127.0.0.1:{self.port}
[realms]
  {REALM} = {{
    database_name = {self.folder}/principal
    key_stash_file = {self.folder}/stash
    max_life = {self._life}
  }}
"""
