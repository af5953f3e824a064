"""What the numbers in a broker's answer say."""

from __future__ import annotations

import functools
from typing import Any

#: What a request comes to when the connection breaks, or nothing comes back in time.
NO_ANSWER = "NO_ANSWER"


def error_of(code: int) -> Any:
    from kafka.errors import for_code

    return for_code(code)


def name_of(code: int) -> str:
    """The name of an answer, such as NO_ERROR or INVALID_PRODUCER_EPOCH."""
    return str(error_of(code).message)


def raise_for(code: int) -> None:
    if code:
        raise error_of(code)()


def is_transient(answer: str) -> bool:
    """Whether the same request may have another answer later; none at all is such an answer."""
    return answer == NO_ANSWER or answer in _transient_answers()


@functools.cache
def _transient_answers() -> frozenset[str]:
    from kafka import errors

    known: list[Any] = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return frozenset(
        str(kind.message) for kind in known if getattr(kind, "retriable", False) and hasattr(kind, "message")
    )
