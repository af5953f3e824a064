"""Servers that a run may break: its own, each behind a network that can be cut, or those of `semel dev`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from semel.dev.database import DatabaseServer
from semel.dev.jars import Say
from semel.dev.kafka import KafkaCluster, lay_out
from semel.dev.ports import free_ports
from semel.dev.records import Record, locked, read_record, write_record
from semel.dev.servers import FOLDER, KAFKA_NAME, KINDS, Wish
from semel.errors import ConfigError
from semel.verify.proxy import Proxy


@dataclass
class Server:
    """A server by its name. Without a proxy it can be killed and started, and nothing else."""

    name: str
    #: What the pipeline connects with. It may hold a password: not for logs.
    url: str = field(repr=False)
    server: KafkaCluster | DatabaseServer = field(repr=False)
    proxy: Proxy | None = None
    #: Called when it was started anew.
    remember: Callable[[], None] = lambda: None

    @property
    def variables(self) -> dict[str, str]:
        return {KINDS[self.name].variable: self.url}

    def kill(self) -> None:
        """SIGKILL to every process of it. Returns when all are dead."""
        if isinstance(self.server, DatabaseServer):
            self.server.kill()
            return
        for broker in self.server.brokers:
            self.server.kill(broker)

    def start(self) -> None:
        """On the same port and data. Returns when it serves; harmless for a server that runs."""
        self.server.launch()
        self.remember()
        self.server.wait_until_ready()

    def cut(self, *, silent: bool = False) -> None:
        self._network.cut(silent=silent)

    def repair(self) -> None:
        self._network.repair()

    def delay(self, seconds: float) -> None:
        self._network.delay(seconds)

    @property
    def _network(self) -> Proxy:
        if self.proxy is None:
            raise ConfigError(f"The network to {self.name} is not ours.", remedy=f"Start it here: --with {self.name}")
        return self.proxy


# Those of this run ----------------------------------------------------------------------------------------------------


@contextmanager
def start_servers(names: Sequence[str], folder: Path, say: Say) -> Iterator[dict[str, Server]]:
    """Real servers with their data below `folder`, each behind a proxy. They end with the block; the data stays."""
    with ExitStack() as stack:
        servers = {}
        for name in names:
            servers[name] = _laid_out(name, folder / name, say)
            # Before it is launched: a start that fails half way is taken down, too.
            stack.callback(_end, servers[name])
            servers[name].server.launch()
        for name, server in servers.items():
            server.server.wait_until_ready()
            if isinstance(server.server, DatabaseServer) and server.proxy:
                # The password is made at the first start.
                servers[name].url = _through(server.server.url, server.proxy.port)
        yield servers


def _laid_out(name: str, folder: Path, say: Say) -> Server:
    if name not in KINDS:
        raise ConfigError(f"There is no server {name!r}.", remedy=f"Name one of those that exist: {', '.join(KINDS)}.")
    database = KINDS[name].database
    if database is None:
        return _kafka(folder, say)
    own, port = free_ports(2)
    return Server(name, "", database(folder, own, say=say), Proxy(port, own))


def _kafka(folder: Path, say: Say) -> Server:
    """Clients go where the broker says that it is, so it says that it is the proxy."""
    layout = lay_out(folder, quick=True)
    own = layout.ports[0]
    (port,) = free_ports(1, besides=astuple(own))
    advertised = f"CLIENT://127.0.0.1:{port},INTERNAL://127.0.0.1:{own.internal}"
    cluster = KafkaCluster(replace(layout, properties={"advertised.listeners": advertised}), say=say)
    proxy = Proxy(port, own.client)
    return Server(KAFKA_NAME, proxy.address, cluster, proxy)


def _end(server: Server) -> None:
    if server.proxy is not None:
        server.proxy.close()
    server.server.stop_all()


def _through(url: str, port: int) -> str:
    parts = urlsplit(url)
    login = f"{parts.username}:{parts.password}@" if parts.password else ""
    return parts._replace(netloc=f"{login}{parts.hostname}:{port}").geturl()


# Those of `semel dev` -------------------------------------------------------------------------------------------------


def dev_server(name: str, say: Say, folder: Path = FOLDER) -> Server:
    """A server of `semel dev` that is up, and that the user allows us to break."""
    record = read_record(folder, name) if name in KINDS else None
    if record is None or not record.members or record.members_up() < len(record.members):
        raise ConfigError(
            f"There is no {name} of `semel dev` that is up in {folder}.", remedy=f"Bring it up: semel dev up {name}"
        )
    server = KINDS[name].open(folder / name, record.members, Wish(), say)
    if not isinstance(server, KafkaCluster | DatabaseServer):
        raise ConfigError(f"{name} cannot be broken.", remedy=f"Choose among {', '.join(KINDS)}.")
    found = server
    return Server(name, server.url or server.address, server, remember=lambda: _remember(record, found, folder))


def _remember(record: Record, server: KafkaCluster | DatabaseServer, folder: Path) -> None:
    """The next command of `semel dev` must find the new processes."""
    with locked(folder):
        write_record(folder, replace(record, wanted=True, members=server.members()))
