"""A real Kafka on this machine: KRaft, one JVM per broker, everything on the loopback interface."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from semel.dev.jars import Say, unavailable
from semel.dev.kafka_program import KAFKA, Program, format_data, new_id, program
from semel.dev.kafka_settings import Kerberos, Layout, Ports, Security, Tls, as_text, properties_of
from semel.dev.logs import telling_line
from semel.dev.ports import free_ports, listens, refuse_taken
from semel.dev.process import Process, spawn
from semel.dev.records import Member, write_private
from semel.errors import ConfigError, MissingExtra, SemelError

__all__ = ["KAFKA", "KafkaCluster", "Kerberos", "Layout", "Ports", "Security", "Tls", "kafka", "lay_out"]

BROKERS_MAX = 5
START_TIMEOUT_S_MAX = 60.0
STOP_TIMEOUT_S_MAX = 20.0
_ANSWER_TIMEOUT_S_MAX = 2.0
_POLL_S = 0.05


@contextmanager
def kafka(
    folder: Path,
    *,
    brokers: int = 1,
    ports: Sequence[int] = (),
    properties: Mapping[str, str] | None = None,
    security: Security | None = None,
    quick: bool = False,
    heap_mb: int = 512,
    say: Say = lambda _: None,
) -> Iterator[KafkaCluster]:
    """Run a Kafka with its data in `folder`. It ends with the block; the data stays.

    `ports` are those that clients use, one per broker; by default any that are free. `properties` go to every broker.
    `quick` starts with two thirds of the work: for tests of behaviour, not for benchmarks.
    """
    layout = lay_out(
        folder, brokers=brokers, ports=ports, properties=properties, security=security, quick=quick, heap_mb=heap_mb
    )
    cluster = KafkaCluster(layout, say=say)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def lay_out(
    folder: Path,
    *,
    brokers: int = 1,
    ports: Sequence[int] = (),
    properties: Mapping[str, str] | None = None,
    security: Security | None = None,
    quick: bool = False,
    heap_mb: int = 512,
) -> Layout:
    """A cluster on paper, with a port for everything."""
    if not 1 <= brokers <= BROKERS_MAX:
        raise ConfigError(
            f"A local Kafka cannot have {brokers} brokers.", remedy=f"Ask for 1 to {BROKERS_MAX} of them."
        )
    if ports and len(ports) != brokers:
        raise ConfigError(f"{brokers} brokers cannot use {len(ports)} ports.", remedy="Give one port per broker.")
    if any(not 0 < port < 65_536 for port in ports):
        raise ConfigError(f"These are not all ports: {', '.join(map(str, ports))}.", remedy="Use 1 to 65535.")
    if "," in str(folder.resolve()):
        # Kafka takes it for two folders.
        raise ConfigError(f"The data of Kafka cannot lie in {folder}.", remedy="Name a folder without a comma.")
    free = free_ports(3 * brokers, besides=ports)
    client = list(ports) or free[:brokers]
    each = tuple(map(Ports, client, free[brokers : 2 * brokers], free[2 * brokers :]))
    return Layout(folder.resolve(), each, dict(properties or {}), security, quick, heap_mb)


class KafkaCluster:
    """Brokers that can be killed, stopped and started one by one. Broker n has the node id n."""

    def __init__(
        self, layout: Layout, processes: Mapping[int, Process] | None = None, say: Say = lambda _: None
    ) -> None:
        self.layout = layout
        self.bootstrap = layout.bootstrap
        self.processes: dict[int, Process] = dict(processes or {})
        # Those that should serve: started, and neither killed nor stopped since.
        self._expected = {broker for broker in self.processes if self.is_alive(broker)}
        self._say = say
        self._program: Program | None = None
        # Where in its log the present life of a broker begins.
        self._log_bytes_before: dict[int, int] = {}

    @property
    def address(self) -> str:
        """The bootstrap servers, under the name that every kind of server has."""
        return self.bootstrap

    @property
    def version(self) -> str:
        return KAFKA.version

    @property
    def url(self) -> str:
        """Kafka has none: clients take the address."""
        return ""

    @property
    def brokers(self) -> range:
        return range(len(self.layout.ports))

    def is_alive(self, broker: int = 0) -> bool:
        return broker in self.processes and self.processes[broker].is_alive()

    def client_options(self, user: str | None = None) -> dict[str, str]:
        """What a confluent-kafka client needs to get in. With security, a user must be named."""
        options = {"bootstrap.servers": self.bootstrap}
        if self.layout.security is None:
            return options
        security, users = self.layout.security, self.layout.security.users
        if user is None or user not in users:
            raise ConfigError(f"This Kafka has no user {user!r}.", remedy=f"Name one that exists: {', '.join(users)}.")
        login = {"sasl.username": user, "sasl.password": users[user]}
        trusted = {"ssl.ca.location": str(security.tls.trusted)} if security.tls else {}
        return {**options, **trusted, "security.protocol": self.layout.protocol, "sasl.mechanism": "PLAIN", **login}

    def kill(self, broker: int = 0) -> None:
        """SIGKILL. Returns when the broker is dead."""
        self._expected.discard(broker)
        self._process(broker).kill()

    def stop(self, broker: int = 0, *, seconds_max: float = STOP_TIMEOUT_S_MAX) -> bool:
        """SIGTERM, then SIGKILL at the limit. Returns whether the broker ended by itself."""
        self._expected.discard(broker)
        return self._process(broker).stop(seconds_max)

    def start(self, broker: int = 0, *, seconds_max: float = START_TIMEOUT_S_MAX) -> None:
        """Start a broker on its port and data. Returns when it serves; harmless for one that runs.

        No broker serves without a majority of them: when half of them are down, use `start_all`.
        """
        self.launch([broker])
        self.wait_until_ready(seconds_max=seconds_max)

    def start_all(self, *, seconds_max: float = START_TIMEOUT_S_MAX) -> None:
        self.launch()
        self.wait_until_ready(seconds_max=seconds_max)

    def stop_all(self, *, seconds_max: float = STOP_TIMEOUT_S_MAX) -> bool:
        """Stop every broker, one after the other. Returns whether those that could end by themselves did.

        A broker ends when the controllers agree that it may. Once half of them are gone nobody can agree to anything
        and it would wait for minutes: then it is killed, which costs a look through its logs at the next start.
        """
        running = [broker for broker in self.brokers if self.is_alive(broker)]
        clean = True
        while 2 * len(running) > len(self.brokers):
            clean = self.stop(running.pop(0), seconds_max=seconds_max) and clean
        for broker in running:
            self.kill(broker)
        return clean

    def wait_until_ready(self, *, seconds_max: float = START_TIMEOUT_S_MAX) -> None:
        """Wait until every broker that should serve answers, and knows of all the others."""
        began = time.monotonic()
        next_word_s = 5.0
        for broker in sorted(self._expected):
            while not self._expected <= self._known_to(broker):
                waited_s = time.monotonic() - began
                if not self.is_alive(broker):
                    raise self._failed(f"Kafka broker {broker} ended while it started", broker)
                if waited_s > seconds_max:
                    raise self._failed(f"Kafka broker {broker} did not serve within {seconds_max:.0f} s", broker)
                if waited_s > next_word_s:
                    self._say(f"waiting for Kafka broker {broker}: {waited_s:.0f} s of at most {seconds_max:.0f} s")
                    next_word_s += 5.0
                time.sleep(_POLL_S)

    def launch(self, brokers: Sequence[int] | None = None) -> None:
        """Start brokers that do not run, all of them by default, without waiting until they serve."""
        absent = [broker for broker in (self.brokers if brokers is None else brokers) if not self.is_alive(broker)]
        if not absent:
            return
        # First the data, then the ports: a user who asks for too many brokers need not find free ports for them.
        kept = self._kept_cluster_id()
        self._refuse_taken_ports(absent)
        self._program = self._program or program(self._say)
        cluster = kept or self._new_cluster_id()
        self._say(f"starting Kafka {KAFKA.version} on {self.bootstrap}")
        for broker in absent:
            format_data(self._program, self.layout, broker, cluster)
            write_private(self.layout.settings(broker), as_text(properties_of(self.layout, broker)))
            log = self.layout.log(broker)
            self._log_bytes_before[broker] = log.stat().st_size if log.is_file() else 0
            self.processes[broker] = spawn(self._program.command(self.layout, broker), log)
            self._expected.add(broker)

    def members(self) -> tuple[Member, ...]:
        """What to remember of each broker that was started, in order to find it again from another process."""
        started = [broker for broker in self.brokers if broker in self.processes]
        return tuple(Member(astuple(self.layout.ports[broker]), self.processes[broker]) for broker in started)

    def _refuse_taken_ports(self, brokers: Sequence[int]) -> None:
        for broker in brokers:
            own = self.layout.ports[broker]
            for port in (own.client, own.internal, own.controller):
                refuse_taken(port, f"Kafka broker {broker}")

    def _kept_cluster_id(self) -> str | None:
        """The identity that the data has, if there is any. Data of more or fewer brokers is not ours to open."""
        if not self._identity.is_file():
            return None
        kept = json.loads(self._identity.read_text())
        count = len(self.brokers)
        if kept["brokers"] != count:
            raise ConfigError(
                f"{self.layout.folder} holds the data of another number of brokers: {kept['brokers']}, not {count}.",
                data_now="the data in that folder was not touched; nothing was started",
                remedy="Ask for as many brokers as there were, remove the data, or name another folder.",
            )
        return str(kept["id"])

    def _new_cluster_id(self) -> str:
        self.layout.folder.mkdir(parents=True, exist_ok=True)
        cluster = new_id()
        write_private(self._identity, json.dumps({"id": cluster, "brokers": len(self.brokers)}))
        return cluster

    @property
    def _identity(self) -> Path:
        return self.layout.folder / "cluster.json"

    def _known_to(self, broker: int) -> set[int]:
        """The brokers that one broker knows to be in service. Empty while it does not answer."""
        port = self.layout.ports[broker].internal
        if not listens(port):
            return set()
        try:
            from confluent_kafka import KafkaException
            from confluent_kafka.admin import AdminClient
        except ModuleNotFoundError as error:
            raise MissingExtra("A local Kafka needs confluent-kafka, which is not installed.", extra="kafka") from error
        # The listener of the brokers asks for no password. It is not worth a log line when one does not answer yet.
        client = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
        try:
            return set(client.list_topics(timeout=_ANSWER_TIMEOUT_S_MAX).brokers)
        except KafkaException:
            return set()

    def _process(self, broker: int) -> Process:
        if broker not in self.processes:
            raise ConfigError(f"Kafka broker {broker} was never started.", remedy="Start it first.")
        return self.processes[broker]

    def _failed(self, what: str, broker: int) -> SemelError:
        log = self.layout.log(broker)
        said = log.read_bytes()[self._log_bytes_before.get(broker, 0) :].decode(errors="replace")
        return unavailable(f"{what}: {telling_line(said)}", remedy=f"Read {log}, then try again.")
