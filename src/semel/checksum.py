"""CRC-32C, which processors compute in passing: 10 GB a second and more.

Kafka wants it in every batch of records, and rows of sinks that commit task by task have a fingerprint of it.
"""

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
        raise MissingExtra(
            "The fingerprints of rows need crc32c, which is not installed.",
            remedy="Install the extra of the sink, which brings it: pip install 'semel[kafka]', 'semel[postgres]' or "
            "'semel[mysql]'",
        ) from None
    return add
