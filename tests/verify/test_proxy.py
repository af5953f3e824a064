"""The network that can be cut: against a real server of sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from semel.dev.ports import free_ports
from semel.verify.proxy import Proxy


def _echo(listener: socket.socket) -> None:
    def answer(client: socket.socket) -> None:
        with suppress(OSError), client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    with suppress(OSError):
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server, port = free_ports(2)
    listener = socket.create_server(("127.0.0.1", server))
    threading.Thread(target=_echo, args=(listener,), daemon=True).start()
    made = Proxy(port, server)
    yield made
    made.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def _says_back(client: socket.socket, words: bytes) -> bytes:
    client.sendall(words)
    return client.recv(100)


def test_what_is_sent_comes_out_at_the_other_end(proxy: Proxy) -> None:
    with _connect(proxy) as client:
        assert _says_back(client, b"hello") == b"hello"
    assert (proxy.connections, proxy.refused) == (1, 0)


def test_a_cut_breaks_connections_and_refuses_new_ones_until_it_is_mended(proxy: Proxy) -> None:
    with _connect(proxy) as client:
        assert _says_back(client, b"one") == b"one"
        proxy.cut()
        with suppress(ConnectionError):
            assert client.recv(100) == b""
    with _connect(proxy) as client, suppress(ConnectionError):
        assert _says_back(client, b"two") == b""
    assert proxy.refused == 1
    proxy.repair()
    with _connect(proxy) as client:
        assert _says_back(client, b"three") == b"three"


def test_what_a_silent_cut_holds_back_arrives_when_it_is_mended(proxy: Proxy) -> None:
    with _connect(proxy) as client:
        assert _says_back(client, b"one") == b"one"
        proxy.cut(silent=True)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            _says_back(client, b"two")
        proxy.repair()
        client.settimeout(5)
        assert client.recv(100) == b"two"
    assert proxy.connections == 1


def test_a_slow_network_takes_its_time_in_both_directions(proxy: Proxy) -> None:
    with _connect(proxy) as client:
        proxy.delay(0.2)
        began = time.monotonic()
        assert _says_back(client, b"slow") == b"slow"
        assert 0.4 <= time.monotonic() - began < 2
        proxy.repair()
        began = time.monotonic()
        assert _says_back(client, b"quick") == b"quick"
        assert time.monotonic() - began < 0.2


def test_a_server_that_is_away_refuses() -> None:
    server, port = free_ports(2)
    proxy = Proxy(port, server)
    with _connect(proxy) as client, suppress(ConnectionError):
        assert client.recv(100) == b""
    assert (proxy.connections, proxy.refused) == (0, 1)
    proxy.close()


def test_nobody_listens_after_the_end(proxy: Proxy) -> None:
    proxy.close()
    with pytest.raises(ConnectionError):
        _connect(proxy)


def test_a_hundred_megabytes_pass_in_seconds_and_unchanged(proxy: Proxy) -> None:
    piece, count = bytes(range(256)) * 4096, 100
    received = bytearray()

    def read(client: socket.socket) -> None:
        while len(received) < len(piece) * count:
            received.extend(client.recv(1 << 20))

    with _connect(proxy) as client:
        client.settimeout(30)
        began = time.monotonic()
        reader = threading.Thread(target=read, args=(client,))
        reader.start()
        for _ in range(count):
            client.sendall(piece)
        reader.join(30)
    assert received == piece * count
    assert time.monotonic() - began < 10
