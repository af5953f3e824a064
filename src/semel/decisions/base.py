"""What the decision log asks of a place to keep records. One test suite covers every store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class StoreUnanswered(Exception):
    """The store did not say whether the record was created. Neither yes nor no may be assumed."""


class RecordStore(ABC):
    """Small immutable files under one root. Paths are relative, with forward slashes."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Create a file whole and durable, or not at all. False when it exists already; exactly one creator gets True.

        No two creators may write the same bytes: where an answer is lost, the record itself says whose it is. Raises
        StoreUnanswered or OSError when the outcome is not known: the caller must not assume either.
        """

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Write a file whole and durable, in place of whatever is there. Readers see the old content or the new one."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """The content, or None when there is no such file."""

    def make_durable(self, path: str) -> None:  # noqa: B027 - elsewhere a name that is seen is durable already
        """Called before anybody acts on a record that was read: power may fail, and the record must still be there.

        Its creator syncs it, too, but may have died in between. Raises OSError when it cannot be done.
        """

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted, temporary ones left out. Empty when there is no such folder."""

    @abstractmethod
    def folders(self, folder: str) -> Sequence[str]:
        """The names of the folders in a folder, sorted. Empty when there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; harmless when there is none."""

    @abstractmethod
    def describe(self) -> str:
        """Where this is, for messages."""
