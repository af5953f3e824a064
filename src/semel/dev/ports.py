"""Ports of the loopback interface."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack

from semel.errors import ConfigError

# Below the ports that systems give to outgoing connections (32768 and up on Linux). A server that is killed and
# started again must find its port free, and a client that keeps trying a dead port out of that range ends up
# connected to itself, on that very port.
_LOWEST, _HIGHEST = 20_000, 32_000
_TRIES_MAX = 1_000
_CONNECT_TIMEOUT_S_MAX = 1.0


def free_port() -> int:
    """A port that nobody uses now."""
    return free_ports(1)[0]


def free_ports(count: int, *, besides: Collection[int] = ()) -> list[int]:
    """Different ports that nobody uses now; `besides` are already spoken for."""
    found: list[int] = []
    with ExitStack() as held:
        for _ in range(_TRIES_MAX):
            if len(found) == count:
                return found
            probe = held.enter_context(socket.socket())
            port = random.SystemRandom().randint(_LOWEST, _HIGHEST)
            if port not in besides and _binds(probe, port):
                found.append(port)
    raise OSError(f"no {count} free ports were found in {_TRIES_MAX} tries")


def is_taken(port: int) -> bool:
    """Whether a server that starts now could not listen there."""
    with socket.socket() as probe:
        # Connections of a server that ended lately linger for a minute; they keep no other server out.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return not _binds(probe, port)


def refuse_taken(port: int, who: str) -> None:
    """Say so before a server tries in vain to listen there."""
    if is_taken(port):
        raise ConfigError(
            f"{who} cannot listen on 127.0.0.1:{port}: another program does.",
            remedy="End that program, or choose another port (--port on the command line).",
        )


def listens(port: int) -> bool:
    """Whether somebody listens there. Unlike `is_taken`, it is never in the way of a server that is about to."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_S_MAX).close()
    except OSError:
        return False
    return True


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
