"""How a producer says that rows did not arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One row, or the producer itself, in librdkafka's words: `name` is its code, such as MSG_SIZE_TOO_LARGE."""

    name: str
    text: str
    topic: str = ""
    partition: int = -1
    key: bytes | None = None
    size: int = 0


class DeliveryFailed(Exception):
    """Rows were not acknowledged. The first failure is the cause; the others are often its echo."""

    def __init__(self, text: str, failures: Sequence[Failure]) -> None:
        super().__init__(text)
        self.failures = tuple(failures)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.failures)
