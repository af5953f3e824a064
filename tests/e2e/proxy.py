"""A network between clients and one Kafka broker that can be cut, and that can hold back one request or one answer.

It knows just enough of Kafka to tell requests apart: each begins with its length and the number of its kind.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from semel.dev.kafka import KafkaCluster, lay_out
from semel.dev.ports import free_ports
from semel.verify.proxy import CHUNK_BYTES, Connection, Proxy

END_TXN = 26
HOLD_S_MAX = 120.0


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


class KafkaProxy(Proxy):
    """One that knows requests, too."""

    def __init__(self, port: int, broker_port: int) -> None:
        self._wanted: Held | None = None
        self._held_answers: dict[Connection, Held] = {}
        super().__init__(port, broker_port)

    def hold_next(self, api: int, *, answer: bool = False) -> Held:
        """Hold back the next request of this kind, or let it through and hold back the answer."""
        self._wanted = Held(api, answer)
        return self._wanted

    def pass_on(self, connection: Connection, source: socket.socket, target: socket.socket) -> None:
        if source is connection.server:
            while data := source.recv(CHUNK_BYTES):
                self._hold(self._held_answers.get(connection))
                target.sendall(data)
            return
        while frame := _frame(source):
            held = self._take(int.from_bytes(frame[4:6], "big"))
            if held is not None and held.the_answer:
                self._held_answers[connection] = held
            else:
                self._hold(held)
            target.sendall(frame)

    def _take(self, api: int) -> Held | None:
        with self._lock:
            if self._wanted is None or self._wanted.api != api:
                return None
            held, self._wanted = self._wanted, None
            return held

    def _hold(self, held: Held | None) -> None:
        if held is not None:
            held.caught.set()
            held.released.wait(HOLD_S_MAX)


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
def proxied_kafka(folder: Path) -> Iterator[tuple[KafkaCluster, KafkaProxy, str]]:
    """A broker whose clients reach it through a proxy, and the address at which the test reaches it directly."""
    layout = lay_out(folder, quick=True)
    own = layout.ports[0]
    (port,) = free_ports(1, besides=astuple(own))
    # Clients go where the broker says it is.
    advertised = f"CLIENT://127.0.0.1:{port},INTERNAL://127.0.0.1:{own.internal}"
    cluster = KafkaCluster(replace(layout, properties={"advertised.listeners": advertised}))
    proxy = KafkaProxy(port, own.client)
    try:
        cluster.start_all()
        yield cluster, proxy, f"127.0.0.1:{own.internal}"
    finally:
        proxy.close()
        cluster.stop_all()
