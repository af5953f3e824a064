"""A network between clients and one server that can be cut, can go silent, and can be slow. It knows no protocol."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 16
CONNECT_S_MAX = 5.0
#: Nobody forgets to mend for longer than that.
SILENT_S_MAX = 300.0


@dataclass(eq=False)
class Connection:
    client: socket.socket
    server: socket.socket
    _once: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def close(self) -> None:
        """Both pumps come by here when one end is gone; a descriptor must not be closed twice."""
        with self._once:
            if self.closed:
                return
            self.closed = True
        for end in (self.client, self.server):
            # Wakes the pump that waits for this end; without it the descriptor stays open below the call.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on `port` of the loopback interface and passes everything on to `server_port`, until told otherwise.

    `connections` counts those that were made, `refused` those that were turned away.
    """

    def __init__(self, port: int, server_port: int) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.connections = 0
        self.refused = 0
        self._server_port = server_port
        self._is_cut = False
        self._delay_s = 0.0
        # Set while data may pass.
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, name=f"proxy {port}", daemon=True).start()

    # What is done to it -----------------------------------------------------------------------------------------------

    def cut(self, *, silent: bool = False) -> None:
        """Break every connection and refuse new ones, until `repair`. A silent cut breaks nothing: data just waits."""
        if silent:
            self._flows.clear()
            return
        with self._lock:
            self._is_cut = True
            broken, self._open = self._open, set()
        for connection in broken:
            connection.close()

    def repair(self) -> None:
        """As it was at first: open, and quick. What waited goes on."""
        with self._lock:
            self._is_cut = False
        self._delay_s = 0.0
        self._flows.set()

    def delay(self, seconds: float) -> None:
        """Hold back each piece of data for so long, in both directions; 0 ends it."""
        self._delay_s = seconds

    def close(self) -> None:
        self.cut()
        self._flows.set()
        # On Linux a close does not wake the thread that accepts; a shutdown does.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # The network ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            # To connect may take a while, in which others come.
            threading.Thread(target=self._serve, args=(client,), name=f"proxy {self.port}", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        connection = self._connect(client)
        if connection is None:
            with self._lock:
                self.refused += 1
            client.close()
            return
        answers = (connection, connection.server, connection.client)
        threading.Thread(target=self._pass, args=answers, name=f"proxy {self.port}", daemon=True).start()
        self._pass(connection, connection.client, connection.server)

    def _connect(self, client: socket.socket) -> Connection | None:
        if self._is_cut:
            return None
        try:
            server = socket.create_connection(("127.0.0.1", self._server_port), timeout=CONNECT_S_MAX)
        except OSError:
            return None
        server.settimeout(None)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(client, server)
        with self._lock:
            if not self._is_cut:
                self._open.add(connection)
                self.connections += 1
                return connection
        server.close()
        return None

    def _pass(self, connection: Connection, source: socket.socket, target: socket.socket) -> None:
        """One direction, until either end is gone or the network is cut."""
        with suppress(OSError):
            self.pass_on(connection, source, target)
        connection.close()
        with self._lock:
            self._open.discard(connection)

    def pass_on(self, connection: Connection, source: socket.socket, target: socket.socket) -> None:  # noqa: ARG002 - some tell connections apart
        buffer = bytearray(CHUNK_BYTES)
        view = memoryview(buffer)
        while count := source.recv_into(buffer):
            if self._delay_s:
                time.sleep(self._delay_s)
            self._flows.wait(SILENT_S_MAX)
            target.sendall(view[:count])
