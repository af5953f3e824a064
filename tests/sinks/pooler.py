"""Between clients and a database, as a connection pooler is: it passes bytes on, and hangs up when told to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 14
#: To close with this is to reset: the other end is not told politely.
RESET = struct.pack("ii", 1, 0)


@dataclass
class HangUp:
    """When to hang up on a client, once: after so many bytes of its own, or instead of the answer to a statement."""

    after_bytes: int = 0
    instead_of_the_answer_to: bytes = b""
    resets: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Pooler:
    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.plan: HangUp | None = None
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="pooler", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            _close(end)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server_port))
                self._ends += [client, server]
                connection = _Connection(self, client, server)
                for pump in (connection.pass_requests, connection.pass_answers):
                    threading.Thread(target=pump, name="pooler", daemon=True).start()


@dataclass
class _Connection:
    pooler: Pooler
    client: socket.socket
    server: socket.socket
    sent_bytes: int = 0
    losing: HangUp | None = None
    was_reset: bool = False

    def pass_requests(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(CHUNK_BYTES):
                self.sent_bytes += len(data)
                plan = self.pooler.plan
                if plan and plan.instead_of_the_answer_to and plan.instead_of_the_answer_to in data:
                    self.pooler.plan, self.losing = None, plan
                self.server.sendall(data)
                if plan and 0 < plan.after_bytes <= self.sent_bytes:
                    self.pooler.plan = None
                    self._hang_up(plan)
                    return
        self._end()

    def pass_answers(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(CHUNK_BYTES):
                if self.losing:
                    self._hang_up(self.losing)
                    return
                self.client.sendall(data)
        self._end()

    def _hang_up(self, plan: HangUp) -> None:
        if plan.resets:
            self._reset()
        self._end()
        plan.done.set()

    def _reset(self) -> None:
        self.was_reset = True
        for end in (self.client, self.server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                # It is not closed while the other thread reads from it.
                end.shutdown(socket.SHUT_RD)
            end.close()

    def _end(self) -> None:
        if not self.was_reset:
            _close(self.client)
            _close(self.server)


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def pooler_before(server_port: int) -> Iterator[Pooler]:
    pooler = Pooler(server_port)
    try:
        yield pooler
    finally:
        pooler.close()
