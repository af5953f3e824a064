"""A network between clients and one Kafka broker that can be cut, and that can hold back one request or one answer.

It knows just enough of Kafka to tell requests apart: each begins with its length and the number of its kind.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from semel.dev.kafka import KafkaCluster, lay_out
from semel.dev.ports import free_ports

END_TXN = 26
HOLD_S_MAX = 120.0
CHUNK_BYTES = 1 << 16


@dataclass
class Held:
    """One request, or the answer to it, on its way. Nothing that comes after it on its connection overtakes it."""

    api: int
    the_answer: bool
    caught: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds_max: float = 60.0) -> None:
        assert self.caught.wait(seconds_max), f"no request of kind {self.api} came by"

    def release(self) -> None:
        self.released.set()


@dataclass
class _Connection:
    client: socket.socket
    broker: socket.socket
    held_answer: Held | None = None

    def close(self) -> None:
        for end in (self.client, self.broker):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on `port` and passes everything on to the broker, until told otherwise."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._broker_port = broker_port
        self._is_cut = False
        self._wanted: Held | None = None
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    # What tests do ----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`."""
        with self._lock:
            self._is_cut = True
            broken, self._connections = self._connections, []
        for connection in broken:
            connection.close()

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def hold_next(self, api: int, *, answer: bool = False) -> Held:
        """Hold back the next request of this kind, or let it through and hold back the answer."""
        self._wanted = Held(api, answer)
        return self._wanted

    def close(self) -> None:
        self.cut()
        self._listener.close()

    # The network ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection = self._connect(client)
            if connection is None:
                client.close()
                continue
            for pump in (self._pass_requests, self._pass_answers):
                threading.Thread(target=pump, args=(connection,), name="proxy", daemon=True).start()

    def _connect(self, client: socket.socket) -> _Connection | None:
        with self._lock:
            if self._is_cut:
                return None
            try:
                broker = socket.create_connection(("127.0.0.1", self._broker_port), timeout=5)
            except OSError:
                return None
            broker.settimeout(None)
            self._connections.append(_Connection(client, broker))
            return self._connections[-1]

    def _pass_requests(self, connection: _Connection) -> None:
        with suppress(OSError):
            while frame := _frame(connection.client):
                held = self._take(int.from_bytes(frame[4:6], "big"))
                if held is not None and held.the_answer:
                    connection.held_answer = held
                elif held is not None:
                    held.caught.set()
                    held.released.wait(HOLD_S_MAX)
                connection.broker.sendall(frame)
        connection.close()

    def _take(self, api: int) -> Held | None:
        with self._lock:
            if self._wanted is None or self._wanted.api != api:
                return None
            held, self._wanted = self._wanted, None
            return held

    def _pass_answers(self, connection: _Connection) -> None:
        with suppress(OSError):
            while data := connection.broker.recv(CHUNK_BYTES):
                held = connection.held_answer
                if held is not None:
                    held.caught.set()
                    held.released.wait(HOLD_S_MAX)
                connection.client.sendall(data)
        connection.close()


def _frame(client: socket.socket) -> bytes:
    """One request with its length; nothing when the client is gone."""
    head = _exactly(client, 4)
    return head and head + _exactly(client, int.from_bytes(head, "big"))


def _exactly(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = client.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


@contextmanager
def proxied_kafka(folder: Path) -> Iterator[tuple[KafkaCluster, Proxy, str]]:
    """A broker whose clients reach it through a proxy, and the address at which the test reaches it directly."""
    layout = lay_out(folder, quick=True)
    own = layout.ports[0]
    (port,) = free_ports(1, besides=astuple(own))
    # Clients go where the broker says it is.
    advertised = f"CLIENT://127.0.0.1:{port},INTERNAL://127.0.0.1:{own.internal}"
    cluster = KafkaCluster(replace(layout, properties={"advertised.listeners": advertised}))
    proxy = Proxy(port, own.client)
    try:
        cluster.start_all()
        yield cluster, proxy, f"127.0.0.1:{own.internal}"
    finally:
        proxy.close()
        cluster.stop_all()
