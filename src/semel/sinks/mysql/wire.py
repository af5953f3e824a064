"""The part of MariaDB's protocol that PyMySQL does not speak: prepared statements that take many rows at once.

Client and server agree on it when they greet each other. A server that has extensions leaves the flag CLIENT_MYSQL out
of its capabilities. The flags of its extensions are in the last 4 of 10 bytes that are reserved otherwise. The client
answers in the same way, in the last 4 of its own reserved bytes. See "Initial Handshake Packet", "SSLRequest Packet"
and "Handshake Response Packet" at https://mariadb.com/kb/en/connection/. A server of MySQL sets the flag and offers
nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CLIENT_MYSQL = 1
#: The third of the flags that do not fit into the first 32.
STMT_BULK_OPERATIONS = 1 << 2
#: What we ask for, if it is offered.
WANTED = STMT_BULK_OPERATIONS

#: Where the flags are in the client's answer, with and without TLS: 4 bytes of flags, 4 of the largest packet, 1 of
#: the character set, 19 that are reserved.
_EXTENDED_AT, _ANSWER_HEAD = 28, 32
#: Behind the text of the version: session, scramble and a zero, flags, character set, status, flags, size of the
#: scramble, 6 reserved bytes, extended flags.
_GREETING = struct.Struct("<I8sxHBHHB6xI")

# https://mariadb.com/kb/en/com_stmt_prepare/, .../com_stmt_close/, .../com_stmt_bulk_execute/
STMT_PREPARE, STMT_CLOSE, STMT_BULK_EXECUTE = 0x16, 0x19, 0xFA
SEND_TYPES_TO_SERVER = 128
_PREPARED = struct.Struct("<xIHHxH")


def offered(greeting: bytes) -> int:
    """The extensions that a server offers."""
    behind_version = greeting.find(b"\0") + 1
    if len(greeting) < behind_version + _GREETING.size:
        return 0
    _, _, flags, _, _, _, _, extended = _GREETING.unpack_from(greeting, behind_version)
    return 0 if flags & CLIENT_MYSQL else int(extended)


def answered(answer: bytes, extended: int) -> bytes:
    """The client's answer, or its wish for TLS, that also asks for extensions."""
    (flags,) = struct.unpack_from("<I", answer)
    return b"".join(
        [
            struct.pack("<I", flags & ~CLIENT_MYSQL),
            answer[4:_EXTENDED_AT],
            struct.pack("<I", extended),
            answer[_ANSWER_HEAD:],
        ]
    )


class Extended:
    """Goes before PyMySQL's connection, and agrees on the extensions where PyMySQL would say that it has none."""

    #: What was agreed on.
    extensions = 0
    _answers = False
    _next_seq_id: int
    _read_packet: Callable[[], Any]

    def _get_server_information(self) -> None:
        greeting = self._read_packet()
        self.extensions = WANTED & offered(bytes(greeting.get_all_data()))
        # PyMySQL reads it again, for everything else.
        self._read_packet = lambda: greeting
        try:
            super()._get_server_information()  # type: ignore[misc]
        finally:
            del self._read_packet

    def _request_authentication(self) -> None:
        self._answers = bool(self.extensions)
        try:
            super()._request_authentication()  # type: ignore[misc]
        finally:
            self._answers = False

    def write_packet(self, payload: Any) -> None:
        # The first packet of the client is its answer; or it is a wish for TLS, and the second is. Others of a login
        # have higher numbers, because the server's are counted, too.
        if self._answers and self._next_seq_id <= 2:
            payload = answered(payload, self.extensions)
        super().write_packet(payload)  # type: ignore[misc]


class Statement:
    """A prepared statement on a connection of PyMySQL, which has none of its own."""

    def __init__(self, connection: Any, sql: str) -> None:
        self.connection = connection
        connection._execute_command(STMT_PREPARE, sql)
        self.number, columns, self.parameters, _ = _PREPARED.unpack_from(connection._read_packet().get_all_data())
        # Each list of descriptions ends with a packet of its own.
        for described in filter(None, (self.parameters, columns)):
            for _ in range(described + 1):
                connection._read_packet()

    def head(self, types: Sequence[tuple[int, int]]) -> bytes:
        """What stands before the rows: of each column its type and whether it is unsigned."""
        pairs = b"".join(map(bytes, types))
        return struct.pack("<IH", self.number, SEND_TYPES_TO_SERVER) + pairs

    def execute_bulk(self, pieces: Sequence[Any]) -> None:
        """Head and rows. The connection's `_result` says what became of them."""
        with self.executing_bulk(pieces):
            pass

    @contextmanager
    def executing_bulk(self, pieces: Sequence[Any]) -> Iterator[None]:
        """The same, with something else to do while the server works. The answer is read whatever comes of that."""
        self.connection._execute_command(STMT_BULK_EXECUTE, b"".join(pieces))
        try:
            yield
        finally:
            self.connection._read_query_result()

    def close(self) -> None:
        """To this the server does not answer."""
        self.connection._execute_command(STMT_CLOSE, struct.pack("<I", self.number))
