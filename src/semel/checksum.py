"""CRC-32C, which Kafka wants in every batch of records, and processors compute in passing: 10 GB a second and more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from semel.errors import MissingExtra


@functools.cache
def crc32c() -> Callable[[Any, int], int]:
    """The function that adds some bytes to a checksum."""
    try:
        from crc32c import crc32c as add
    except ImportError:
        raise MissingExtra("The Kafka sink needs crc32c, which is not installed.", extra="kafka") from None
    return add
