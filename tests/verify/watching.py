"""Readers as tests use them: of rows with the numbers below 100, in a thread, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from semel.errors import ConfigError
from semel.sinks import Sink
from semel.verify.readers import Reader, open_reader
from semel.verify.workload import DEFAULT, Workload

ROWS = 100
SETTLE_S = 20.0


def number_of(identity: str) -> int | None:
    return int(identity) if identity.isdigit() and int(identity) < ROWS else None


def reader_of(sink: Sink, workload: Workload = DEFAULT, **settings: Any) -> Reader:
    return open_reader(sink, workload, number_of, **settings)


def refused(make: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value


@contextmanager
def running(reader: Reader) -> Iterator[Reader]:
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()


def names(found: Any) -> list[str]:
    """The branches or files among words, without the words."""
    return sorted(words.split()[-1] for words in found)
